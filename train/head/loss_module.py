"""From what the verifier's pass left to the loss of a head.

Shapes: B = batch, T = tokens, S = unrolled steps, H = hidden size.
"""

import torch
from torch import Tensor, nn

from polybasic.train.data.batches import LocalBatch
from polybasic.train.features.lm_head import LmHead
from polybasic.train.features.states import Features
from polybasic.train.head.eagle2 import DraftHead, UnrolledHead
from polybasic.train.head.early_exit import EarlyExit, early_exit_loss
from polybasic.train.head.losses import UnrolledLoss, unrolled_loss
from polybasic.train.head.medusa import MedusaHead, medusa_loss
from polybasic.train.head.positions import PositionHead, positions_loss
from polybasic.train.head.steering import Steering, steering_loss
from polybasic.train.settings import HeadSettings


class LossModule(nn.Module):
    """What the engine runs: from the features of a share of a batch to the loss.

    Args:
        head: to train.
        settings: of the training.
        scales: float32 [H], units of the states' channels in which a loss between states is taken;
            default: 1.
    """

    def __init__(
        self, head: DraftHead, settings: HeadSettings, scales: Tensor | None = None
    ) -> None:
        super().__init__()
        self.head = head
        self._settings, self._scales = settings, scales

    def noise_shape(self, features: Features) -> torch.Size:
        """Of the noise on a share's features: [B, T - 2, H], of an EAGLE-3 head [B, T - 2, 3H]."""
        return self.head.source(features)[:, 2:].shape

    def forward(
        self,
        share: LocalBatch,
        features: Features,
        lm_head: LmHead,
        noise: Tensor,
        token_counts: Tensor,
        anchors: Tensor | None = None,
    ) -> UnrolledLoss:
        """Rows 0 .. T-3 are read: the last one predicts the last token.

        Args:
            share: B rows of one conversation, or of several whose first two tokens are marked as
                not the assistant's: no draft then goes from one into the next.
            features: of the share's tokens, the verifier's.
            lm_head: the verifier's.
            noise: of `noise_shape`, added to what is read.
            token_counts: [S], over how many tokens the mean of each step, or each position, is
                taken.
            anchors: int64 [B, A], of a head that gives several positions at once; [B, 1] of a
                steering, see `polybasic.train.head.steering.block_starts`.
        """
        head, features = self.head, features.to(self.head.dtype)
        given = self._settings, share, features, lm_head, noise, token_counts
        if isinstance(head, MedusaHead):
            return medusa_loss(head, *given)
        if isinstance(head, Steering):
            assert anchors is not None, "blocks of a steering begin at random places"
            return steering_loss(head, *given, anchors[:, 0])
        if isinstance(head, EarlyExit):
            return early_exit_loss(head, *given)
        inputs = head.fuse(head.source(features)[:, :-2] + noise.to(head.dtype))
        document_ids = share.document_ids
        token_ids, teacher = share.token_ids[:, 1:-1], lm_head.to(head.dtype)
        if document_ids is not None:
            document_ids = document_ids[:, :-2]
        if isinstance(head, PositionHead):
            assert anchors is not None, "such a head drafts from anchors"
            return positions_loss(
                head,
                head.predict(token_ids, inputs, anchors, document_ids),
                anchors,
                token_ids,
                features.taught,
                teacher,
                share.is_assistant[:, 2:],
                self._settings,
                token_counts,
                self._scales,
            )
        assert isinstance(head, UnrolledHead)
        outputs = head.unroll(token_ids, inputs, self._settings.unroll_steps, document_ids)
        return unrolled_loss(
            [head.projected(output) for output in outputs],
            features.taught,
            teacher,
            head.projection(teacher),
            share.is_assistant[:, 2:],
            self._settings,
            head.draft_token_ids,
            token_counts,
            self._scales,
        )
