"""Steering in training: the map from a verifier's states to vectors that bias a frozen drafter.

(Berdoz et al., arXiv 2511.09844.) A draft holds one vector for all of its tokens. So does training:
a row of tokens is cut into blocks, at places that follow from seed and step, and the tokens of a
block are steered by the state before its first one.

Shapes: B = batch, T = tokens, H = hidden size of the verifier, L = layers of the drafter, D = its
hidden size.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from polybasic.chain.kernels.executor import Executor
from polybasic.chain.kernels.rotary import RotaryTable
from polybasic.chain.model.steering import steered
from polybasic.chain.model.stored import StoredTensors
from polybasic.train.data.batches import LocalBatch
from polybasic.train.data.packing import positions_in_documents
from polybasic.train.features.head_shape import HeadShape
from polybasic.train.features.lm_head import LmHead
from polybasic.train.features.states import Features
from polybasic.train.head.eagle2 import DraftHead
from polybasic.train.head.losses import UnrolledLoss, unrolled_loss
from polybasic.train.settings import HeadSettings


class Steering(DraftHead):
    """up(down(state)), which is 0 at first."""

    def __init__(
        self,
        shape: HeadShape,
        embedding: Tensor | None = None,
        draft_token_ids: Tensor | None = None,
    ) -> None:
        super().__init__(shape, embedding, draft_token_ids)
        size = shape.steered_layers * shape.steered_size
        self.down = nn.Linear(shape.hidden_size, shape.adapter_rank, bias=False)
        self.up = nn.Linear(shape.adapter_rank, size, bias=False)
        nn.init.zeros_(self.up.weight)
        # in a list, so that it is no part of this module
        self._drafter: list[tuple[PreTrainedModel, Executor]] = []

    @property
    def dtype(self) -> torch.dtype:
        """See `DraftHead.dtype`."""
        return self.down.weight.dtype

    def source(self, features: Features) -> Tensor:
        """See `DraftHead.source`; the states [B, T, H]."""
        return features.states

    def set_drafter(self, model: PreTrainedModel, executor: Executor) -> None:
        """Set the model that is steered: to train with, and as evaluations draft with it.

        Args:
            model: in the dtype of this module; it is frozen.
            executor: of the same weights.
        """
        model.requires_grad_(False)
        self._drafter = [(model, executor)]

    def forward(
        self, token_ids: Tensor, held: Tensor, positions: Tensor | None
    ) -> tuple[Tensor, LmHead]:
        """The steered drafter's states [B, T, D], and its own lm_head.

        Args:
            token_ids: [B, T].
            held: [B, T, H], the verifier's state that steers each token.
            positions: [B, T], which begin anew with each conversation; None: one to a row.
        """
        ((model, _),) = self._drafter
        vectors = self.up(self.down(held)).unflatten(-1, (self.shape.steered_layers, -1))
        with _biased(model, vectors):
            states = model.model(
                input_ids=token_ids, position_ids=positions, use_cache=False
            ).last_hidden_state
        softcap = getattr(model.config, "final_logit_softcapping", None)
        return states, LmHead(model.get_output_embeddings().weight, softcap)

    def served(self, tensors: StoredTensors, num_positions: int) -> Executor:
        """As `polybasic.train.head.served.served_head`, with the drafter that was set."""
        ((_, executor),) = self._drafter
        weights = executor.weights
        rotary = RotaryTable(weights.config, num_positions, weights.dtype, weights.device)
        drafter = executor.over(replace(weights, rotary=rotary))
        return steered(tensors, drafter, self.shape.hidden_size)


@contextmanager
def _biased(model: PreTrainedModel, vectors: Tensor) -> Iterator[None]:
    """Add vectors [B, T, L, D] to the outputs of the layers."""

    def add(layer: int) -> Any:
        return lambda module, args, output: output + vectors[:, :, layer]

    layers: Any = model.model.layers
    hooks = [module.register_forward_hook(add(index)) for index, module in enumerate(layers)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def block_starts(phases: Tensor, length: int, num_tokens: int, first: Tensor) -> Tensor:
    """The first token [B, T] of the block that each token lies in.

    Args:
        phases: int64 [B], 0 .. length - 1: tokens of the first block, or none.
        length: of a block.
        num_tokens: T.
        first: int64 [B, T], the first token of each token's conversation, which begins a block.
    """
    rows = torch.arange(num_tokens, device=phases.device)
    return torch.maximum(rows - (rows - phases[:, None]) % length, first)


def steering_loss(
    head: Steering,
    settings: HeadSettings,
    share: LocalBatch,
    features: Features,
    lm_head: LmHead,
    noise: Tensor,
    token_counts: Tensor,
    phases: Tensor,
) -> UnrolledLoss:
    """The mean over the tokens of answers.

    Args:
        features: in the head's dtype.
        phases: of `block_starts`; all else as `polybasic.train.head.loss_module.LossModule`.
    """
    token_ids, positions = share.token_ids[:, :-1], None
    rows = torch.arange(token_ids.shape[1], device=token_ids.device)
    first = torch.zeros_like(token_ids)
    if share.document_ids is not None:
        positions = positions_in_documents(share.document_ids[:, :-1])
        first = rows - positions
    starts = block_starts(phases, settings.num_positions, token_ids.shape[1], first)
    before = F.pad(head.source(features)[:, :-2] + noise.to(head.dtype), (0, 0, 1, 0))
    held = before.gather(1, starts[..., None].expand(-1, -1, before.shape[-1]))
    held = held * (starts > first)[..., None]
    states, student = head(token_ids, held, positions)
    return unrolled_loss(
        [states[:, 1:]],
        features.taught,
        lm_head.to(head.dtype),
        student,
        share.is_assistant[:, 2:],
        settings,
        None,
        token_counts,
    )
