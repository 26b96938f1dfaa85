"""Stages: a verifying model together with everything below it.

Stages nest: a `TreeStage` verifies a drafter's tree, a `BlockStage` verifies the block that the
stage below it hands up. Two models are one TreeStage, three are a BlockStage over a TreeStage,
four two BlockStages over one. A stage sees token ids only.

#   R = rows (tokens), W = width of the verifier's states, which stages only pass on
"""

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from polybasic.chain.formats.plan import Flush
from polybasic.chain.kernels.drafts import DraftTree, walk
from polybasic.deploy.drafters.interface import Drafter
from polybasic.deploy.rounds.flushing import AdaptiveFlushing
from polybasic.deploy.rounds.sampling import Joiner, Prefixes, Sampler
from polybasic.deploy.rounds.stopping import cut_at_end
from polybasic.deploy.rounds.verifier import Verifier


@dataclass(frozen=True)
class Block:
    """Tokens handed up, each drawn exactly from the proposing model's distribution.

    Attributes:
        tokens: in order.
        distributions: one row for each token, as the sampler joins them; None if there are none.
    """

    tokens: list[int]
    distributions: Any


@dataclass(frozen=True)
class Round:
    """The gain of one pass of a stage's verifier.

    Attributes:
        tokens: at least one.
        distributions: of the rows that the verifier read.
        rows: for each token, the row that it was drawn from.
    """

    tokens: list[int]
    distributions: Any
    rows: list[int]


class Stage(ABC):
    """What the stage above, or the engine, can ask of a stage.

    Attributes:
        verifier: the stage's own model.
        stop_tokens: ids that end what it proposes.
        tokens: the sequence so far.
        accepted_lengths: tokens gained by each of its passes since the stage was made.
    """

    def __init__(
        self, verifier: Verifier, sampler: Joiner, stop_tokens: Collection[int] = ()
    ) -> None:
        self.verifier, self.sampler = verifier, sampler
        self.stop_tokens = frozenset(stop_tokens)
        self.tokens: list[int] = []
        self.accepted_lengths: list[int] = []

    @abstractmethod
    def prefill(self, tokens: list[int], states: Tensor | None = None) -> None:
        """Begin a sequence.

        Args:
            tokens: the prompt, at least one token.
            states: the states [len(tokens) - 1, W] of all tokens but the last, if the stage above
                has already read them into the shared cache.
        """

    def propose(
        self, num_tokens: int, limit: int, flushing: AdaptiveFlushing | None = None
    ) -> Block:
        """Continue the sequence until `num_tokens` are gained or a stop token is drawn.

        The last round may gain more, but the total never exceeds `limit`; `flushing` may stop
        earlier. Whether a position belongs to the block is decided before its token is drawn.
        """
        taken: list[Any] = []
        tokens: list[int] = []
        wants_more = True
        while wants_more and len(tokens) < min(num_tokens, limit):
            gained, rows, wants_more = self._gain(limit - len(tokens), flushing)
            tokens += gained
            taken.append(rows)
        return Block(tokens, self.sampler.join(taken) if taken else None)

    @abstractmethod
    def resolve(self, length: int, next_token: int, states: Tensor | None = None) -> None:
        """Cut the sequence to its first `length` tokens and continue with `next_token`.

        Args:
            states: the states [R, W] of the last R of these `length` tokens, if the stage above
                has already read them into the shared cache.
        """

    @abstractmethod
    def _round(self, limit: int) -> Round:
        """Gain at most `limit` tokens, which are committed."""

    def _gain(self, limit: int, flushing: AdaptiveFlushing | None) -> tuple[list[int], Any, bool]:
        """A round's tokens, their rows, and whether another round may follow.

        The rest of the round, above all the logits of its rows, is freed here.
        """
        one = self._round(limit)
        _, stopped_by = cut_at_end(one.tokens, limit, self.stop_tokens)
        wants_more = stopped_by != "stop"
        if wants_more and flushing is not None:
            wants_more = flushing.wants_more(
                self.sampler.probabilities(one.distributions, one.rows, one.tokens)
            )
        return one.tokens, self.sampler.take(one.distributions, one.rows), wants_more


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

    def prefill(self, tokens: list[int], states: Tensor | None = None) -> None:
        self.tokens = list(tokens)
        self.drafter.rewind(0)
        if states is None:
            self.verifier.cache.truncate(0)
            self._catch_up()
        else:
            self.drafter.observe(states)

    def propose(
        self, num_tokens: int, limit: int, flushing: AdaptiveFlushing | None = None
    ) -> Block:
        self._catch_up()
        return super().propose(num_tokens, limit, flushing)

    def resolve(self, length: int, next_token: int, states: Tensor | None = None) -> None:
        cache = self.verifier.cache
        if states is None:
            cache.truncate(min(cache.length, length))
            self.drafter.rewind(cache.length)
        else:
            self.drafter.rewind(length - len(states))
            self.drafter.observe(states)
        self.tokens[length:] = [next_token]

    def _round(self, limit: int) -> Round:
        return self._verify(self._draft(limit), limit)

    @abstractmethod
    def _draft(self, limit: int) -> Any:
        """Candidates for `_verify`, in a round that gains at most `limit` tokens."""

    @abstractmethod
    def _verify(self, tree: Any, limit: int) -> Round:
        """A pass over the tree and the walk; the gained tokens are committed."""

    def _catch_up(self) -> None:
        """Read the tokens that the cache does not hold yet, except the last."""
        missing = self.tokens[self.verifier.cache.length : -1]
        if missing:
            states = self.verifier.read(missing)
            self.verifier.cache.keep(range(len(missing)))
            self.drafter.observe(states)


class TreeStage(BaseTreeStage):
    """A tree stage whose trees and draws are on the host."""

    sampler: Sampler

    def _draft(self, limit: int) -> DraftTree:
        return self.drafter.draft(self.tokens, max_depth=limit - 1)

    def _verify(self, tree: DraftTree, limit: int) -> Round:
        states = self.verifier.read_tree(tree)
        distributions = self.sampler.distributions(
            self.verifier.logits(states), Prefixes(self.tokens, tree.paths())
        )
        path, last_token = walk(tree, lambda row: self.sampler.draw(distributions, row))
        drawn = [*(tree.tokens[row] for row in path[1:]), last_token]
        gained, _ = cut_at_end(drawn, limit, self.stop_tokens)
        path = path[: len(gained)]
        self.verifier.cache.keep(path)
        self.drafter.observe(states[path])
        self.tokens += gained
        self.accepted_lengths.append(len(gained))
        return Round(gained, distributions, path)


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
        self._num_read = 0  # leading tokens whose rows in the cache were written by this verifier

    def prefill(self, tokens: list[int], states: Tensor | None = None) -> None:
        self.tokens = list(tokens)
        if states is None:
            self.verifier.cache.truncate(0)
            if len(tokens) > 1:
                states = self.verifier.read(tokens[:-1])
                self.verifier.cache.keep(range(len(tokens) - 1))
        self._num_read = len(tokens) - 1
        self.below.prefill(tokens, states if self.shares_cache else None)

    def resolve(self, length: int, next_token: int, states: Tensor | None = None) -> None:
        self._num_read = min(self._num_read, length) if states is None else length
        self.tokens[length:] = [next_token]
        self.below.resolve(length, next_token, states if self.shares_cache else None)

    def _round(self, limit: int) -> Round:
        if self._flushing is not None:
            self._flushing.begin_block()
        block = self.below.propose(min(self.flush.length, limit - 1), limit - 1, self._flushing)
        unread = self.tokens[self._num_read :]
        self.verifier.cache.truncate(self._num_read)
        num_kept, next_token, states, distributions = self._verify(unread, block)
        if self._flushing is not None:
            self._flushing.learn(num_kept)
        gained, _ = cut_at_end([*block.tokens[:num_kept], next_token], limit, self.stop_tokens)
        self.verifier.cache.keep(range(len(unread) + len(gained) - 1))
        self.tokens += gained
        self.accepted_lengths.append(len(gained))
        self._num_read = len(self.tokens) - 1
        states = states[: len(unread) + len(gained) - 1]
        self.below.resolve(self._num_read, gained[-1], states if self.shares_cache else None)
        return Round(gained, distributions, list(range(len(gained))))

    @abstractmethod
    def _verify(self, unread: list[int], block: Block) -> tuple[int, int, Tensor, Any]:
        """A pass over the unread tokens and the block after them.

        Returns:
            How many of the block's tokens are kept, the token after them, the states of the rows
            that were read, and the distributions for the block's tokens and the one after.
        """


class BlockStage(BaseBlockStage):
    """A block stage whose draws are on the host."""

    sampler: Sampler

    def _verify(self, unread: list[int], block: Block) -> tuple[int, int, Tensor, Any]:
        states = self.verifier.read(unread + block.tokens)
        logits = self.verifier.logits(states[len(unread) - 1 :])
        prefixes = Prefixes(
            self.tokens, [block.tokens[:length] for length in range(len(block.tokens) + 1)]
        )
        distributions = self.sampler.distributions(logits, prefixes)
        num_kept, next_token = self.sampler.verify(block.tokens, block.distributions, distributions)
        return num_kept, next_token, states, distributions
