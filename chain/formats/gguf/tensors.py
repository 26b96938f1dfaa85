"""Tensors of a checkpoint as llama.cpp names them and lays them out.

#   O = out features, I = in features, G = groups of one row, B = blocks of one row (I / 32)
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import gguf
import numpy as np
import torch
from torch import Tensor

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.awq import CODES_PER_WORD, PARTS, QuantizedWeight
from polybasic.chain.formats.checkpoints.block_types import GROUP, BlockType, typed_name
from polybasic.chain.formats.checkpoints.blocks import BlockWeight
from polybasic.chain.formats.checkpoints.config import ConfigFile
from polybasic.chain.formats.checkpoints.decoder_config import DecoderConfig

Type: TypeAlias = gguf.GGMLQuantizationType
TYPES = {torch.float32: Type.F32, torch.float16: Type.F16, torch.bfloat16: Type.BF16}
"""Of values that are kept as they are."""
_OUTPUT = "lm_head.weight"
_UNREAD = "rotary_emb.inv_freq"
"""That old checkpoints hold, and nothing reads."""


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor of a file, laid out when `data` is asked for.

    Attributes:
        name: llama.cpp's.
        type: of its values.
        shape: [O, I], or [O] of a norm or bias.
    """

    name: str
    type: Type
    shape: tuple[int, ...]
    _parts: tuple[Tensor, ...]
    _blocks: BlockType | None = None
    _num_heads: int | None = None
    _is_offset: bool = False

    @property
    def num_bytes(self) -> int:
        """Of its data."""
        block, size = gguf.GGML_QUANT_SIZES[self.type]
        return int(np.prod(self.shape)) // block * size

    def data(self) -> np.ndarray:
        """Its bytes, uint8 [O, bytes of a row]."""
        if len(self._parts) == len(PARTS):
            packed = pack_q4_1(QuantizedWeight.unpack(*self._parts, name=self.name))
        else:
            (tensor,) = self._parts
            is_packed = self._blocks is not None and self.type.name == self._blocks.name
            if self._blocks is not None and not is_packed:
                tensor = BlockWeight(self._blocks, tensor).dequantized()
            if self._is_offset:
                tensor = 1 + tensor.float()
            if is_packed:
                packed = tensor
            elif self.type in TYPES.values():
                dtype = next(dtype for dtype, kind in TYPES.items() if kind is self.type)
                packed = tensor.to(dtype).contiguous().view(torch.uint8)
            else:
                values = gguf.quants.quantize(tensor.float().numpy(), self.type)
                packed = torch.from_numpy(values)
        packed = packed.view(self.shape[0], -1)
        if self._num_heads is not None:
            packed = interleaved(packed, self._num_heads)
        return packed.numpy()


def tensors_of(
    tensors: Mapping[str, Tensor],
    config: ConfigFile,
    architecture: gguf.MODEL_ARCH,
    matrices: Type | None = None,
) -> list[GGUFTensor]:
    """All tensors of a file.

    Norms and biases become float32, as llama.cpp reads them. Matrices in 4 bits become Q4_1, those
    in blocks keep these unless a type is given.

    Args:
        tensors: of a checkpoint, by the name that they are stored under.
        config: of the same checkpoint.
        matrices: type of the other matrices; None for those that they are stored in.

    Raises:
        UserError: a tensor that the architecture does not have.
    """
    names = gguf.get_tensor_name_map(architecture, config.decoder.num_layers)
    found = []
    for stored_name, parts in _grouped(tensors, config.decoder):
        name, blocks = typed_name(stored_name)
        translated = names.get_name(name, try_suffixes=(".weight", ".bias"))
        is_bias = name.endswith(".bias") and name.split(".")[-2] not in config.decoder.biased
        if translated is None or is_bias:
            raise UserError(
                "llama.cpp computes this model otherwise",
                f"{config.folder} holds {name}",
                "run the chain here",
            )
        first, *rest = parts
        shape = tuple(first.shape)
        if rest:
            shape, kind = (shape[1] * CODES_PER_WORD, shape[0]), Type.Q4_1
        elif len(shape) == 1:
            kind = Type.F32
        elif blocks is not None:
            kind = gguf.GGMLQuantizationType[blocks.name] if matrices is None else matrices
            shape = (shape[0], shape[1] // blocks.num_bytes * blocks.size)
        else:
            kind = TYPES[first.dtype] if matrices is None else matrices
        found.append(
            GGUFTensor(
                translated,
                kind,
                shape,
                parts,
                blocks,
                heads_interleaved(name, architecture, config.decoder),
                has_one_added(name, config.decoder),
            )
        )
    if config.decoder.rope["rope_type"] == "llama3":
        divisors = llama3_divisors(config.decoder.head_dim, config.decoder.rope)
        found.append(GGUFTensor("rope_freqs.weight", Type.F32, tuple(divisors.shape), (divisors,)))
    return found


def pack_q4_1(weight: QuantizedWeight) -> Tensor:
    """A weight in 4 bits as blocks of 32 codes with a scale and a least value, uint8 [O, 20 B].

    Codes are kept, and so are scales in float16. The least value is the rounded product of scale
    and zero: weights move by at most 15 / 2048 of a step.
    """
    blocks = weight.codes.unflatten(1, (-1, 2, GROUP // 2))
    nibbles_OBn = blocks[:, :, 0] | blocks[:, :, 1] << 4
    scales = weight.scales.float()
    constants_OG2 = torch.stack([scales, -scales * weight.zeros.float()], dim=2).half()
    constants_OB2 = constants_OG2.repeat_interleave(weight.group_size // GROUP, dim=1)
    return torch.cat([constants_OB2.contiguous().view(torch.uint8), nibbles_OBn], dim=2).flatten(1)


def heads_interleaved(
    name: str, architecture: gguf.MODEL_ARCH, decoder: DecoderConfig
) -> int | None:
    """Heads of a checkpoint's tensor whose rows llama.cpp puts into another order, else None."""
    if architecture is not gguf.MODEL_ARCH.LLAMA:
        return None
    heads = {"q_proj": decoder.num_heads, "k_proj": decoder.num_kv_heads}
    return heads.get(name.split(".")[-2])


def has_one_added(name: str, decoder: DecoderConfig) -> bool:
    """Whether llama.cpp adds 1 to a checkpoint's tensor: to the norms of a Gemma."""
    return decoder.has_offset_norms and name.endswith("norm.weight")


def interleaved(rows: Tensor, num_heads: int) -> Tensor:
    """Rows [O, ...] in the order that llama.cpp wants of a Llama, which rotates neighbours."""
    return rows.unflatten(0, (num_heads, 2, -1)).transpose(1, 2).reshape(rows.shape)


def separated(rows: Tensor, num_heads: int) -> Tensor:
    """Rows [O, ...] in the order of checkpoints, from that of `interleaved`."""
    return rows.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).reshape(rows.shape)


def llama3_divisors(head_dim: int, rope: Mapping[str, Any]) -> Tensor:
    """What the rotary frequencies of Llama 3.1 are divided by: `factor` where they are low.

    Returns:
        float32 [head_dim / 2].
    """
    frequencies = rope["rope_theta"] ** -(torch.arange(0, head_dim, 2).double() / head_dim)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * torch.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 / (kept + (1 - kept) / rope["factor"])).float()


def _grouped(
    tensors: Mapping[str, Tensor], decoder: DecoderConfig
) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    """Tensors by name; the three of a linear in 4 bits under the name of its weight."""
    for name, tensor in tensors.items():
        stem, _, part = name.rpartition(".")
        if part == PARTS[0]:
            yield f"{stem}.weight", tuple(tensors[f"{stem}.{suffix}"] for suffix in PARTS)
        elif part in PARTS or name.endswith(_UNREAD):
            continue
        elif typed_name(name)[0] != _OUTPUT or not decoder.tie_word_embeddings:
            yield name, (tensor,)
