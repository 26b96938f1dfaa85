"""Draft heads as the runtime runs them.

#   R = rows (tokens of one pass), D = hidden size of the verifier, V = tokens that can be drafted
"""

from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from polybasic.chain.formats.config import DecoderConfig
from polybasic.chain.kernels.cpu.matrices import NativeLinear
from polybasic.chain.kernels.cpu.passes import NativeModel, NativeParts, supports
from polybasic.chain.kernels.torch.attend import Attend
from polybasic.chain.kernels.torch.operations import DeviceLinear, Norm
from polybasic.chain.kernels.torch.rotary import RotaryTable
from polybasic.chain.model.decoder import DecoderLayer, rms_norm
from polybasic.chain.model.device_model import DeviceModel, DeviceParts
from polybasic.chain.model.linear import Linear, Softcapped


class EagleHead:
    """An EAGLE-2 head: one decoder layer that continues the verifier's features (Li et al., 2024).

    Row t reads the feature of token t (the verifier's state after its final norm) together with
    token t+1, and predicts the feature of token t+1, which the verifier's own output projection
    turns into a distribution over token t+2. The row's position is t.

    Args:
        config: of the head's single layer.
        embedding: the verifier's, [vocabulary, D], as stored, without any scaling factor.
        fc: 2D -> D.
        lm_head: D -> V, the verifier's, for the whole vocabulary or only `draft_token_ids`.
        draft_token_ids: int64 [V], the token of each draft id; None if they are the same.

    Attributes:
        feature_layers: the verifier's layers whose inputs the head reads.
        input_width: number of columns of the verifier's states that it reads.
    """

    feature_layers: tuple[int, ...] = ()

    def __init__(
        self,
        config: DecoderConfig,
        embedding: Tensor,
        fc: Linear,
        layer: DecoderLayer,
        rotary: RotaryTable,
        lm_head: Linear,
        draft_token_ids: Tensor | None = None,
    ) -> None:
        self.config, self.rotary = config, rotary
        self.embedding, self.fc, self.layer = embedding, fc, layer
        self.lm_head, self.draft_token_ids = lm_head, draft_token_ids
        self.input_width = config.hidden_size

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def select_inputs(self, states: Tensor) -> Tensor:
        """The columns of the verifier's states that the head reads, [R, input_width]."""
        # the verifier may have an EAGLE-3 head, too
        return states if states.shape[-1] == self.input_width else states[:, : self.input_width]

    def features(self, inputs: Tensor) -> Tensor:
        """Features [R, D] of the selected inputs."""
        return inputs

    def forward(self, token_ids: Tensor, features: Tensor, cache: Tensor, attend: Attend) -> Tensor:
        """Predicted features [R, D].

        Args:
            token_ids: int64 [R], token t+1 of each row.
            features: [R, D], feature of token t of each row.
            cache: [2K, capacity, H]; rows from `attend.start` on are written.
        """
        if self.native is not None:
            return self.native.forward(token_ids, [cache], attend, features)
        x_RD = self.fc(torch.cat([F.embedding(token_ids, self.embedding), features], -1))
        (view,) = attend.views_of(self)
        return self.layer.forward(x_RD, cache, attend.start, view)

    def logits(self, features: Tensor) -> Tensor:
        """Logits [R, V] of `features` [R, D]."""
        return self.lm_head(features)

    @cached_property
    def native(self) -> NativeModel | None:
        """Runs each pass or draft in one call, on a CPU with native kernels; else None."""
        lm_head, softcap = self._uncapped()
        layer = self.layer.native()
        if layer is None or not isinstance(lm_head, NativeLinear) or not supports(self.config):
            return None
        parts = NativeParts(
            config=self.config,
            embedding=self.embedding,
            layers=[layer],
            rotary=self.rotary,
            lm_head=lm_head,
            softcap=softcap,
            **self._native_parts(),
        )
        return NativeModel(lm_head.kernels, parts)

    @cached_property
    def device_model(self) -> DeviceModel | None:
        """Runs passes without the host, if the weights have the layout for it; else None."""
        lm_head, softcap = self._uncapped()
        layer = self.layer.on_device()
        if layer is None or not (
            isinstance(lm_head, DeviceLinear) and isinstance(self.fc, DeviceLinear)
        ):
            return None
        parts = DeviceParts(
            config=self.config,
            embedding=self.embedding,
            layers=[layer],
            rotary=self.rotary,
            lm_head=lm_head,
            softcap=softcap,
            fc=self.fc,
            **self._device_norms(),
        )
        return DeviceModel(parts)

    def _uncapped(self) -> tuple[Linear, float | None]:
        """The output projection before soft-capping, and the soft cap."""
        if isinstance(self.lm_head, Softcapped):
            return self.lm_head.linear, self.lm_head.softcap
        return self.lm_head, None

    def _native_parts(self) -> dict[str, Any]:
        return {"kind": "eagle2", "fc": self.fc}

    def _device_norms(self) -> dict[str, Any]:
        return {}


class Eagle3Head(EagleHead):
    """An EAGLE-3 head (Li et al., arXiv 2503.01840): its features are fused from three of the
    verifier's layers, and it has an output projection of its own.

    Its layer's attention reads the token's embedding and the feature, each normed and
    concatenated; the feature itself is the residual.

    Args:
        fc: 3D -> D, of the concatenated inputs of the verifier's `feature_layers`.
        layer: without a norm before attention, which reads 2D.
        lm_head: D -> V, the head's own.
        embedding_norm: [D].
        feature_norm: [D].
        final_norm: [D], before the output projection.

    The other arguments are those of `EagleHead`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        embedding: Tensor,
        fc: Linear,
        layer: DecoderLayer,
        rotary: RotaryTable,
        lm_head: Linear,
        draft_token_ids: Tensor | None = None,
        *,
        feature_layers: tuple[int, ...],
        embedding_norm: Tensor,
        feature_norm: Tensor,
        final_norm: Tensor,
    ) -> None:
        super().__init__(config, embedding, fc, layer, rotary, lm_head, draft_token_ids)
        self.feature_layers = feature_layers
        self.input_width = len(feature_layers) * config.hidden_size
        self.embedding_norm, self.feature_norm = embedding_norm, feature_norm
        self.final_norm = final_norm

    def select_inputs(self, states: Tensor) -> Tensor:
        return states[:, self.config.hidden_size :]

    def features(self, inputs: Tensor) -> Tensor:
        return self.fc(inputs)

    def forward(self, token_ids: Tensor, features: Tensor, cache: Tensor, attend: Attend) -> Tensor:
        if self.native is not None:
            return self.native.forward(token_ids, [cache], attend, features)
        eps = self.config.rms_norm_eps
        embedded = rms_norm(F.embedding(token_ids, self.embedding), self.embedding_norm, eps)
        inputs = torch.cat([embedded, rms_norm(features, self.feature_norm, eps)], -1)
        (view,) = attend.views_of(self)
        return self.layer.forward(features, cache, attend.start, view, inputs)

    def logits(self, features: Tensor) -> Tensor:
        return self.lm_head(rms_norm(features, self.final_norm, self.config.rms_norm_eps))

    def _native_parts(self) -> dict[str, Any]:
        return {
            "kind": "eagle3",
            "embedding_norm": self.embedding_norm,
            "feature_norm": self.feature_norm,
            "final_norm": self.final_norm,
        }

    def _device_norms(self) -> dict[str, Any]:
        eps = self.config.rms_norm_eps
        return {
            "embedding_norm": Norm(self.embedding_norm, eps),
            "feature_norm": Norm(self.feature_norm, eps),
            "final_norm": Norm(self.final_norm, eps),
        }
