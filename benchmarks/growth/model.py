"""Function-preserving growth: a small Llama inside the shapes of a large one.

A grown model computes the small model's logits at the large model's cost: acceptance can be
measured with weights that fit into a repository, and time with shapes that people serve.

- Width: added channels of the residual stream are zero everywhere. A norm over D' channels sees
  D/D' of the mean square, so its weights are scaled by sqrt(D/D') and epsilon by D/D'.
- Heads: a head of h dimensions moves into one of H; rotary pair i goes where the large head has
  its frequency, and scores are scaled by sqrt(H/h) against the larger divisor. Query heads that
  shared a key/value head may get copies of it.
- Added heads, neurons and layers compute values that nothing reads: their columns of o_proj and
  down_proj are zero.
- Vocabulary: one added channel carries a constant, which the output projection turns into very
  low logits of the added tokens.

Weights that cannot affect an output are random, so that they cost as much as ordinary numbers. They
are drawn once and are the same in all layers.

#   D = hidden size, I = in features, O = out features, V = vocabulary, G = 4-bit groups of an input
#   row; primed in the grown model
"""

from dataclasses import dataclass
from functools import cache, cached_property
from math import frexp, prod, sqrt
from typing import Any

import torch
from torch import Tensor

from growth.shapes import GrownShape, check_sizes, num_kv_copies
from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.awq import CODES_PER_WORD, QuantizedWeight
from polybasic.chain.formats.checkpoints.decoder_config import DecoderConfig
from polybasic.chain.formats.checkpoints.quantization import GROUP_SIZE

_CPU = torch.device("cpu")
NOWHERE = -1
"""In an index: this feature of the grown model has no origin in the small one."""
_CONSTANT = 1e-2
"""Value of the added channel: in the embedding relative to its root mean square, in a head's states
as it is. Too small to affect a norm."""
_CONSTANT_GAIN = 1e3
"""Weight of the final norm for the added channel."""
_ADDED_TOKEN_WEIGHT = -3e4
"""Weight of the output projection for the added channel; within the range of float16."""
_FILLER_BLOCK = 1 << 20
_FILLER_ZERO, _FILLER_SCALE = 8, 0.004
"""For groups that the small model does not have; their weights are as large as `_filler`'s."""

Packed = tuple[Tensor, Tensor, Tensor]
"""AutoAWQ's qweight, qzeros and scales of one linear."""


class Growth:
    """Where each feature of a grown model comes from.

    Attributes are int64 indices into the small model's features, NOWHERE for added ones:
    hidden [D'], neurons, tokens [V'], queries and keys (rows of their projections), values,
    attended (columns of o_proj).

    Args:
        small: of the model, or of a draft head.
        shape: to grow to.
        device: of the indices and the grown weights.

    Raises:
        UserError: as `check_sizes`, or rotary parameters that do not carry over to larger heads.
    """

    def __init__(
        self, small: DecoderConfig, shape: GrownShape, device: torch.device = _CPU
    ) -> None:
        check_sizes(small, shape)
        self.small, self.shape = small, shape
        self.vocab_size = max(small.vocab_size, shape.vocab_size)
        self.hidden = _first(small.hidden_size, shape.hidden_size).to(device)
        self.neurons = _first(small.intermediate_size, shape.intermediate_size).to(device)
        self.tokens = _first(small.vocab_size, self.vocab_size).to(device)
        self.query_scale, self.rope = _scaled_scores(small, shape.head_dim // small.head_dim)
        query_heads, kv_heads = _heads(small, shape, num_kv_copies(small, shape))
        rotated = _rotated_dims(small.head_dim, shape.head_dim)
        plain = _first(small.head_dim, shape.head_dim)
        self.queries = _in_heads(query_heads, rotated, small.head_dim).to(device)
        self.keys = _in_heads(kv_heads, rotated, small.head_dim).to(device)
        self.values = _in_heads(kv_heads, plain, small.head_dim).to(device)
        self.attended = _in_heads(query_heads, plain, small.head_dim).to(device)

    @property
    def constant_channel(self) -> int | None:
        """The added channel that keeps added tokens improbable; None if no tokens are added."""
        return None if self.vocab_size == self.small.vocab_size else self.small.hidden_size

    @property
    def norm_eps(self) -> float:
        """Of the grown model's norms."""
        return self.small.rms_norm_eps * self.small.hidden_size / self.shape.hidden_size


@dataclass(frozen=True, eq=False)
class Placing:
    """How a matrix [O, I] moves into one of [O', I'].

    Attributes:
        rows: origin of each output feature, int64 [O'].
        columns: origin of each input feature, int64 [I'].
        fills_rows: added rows may hold random weights, since nothing reads their outputs.
        fills_columns: added columns may hold random weights, since their inputs are zero.
        zero_column: an added column that must stay zero nevertheless.
        scale: of all weights that are moved.
        group_size: inputs that share a scale in 4 bits.
    """

    rows: Tensor
    columns: Tensor
    fills_rows: bool = False
    fills_columns: bool = False
    zero_column: int | None = None
    scale: float = 1.0
    group_size: int = GROUP_SIZE

    def dense(self, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
        """`weight` [O, I] as [O', I'] in `dtype`; None stands for an added layer's."""
        grown = self._dense_surroundings(dtype).clone()
        if weight is not None:
            weight = weight.to(self.rows.device)
            is_row, is_column = self.rows != NOWHERE, self.columns != NOWHERE
            moved = weight[self.rows[is_row]][:, self.columns[is_column]].float() * self.scale
            grown[is_row.nonzero(), is_column.nonzero().T] = moved.to(dtype)
        return grown

    def int4(self, weight: QuantizedWeight | None, name: str) -> Packed:
        """The same for 4-bit codes, packed; a group keeps its zero point and its scale.

        Only words that hold moved codes are unpacked: packing whole matrices takes minutes.

        Args:
            weight: of the small model, on the device of the indices; None for an added layer's.
            name: of the linear, for errors.

        Raises:
            UserError: as `group_origins`, or `weight` is malformed.
        """
        parts = qweight, qzeros, scales = tuple(part.clone() for part in self._packed_surroundings)
        if weight is None:
            return qweight, qzeros, scales
        origins = self.group_origins
        groups = (origins != NOWHERE).nonzero().flatten()
        words = (self.rows != NOWHERE).view(-1, CODES_PER_WORD).any(1).nonzero().flatten()
        inputs, rows = _each(groups, self.group_size), _each(words, CODES_PER_WORD)
        at = (inputs[:, None], words), (groups[:, None], words), (groups[:, None], rows)
        block = QuantizedWeight.unpack(
            *(part[where] for part, where in zip(parts, at, strict=True)), name=name
        )
        is_row, is_column = self.rows[rows] != NOWHERE, self.columns[inputs] != NOWHERE
        taken = self.rows[rows][is_row]
        block.zeros[is_row] = weight.zeros[taken][:, origins[groups]]
        moved_scales = weight.scales[taken][:, origins[groups]].float() * self.scale
        block.scales[is_row] = moved_scales.to(block.scales.dtype)
        block.codes[is_row] = block.zeros[is_row].repeat_interleave(self.group_size, 1)
        block.codes[is_row.nonzero(), is_column.nonzero().T] = weight.codes[taken][
            :, self.columns[inputs][is_column]
        ]
        for part, where, packed in zip(parts, at, block.pack(name), strict=True):
            part[where] = packed
        return qweight, qzeros, scales

    @cached_property
    def _is_filled(self) -> Tensor:
        """Which weights are random, bool [O', I']."""
        rows = (self.rows == NOWHERE) & self.fills_rows
        columns = (self.columns == NOWHERE) & self.fills_columns
        is_filled = rows[:, None] | columns
        if self.zero_column is not None:
            is_filled[:, self.zero_column] = False
        return is_filled

    @cached_property
    def _surroundings(self) -> dict[torch.dtype, Tensor]:
        return {}

    def _dense_surroundings(self, dtype: torch.dtype) -> Tensor:
        """[O', I'] before anything is moved into it."""
        if dtype not in self._surroundings:
            filler = _repeated(_filler().to(self.rows.device), self._is_filled.shape).to(dtype)
            self._surroundings[dtype] = filler.masked_fill_(~self._is_filled, 0)
        return self._surroundings[dtype]

    @cached_property
    def _packed_surroundings(self) -> Packed:
        codes = _repeated(_filler_codes().to(self.rows.device), self._is_filled.shape)
        codes = codes.masked_fill_(~self._is_filled, _FILLER_ZERO)
        zeros = codes.new_full((len(self.rows), len(self.group_origins)), _FILLER_ZERO)
        scales = torch.full_like(zeros, _FILLER_SCALE, dtype=torch.float16)
        return QuantizedWeight(codes, zeros, scales).pack("grown")

    @cached_property
    def group_origins(self) -> Tensor:
        """The 4-bit group that each grown group takes its codes from, int64 [G'].

        Raises:
            UserError: a group would take codes from two groups, or the grown sizes are not
                multiples of groups and words.
        """
        for what, size, divisor in (
            ("inputs", len(self.columns), self.group_size),
            ("outputs", len(self.rows), CODES_PER_WORD),
        ):
            if size % divisor:
                raise UserError(
                    "4-bit weights cannot be grown",
                    f"{size} {what} are no multiple of {divisor}",
                    "choose another shape",
                )
        columns = self.columns.unflatten(0, (-1, self.group_size))
        is_moved = columns != NOWHERE
        origins = torch.where(is_moved, columns // self.group_size, NOWHERE)
        groups = origins.amax(1)
        if (is_moved & (origins != groups[:, None])).any():
            raise UserError(
                "4-bit groups cannot be grown",
                f"a group of {self.group_size} inputs would take codes from two groups",
                "choose a shape in which the small model's heads stay together by groups",
            )
        return groups


class GrownWeights:
    """The matrices and vectors of a grown Llama or EAGLE-2 head.

    Args:
        growth: where its features come from.
        group_size: of the small model's weights in 4 bits; None of a model that has none.
    """

    def __init__(self, growth: Growth, group_size: int | None = None) -> None:
        self.growth = growth
        hidden, group_size = growth.hidden, group_size or GROUP_SIZE
        self._reads_hidden: dict[str, Any] = {
            "columns": hidden,
            "fills_columns": True,
            "zero_column": growth.constant_channel,
            "group_size": group_size,
        }
        reads = self._reads_hidden
        self.linears = {
            "self_attn.q_proj": Placing(
                growth.queries, fills_rows=True, scale=growth.query_scale, **reads
            ),
            # queries may be random in a head's added dimensions, so their keys are zero
            "self_attn.k_proj": Placing(growth.keys, **reads),
            "self_attn.v_proj": Placing(growth.values, fills_rows=True, **reads),
            "self_attn.o_proj": Placing(hidden, growth.attended, group_size=group_size),
            "mlp.gate_proj": Placing(growth.neurons, fills_rows=True, **reads),
            "mlp.up_proj": Placing(growth.neurons, fills_rows=True, **reads),
            "mlp.down_proj": Placing(hidden, growth.neurons, group_size=group_size),
        }
        """Placings of each layer's linears, by name in checkpoints."""

    def check_groups(self) -> None:
        """Check that 4-bit weights can be grown, before any are.

        Raises:
            UserError: as `Placing.group_origins`.
        """
        for placing in self.linears.values():
            _ = placing.group_origins

    def norm(self, weight: Tensor | None, *, is_final: bool = False) -> Tensor:
        """Weight [D'] of a norm in float32; None stands for an added layer's."""
        growth = self.growth
        scale = sqrt(growth.small.hidden_size / growth.shape.hidden_size)
        grown = torch.zeros(growth.shape.hidden_size, device=growth.hidden.device)
        is_small = growth.hidden != NOWHERE
        grown[is_small] = scale if weight is None else weight.to(grown.device).float() * scale
        if is_final and growth.constant_channel is not None:
            grown[growth.constant_channel] = _CONSTANT_GAIN
        return grown

    def embedding(self, weight: Tensor) -> Tensor:
        """[V, D] as [V', D'], with the constant in its channel."""
        growth = self.growth
        grown = Placing(growth.tokens, growth.hidden).dense(weight, weight.dtype)
        if growth.constant_channel is not None:
            grown[:, growth.constant_channel] = _root_mean_square(weight) * _CONSTANT
        return grown

    def lm_head(self, weight: Tensor) -> Tensor:
        """[V, D] as [V', D']; added tokens read only the constant."""
        growth, constant = self.growth, self.growth.constant_channel
        grown = Placing(growth.tokens, **self._reads_hidden).dense(weight, weight.dtype)
        if constant is not None:
            is_added = growth.tokens == NOWHERE
            grown[is_added] = 0
            grown[is_added, constant] = _ADDED_TOKEN_WEIGHT
        return grown

    def fc(self, weight: Tensor, embedding: Tensor) -> Tensor:
        """[D, 2D] of a head as [D', 2D'].

        The constant comes from the embedding, not from the feature, whose constant is large enough
        after the final norm to affect a head's norm.

        Args:
            weight: of the small head.
            embedding: [V, D] that it reads.
        """
        growth, constant = self.growth, self.growth.constant_channel
        placing = Placing(growth.hidden, **self._reads_hidden)
        grown = torch.cat([placing.dense(half, weight.dtype) for half in weight.chunk(2, 1)], 1)
        if constant is not None:
            grown[constant] = 0
            grown[constant, constant] = 1 / _root_mean_square(embedding)
        return grown

    def fc_bias(self, bias: Tensor) -> Tensor:
        """[D] as [D']."""
        return self.states(bias[None])[0]

    def states(self, rows: Tensor) -> Tensor:
        """Rows [N, D] that are added to states, as [N, D']."""
        is_small = self.growth.hidden != NOWHERE
        grown = rows.new_zeros(len(rows), len(is_small), device=is_small.device)
        grown[:, is_small] = rows.to(is_small.device)
        return grown

    def by_token(self, table: Tensor) -> Tensor:
        """[V, rank] as [V', rank]."""
        is_small = self.growth.tokens != NOWHERE
        grown = table.new_zeros(len(is_small), table.shape[1], device=is_small.device)
        grown[is_small] = table.to(is_small.device)
        return grown


def _root_mean_square(weight: Tensor) -> float:
    return weight.float().square().mean().sqrt().item()


@cache
def _filler() -> Tensor:
    """Random weights of ordinary magnitude."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(_FILLER_BLOCK, generator=generator).mul_(0.02).bfloat16()


@cache
def _filler_codes() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 16, (_FILLER_BLOCK,), generator=generator).to(torch.uint8)


def _repeated(block: Tensor, shape: torch.Size) -> Tensor:
    """One block repeated, since drawing is slow."""
    num = prod(shape)
    return block.repeat(-(-num // len(block)))[:num].view(shape)


def _each(units: Tensor, size: int) -> Tensor:
    """Indices of all elements of these units of `size`."""
    return (units[:, None] * size + torch.arange(size, device=units.device)).flatten()


def _first(size: int, grown_size: int) -> Tensor:
    """Origins with the small model's features first, then added ones."""
    indices = torch.arange(grown_size)
    return torch.where(indices < size, indices, NOWHERE)


def _scaled_scores(small: DecoderConfig, ratio: int) -> tuple[float, dict[str, Any]]:
    """Factor of the queries and rotary parameters that undo a head size `ratio` times as large.

    A power of two keeps stored weights exact, 4-bit scales too. Any other factor goes into the
    rotations: YaRN scales queries and keys, and at factor 1 has the default frequencies.
    """
    root, rope = sqrt(ratio), small.rope
    is_power_of_two = frexp(root)[0] == 0.5
    if ratio == 1 or (is_power_of_two and rope["rope_type"] != "yarn"):
        return root, rope
    if rope["rope_type"] != "default":
        raise UserError(
            "heads cannot be grown",
            f"rope_type {rope['rope_type']}, a head size {ratio} times as large",
            "choose a shape with the model's head size",
        )
    return 1.0, {
        **rope,
        "rope_type": "yarn",
        "factor": 1.0,
        "attention_factor": ratio**0.25,
        "original_max_position_embeddings": small.context_tokens,
    }


def _heads(small: DecoderConfig, shape: GrownShape, copies: int) -> tuple[Tensor, Tensor]:
    """Origins of the query heads [A'] and of the key/value heads [K'].

    Each key/value head goes into `copies` of the grown model's, each with a part of its queries.
    """
    served = shape.num_heads // shape.num_kv_heads
    query_heads = torch.full((shape.num_kv_heads, served), NOWHERE)
    kv_heads = torch.full((shape.num_kv_heads,), NOWHERE)
    for head in range(small.num_kv_heads):
        queries = torch.arange(small.query_groups) + head * small.query_groups
        for copy, part in enumerate(queries.split(served)):
            kv_heads[head * copies + copy] = head
            query_heads[head * copies + copy, : len(part)] = part
    return query_heads.flatten(), kv_heads


def _rotated_dims(size: int, grown_size: int) -> Tensor:
    """Origins [H'] of a head's dimensions, so that each pair keeps its frequency.

    Pair i of H/2 turns with theta^(-2i/H): in a head k times as large that is pair k i.
    """
    ratio, half = grown_size // size, size // 2
    origins = torch.full((2, half, ratio), NOWHERE)
    origins[:, :, 0] = torch.arange(size).view(2, half)
    return origins.flatten()


def _in_heads(heads: Tensor, dims: Tensor, size: int) -> Tensor:
    """Origins of all features [heads x dims] from those of heads and of a head's dimensions."""
    origins = heads[:, None] * size + dims
    return torch.where((heads[:, None] != NOWHERE) & (dims != NOWHERE), origins, NOWHERE).flatten()
