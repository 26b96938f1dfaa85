"""What each round of an answer proposed, and what its verifier kept of it."""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from polybasic.chain.base.errors import UserError
from polybasic.chain.kernels.drafts import DraftTree
from polybasic.deploy.runtime.engine import Engine, rounds_of
from polybasic.deploy.runtime.request import Request
from polybasic.deploy.runtime.rounds.judging import JudgedBlockStage, RememberingTreeStage
from polybasic.deploy.runtime.rounds.passes import Passes
from polybasic.deploy.runtime.rounds.stages import Block, BlockStage, Kept, Round, Stage, TreeStage
from polybasic.deploy.runtime.rounds.tolerance import TolerantBlockStage


@dataclass(frozen=True)
class TracedRound:
    """One pass of a verifier: what was proposed to it, and what it gained.

    Attributes:
        verifier: name of the member whose pass it was.
        proposer: name of the member that proposed; "" if nothing was proposed.
        position: number of tokens before the round, prompt included.
        tokens: ids that were proposed, a tree row by row, parents before children, or a block.
        parents: for each of them, the place of its parent in `tokens`; -1 follows the sequence.
        probabilities: for each of them, the verifier's own probability of it after its parent.
        kept: places in `tokens` of those that were accepted, from the first on.
        gained: ids that the round added: those accepted and, unless the answer ended with one of
            these, one that the verifier drew itself.
        seconds: of the round with all that lies below it: drafts, and passes of the members below.
    """

    verifier: str
    proposer: str
    position: int
    tokens: list[int]
    parents: list[int]
    probabilities: list[float]
    kept: list[int]
    gained: list[int]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """As an object of JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Trace:
    """An answer, round by round.

    Attributes:
        text: of the answer.
        token_ids: of the answer.
        prompt: ids of the prompt.
        rounds: in the order in which they ended: of each verifying member, the lowest first.
    """

    text: str
    token_ids: list[int]
    prompt: list[int]
    rounds: list[TracedRound]


def traced(engine: Engine, request: Request) -> Iterator[tuple[list[int], list[TracedRound]]]:
    """The tokens of each of the root's rounds, and what was traced on the way to them.

    Rounds run on the host, which draws the same tokens as captured ones.

    Args:
        request: which `Engine.check` has passed.

    Raises:
        UserError: other answers are being made, or the target is on another machine.
    """
    if engine.num_running:
        raise UserError(
            "chain is busy", f"{engine.num_running} answers are being made", "trace when they ended"
        )
    if engine.models.remote is not None:
        raise UserError("target is elsewhere", "trace", "trace where all members are")
    log: list[TracedRound] = []

    def make(kind: type[Stage], *given: Any) -> Stage:
        of_kind = {
            TreeStage: _TracedTreeStage,
            BlockStage: _TracedBlockStage,
            TolerantBlockStage: _TracedTolerantStage,
            RememberingTreeStage: _TracedRememberingStage,
            JudgedBlockStage: _TracedJudgedStage,
        }[kind]
        stage: Stage = of_kind(*given)
        stage.log = log  # type: ignore[attr-defined]
        return stage

    # log-probabilities are computed on the host, where rounds can be looked at
    request = replace(request, sampling=request.sampling.seeded(), logprobs=0, follows_plans=False)
    (root, *_), _ = engine.stages(request, make)
    began = time.perf_counter()
    for tokens, _ in rounds_of(root, request):
        if not log:
            position, seconds = len(request.token_ids), time.perf_counter() - began
            log.append(
                TracedRound(root.verifier.name, "", position, [], [], [], [], tokens, seconds)
            )
        yield tokens, [*log]
        log.clear()


class _TracedTreeStage(TreeStage):
    """Writes each of its rounds into a log."""

    log: list[TracedRound]

    def _round(self, limit: int) -> Passes[Round]:
        self._began = time.perf_counter()
        return (yield from super()._round(limit))

    def _verify(self, tree: DraftTree, limit: int) -> Passes[Round]:
        position = len(self.tokens)
        gain = yield from super()._verify(tree, limit)
        parents, tokens = tree.parents[1:], tree.tokens[1:]
        self.log.append(
            TracedRound(
                self.verifier.name,
                tree.proposer if tokens else "",
                position,
                tokens,
                [parent - 1 for parent in parents],
                self.sampler.probabilities(gain.distributions, parents, tokens),
                _kept([row - 1 for row in gain.rows[1:]], tokens, gain.tokens),
                gain.tokens,
                time.perf_counter() - self._began,
            )
        )
        return gain


class _TracedBlockStage(BlockStage):
    """Writes each of its rounds into a log."""

    log: list[TracedRound]

    def _round(self, limit: int) -> Passes[Round]:
        began, position = time.perf_counter(), len(self.tokens)
        gain = yield from super()._round(limit)
        block = self._block
        places = list(range(len(block.tokens)))
        self.log.append(
            TracedRound(
                self.verifier.name,
                self.below.verifier.name if places else "",
                position,
                block.tokens,
                [place - 1 for place in places],
                self.sampler.probabilities(gain.distributions, places, block.tokens),
                _kept(places[: self._num_kept], block.tokens, gain.tokens),
                gain.tokens,
                time.perf_counter() - began,
            )
        )
        return gain

    def _verify(self, unread: list[int], block: Block) -> Passes[Kept]:
        kept = yield from super()._verify(unread, block)
        self._block, self._num_kept = block, kept.num_tokens
        return kept


class _TracedTolerantStage(_TracedBlockStage, TolerantBlockStage):
    """The same of a lossy plan."""


class _TracedRememberingStage(_TracedTreeStage, RememberingTreeStage):
    """The same below a judge."""


class _TracedJudgedStage(_TracedBlockStage, JudgedBlockStage):
    """The same of a judge."""


def _kept(places: list[int], proposed: list[int], gained: list[int]) -> list[int]:
    """Places of the accepted tokens among those gained, which may have been cut at their end.

    A path's rows are those that tokens were drawn from: the last token was drawn from the last of
    them, and is a proposal itself only where the answer was cut at it.
    """
    found = []
    for place, token in zip(places, gained, strict=False):
        if proposed[place] != token:
            break
        found.append(place)
    return found
