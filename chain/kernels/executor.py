"""What every executor of a model's passes can do: in PyTorch, in C++ or in Triton.

#   R = rows (tokens of one pass), D = hidden size, V = tokens to choose from
#   W = width of the states: D, plus D for each feature layer that is asked for
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from polybasic.chain.formats.checkpoints.decoder_config import DecoderConfig
from polybasic.chain.formats.plan import Window
from polybasic.chain.kernels.drafts import Candidates
from polybasic.chain.kernels.noise import gumbel_noise
from polybasic.chain.kernels.rows import Rows
from polybasic.chain.kernels.shortlist import Shortlist
from polybasic.chain.kernels.weights import ModelWeights

Layers = Sequence[Tensor]
"""The cache of a sequence: one [2K, capacity, H] a layer, keys first; K key/value heads of size
H. Rows that were never written are finite."""


@runtime_checkable
class HoldsSource(Protocol):
    """What `Layers` of an encoder-decoder are, too.

    Attributes:
        num_source: leading rows that hold the source; set by the pass that reads it.
    """

    num_source: int


@dataclass(frozen=True)
class Perturbation:
    """Makes a draft follow draws with known noise: its scores are those of perturbed logits.

    Attributes:
        scale: factor of the logits; a tensor [] where rounds stay on the device.
        added: to the scaled logits, float32 [levels, vocabulary], a row for each level.
    """

    scale: float | Tensor
    added: Tensor


@dataclass(frozen=True)
class DraftRequest:
    """One sequence's draft.

    Attributes:
        state: [1, D] as `Executor.forward` returns it, which the first level follows; of a head
            that gives all positions at once [depth, D], a row for each level.
        cache: of the sequence; has room for (depth - 1) * top_k rows after `start`.
        start: committed rows of the cache; the position of the first level. A tensor, int64 [],
            where rounds stay on the device.
        depth: levels, at least one.
        top_k: at most V.
        window: the part of a long context that rows see; None for all of it.
        perturbation: of the logits, with at least `depth` rows; None leaves them as they are.
        least_score: no level follows one whose candidates all score less. Not for drafts that stay
            on the device.
        shortlist: of tokens that can be drafted, as `Executor.shortlist` made it; None for all.
    """

    state: Tensor
    cache: Layers
    start: int | Tensor
    depth: int
    top_k: int
    window: Window | None = None
    perturbation: Perturbation | None = None
    least_score: float = -math.inf
    shortlist: Shortlist | None = None


class Runner(Protocol):
    """Runs a function of a key; see `polybasic.chain.kernels.cuda.graphs.Graphs.run`."""

    def run(self, key: Hashable, function: Callable[[], None], label: str | None = None) -> None:
        """Run the function, or repeat what the first one of its key did on the device."""


class Executor(ABC):
    """Runs passes of one model.

    `polybasic.chain.kernels.torch.executor` is the reference: it decides what is right, and runs
    every model on every device. The others are faster, and say what they take.

    Attributes:
        name: of the kind of executor.
        runs_on_device: whether passes and drafts also take rows that only the device knows, so
            that whole rounds can be captured (`polybasic.chain.kernels.torch.rows`).
        is_batch_invariant: whether a row gets the same bits in any company, alone or in a tree, a
            prompt or a pass over several sequences.
        reads_whole_prompts: whether all tokens of a prompt but the last come in one pass.
        weights: of the model.
    """

    name: ClassVar[str]
    runs_on_device = False
    is_batch_invariant = False
    reads_whole_prompts = False

    def __init__(self, weights: ModelWeights) -> None:
        self.weights = weights

    @property
    def config(self) -> DecoderConfig:
        return self.weights.config

    @property
    def device(self) -> torch.device:
        return self.weights.device

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.dtype

    @property
    def max_levels(self) -> int | None:
        """The deepest draft; None for any."""
        return self.weights.max_levels

    def states_width(self, feature_layers: tuple[int, ...] = ()) -> int:
        """W."""
        return (1 + len(feature_layers)) * self.config.hidden_size

    @abstractmethod
    def over(self, weights: ModelWeights) -> "Executor":
        """The same kind of executor over other weights, which share its layout."""

    @abstractmethod
    def forward(
        self,
        token_ids: Tensor,
        caches: Sequence[Layers],
        rows: Sequence[Rows],
        features: Tensor | None = None,
        feature_layers: tuple[int, ...] = (),
    ) -> Tensor:
        """States [R, W] of a pass over rows of one or more sequences.

        A decoder's states are the residual stream after the final norm, followed by the inputs of
        `feature_layers` in order. A head's are the residual stream, before its final norm unless
        it continues what that makes of it (`ModelWeights.norms_output`).

        Args:
            token_ids: int64 [R], one sequence after the other.
            caches: of each sequence; the rows of the pass are written.
            rows: of each sequence.
            features: [R, D], for a head: the feature of the token before each row's.
            feature_layers: layers whose inputs are a part of the states.
        """

    @abstractmethod
    def logits(self, states: Tensor) -> Tensor:
        """Logits [R, V] of states [R, W] as `forward` returns them, in the compute dtype."""

    def shortlist(self) -> Shortlist | None:
        """A new one, if another model checks the tokens and some can be left out; else None."""
        return None

    @property
    def bytes_left_out(self) -> int:
        """Of its output projection, what passes skip until their sequence has seen a rare token."""
        return 0

    def listed_logits(
        self, states: Tensor, shortlists: Sequence[Shortlist | None], num_rows: Sequence[int]
    ) -> Tensor:
        """As `logits`, minus infinity for tokens that a row's shortlist does not have.

        Args:
            shortlists: of each sequence, as `shortlist` made them; None has all tokens.
            num_rows: of each sequence among the R.
        """
        raise NotImplementedError(f"{type(self).__name__} makes no shortlists")

    @abstractmethod
    def features(self, inputs: Tensor) -> Tensor:
        """A head's features [R, D] of its inputs, which `select_inputs` takes of states."""

    @abstractmethod
    def drafts(self, requests: Sequence[DraftRequest]) -> list[Candidates]:
        """All candidates that follow each state: EAGLE-2's dynamic trees before the best are kept.

        At each level the `top_k` candidates with the highest cumulative log-probability are
        expanded by `top_k` tokens each (Li et al., EAGLE-2, 2024). The rows that are written stay
        provisional: the next pass overwrites them.

        Args:
            requests: of different sequences, each with a cache of its own.
        """

    def prepare(self, functions: Sequence[Callable[[], None]]) -> None:  # noqa: B027
        """Choose together what functions that run passes would choose one by one, if anything.

        Args:
            functions: each is called, and computes no numbers that mean anything.
        """

    def capture_by(self, runner: Runner) -> None:  # noqa: B027
        """Run passes over few rows that the host knows by a runner, where they can be captured."""

    def known_passes(self) -> list[Callable[[], None]]:
        """Functions for `prepare`: passes over all numbers of rows that `capture_by` takes."""
        return []

    def draft(
        self,
        state: Tensor,
        cache: Layers,
        start: int | Tensor,
        depth: int,
        top_k: int,
        window: Window | None = None,
        perturbation: Perturbation | None = None,
    ) -> Candidates:
        """The draft of one sequence: see `DraftRequest`."""
        request = DraftRequest(state, cache, start, depth, top_k, window, perturbation)
        return self.drafts([request])[0]

    def noise(self, key: Tensor, positions: Tensor) -> Tensor:
        """Noise float32 [P, vocabulary]: see `polybasic.chain.kernels.noise.gumbel_noise`.

        Args:
            key: int64 [3], or [P, 3].
            positions: int64 [P].
        """
        return gumbel_noise(key, positions, self.config.vocab_size)
