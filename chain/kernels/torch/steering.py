"""An independent model whose layers are biased by vectors made of a verifier's states.

#   R = rows, D = hidden size, L = layers, H = hidden size of the verifier
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from polybasic.chain.kernels.executor import DraftRequest, Layers
from polybasic.chain.kernels.rows import Rows
from polybasic.chain.kernels.torch.executor import Attend, TorchExecutor
from polybasic.chain.kernels.torch.operations import Operations
from polybasic.chain.kernels.torch.rows import DeviceRows
from polybasic.chain.kernels.weights import LayerWeights, Linear, ModelWeights


class SteeredExecutor(TorchExecutor):
    """A decoder that reads, with each token, the verifier's state of the token before it.

    `up(down(state))` gives a vector for each layer, which is added to the layer's output. States
    that a pass returns are followed by the verifier's ones; a draft holds that of its request for
    all of its rows, since the verifier has none for them yet.

    Args:
        weights: of the model.
        down, up: H -> rank -> L * D.
        verifier_width: H.
    """

    def __init__(
        self, weights: ModelWeights, down: Linear, up: Linear, verifier_width: int
    ) -> None:
        super().__init__(weights)
        self.verifier_width = verifier_width
        self._down, self._up = down, up

    def over(self, weights: ModelWeights) -> "SteeredExecutor":
        return SteeredExecutor(weights, self._down, self._up, self.verifier_width)

    def forward(
        self,
        token_ids: Tensor,
        caches: Sequence[Layers],
        rows: Sequence[Rows | DeviceRows],
        features: Tensor | None = None,
        feature_layers: tuple[int, ...] = (),
    ) -> Tensor:
        assert features is not None, "a steered model reads the verifier's states"
        states = super().forward(token_ids, caches, rows, features, feature_layers)
        return torch.cat([states, features], -1)

    def features(self, inputs: Tensor) -> Tensor:
        return inputs

    def _draft_features(self, request: DraftRequest, states: Tensor) -> Tensor:
        return request.state[:, self.config.hidden_size :].expand(len(states), -1)

    def _embed(
        self, operations: Operations, token_ids: Tensor, features: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        assert features is not None
        # of the pass that begins here, [R, L * D]
        self._vectors = operations.product(self._up, operations.product(self._down, features))
        return super()._embed(operations, token_ids, None)

    def _layer(
        self,
        operations: Operations,
        index: int,
        layer: LayerWeights,
        x_RD: Tensor,
        attend: Attend,
        attention_input: Tensor | None,
    ) -> Tensor:
        out = super()._layer(operations, index, layer, x_RD, attend, attention_input)
        width = self.config.hidden_size
        return out + self._vectors[:, index * width : (index + 1) * width]
