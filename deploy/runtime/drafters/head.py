"""Drafts by a head, which continues the verifier's features."""

from typing import Self

from torch import Tensor

from polybasic.chain.formats.plan import Tree
from polybasic.chain.kernels.executor import Executor
from polybasic.deploy.runtime.drafters.expansion import ExpandingDrafter
from polybasic.deploy.runtime.rounds.cache import KeyValueCache
from polybasic.deploy.runtime.rounds.lazy_rows import LazyRows


class EagleDrafter(ExpandingDrafter):
    """Drafts by a head: the first level reads the new observations, every other one `top_k` rows.

    A draft depends only on the tokens and the observed states.

    Args:
        head: the draft head.
        tree: shape of the drafts.
        capacity: rows of the head's cache, those of a draft included.

    Attributes:
        observed: by position, so that any row of the cache can be read again.
    """

    def __init__(self, head: Executor, tree: Tree, capacity: int) -> None:
        self.observed = Observed(head, capacity)
        # A row reads the state of one token and the token after it.
        super().__init__(head, KeyValueCache.of(head, capacity), tree, lag=1)

    @property
    def num_observed(self) -> int:
        return self.observed.length

    def observe(self, states: Tensor) -> None:
        self.observed.append(self.model.weights.select_inputs(states))

    def rewind(self, num_observed: int) -> None:
        self.observed.truncate(num_observed)
        # Row t also holds token t + 1, so the last row is read again.
        self.cache.truncate(min(self.cache.length, max(num_observed - 1, 0)))

    def copy_from(self, other: Self, num_tokens: int) -> None:
        super().copy_from(other, num_tokens)
        self.observed.copy_from(other.observed, num_tokens)

    def fill(self, num_tokens: int) -> None:
        super().fill(num_tokens)
        self.observed.truncate(0)
        self.observed.length = num_tokens

    def give_back(self) -> None:
        super().give_back()
        self.observed.give_back()

    def begin(self, tokens: list[int]) -> int:
        assert self.observed.length == len(tokens) - 1 >= 1
        return super().begin(tokens)

    def features(self, start: int, end: int, rows_ahead: int = 0) -> Tensor:
        features = self.model.features(self.observed.inputs[start:end])
        positions = self.model.weights.positions
        return positions.with_rows_ahead(features, rows_ahead) if positions else features


class Observed:
    """What a head reads of the verifier's states, for one sequence.

    Attributes:
        inputs: [capacity, input width of the head].
        length: leading rows that are known.
    """

    def __init__(self, head: Executor, capacity: int, width: int | None = None) -> None:
        width = width or head.weights.input_width
        self._rows = LazyRows((capacity, width), dtype=head.dtype, device=head.device)
        self.inputs, self.length = self._rows.tensor, 0

    def append(self, inputs: Tensor) -> None:
        """Add rows [R, input width]."""
        end = self.length + len(inputs)
        self.inputs[self.length : end] = inputs
        self.length = end

    def truncate(self, length: int) -> None:
        """Forget all rows from `length` on."""
        assert 0 <= length <= self.length, f"truncate to {length} of {self.length} rows"
        self.length = length
        self._rows.truncate(length)

    def copy_from(self, other: Self, num_rows: int) -> None:
        """Take over the first rows of one of the same shape, at most `num_rows`."""
        self.length = min(num_rows, other.length)
        self._rows.take_over(other._rows, self.length)

    def give_back(self) -> None:
        """Return the memory of rows that are not known."""
        self._rows.give_back(self.length)
