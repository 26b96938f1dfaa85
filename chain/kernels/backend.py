"""A backend: the layout of weights on a device, and the executor that reads it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from polybasic.chain.formats.checkpoints.awq import QuantizedWeight, round_to_nearest
from polybasic.chain.formats.checkpoints.block_types import GROUP
from polybasic.chain.formats.checkpoints.blocks import BlockWeight, in_8_bits
from polybasic.chain.formats.checkpoints.decoder_config import DecoderConfig
from polybasic.chain.formats.checkpoints.quantization import DRAFT_GROUP_SIZE
from polybasic.chain.kernels.executor import Executor
from polybasic.chain.kernels.weights import Embedding, Linear, ModelWeights

WEIGHTS_AT_ONCE = 1 << 22
"""That are rounded to 4 bits or dequantized: in float32 all would be larger than what is made."""

LayOut = Callable[[Tensor, Tensor | None], Linear]
"""A backend's way with a weight [O, I] and a bias [O]."""


class Backend(ABC):
    """Lays out the weights of models on a device, in a dtype, and runs them.

    Attributes:
        name: of the executor.
        packs_4_bits: whether 4-bit weights stay packed.
        keeps_blocks: whether weights in GGML's blocks stay in these.
        keeps_dense: whether `dense` keeps the tensor that it is given.
        rounds_checked: whether `checked` rounds weights to 8 bits.
        rounds_float32: whether both round weights in float32, too: those for a verifier whose
            products round its rows.
    """

    name: str
    packs_4_bits = True
    keeps_blocks = False
    keeps_dense = True
    rounds_checked = False
    rounds_float32 = False

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype

    def takes(self, config: DecoderConfig) -> bool:
        """Whether its executor runs models of this config; PyTorch's runs all."""
        return config.encoder is None

    @abstractmethod
    def dense(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Lay out `weight` [O, I] and `bias` [O], both on the device and in the dtype."""

    @abstractmethod
    def int4(self, weight: QuantizedWeight, bias: Tensor | None = None) -> Linear:
        """Lay out a 4-bit weight; `bias` [O] is on the device and in the dtype."""

    def blocks(self, weights: Sequence[BlockWeight], bias: Tensor | None = None) -> Linear:
        """Lay out weights of the same inputs in GGML's blocks, one after the other.

        They are dequantized where no kernels read them.
        """
        parts = [weight.dequantized(self.dtype).to(self.device) for weight in weights]
        return self.dense(parts[0] if len(parts) == 1 else torch.cat(parts), bias)

    def embedding(self, weight: BlockWeight) -> Embedding:
        """Lay out an embedding in GGML's blocks; dequantized where no kernels read them."""
        return weight.dequantized(self.dtype).to(self.device)

    @abstractmethod
    def executor(self, weights: ModelWeights) -> Executor:
        """Runs a model whose linears this backend has laid out."""

    def rounds_drafts(self, in_size: int) -> bool:
        """Whether `draft` rounds a weight over so many inputs to 4 bits."""
        return self.packs_4_bits and self._rounds and in_size % DRAFT_GROUP_SIZE == 0

    @property
    def _rounds(self) -> bool:
        return self.dtype in (torch.bfloat16, torch.float16) or self.rounds_float32

    def checked(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """As `dense`, for the output projection of a model whose tokens another one checks.

        In 16 bits it would be up to a half of what a pass over layers in 4 bits reads. In 8 bits
        the model's best token is the target's as often as before, in 4 bits less often.
        """
        if not (self.rounds_checked and self._rounds) or weight.shape[1] % GROUP:
            return self.dense(weight, bias)
        return self.blocks([in_8_bits(weight)], bias)

    def draft(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """As `dense`, for a product that only drafts: kernels read weights rounded to 4 bits.

        Bad drafts cost time and no quality, and a head of a quarter of the bytes stays in the
        processor's caches from one level of a draft to the next.
        """
        if not self.rounds_drafts(weight.shape[1]):
            return self.dense(weight, bias)
        num_rows = max(1, WEIGHTS_AT_ONCE // weight.shape[1])
        rounded = [round_to_nearest(rows, DRAFT_GROUP_SIZE) for rows in weight.split(num_rows)]
        return self.int4(QuantizedWeight.stack(rounded), bias)
