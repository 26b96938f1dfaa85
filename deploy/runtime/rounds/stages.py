"""Stages: a verifying model together with everything below it.

Stages nest: a `TreeStage` verifies a drafter's tree, a `BlockStage` verifies the block that the
stage below it hands up. Two models are one TreeStage, three are a BlockStage over a TreeStage,
four two BlockStages over one. A stage sees token ids only. What it does is a generator of the
passes that it needs (`polybasic.deploy.runtime.rounds.passes`).

#   R = rows (tokens), W = width of the verifier's states, which stages only pass on
"""

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from polybasic.chain.formats.plan import Flush
from polybasic.chain.kernels.drafts import NGRAM, DraftTree, walk
from polybasic.deploy.runtime.drafters.interface import Drafter
from polybasic.deploy.runtime.rounds.draws import Draws
from polybasic.deploy.runtime.rounds.flushing import AdaptiveFlushing, Flushing
from polybasic.deploy.runtime.rounds.logprobs import TokenLogprobs, logprobs_of
from polybasic.deploy.runtime.rounds.passes import Passes, VerifierPass, draft
from polybasic.deploy.runtime.rounds.proposals import Proposals
from polybasic.deploy.runtime.rounds.sampling import Joiner, Prefixes, Sampler
from polybasic.deploy.runtime.rounds.stopping import cut_at_end
from polybasic.deploy.runtime.rounds.verifier import Verifier

FEW_UNREAD = 4
"""Tokens that cost little in the pass over a tree, and a pass of its own as much as one."""


@dataclass(frozen=True)
class Block:
    """Tokens handed up, each drawn exactly from the proposing model's distribution.

    Attributes:
        tokens: in order.
        distributions: one row for each token, as the sampler joins them; None if there are none.
        proposers: for each token, the member that proposed it first.
        logprobs: for each token, if the stage is asked for them.
    """

    tokens: list[int]
    distributions: Any
    proposers: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(frozen=True)
class Round:
    """The gain of one pass of a stage's verifier.

    Attributes:
        tokens: at least one.
        distributions: of the rows that the verifier read.
        rows: for each token, the row that it was drawn from.
        proposers: for each token, the member that proposed it first.
        logprobs: for each token, if the stage is asked for them.
    """

    tokens: list[int]
    distributions: Any
    rows: list[int]
    proposers: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


class Stage(ABC):
    """What the stage above, or the engine, can ask of a stage.

    Attributes:
        verifier: the stage's own model.
        stop_tokens: ids that end what it proposes.
        tokens: the sequence so far.
        accepted_lengths: tokens gained by each of its passes since the stage was made.
        proposals: by member, what was proposed to the verifier since the stage was made.
        num_tolerated: tokens kept that are not the verifier's own, as lossy plans do.
        num_logprobs: most probable tokens whose log-probabilities its rounds give beside those of
            the tokens gained; None gives none.
        num_prompt_logprobs: the same of the tokens of a prompt, which `prompt_logprobs` takes.
    """

    def __init__(
        self, verifier: Verifier, sampler: Joiner, stop_tokens: Collection[int] = ()
    ) -> None:
        self.verifier, self.sampler = verifier, sampler
        self.stop_tokens = frozenset(stop_tokens)
        self.tokens: list[int] = []
        self.accepted_lengths: list[int] = []
        self.proposals: dict[str, Proposals] = {}
        self.num_tolerated = 0
        self.num_logprobs: int | None = None
        self.num_prompt_logprobs: int | None = None
        self.prompt_logprobs: list[TokenLogprobs] = []

    @property
    def num_read(self) -> int:
        """Leading tokens whose rows in the verifier's cache were written by this verifier."""
        return self.verifier.cache.length

    @property
    @abstractmethod
    def num_held(self) -> int:
        """Leading tokens that were read, and whose states were observed, by what shares a cache."""

    @abstractmethod
    def begin(self, tokens: list[int], num_held: int) -> None:
        """Begin or resume a sequence, before anything is read.

        Args:
            tokens: at least one.
            num_held: leading ones that need not be read again, at most `self.num_held`.
        """

    @abstractmethod
    def catch_up(self) -> Passes[None]:
        """Read, in parts, the tokens that the caches do not hold yet, except the last."""

    def start(self, tokens: list[int]) -> Passes[Block]:
        """Begin a sequence with its prompt, and draw the token after it where that is possible
        before anything below has read the prompt.

        Args:
            tokens: the prompt, at least one token.
        """
        yield from self.prefill(tokens)
        return Block([], None)

    @abstractmethod
    def settle(self) -> None:
        """Drop what was read beyond the sequence so far, when a round is given up half-way."""

    def prefill(self, tokens: list[int]) -> Passes[None]:
        """Begin a sequence with its prompt, of which caches may hold leading tokens.

        Args:
            tokens: the prompt, at least one token.
        """
        self.begin(tokens, min(self.num_held, len(tokens) - 1))
        yield from self.catch_up()

    @abstractmethod
    def observe(self, states: Tensor) -> None:
        """Take the states [R, W] of tokens that the stage above read into the shared cache."""

    def propose(
        self, num_tokens: int, limit: int, flushing: Flushing | None = None
    ) -> Passes[Block]:
        """Continue the sequence until `num_tokens` are gained or a stop token is drawn.

        The last round may gain more, but the total never exceeds `limit`; `flushing` may stop
        earlier. Whether a position belongs to the block is decided before its token is drawn.
        """
        block = Block([], None)
        taken: list[Any] = []
        wants_more = True
        while wants_more and len(block.tokens) < min(num_tokens, limit):
            rows, wants_more = yield from self._gain(block, limit - len(block.tokens), flushing)
            taken.append(rows)
        return replace(block, distributions=self.sampler.join(taken) if taken else None)

    @abstractmethod
    def resolve(self, length: int, next_token: int, states: Tensor | None = None) -> None:
        """Cut the sequence to its first `length` tokens and continue with `next_token`.

        Args:
            states: the states [R, W] of the last R of these `length` tokens, if the stage above
                has already read them into the shared cache.
        """

    @abstractmethod
    def _round(self, limit: int) -> Passes[Round]:
        """Gain at most `limit` tokens, which are committed."""

    def _gain(
        self, block: Block, limit: int, flushing: Flushing | None
    ) -> Passes[tuple[Any, bool]]:
        """Add a round's tokens to a block; their rows, and whether another round may follow.

        The rest of the round, above all the logits of its rows, is freed here.
        """
        gain = yield from self._round(limit)
        block.tokens.extend(gain.tokens)
        block.proposers.extend(gain.proposers)
        block.logprobs.extend(gain.logprobs)
        _, stopped_by = cut_at_end(gain.tokens, limit, self.stop_tokens)
        wants_more = stopped_by != "stop"
        if flushing is not None:
            wants_more &= flushing.wants_more(
                self.sampler.probabilities(gain.distributions, gain.rows, gain.tokens)
            )
        return self.sampler.take(gain.distributions, gain.rows), wants_more

    def _read_in_parts(self, leaves_a_pass: bool = False) -> Passes[None]:
        """Read the tokens that the cache lacks, for all stages that share it.

        Args:
            leaves_a_pass: leave the tokens that one pass takes; else the last one alone.
        """
        cache, pace = self.verifier.cache, self.verifier.pace
        while len(self.tokens) - (first := self.num_read) > (pace.rows if leaves_a_pass else 1):
            part = self.tokens[first : min(first + pace.rows, len(self.tokens) - 1)]
            num_top = self.num_prompt_logprobs
            wanted = None if num_top is None else 0
            read = yield VerifierPass(self.verifier, part, wanted, is_prompt=True)
            cache.keep(range(len(part)))
            self.observe(read.states)
            if num_top is not None:
                following = self.tokens[first + 1 : first + 1 + len(part)]
                self.prompt_logprobs += logprobs_of(read.logits, following, num_top)

    def _count(self, proposer: str, num_tokens: int, num_accepted: int) -> None:
        if not num_tokens:
            return
        self.proposals.setdefault(proposer, Proposals()).count(num_tokens, num_accepted)

    def _logprobs(self, logits: Any, rows: list[int], tokens: list[int]) -> list[TokenLogprobs]:
        if self.num_logprobs is None:
            return []
        return logprobs_of(logits[rows], tokens, self.num_logprobs)


class BaseTreeStage(Stage):
    """The innermost stage: a verifier walks the drafter's tree by sampling.

    Each token is drawn from the verifier's own distribution, whatever was drafted; the candidates
    only decide how many draws one pass allows.
    """

    def __init__(
        self,
        verifier: Verifier,
        drafter: Drafter,
        sampler: Joiner,
        stop_tokens: Collection[int] = (),
    ) -> None:
        super().__init__(verifier, sampler, stop_tokens)
        self.drafter = drafter

    @property
    def num_held(self) -> int:
        num_observed = self.drafter.num_observed
        length = self.verifier.cache.length
        return length if num_observed is None else min(length, num_observed)

    def begin(self, tokens: list[int], num_held: int) -> None:
        self.tokens = list(tokens)
        self.verifier.see(tokens)
        self.verifier.cache.truncate(num_held)
        self.drafter.rewind(num_held)

    def settle(self) -> None:
        """Nothing to drop: a pass that was not kept leaves nothing."""

    def catch_up(self) -> Passes[None]:
        yield from self._read_in_parts()

    def observe(self, states: Tensor) -> None:
        self.drafter.observe(states)

    def propose(
        self, num_tokens: int, limit: int, flushing: Flushing | None = None
    ) -> Passes[Block]:
        if not self._reads_with_tree:
            yield from self.catch_up()
        return (yield from super().propose(num_tokens, limit, flushing))

    @property
    def _reads_with_tree(self) -> bool:
        """Whether a pass over a tree reads what the cache lacks of the tokens before it, too."""
        return False

    def resolve(self, length: int, next_token: int, states: Tensor | None = None) -> None:
        cache = self.verifier.cache
        if states is None:
            cache.truncate(min(cache.length, length))
            self.drafter.rewind(cache.length)
        else:
            self.drafter.rewind(length - len(states))
            self.drafter.observe(states)
        self.tokens[length:] = [next_token]

    def _round(self, limit: int) -> Passes[Round]:
        tree = yield from self._draft(limit)
        return (yield from self._verify(tree, limit))

    @abstractmethod
    def _draft(self, limit: int) -> Passes[Any]:
        """Candidates for `_verify`, in a round that gains at most `limit` tokens."""

    @abstractmethod
    def _verify(self, tree: Any, limit: int) -> Passes[Round]:
        """A pass over the tree and the walk; the gained tokens are committed."""

    def _commit(self, gained: list[int], states: Tensor) -> None:
        """Take the gained tokens and the states of the rows that they were drawn from."""
        self.drafter.observe(states)
        self.tokens += gained
        self.accepted_lengths.append(len(gained))


class HostStage(Stage):
    """A stage whose draws are on the host, where the prompt's last pass gives a token, too."""

    sampler: Sampler

    def start(self, tokens: list[int]) -> Passes[Block]:
        self.begin(tokens, min(self.num_held, len(tokens) - 1))
        yield from self._read_in_parts(leaves_a_pass=self.num_prompt_logprobs is None)
        unread, nothing = self.tokens[self.num_read :], Block([], None)
        asked = verify(self.verifier, self.sampler, tokens, unread, nothing, is_prompt=True)
        kept = yield from asked
        self.verifier.cache.keep(range(len(unread)))
        self.resolve(len(tokens), kept.next_token, kept.states)
        gained = [kept.next_token]
        logprobs = self._logprobs(kept.logits, [0], gained)
        return Block(gained, kept.distributions, [self.verifier.name], logprobs)


class TreeStage(HostStage, BaseTreeStage):
    """A tree stage whose trees and draws are on the host."""

    @property
    def _reads_with_tree(self) -> bool:
        drafter, num_unread = self.drafter, len(self.tokens) - 1 - self.num_read
        drafts_by_model = drafter.clock is not None or drafter.num_observed is not None
        return num_unread <= FEW_UNREAD and not drafts_by_model

    def _draft(self, limit: int) -> Passes[DraftTree]:
        return (yield from draft(self.drafter, self.tokens, limit - 1, self.sampler.constraint))

    def _verify(self, tree: DraftTree, limit: int) -> Passes[Round]:
        draws = Draws(self.sampler, Prefixes(self.tokens, tree.paths()))
        unread = self.tokens[self.num_read : -1]
        num_unread = len(unread)
        rows: list[int] | DraftTree = tree.after(unread)
        if len(tree) == 1:
            rows = [*unread, *tree.tokens]
        read = yield VerifierPass(self.verifier, rows, num_unread, draws=draws)
        distributions = read.distributions()
        walked, last_token = walk(tree, lambda row: self.sampler.draw(distributions, row))
        drawn = [*(tree.tokens[row] for row in walked[1:]), last_token]
        gained, _ = cut_at_end(drawn, limit, self.stop_tokens)
        path = walked[: len(gained)]
        self.verifier.cache.keep([*range(num_unread), *(num_unread + row for row in path)])
        # a device gathers no rows that lie together
        kept = slice(len(path)) if path[-1] < len(path) else path
        self._commit(gained, read.states[num_unread:][kept])
        first_copied = len(tree) - tree.num_copied
        num_copied = sum(row >= first_copied for row in path)
        self._count(tree.proposer, first_copied - 1, len(path) - 1 - num_copied)
        self._count(NGRAM, tree.num_copied, num_copied)
        # the last token the verifier drew itself, unless the answer ends before it
        proposers = [*map(tree.proposer_of, walked[1:]), self.verifier.name][: len(gained)]
        logprobs = self._logprobs(read.logits, path, gained)
        return Round(gained, distributions, path, proposers, logprobs)


class BaseBlockStage(Stage):
    """A verifier above a stage: it cuts the block that the stage proposes, as the sampler says.

    Args:
        flush: how many tokens the stage below collects before this verifier runs.
    """

    def __init__(
        self,
        verifier: Verifier,
        below: Stage,
        sampler: Joiner,
        flush: Flush,
        stop_tokens: Collection[int] = (),
    ) -> None:
        super().__init__(verifier, sampler, stop_tokens)
        self.below, self.flush = below, flush
        self._flushing = AdaptiveFlushing(flush.adaptive) if flush.adaptive else None
        self.shares_cache = verifier.cache is below.verifier.cache
        self._num_read = 0

    @property
    def num_read(self) -> int:
        return self._num_read

    @property
    def num_held(self) -> int:
        return self.below.num_held if self.shares_cache else self.verifier.cache.length

    def begin(self, tokens: list[int], num_held: int) -> None:
        self.tokens = list(tokens)
        self.verifier.see(tokens)
        self.verifier.cache.truncate(num_held)
        self._num_read = num_held
        held_below = num_held if self.shares_cache else min(self.below.num_held, len(tokens) - 1)
        self.below.begin(tokens, held_below)

    def settle(self) -> None:
        self.begin(self.tokens, min(self.num_held, self._num_read))

    def catch_up(self) -> Passes[None]:
        yield from self._read_in_parts()
        yield from self.below.catch_up()

    def observe(self, states: Tensor) -> None:
        self._num_read += len(states)
        if self.shares_cache:
            self.below.observe(states)

    def resolve(self, length: int, next_token: int, states: Tensor | None = None) -> None:
        self._num_read = min(self._num_read, length) if states is None else length
        self.tokens[length:] = [next_token]
        self.below.resolve(length, next_token, states if self.shares_cache else None)

    def _round(self, limit: int) -> Passes[Round]:
        block = yield from self._proposed(limit - 1)
        unread = self.tokens[self._num_read :]
        self.verifier.cache.truncate(self._num_read)
        kept = yield from self._verify(unread, block)
        if self._flushing is not None:
            self._flushing.learn(kept.num_tokens)
        drawn = [*block.tokens[: kept.num_tokens], kept.next_token]
        gained, _ = cut_at_end(drawn, limit, self.stop_tokens)
        self.verifier.cache.keep(range(len(unread) + len(gained) - 1))
        self.tokens += gained
        self.accepted_lengths.append(len(gained))
        self._count(self.below.verifier.name, len(block.tokens), len(gained) - 1)
        self._num_read = len(self.tokens) - 1
        states = kept.states[: len(unread) + len(gained) - 1]
        self.below.resolve(self._num_read, gained[-1], states if self.shares_cache else None)
        proposers = [*block.proposers[: kept.num_tokens], self.verifier.name][: len(gained)]
        rows = list(range(len(gained)))
        logprobs = self._logprobs(kept.logits, rows, gained)
        return Round(gained, kept.distributions, rows, proposers, logprobs)

    def _proposed(self, limit: int) -> Passes[Block]:
        """A block of at most `limit` tokens."""
        if self._flushing is not None:
            self._flushing.begin_block()
        length = min(self.flush.length, limit)
        return (yield from self.below.propose(length, limit, self._flushing))

    @abstractmethod
    def _verify(self, unread: list[int], block: Block) -> "Passes[Kept]":
        """A pass over the unread tokens and the block after them."""


@dataclass(frozen=True)
class Kept:
    """What a verifier keeps of a block.

    Attributes:
        num_tokens: how many of the block's tokens.
        next_token: after them.
        states: of the rows that were read.
        distributions: for the block's tokens and the one after.
        logits: of the same rows, where they are on the host.
    """

    num_tokens: int
    next_token: int
    states: Tensor
    distributions: Any
    logits: Any = None


class BlockStage(HostStage, BaseBlockStage):
    """A block stage whose draws are on the host."""

    def _verify(self, unread: list[int], block: Block) -> Passes[Kept]:
        return (yield from verify(self.verifier, self.sampler, self.tokens, unread, block))


def verify(
    verifier: Verifier,
    sampler: Sampler,
    tokens: list[int],
    unread: list[int],
    block: Block,
    is_prompt: bool = False,
) -> Passes[Kept]:
    """A pass over a block, and what is kept of it; its rows are provisional.

    Args:
        tokens: the sequence before the block.
        unread: its last tokens, at least one, which the cache does not hold yet.
        is_prompt: whether these are of a prompt.
    """
    prefixes = Prefixes(tokens, [block.tokens[:length] for length in range(len(block.tokens) + 1)])
    draws = Draws(sampler, prefixes)
    rows = unread + block.tokens
    read = yield VerifierPass(verifier, rows, len(unread) - 1, is_prompt, draws)
    distributions = read.distributions()
    num_kept, next_token = sampler.verify(block.tokens, block.distributions, distributions)
    return Kept(num_kept, next_token, read.states, distributions, read.logits)
