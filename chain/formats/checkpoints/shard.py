"""A model divided over several processes: what of it each of them holds. No torch in here.

Attention is divided by key/value heads, each with the query heads that read it; the MLP by its
inner values; the output projection by tokens. What reads the hidden state is divided by outputs,
what writes it by inputs, so that two sums over all processes make a layer (Shoeybi et al.,
Megatron-LM, 2019). Norms and the embedding are whole everywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.readable import alternatives
from polybasic.chain.formats.checkpoints.decoder_config import DecoderConfig

_LANES = 16
"""Outputs that lie side by side for the CPU's kernels, which stay together where they can."""
_MOST = 64


@dataclass(frozen=True)
class Partition:
    """Which part of a linear a process holds.

    Attributes:
        outputs: parts of its outputs, one after the other; None for all.
        inputs: None for all.
        has_bias: of a linear divided by inputs, whose outputs are summed, one process adds it.
    """

    outputs: tuple[slice, ...] | None = None
    inputs: slice | None = None
    has_bias: bool = True


ALL = Partition()


@dataclass(frozen=True)
class Shard:
    """Part `rank` of `count` parts of a model.

    Attributes:
        rank: from 0.
        count: processes.
    """

    rank: int = 0
    count: int = 1

    def part(self, size: int, unit: int = 1) -> slice:
        """Of so many values: whole units, as many as the other parts have or one more or less."""
        assert size % unit == 0, f"{size} values in units of {unit}"
        begin, end = (size // unit * rank // self.count for rank in (self.rank, self.rank + 1))
        return slice(begin * unit, end * unit)

    def tokens(self, config: DecoderConfig) -> slice:
        """Rows of the output projection."""
        size = config.vocab_size
        return self.part(size, _LANES if size % _LANES == 0 else 1)

    def inner(self, config: DecoderConfig, group_size: int | None) -> slice:
        """Inner values of the MLP.

        Args:
            config: of the whole model.
            group_size: inputs of a 4-bit weight that share a scale, which stay together; None of
                a model that is not in 4 bits.
        """
        size = config.intermediate_size
        if group_size is not None:
            return self.part(size, group_size)
        return self.part(size, _LANES if size % _LANES == 0 and size >= _LANES * self.count else 1)

    def local(self, config: DecoderConfig, group_size: int | None) -> DecoderConfig:
        """The config of this part: its heads, and its size of the MLP."""
        inner = self.inner(config, group_size)
        return replace(
            config,
            num_heads=config.num_heads // self.count,
            num_kv_heads=config.num_kv_heads // self.count,
            intermediate_size=inner.stop - inner.start,
        )

    def linears(self, config: DecoderConfig, group_size: int | None) -> dict[str, Partition]:
        """What is held of a layer's linears, by name as `layer_linears` has them.

        Args:
            config, group_size: as in `inner`.

        Returns:
            What is divided; a whole model divides nothing.
        """
        if self.count == 1:
            return {}
        H, groups = config.head_dim, config.query_groups
        heads, inner = self.part(config.num_kv_heads), self.inner(config, group_size)
        keys = slice(heads.start * H, heads.stop * H)
        queries = slice(keys.start * groups, keys.stop * groups)
        A, K, I = config.num_heads * H, config.num_kv_heads * H, config.intermediate_size  # noqa: E741
        adds_bias = self.rank == 0
        return {
            "self_attn.q_proj": Partition((queries,)),
            "self_attn.k_proj": Partition((keys,)),
            "self_attn.v_proj": Partition((keys,)),
            "self_attn.qkv_proj": Partition((queries, _moved(keys, A), _moved(keys, A + K))),
            "self_attn.o_proj": Partition(None, queries, adds_bias),
            "mlp.gate_proj": Partition((inner,)),
            "mlp.up_proj": Partition((inner,)),
            "mlp.gate_up_proj": Partition((inner, _moved(inner, I))),
            "mlp.down_proj": Partition(None, inner, adds_bias),
        }


WHOLE = Shard()


def divides(config: DecoderConfig, count: int, group_size: int | None) -> str | None:
    """What of a model cannot be divided by so many processes, as people say it; None if all can."""
    kv_heads, inner = config.num_kv_heads, config.intermediate_size
    if kv_heads % count:
        return f"{kv_heads} key/value heads"
    if group_size is None or count == 1:
        return None if inner >= count else f"{inner} inner values of the MLP"
    attended = config.num_heads * config.head_dim // count
    if attended % group_size:
        return f"{config.num_heads * config.head_dim} attended values in groups of {group_size}"
    if inner // group_size < count:
        return f"{inner // group_size} groups of the MLP's 4-bit weights"
    return None


def check_divisible(models: Sequence[tuple[str, DecoderConfig, int | None]], count: int) -> None:
    """Refuse a number of processes that the models cannot be divided by.

    Args:
        models: name, config, and group size as in `Shard.inner`.

    Raises:
        UserError: one cannot be.
    """
    for name, config, group_size in models:
        if (reason := divides(config, count, group_size)) is not None:
            possible = alternatives(
                number
                for number in range(1, _MOST + 1)
                if not any(divides(config, number, group) for _, config, group in models)
            )
            raise UserError(
                "a model cannot be divided by so many processes",
                f"{count} processes, {reason} of {name}",
                f"use {possible} (--tensor-parallel)",
            )


def _moved(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)
