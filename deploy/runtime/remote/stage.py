"""The stage of a target that runs elsewhere, over the stages that run here.

Only token ids travel: draws are greedy or coupled, so that the target's own draw for a position
says whether a proposed token is kept. While an answer is under way the stages below may go on as if
all of a block were kept, and the next token were the one that they draw themselves; where that
proves right, the next block is under way already, and where not, they are cut back.
"""

from collections import deque
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from polybasic.chain.formats.plan import Flush
from polybasic.deploy.runtime.drafters.interface import Drafter
from polybasic.deploy.runtime.remote.session import Session, Verdict
from polybasic.deploy.runtime.rounds.flushing import AdaptiveFlushing, Flushing
from polybasic.deploy.runtime.rounds.passes import Passes, draft
from polybasic.deploy.runtime.rounds.sampling import GreedyRows, GreedySampler, Sampling
from polybasic.deploy.runtime.rounds.stages import Block, Round, Stage
from polybasic.deploy.runtime.rounds.stopping import cut_at_end
from polybasic.deploy.runtime.rounds.verifier import PassClock

MAX_AHEAD = 4
"""Blocks that are sent while the answer to an earlier one is under way. The target spends no pass
on those that follow what it has refused."""


@dataclass(frozen=True)
class RemotePass:
    """Waits for the target's verdict on the first block that is under way."""

    session: Session

    @property
    def is_ready(self) -> bool:
        """Whether the verdict is there."""
        return self.session.has_verdict

    @property
    def kind(self) -> Hashable:
        """One for all verdicts that are there; others are waited for one by one."""
        return RemotePass if self.is_ready else (RemotePass, id(self.session))

    def run(self) -> Verdict:
        """The verdict."""
        return self.session.verdict()

    @staticmethod
    def run_together(passes: "Sequence[RemotePass]") -> list[Verdict]:
        """The verdicts for several sequences."""
        return [remote_pass.run() for remote_pass in passes]


class DraftedBlocks:
    """Proposes the most probable path of a drafter's trees: what is below a target alone.

    Args:
        drafter: reads no states of a verifier.

    Attributes:
        tokens: the sequence so far, with what was proposed.
    """

    def __init__(self, drafter: Drafter, stop_tokens: Collection[int]) -> None:
        self.drafter, self.stop_tokens = drafter, stop_tokens
        self.tokens: list[int] = []
        self.num_held = 0

    def begin(self, tokens: list[int], num_held: int) -> None:
        """See `polybasic.deploy.runtime.rounds.stages.Stage`; so are the others."""
        self.tokens = list(tokens)
        self.drafter.rewind(len(tokens))

    def catch_up(self) -> Passes[None]:
        yield from ()

    def settle(self) -> None:
        """Nothing to drop."""

    def propose(
        self, num_tokens: int, limit: int, flushing: Flushing | None = None
    ) -> Passes[Block]:
        """The path of one draft, at most `limit` tokens; none where nothing is drafted."""
        tree = yield from draft(self.drafter, self.tokens, limit)
        rows = tree.best_path()[1:]
        path, _ = cut_at_end([tree.tokens[row] for row in rows], limit, self.stop_tokens)
        self.tokens += path
        return Block(path, None, [*map(tree.proposer_of, rows)][: len(path)])

    def resolve(self, length: int, next_token: int, states: Tensor | None = None) -> None:
        self.drafter.rewind(min(length, len(self.tokens)))
        self.tokens[length:] = [next_token]


Below = Stage | DraftedBlocks


class RemoteStage(Stage):
    """Verifies the blocks of the stage below by a target that runs elsewhere.

    Args:
        session: of the target.
        below: proposes; None asks for token by token.
        flush: how many tokens the stage below collects before they are sent.
        sampling: of the request, greedy or with a seed.
        num_prompt_tokens: leading tokens that are not output.
        stop_tokens: ids that end what it proposes.
        optimistic: go on while an answer is under way.
    """

    def __init__(
        self,
        session: Session,
        below: Below | None,
        flush: Flush,
        sampling: Sampling,
        num_prompt_tokens: int,
        stop_tokens: Collection[int] = (),
        optimistic: bool = True,
    ) -> None:
        named: Any = session  # has a verifier's name and clock, and no cache here
        super().__init__(named, GreedySampler(sampling, num_prompt_tokens), stop_tokens)
        self.session, self.below, self.flush = session, below, flush
        self.sampling, self.num_prompt_tokens = sampling, num_prompt_tokens
        self.optimistic = optimistic
        self._proposers: list[str] = []  # of what is proposed after the sequence
        self._flushing = AdaptiveFlushing(flush.adaptive) if flush.adaptive else None
        self._bins: deque[list[int]] = deque()  # of the blocks under way
        session.clock = PassClock(session.clock.device)

    @property
    def num_held(self) -> int:
        return 0 if self.below is None else self.below.num_held

    def begin(self, tokens: list[int], num_held: int) -> None:
        self._drop()
        self.tokens = list(tokens)
        if self.below is not None:
            self.below.begin(tokens, min(self.below.num_held, len(tokens) - 1))

    def catch_up(self) -> Passes[None]:
        """The far side reads the tokens meanwhile, and is not waited for."""
        self.session.begin(self.tokens, self.num_prompt_tokens, self.sampling, self.num_logprobs)
        if self.below is not None:
            yield from self.below.catch_up()

    def settle(self) -> None:
        self._drop()
        self.session.end()
        if self.below is not None:
            self.below.settle()
            self.below.begin(self.tokens, min(self.below.num_held, len(self.tokens) - 1))

    def observe(self, states: Tensor) -> None:
        """Its cache is shared with no stage here."""

    def resolve(self, length: int, next_token: int, states: Tensor | None = None) -> None:
        raise AssertionError("a target is above all other stages")

    def _round(self, limit: int) -> Passes[Round]:
        session = self.session
        if not session.sent:
            while self._may_propose(limit) and (yield from self._propose(limit)):
                pass
            self._send()
        while self.optimistic and not session.has_verdict:
            if self._may_propose(limit) and (yield from self._propose(limit)):
                continue
            if self._num_waiting == 0 or len(session.sent) > MAX_AHEAD:
                break
            self._send()
        drafted = session.sent[0].ids[1:]
        verdict: Verdict = yield RemotePass(session)
        drawn = [*drafted[: verdict.num_kept], verdict.next_token]
        gained, _ = cut_at_end(drawn, limit, self.stop_tokens)
        proposers = [*self._proposers[: verdict.num_kept], session.name][: len(gained)]
        self.accepted_lengths.append(len(gained))
        if drafted:
            by = self.below.verifier.name if isinstance(self.below, Stage) else self._proposers[0]
            self._count(by, len(drafted), len(gained) - 1)
        if self._flushing is not None:
            self._flushing.learn(verdict.num_kept, self._bins.popleft())
        self._commit(gained)
        rows = list(range(len(gained)))
        return Round(gained, GreedyRows(gained), rows, proposers, verdict.logprobs[: len(gained)])

    def _commit(self, gained: list[int]) -> None:
        """Take what the target has drawn, and cut the stage below where it differs."""
        start = len(self.tokens)
        self.tokens += gained
        if self.below is None:
            return
        if self.below.tokens[start : len(self.tokens)] == gained:
            del self._proposers[: len(gained)]
        else:
            self._drop()
            self.below.resolve(len(self.tokens) - 1, gained[-1])

    def _may_propose(self, limit: int) -> bool:
        """Whether what the stage below draws next may belong to the next block of this answer."""
        if self.below is None or self._is_whole:
            return False
        has_room = len(self._proposers) + 1 < limit
        return has_room and not (self._proposers and self.below.tokens[-1] in self.stop_tokens)

    def _propose(self, limit: int) -> Passes[bool]:
        """Have the stage below gain some tokens; False if it has none."""
        assert self.below is not None, "a stage that proposes"
        left = limit - 1 - len(self._proposers)
        block = yield from self.below.propose(1, left, self._flushing)
        self._proposers += block.proposers
        return bool(block.tokens)

    @property
    def _num_waiting(self) -> int:
        """Tokens of the next message: the last one before its block, and what is proposed of it."""
        return 1 + len(self._proposers) - sum(len(block.ids) for block in self.session.sent)

    @property
    def _is_whole(self) -> bool:
        """Whether no more is proposed before the next message."""
        is_long = self._num_waiting > self.flush.length
        return is_long or (self._flushing is not None and not self._flushing.pays)

    def _send(self) -> None:
        """Send what is proposed and not under way, with the token before it."""
        num = self._num_waiting
        ids = [self.tokens[-1]] if self.below is None else self.below.tokens[-num:]
        self.session.send(ids)
        if self._flushing is not None:
            self._bins.append(self._flushing.bins)
            self._flushing.begin_block(num_before=1)

    def _drop(self) -> None:
        """Forget what is proposed."""
        self.session.drop()
        self._proposers = []
        self._bins.clear()
        if self._flushing is not None:
            self._flushing.begin_block()
