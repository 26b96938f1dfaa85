"""Heads that give several positions at once, in training: from where they draft, and their loss.

A head drafts from *anchors*, rows of a conversation. Position k of anchor t is token t+2+k: it
counts if all tokens from t+2 up to it are the assistant's.

Shapes: B = batch, R = rows, A = anchors of a conversation, K = positions, H = hidden size.
"""

from abc import abstractmethod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from polybasic.train.features.lm_head import LmHead
from polybasic.train.features.states import Features
from polybasic.train.head.eagle2 import DraftHead
from polybasic.train.head.losses import PredictedStates, UnrolledLoss, positions_sum
from polybasic.train.settings import HeadSettings


class Drafted(NamedTuple):
    """What a head predicts.

    Attributes:
        first: [B, R, H], position 0 of all rows.
        later: [B, A, K - 1, H], the further positions of the anchors.
    """

    first: Tensor
    later: Tensor


class PositionHead(DraftHead):
    """A draft head whose one pass gives all positions of a draft."""

    @property
    @abstractmethod
    def num_positions(self) -> int:
        """K."""

    @abstractmethod
    def predict(
        self,
        token_ids: Tensor,
        features: Tensor,
        anchors: Tensor,
        document_ids: Tensor | None = None,
    ) -> Drafted:
        """Predict from every row, and all positions from the anchors.

        Args:
            token_ids: [B, R], the token after each feature.
            features: [B, R, H], what `fuse` makes of the verifier's.
            anchors: int64 [B, A], rows.
            document_ids: int64 [B, R], as `positions_in_documents` takes them; None: a row of the
                batch is one conversation.
        """

    @abstractmethod
    def corrected(self, hiddens: Tensor, previous: Tensor) -> Tensor:
        """What `projection_at` of a later position reads.

        Args:
            hiddens: [N, H], of `predict`.
            previous: int64 [N], the token before each position.
        """

    @abstractmethod
    def projection_at(self, position: int, lm_head: LmHead) -> LmHead:
        """To the logits of the draft vocabulary at a position, given the verifier's."""


def choose_anchors(is_label: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Rows to draft from, int64 [B, A], as many in each conversation.

    A conversation with fewer rows that count gets others, which count nothing.

    Args:
        is_label: bool [B, R], whether the token that a row predicts is the assistant's.
        share: of the rows that count, in the mean conversation.
        generator: on the CPU.
    """
    num = max(1, round(share * float(is_label.sum(1).float().mean())))
    order = torch.rand(is_label.shape, generator=generator) + is_label.cpu()
    return order.topk(min(num, is_label.shape[1]), dim=1).indices.sort(1).values


def counted_positions(is_label: Tensor, anchors: Tensor, num_positions: int) -> Tensor:
    """Whether each later position of each anchor counts, bool [B, A, K - 1].

    Args:
        is_label: bool [B, R].
        anchors: int64 [B, A].
        num_positions: K.
    """
    ahead = anchors[:, :, None] + torch.arange(num_positions, device=anchors.device)
    padded = F.pad(is_label, (0, num_positions))
    found = padded.gather(1, ahead.flatten(1)).view(ahead.shape)
    return found.cumprod(2)[:, :, 1:].bool()


def position_counts(is_label: Tensor, anchors: Tensor, num_positions: int) -> Tensor:
    """How many tokens count at each position, int64 [K]; position 0 counts in all rows."""
    later = counted_positions(is_label, anchors, num_positions)
    return torch.cat((is_label.sum()[None], later.sum(dim=(0, 1))))


def positions_loss(
    head: PositionHead,
    drafted: Drafted,
    anchors: Tensor,
    token_ids: Tensor,
    taught: Features,
    teacher: LmHead,
    is_label: Tensor,
    settings: HeadSettings,
    token_counts: Tensor,
    scales: Tensor | None = None,
) -> UnrolledLoss:
    """The token loss at each position, and smooth-L1 between states.

    Position 0 weighs as much as the later ones together, of which position k weighs
    `step_decay ** k`: nothing of a draft is accepted if its first token is not.

    Args:
        drafted: of `head`.
        anchors: int64 [B, A].
        token_ids: [B, R], the token after each row's feature.
        taught: the verifier's of these tokens, [B, R, ...].
        teacher: the verifier's lm_head.
        is_label: bool [B, R].
        settings: of the run.
        token_counts: [K], what the sum of each position is divided by.
        scales: float32 [H], units of the states' channels.
    """
    num_later = head.num_positions - 1
    decays = settings.step_decay ** torch.arange(1, num_later + 1, device=anchors.device)
    weights = torch.cat((decays.new_ones(1), decays / decays.sum())) / 2
    is_counted = counted_positions(is_label, anchors, head.num_positions)

    def predicted(position: int) -> PredictedStates:
        student = head.projection_at(position, teacher)
        if position == 0:
            hiddens = drafted.first[is_label]
            return PredictedStates(hiddens, hiddens, taught[is_label], student)
        counts = is_counted[:, :, position - 1]
        batch = counts.nonzero()[:, 0]
        rows = anchors[counts] + position
        hiddens = drafted.later[:, :, position - 1][counts]
        read = head.corrected(hiddens, token_ids[batch, rows])
        return PredictedStates(hiddens, read, taught[batch, rows], student)

    return positions_sum(
        map(predicted, range(head.num_positions)),
        weights,
        token_counts,
        teacher,
        head.draft_token_ids,
        settings,
        scales,
    )
