"""Bytes that a pass must move: over the bandwidth of memory they bound its time from below.

Weights count as the runtime keeps them: in the compute dtype, or as 4-bit codes with a scale and an
offset for each group, although kernels may read more (a dequantized copy beyond a few rows).
Activations are not counted: they stay in the processor's caches. Weights may do so too where a
whole model is small enough, and its passes then take less than their bound.

#   R = rows (tokens of one pass)
"""

from dataclasses import dataclass, replace
from math import prod

from polybasic.chain.formats.checkpoints.decoder_config import DecoderConfig
from polybasic.chain.formats.checkpoints.kinds import Kind
from polybasic.chain.formats.checkpoints.names import (
    Shape,
    layer_norms,
    linear_shapes,
    required_biases,
)
from polybasic.chain.formats.checkpoints.quantization import (
    DRAFT_GROUP_SIZE,
    GROUP_SIZE,
    largest_group_size,
)
from polybasic.chain.kernels.cpu.matrices import NativeLinear
from polybasic.chain.kernels.rows import seen_from
from polybasic.chain.kernels.selection import backend_for
from polybasic.deploy import Chain

SCALE_BYTES = 4
"""A scale and an offset in bfloat16, for a group of inputs of one output."""
ROUNDED_GROUP_BYTES = 3
"""A float16 scale and a byte of zero, for a group of a rounded head."""


@dataclass(frozen=True)
class Moved:
    """Bytes of one pass, or of all passes of a draft.

    Attributes:
        weights: of the layers, and of what else is read whole but the output projection.
        lm_head: of the output projection.
        cache: keys and values, read and written.
        embeddings: of the rows' tokens.
    """

    weights: int
    lm_head: int
    cache: int
    embeddings: int

    @property
    def total(self) -> int:
        return self.weights + self.lm_head + self.cache + self.embeddings

    def times(self, factor: int) -> "Moved":
        """Of so many passes."""
        return Moved(*(factor * part for part in vars(self).values()))


def member_pass(chain: Chain, name: str, context: int, rows: int) -> Moved:
    """A pass of a verifying member over R tokens behind `context` cached ones, logits included."""
    decoder = chain.engine.verifiers[name].decoder
    kind = chain.manifest.member(name).kind
    moved = decoder_pass(decoder.config, kind, decoder.dtype.itemsize, context, rows)
    projection = decoder.weights.lm_head
    if not isinstance(projection, NativeLinear):
        return moved
    return replace(moved, lm_head=projection.num_bytes - decoder.bytes_left_out)


def decoder_pass(
    config: DecoderConfig, kind: Kind, itemsize: int, context: int, rows: int
) -> Moved:
    """A pass of a decoder.

    Args:
        kind: "awq" for layers in 4 bits.
        itemsize: bytes of a value of the compute dtype.
    """
    one_layer = layer_bytes(config, kind, itemsize)
    norm_size = config.hidden_size * (4 if config.has_offset_norms else itemsize)
    return Moved(
        weights=config.num_layers * one_layer + norm_size,
        lm_head=config.vocab_size * config.hidden_size * itemsize,
        cache=sum(
            cache_bytes(config, layer, itemsize, context, rows)
            for layer in range(config.num_layers)
        ),
        embeddings=rows * config.hidden_size * itemsize,
    )


def member_draft(chain: Chain, name: str, context: int, depth: int, top_k: int) -> Moved:
    """All passes of a draft of a drafting member."""
    drafter = chain.engine.models.drafters[name]
    weights = drafter.weights
    config, itemsize = weights.config, weights.dtype.itemsize
    kind = chain.manifest.member(name).kind
    if not weights.is_head:
        return decoder_pass(config, kind, itemsize, context, top_k).times(depth)
    backend = backend_for(weights.device, weights.dtype, config)
    moved = head_draft(
        config,
        kind,
        weights.num_draft_tokens,
        itemsize,
        context,
        depth,
        top_k,
        backend.rounds_drafts(config.hidden_size),
    )
    return replace(moved, lm_head=moved.lm_head - depth * drafter.bytes_left_out)


def head_draft(
    config: DecoderConfig,
    kind: Kind,
    num_tokens: int,
    itemsize: int,
    context: int,
    depth: int,
    top_k: int,
    is_rounded: bool = False,
) -> Moved:
    """All passes of a head's draft; each reads the whole head.

    An EAGLE-3 head fuses the verifier's features once a draft.

    Args:
        num_tokens: that can be drafted.
        is_rounded: weights are read in 4 bits.
    """
    width = config.hidden_size
    # of one weight, its share of a group's scale and zero included
    weight_bytes = 0.5 + ROUNDED_GROUP_BYTES / DRAFT_GROUP_SIZE if is_rounded else itemsize
    linears = sum(prod(shape) for shape in linear_shapes(config, kind).values())
    norms = layer_bytes(config, kind, itemsize) - linears * itemsize
    fused = width * weight_bytes * (3 * width if kind == "eagle3" else 2 * width * depth)
    return Moved(
        weights=round(depth * (linears * weight_bytes + norms) + fused),
        lm_head=round(depth * num_tokens * width * weight_bytes),
        cache=depth * cache_bytes(config, 0, itemsize, context, top_k),
        embeddings=depth * top_k * width * itemsize,
    )


def layer_bytes(config: DecoderConfig, kind: Kind, itemsize: int) -> int:
    """Weights of one layer: linears with the biases that the config asks for, and norms."""
    linears = linear_shapes(config, kind)
    # the groups that a copy gets where none are asked for
    group_size = largest_group_size(in_size for _, in_size in linears.values()) or GROUP_SIZE
    num_bytes = sum(linear_bytes(shape, kind, itemsize, group_size) for shape in linears.values())
    num_bytes += sum(linears[name][0] * itemsize for name in required_biases(config))
    norm_itemsize = 4 if config.has_offset_norms else itemsize
    norms = layer_norms(config, kind).values()
    return num_bytes + sum(prod(shape) * norm_itemsize for _, shape in norms)


def linear_bytes(shape: Shape, kind: Kind, itemsize: int, group_size: int = GROUP_SIZE) -> int:
    """One weight [out, in]."""
    out_size, in_size = shape
    if kind != "awq":
        return out_size * in_size * itemsize
    return out_size * in_size // 2 + out_size * (in_size // group_size) * SCALE_BYTES


def cache_bytes(config: DecoderConfig, layer: int, itemsize: int, context: int, rows: int) -> int:
    """Keys and values of one layer: those of the context that it sees, and R new ones."""
    _, first = seen_from(context, config.kinds[config.kind_of(layer)], None)
    return 2 * config.num_kv_heads * config.head_dim * itemsize * (context - first + rows)
