"""From what the verifier's pass left to the loss of a head.

Shapes: B = batch, T = tokens, S = unrolled steps, H = hidden size.
"""

import torch
from torch import Tensor, nn

from polybasic.train.data.batches import Share
from polybasic.train.features.lm_head import LmHead
from polybasic.train.features.states import Features
from polybasic.train.head.eagle2 import DraftHead
from polybasic.train.head.losses import UnrolledLoss, unrolled_loss
from polybasic.train.settings import HeadSettings


class LossModule(nn.Module):
    """What the engine runs: from the features of a share of a batch to the loss."""

    def __init__(self, head: DraftHead, settings: HeadSettings) -> None:
        super().__init__()
        self.head = head
        self._settings = settings

    def noise_shape(self, features: Features) -> torch.Size:
        """Of the noise on a share's features: [B, T - 2, H], of an EAGLE-3 head [B, T - 2, 3H]."""
        return self.head.source(features)[:, 2:].shape

    def forward(
        self,
        share: Share,
        features: Features,
        lm_head: LmHead,
        noise: Tensor,
        token_counts: Tensor,
    ) -> UnrolledLoss:
        """Rows 0 .. T-3 are read: the last one predicts the last token.

        Args:
            share: B rows of one conversation, or of several whose first two tokens are marked as
                not the assistant's: no draft then goes from one into the next.
            features: of the share's tokens, the verifier's.
            lm_head: the verifier's.
            noise: of `noise_shape`, added to what is read.
            token_counts: [S], over how many tokens each step's mean is taken.
        """
        head, features = self.head, features.to(self.head.dtype)
        inputs = head.fuse(head.source(features)[:, :-2] + noise.to(head.dtype))
        document_ids = share.document_ids
        outputs = head.unroll(
            share.token_ids[:, 1:-1],
            inputs,
            self._settings.unroll_steps,
            None if document_ids is None else document_ids[:, :-2],
        )
        teacher = lm_head.to(head.dtype)
        return unrolled_loss(
            [head.projected(output) for output in outputs],
            features.states[:, 1:-1],
            teacher,
            head.projection(teacher),
            share.is_assistant[:, 2:],
            self._settings,
            head.draft_token_ids,
            token_counts,
        )
