"""Early exits in training: a norm, and an adapter of low rank, behind the target's first layers.

Shapes: B = batch, T = tokens, H = hidden size.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from polybasic.chain.formats.checkpoints.decoder_config import HeadConfig
from polybasic.chain.kernels.executor import Executor
from polybasic.chain.kernels.rotary import RotaryTable
from polybasic.chain.model.early_exit import early_exit
from polybasic.chain.model.stored import StoredTensors
from polybasic.train.data.batches import LocalBatch
from polybasic.train.features.head_shape import HeadShape
from polybasic.train.features.lm_head import LmHead
from polybasic.train.features.states import Features
from polybasic.train.head.eagle2 import DraftHead
from polybasic.train.head.losses import UnrolledLoss, unrolled_loss
from polybasic.train.settings import HeadSettings


class EarlyExit(DraftHead):
    """What is learned of an early exit; the layers before it and the lm_head behind it are frozen.

    A draft runs the layers over its own tokens, as the verifier does over the text: what an exit
    reads in a draft is what it reads in training, hence there is nothing to unroll.
    """

    def __init__(
        self,
        shape: HeadShape,
        embedding: Tensor | None = None,
        draft_token_ids: Tensor | None = None,
    ) -> None:
        super().__init__(shape, embedding, draft_token_ids)
        self.norm = LlamaRMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.adapter = _Adapter(shape.hidden_size, shape.adapter_rank)
        self._model: Executor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """See `DraftHead.dtype`."""
        return self.norm.weight.dtype

    def source(self, features: Features) -> Tensor:
        """See `DraftHead.source`; the output of the last layer that is run, [B, T, H]."""
        assert features.layers is not None, "an early exit reads the input of a layer"
        return features.layers

    def forward(self, outputs: Tensor) -> Tensor:
        """From the layers' outputs to what lm_head reads, both [B, T, H]."""
        adapted: Tensor = self.norm(self.adapter(outputs))
        return adapted

    def set_model(self, model: Executor) -> None:
        """Set the loaded model that evaluations draft with, and begin with its final norm.

        Args:
            model: at least the layers that are run.
        """
        self._model = model
        assert model.weights.final_norm is not None, "a decoder"
        self.norm.weight.detach().copy_(model.weights.final_norm)

    def served(
        self,
        config: HeadConfig,
        tensors: StoredTensors,
        num_positions: int,
        token_ids: Tensor | None,
    ) -> Executor:
        """As `polybasic.train.head.served.served_head`, over the layers of its model."""
        assert self._model is not None, "an early exit is served with its model"
        weights = self._model.weights
        rotary = RotaryTable(weights.config, num_positions, weights.dtype, weights.device)
        model = self._model.over(replace(weights, rotary=rotary))
        return early_exit(config, tensors, model, token_ids)


class _Adapter(nn.Module):
    """x + up(down(x)), which is x at first; x alone for rank 0."""

    def __init__(self, size: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(size, rank, bias=False) if rank else None
        self.up = nn.Linear(rank, size, bias=False) if rank else None
        if self.up is not None:
            nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        if self.down is None or self.up is None:
            return x
        added: Tensor = self.up(self.down(x))
        return x + added


def early_exit_loss(
    head: EarlyExit,
    settings: HeadSettings,
    share: LocalBatch,
    features: Features,
    lm_head: LmHead,
    noise: Tensor,
    token_counts: Tensor,
) -> UnrolledLoss:
    """The mean over the tokens of answers, each predicted from the token before it.

    Args:
        features: in the head's dtype; all else as `polybasic.train.head.loss_module.LossModule`.
    """
    teacher = lm_head.to(head.dtype)
    return unrolled_loss(
        [head(head.source(features)[:, 1:-1] + noise.to(head.dtype))],
        features.taught,
        teacher,
        head.projection(teacher),
        share.is_assistant[:, 2:],
        settings,
        head.draft_token_ids,
        token_counts,
    )
