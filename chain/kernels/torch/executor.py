"""The reference executor, in PyTorch: it decides what is right and runs every model everywhere.

Passes are computed by `Operations`; with those of Triton this is the executor of GPUs.

#   R = rows (tokens of one pass), D = hidden size, W = width of the states, V = tokens to draft
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from polybasic.chain.kernels.drafts import Candidates
from polybasic.chain.kernels.executor import DraftRequest, Executor, Layers
from polybasic.chain.kernels.rows import Rows, seen_from, split_rows
from polybasic.chain.kernels.torch.expansion import Level, expand, expansion
from polybasic.chain.kernels.torch.operations import (
    DeviceEmbedding,
    Heads,
    Norm,
    Operations,
    softcapped,
)
from polybasic.chain.kernels.torch.positions import position_drafts
from polybasic.chain.kernels.torch.rows import DeviceRows, Span
from polybasic.chain.kernels.weights import LayerWeights, Linear, ModelWeights, embed

BLOCK_ROWS = 512
"""Most rows of a pass that needs a mask, whose size is rows by columns."""
REFERENCE = Operations()
Attend = Callable[[int, Tensor], Tensor]
"""Number of a layer, and queries, keys and values of a pass's rows [R, (K*G + K + K) * H] -> what
the rows attend to [R, K * G * H]."""


@dataclass(frozen=True)
class SequenceRows:
    """Rows of one sequence in a pass.

    Attributes:
        place: which of the pass's rows.
        spans: what they see in each kind of layer.
    """

    place: slice
    cache: Layers
    rows: DeviceRows
    spans: list[Span]


class TorchExecutor(Executor):
    """Runs passes by `Operations`; also over rows that only the device knows.

    Such a pass has shapes that depend on the numbers of rows and the cache's capacity alone, and
    reads everything else from tensors, so that it can be captured. `drafts` does the same where
    `start` is int64 [] on the device.

    Args:
        weights: of the model.
        runs_on_device: whether rounds stay on the device.

    Attributes:
        operations: of rounds that stay on the device.
        embedding: of a weight in blocks.
        heads: of each layer.
    """

    name: ClassVar[str] = "torch"
    operations = REFERENCE
    embedding: ClassVar[type[DeviceEmbedding]] = DeviceEmbedding

    def __init__(self, weights: ModelWeights, runs_on_device: bool = False) -> None:
        super().__init__(weights)
        self.runs_on_device = runs_on_device
        config, scale = weights.config, weights.config.attention_scale
        self.heads = [
            Heads(
                config.num_kv_heads,
                config.query_groups,
                config.head_dim,
                config.head_dim**-0.5 if scale is None else scale,
                config.attention_softcap,
                self._norm(layer.query_norm),
                self._norm(layer.key_norm),
            )
            for layer in weights.layers
        ]

    def over(self, weights: ModelWeights) -> "TorchExecutor":
        return type(self)(weights, self.runs_on_device)

    def forward(
        self,
        token_ids: Tensor,
        caches: Sequence[Layers],
        rows: Sequence[Rows | DeviceRows],
        features: Tensor | None = None,
        feature_layers: tuple[int, ...] = (),
    ) -> Tensor:
        on_device = [read for read in rows if isinstance(read, DeviceRows)]
        known = [read for read in rows if isinstance(read, Rows)]
        if on_device:
            assert not known, "rows of a pass are known to the host, or none is"
            given = token_ids, caches, on_device, features, feature_layers
            return self._pass_over(self.operations, *given)
        states = []
        for parts in split_rows(known, self._most_rows(known)):
            tokens = slice(parts[0][1].start, parts[-1][1].stop)
            states.append(
                self._pass_over(
                    self.operations_for(tokens.stop - tokens.start),
                    token_ids[tokens],
                    [caches[place] for place, _, _ in parts],
                    [DeviceRows.of(part, self.device) for _, _, part in parts],
                    None if features is None else features[tokens],
                    feature_layers,
                )
            )
        return states[0] if len(states) == 1 else torch.cat(states)

    def run_layers(
        self,
        operations: Operations,
        token_ids: Tensor,
        attend: Attend,
        features: Tensor | None,
        feature_layers: tuple[int, ...],
    ) -> Tensor:
        """States [R, W] of a pass whose attention is given.

        Args:
            token_ids: int64 [R].
            features, feature_layers: see `Executor.forward`.
        """
        weights = self.weights
        x_RD, attention_input = self._embed(operations, token_ids, features)
        inputs: dict[int, Tensor] = {}
        for index, layer in enumerate(weights.layers):
            if index in feature_layers:
                inputs[index] = x_RD
            x_RD = self._layer(operations, index, layer, x_RD, attend, attention_input)
            attention_input = None
        if weights.final_norm is None or not weights.has_normed_states:
            return x_RD
        if weights.adapter is not None:
            down, up = weights.adapter
            x_RD = operations.product(up, operations.product(down, x_RD), added=x_RD)
        final = operations.norm(x_RD, Norm(weights.final_norm, self._eps))
        if not feature_layers:
            return final
        return torch.cat([final, *(inputs[index] for index in feature_layers)], -1)

    def logits(self, states: Tensor) -> Tensor:
        return logits_of(self.weights, states, self.operations_for(len(states)))

    def logits_on_device(self, states: Tensor) -> Tensor:
        """As `logits`, in a round that stays on the device."""
        return logits_of(self.weights, states, self.operations)

    def features(self, inputs: Tensor) -> Tensor:
        return features_of(self.weights, inputs, self.operations_for(len(inputs)))

    def features_on_device(self, inputs: Tensor) -> Tensor:
        """As `features`, in a round that stays on the device."""
        return features_of(self.weights, inputs, self.operations)

    def drafts(self, requests: Sequence[DraftRequest]) -> list[Candidates]:
        return [self._draft(request) for request in requests]

    def noise(self, key: Tensor, positions: Tensor) -> Tensor:
        return self.operations.noise(key, positions, self.config.vocab_size)

    def operations_for(self, num_rows: int) -> Operations:
        """Of a pass over so many rows that the host knows."""
        return REFERENCE

    def _most_rows(self, rows: Sequence[Rows]) -> int:
        """Of one pass: all, unless some would need too large a mask."""
        first, kinds = rows[0], self.config.kinds
        is_whole_prompt = (
            len(rows) == 1
            and first.start == 0
            and first.paths is None
            and self.config.attention_softcap is None
            and all(seen_from(first.end - 1, kind, first.window)[1] == 0 for kind in kinds)
        )
        return max(first.num_rows, 1) if is_whole_prompt else BLOCK_ROWS

    def _pass_over(
        self,
        operations: Operations,
        token_ids: Tensor,
        caches: Sequence[Layers],
        rows: Sequence[DeviceRows],
        features: Tensor | None,
        feature_layers: tuple[int, ...],
    ) -> Tensor:
        """A pass whose sequences attend one after the other."""
        sequences, first = [], 0
        for cache, read in zip(caches, rows, strict=True):
            spans = [read.span_of(kind) for kind in self.config.kinds]
            place = slice(first, first + read.num_rows)
            sequences.append(SequenceRows(place, cache, read, spans))
            first = place.stop
        attend = self._attend(operations, sequences)
        return self.run_layers(operations, token_ids, attend, features, feature_layers)

    def _attend(self, operations: Operations, sequences: Sequence[SequenceRows]) -> Attend:
        weights = self.weights

        def attend(index: int, qkv: Tensor) -> Tensor:
            kind = weights.layers[index].kind
            attended = [
                operations.attention(
                    qkv[sequence.place],
                    sequence.cache[index],
                    sequence.rows,
                    sequence.spans[kind],
                    self.heads[index],
                    weights.rotary.tables[kind],
                )
                for sequence in sequences
            ]
            return attended[0] if len(attended) == 1 else torch.cat(attended)

        return attend

    def _draft(self, request: DraftRequest) -> Candidates:
        start = request.start
        if isinstance(start, Tensor):
            operations, prefix, known_prefix = self.operations, start, None
        else:
            operations, known_prefix = self.operations_for(request.top_k), start
            prefix = torch.tensor(start, device=self.device)

        weights, positions = self.weights, self.weights.positions
        if positions is not None:
            return position_drafts(
                positions,
                logits_of(weights, request.state[: request.depth], operations),
                operations,
                prefix,
                request.top_k,
                weights.draft_token_ids,
                request.perturbation,
                request.least_score,
            )

        def run(levels: Sequence[Level]) -> list[tuple[Tensor, Tensor]]:
            [level] = levels
            features = self._draft_features(request, level.states)
            given = level.tokens, [request.cache], [level.rows], features, ()
            states = self._pass_over(operations, *given)
            return [(states, logits_of(weights, states, operations))]

        state = request.state[:, : self.config.hidden_size]
        work = expansion(
            logits_of(weights, state, operations),
            operations,
            state,
            prefix,
            request.depth,
            request.top_k,
            weights.draft_token_ids,
            request.window,
            request.perturbation,
            known_prefix,
            request.least_score,
        )
        return expand([work], run)[0]

    def _draft_features(self, request: DraftRequest, states: Tensor) -> Tensor | None:
        """What a level of a draft reads beside its tokens, of their parents' states."""
        return states if self.weights.is_head else None

    def _embed(
        self, operations: Operations, token_ids: Tensor, features: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The residual stream before the first layer, and its attention's input if different."""
        weights = self.weights
        embedded = embed(weights.embedding, token_ids)
        if features is None:
            scale = weights.embedding_scale
            return embedded if scale is None else embedded * scale, None
        if weights.embedding_norm is None or weights.feature_norm is None:
            read = torch.cat([embedded, features], -1)
            return operations.product(_required(weights.fc), read), None
        normed = [
            operations.norm(embedded, Norm(weights.embedding_norm, self._eps)),
            operations.norm(features, Norm(weights.feature_norm, self._eps)),
        ]
        return normed[1] if weights.norms_residual else features, torch.cat(normed, -1)

    def _layer(
        self,
        operations: Operations,
        index: int,
        layer: LayerWeights,
        x_RD: Tensor,
        attend: Attend,
        attention_input: Tensor | None,
    ) -> Tensor:
        x_RD = self._attended(operations, index, layer, x_RD, attend, attention_input)
        return self._with_mlp(operations, layer, x_RD)

    def _attended(
        self,
        operations: Operations,
        index: int,
        layer: LayerWeights,
        x_RD: Tensor,
        attend: Attend,
        attention_input: Tensor | None = None,
    ) -> Tensor:
        """The residual stream after a layer's attention."""
        if attention_input is None:
            qkv = operations.product(layer.qkv, x_RD, self._norm(layer.input_norm))
        else:
            qkv = operations.product(layer.qkv, attention_input)
        attended = attend(index, qkv)
        return self._add_product(operations, layer.out, attended, x_RD, layer.attention_post_norm)

    def _with_mlp(self, operations: Operations, layer: LayerWeights, x_RD: Tensor) -> Tensor:
        """The residual stream after a layer's MLP."""
        inner = operations.gated_product(
            layer.gate_up, x_RD, self._norm(layer.mlp_norm), self.config.activation
        )
        return self._add_product(operations, layer.down, inner, x_RD, layer.mlp_post_norm)

    def _add_product(
        self,
        operations: Operations,
        linear: Linear,
        rows: Tensor,
        x_RD: Tensor,
        post_norm: Tensor | None,
    ) -> Tensor:
        """`x_RD` plus the product of the rows, which is normed first if there is a norm."""
        all_reduce = self.weights.all_reduce
        if post_norm is None and all_reduce is None:
            return operations.product(linear, rows, added=x_RD)
        out = operations.product(linear, rows)
        if all_reduce is not None:
            out = all_reduce(out)
        return x_RD + (
            out if post_norm is None else operations.norm(out, Norm(post_norm, self._eps))
        )

    @property
    def _eps(self) -> float:
        return self.config.rms_norm_eps

    def _norm(self, weight: Tensor | None) -> Norm | None:
        return None if weight is None else Norm(weight, self._eps)


def logits_of(weights: ModelWeights, states: Tensor, operations: Operations = REFERENCE) -> Tensor:
    """See `Executor.logits`."""
    config = weights.config
    # features may follow a decoder's states
    norm = None
    if weights.final_norm is not None and not weights.has_normed_states:
        norm = Norm(weights.final_norm, config.rms_norm_eps)
    states = states[:, : config.hidden_size].contiguous()
    logits = operations.product(weights.lm_head, states, norm)
    softcap = weights.logit_softcap
    return logits if softcap is None else softcapped(logits, softcap)


def features_of(
    weights: ModelWeights, inputs: Tensor, operations: Operations = REFERENCE
) -> Tensor:
    """See `Executor.features`."""
    if not weights.fuses_features:
        return inputs
    if norms := [Norm(norm, weights.config.rms_norm_eps) for norm in weights.feature_norms]:
        parts = zip(inputs.chunk(len(norms), -1), norms, strict=True)
        inputs = torch.cat([operations.norm(part, norm) for part, norm in parts], -1)
    return operations.product(_required(weights.fc), inputs.contiguous())


def _required(linear: Linear | None) -> Linear:
    assert linear is not None, "a draft head's fc"
    return linear
