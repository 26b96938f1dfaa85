"""Passes of encoder-decoders: T5 1.1 and FLAN-T5 (Raffel et al., 2020).

A sequence is its source, the token that the decoder starts from, and the answer. The rows of the
source in a layer's cache hold the keys and values that the layer reads of the encoded source, the
rows after them those of the decoder's own attention: a source is read like a prompt, in one pass,
and whatever counts tokens, rolls back or copies need not know of encoders.

#   R = rows (tokens of one pass), S = tokens of the source, D = hidden size
#   K = heads, H = head size, C = rows of the cache that the decoder's own attention reads
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from polybasic.chain.formats.checkpoints.decoder_config import EncoderConfig
from polybasic.chain.kernels.executor import HoldsSource, Layers
from polybasic.chain.kernels.rows import Rows
from polybasic.chain.kernels.torch.executor import Attend, SequenceRows, TorchExecutor
from polybasic.chain.kernels.torch.operations import Norm, Operations
from polybasic.chain.kernels.torch.rows import DeviceRows
from polybasic.chain.kernels.weights import LayerWeights, Linear, ModelWeights, embed


@dataclass(frozen=True)
class SourceWeights:
    """What a layer of the decoder reads the source by.

    Attributes:
        norm: weight [D] of the norm before it.
        query: D -> K * H.
        key_value: D -> 2 * K * H of the encoded source, keys first.
        out: K * H -> D.
    """

    norm: Tensor
    query: Linear
    key_value: Linear
    out: Linear


@dataclass(frozen=True)
class EncoderWeights:
    """The encoder, and what ties it to the decoder.

    Attributes:
        layers: of the encoder.
        final_norm: [D], of its output.
        distances: [buckets, K], added to the scores of the encoder's attention.
        decoder_distances: the same of the decoder's own attention.
        sources: for each layer of the decoder.
    """

    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    distances: Tensor
    decoder_distances: Tensor
    sources: tuple[SourceWeights, ...]


class EncoderDecoderExecutor(TorchExecutor):
    """Runs passes of an encoder-decoder, whose rows the host knows.

    Rows at the beginning of a sequence, up to its first start token, are the source: their states
    are the encoder's, which no token is drawn after. All of them come in one pass.

    Args:
        weights: of the decoder.
        encoder: of the encoder.
    """

    name: ClassVar[str] = "encoder-decoder"
    reads_whole_prompts = True

    def __init__(self, weights: ModelWeights, encoder: EncoderWeights) -> None:
        super().__init__(weights)
        self.encoder = encoder

    def over(self, weights: ModelWeights) -> "EncoderDecoderExecutor":
        return type(self)(weights, self.encoder)

    def forward(
        self,
        token_ids: Tensor,
        caches: Sequence[Layers],
        rows: Sequence[Rows | DeviceRows],
        features: Tensor | None = None,
        feature_layers: tuple[int, ...] = (),
    ) -> Tensor:
        states: list[Tensor] = []
        ids, decoded, places = list[Tensor](), list[tuple[Layers, Rows]](), list[int]()
        for cache, read, part in zip(
            caches, rows, token_ids.split([each.num_rows for each in rows]), strict=True
        ):
            assert isinstance(read, Rows), "rows that the host knows"
            num_source = 0
            if read.start == 0:
                num_source = source_length(part.tolist(), self._shape.start_token_id)
                states.append(self._read_source(part[:num_source], cache))
                read = read.part(num_source, read.num_rows)
            if read.num_rows:
                ids.append(part[num_source:])
                decoded.append((cache, read))
                places.append(len(states))
                states.append(part)  # in whose place its states come
        if decoded:
            found = super().forward(
                torch.cat(ids),
                [cache for cache, _ in decoded],
                [read for _, read in decoded],
                features,
                feature_layers,
            )
            parts = found.split([read.num_rows for _, read in decoded])
            for place, own in zip(places, parts, strict=True):
                states[place] = own
        return states[0] if len(states) == 1 else torch.cat(states)

    @property
    def _shape(self) -> EncoderConfig:
        assert self.config.encoder is not None, "an encoder-decoder"
        return self.config.encoder

    def _read_source(self, token_ids: Tensor, cache: Layers) -> Tensor:
        """Encode a source, write what the decoder's layers read of it, and return its states."""
        assert isinstance(cache, HoldsSource), "of a sequence"
        num_tokens, heads = len(token_ids), self.config.num_heads
        operations = self.operations_for(num_tokens)
        places = torch.arange(num_tokens, device=self.device)
        added = self._added(self.encoder.distances, places, places, both_ways=True)

        def attend(index: int, qkv: Tensor) -> Tensor:
            queries, keys, values = qkv.view(num_tokens, 3, heads, -1).permute(1, 2, 0, 3)
            return _attention(queries, keys, values, added)

        x_SD = embed(self.weights.embedding, token_ids)
        for index, layer in enumerate(self.encoder.layers):
            x_SD = self._with_mlp(
                operations, layer, self._attended(operations, index, layer, x_SD, attend)
            )
        x_SD = operations.norm(x_SD, Norm(self.encoder.final_norm, self._eps))
        for source, rows in zip(self.encoder.sources, cache, strict=True):
            read = operations.product(source.key_value, x_SD)
            rows[:, :num_tokens] = read.view(num_tokens, 2 * heads, -1).transpose(0, 1)
        cache.num_source = num_tokens
        return x_SD

    def _attend(self, operations: Operations, sequences: Sequence[SequenceRows]) -> Attend:
        return _DecoderAttention(self, sequences)

    def _layer(
        self,
        operations: Operations,
        index: int,
        layer: LayerWeights,
        x_RD: Tensor,
        attend: Attend,
        attention_input: Tensor | None,
    ) -> Tensor:
        assert isinstance(attend, _DecoderAttention), "of this executor's pass"
        x_RD = self._attended(operations, index, layer, x_RD, attend)
        source = self.encoder.sources[index]
        queries = operations.product(source.query, x_RD, self._norm(source.norm))
        x_RD = self._add_product(
            operations, source.out, attend.of_source(index, queries), x_RD, None
        )
        return self._with_mlp(operations, layer, x_RD)

    def _added(
        self, distances: Tensor, positions: Tensor, columns: Tensor, both_ways: bool = False
    ) -> Tensor:
        """What is added to the scores [K, R, C] of rows at positions [R] for columns at [C]."""
        found = buckets(columns - positions[:, None], self._shape, both_ways)
        return distances[found].permute(2, 0, 1)


class _DecoderAttention:
    """Attention of a pass of the decoder: to its own rows, and to the source."""

    def __init__(self, executor: EncoderDecoderExecutor, sequences: Sequence[SequenceRows]) -> None:
        self._sequences = sequences
        self._added = [self._added_of(executor, sequence) for sequence in sequences]
        self._num_heads = executor.config.num_heads

    def __call__(self, index: int, qkv: Tensor) -> Tensor:
        """As `Attend`; the rows' keys and values are written."""
        attended = []
        for sequence, added in zip(self._sequences, self._added, strict=True):
            cache, rows, num_source = _parts(sequence, index)
            own = qkv[sequence.place].view(rows.num_rows, 3 * self._num_heads, -1).transpose(0, 1)
            queries, written = own.split([self._num_heads, 2 * self._num_heads])
            assert rows.known_prefix is not None, "rows that the host knows"
            first = rows.known_prefix + rows.first
            end = first + rows.num_rows
            cache[:, first:end] = written
            keys, values = cache[:, num_source:end].split(self._num_heads)
            attended.append(_attention(queries, keys, values, added))
        return attended[0] if len(attended) == 1 else torch.cat(attended)

    def of_source(self, index: int, queries: Tensor) -> Tensor:
        """What queries [R, K * H] find in the encoded source, likewise."""
        attended = []
        for sequence in self._sequences:
            cache, rows, num_source = _parts(sequence, index)
            own = queries[sequence.place].view(rows.num_rows, self._num_heads, -1).transpose(0, 1)
            keys, values = cache[:, :num_source].split(self._num_heads)
            attended.append(_attention(own, keys, values, None))
        return attended[0] if len(attended) == 1 else torch.cat(attended)

    @staticmethod
    def _added_of(executor: EncoderDecoderExecutor, sequence: SequenceRows) -> Tensor:
        """Distances and, for what a row does not see, minus infinity, [K, R, C]."""
        cache, rows, num_source = _parts(sequence, 0)
        [span] = sequence.spans
        assert not span.tokens, "no window"
        committed = torch.arange(num_source, rows.known_prefix or 0, device=executor.device)
        columns = torch.cat([committed, rows.columns])
        added = executor._added(executor.encoder.decoder_distances, rows.positions, columns)
        return added + span.mask(cache.shape[1], 1, executor.dtype)[:, num_source:]


def _parts(sequence: SequenceRows, index: int) -> tuple[Tensor, DeviceRows, int]:
    """A layer's cache, the rows, and how many of the cache's rows are of the source."""
    assert isinstance(sequence.cache, HoldsSource), "of a sequence"
    # of tokens that nothing has read, as where costs are measured, there may be fewer
    prefix = sequence.rows.known_prefix or 0
    num_source = min(sequence.cache.num_source, prefix)
    return sequence.cache[index], sequence.rows, num_source or prefix


def _attention(queries: Tensor, keys: Tensor, values: Tensor, added: Tensor | None) -> Tensor:
    """[R, K * H] of queries [K, R, H]; T5's scores have no factor."""
    found = F.scaled_dot_product_attention(
        queries[None], keys[None], values[None], attn_mask=added, scale=1.0
    )
    return found[0].transpose(0, 1).flatten(1)


def source_length(token_ids: Sequence[int], start_token_id: int) -> int:
    """Tokens of a sequence's source: those before its first start token, or all."""
    tokens = list(token_ids)
    return tokens.index(start_token_id) if start_token_id in tokens else len(tokens)


def buckets(distances: Tensor, shape: EncoderConfig, both_ways: bool) -> Tensor:
    """The bucket of each distance from a row to a column, int64.

    Half of the buckets of a direction hold one distance each, the others wider and wider ones; the
    last one all from `max_distance` on.

    Args:
        distances: int64, negative for columns before the row.
        both_ways: whether columns after the row are seen, which then have the second half.
    """
    num = shape.num_buckets // 2 if both_ways else shape.num_buckets
    offsets = (distances > 0) * num if both_ways else torch.zeros_like(distances)
    lengths = distances.abs() if both_ways else (-distances).clamp(min=0)
    num_exact = num // 2
    share = (lengths.clamp(min=1) / num_exact).log() / math.log(shape.max_distance / num_exact)
    wide = num_exact + (share * (num - num_exact)).long()
    return offsets + torch.where(lengths < num_exact, lengths, wide.clamp(max=num - 1))
