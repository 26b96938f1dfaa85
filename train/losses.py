"""What the head is trained on: the target's features, and its distribution behind lm_head.

Shapes: S = unrolled steps, N = assistant tokens of a batch, H = hidden size, V = vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from polybasic.train.target import LmHead

_CHUNK_BYTES = 16 << 20  # of logits at a time: what a CPU's cache holds
_CHUNK_TOKENS = 128  # but not less, for a GPU's sake


@dataclass(frozen=True)
class UnrolledLoss:
    """The loss and its parts; `total` is the only one with a gradient."""

    total: Tensor
    feature: Tensor
    token: Tensor
    agreement: Tensor
    """[S], the share of tokens for which head and target have the same argmax, by step."""


def step_weights(is_label: Tensor, num_steps: int) -> Tensor:
    """Which rows count in which step.

    Row t of step 1 counts if the token that it predicts (t+2) is the assistant's. Later steps
    count where the whole draft, from its first token on, is the assistant's.

    Args:
        is_label: bool [B, R], whether the token predicted by a row is the assistant's.
        num_steps: S.

    Returns:
        bool [S, B, R].
    """
    weights = [is_label]
    for _ in range(1, num_steps):
        earlier = F.pad(weights[-1][:, :-1], (1, 0))
        weights.append(is_label & earlier)
    return torch.stack(weights)


def unrolled_loss(
    outputs: list[Tensor],
    target_features: Tensor,
    lm_head: LmHead,
    is_label: Tensor,
    feature_weight: float,
    token_weight: float,
    token_counts: Tensor | None = None,
) -> UnrolledLoss:
    """Smooth-L1 between features plus soft cross-entropy through the frozen lm_head.

    Each part is a mean over the tokens that count in a step, then over the steps.

    Args:
        outputs: S predicted features [B, R, H].
        target_features: [B, R, H], the true features of the same rows.
        lm_head: the target's, frozen, in the outputs' dtype.
        is_label: bool [B, R], whether the token predicted by a row is the assistant's.
        feature_weight: of the smooth-L1.
        token_weight: of the cross-entropy.
        token_counts: [S], what each step's sum is divided by; default: as many tokens as count
            in it. A process that has a share of a batch passes its part of the batch's count.
    """
    weights = step_weights(is_label, len(outputs))[:, is_label].float()  # [S, N]
    counts = weights.sum(dim=1) if token_counts is None else token_counts.float()
    weights = weights / torch.where(counts > 0, counts, 1.0)[:, None]
    teachers = target_features[is_label]
    hiddens = torch.stack([output[is_label] for output in outputs])
    distance = F.smooth_l1_loss(
        hiddens.float(), teachers.float().expand(hiddens.shape), reduction="none"
    ).mean(dim=-1)
    feature = (distance * weights).sum(dim=1).mean()
    token, agreement = _SoftCrossEntropy.apply(hiddens, teachers, lm_head, weights)
    return UnrolledLoss(
        total=feature_weight * feature + token_weight * token.mean(),
        feature=feature.detach(),
        token=token.detach().mean(),
        agreement=agreement,
    )


class _SoftCrossEntropy(torch.autograd.Function):
    """Cross-entropy of [S, N, H] against softmax(lm_head(teachers)), a weighted sum by step.

    lm_head is frozen, so the gradient of the hidden states is known as soon as the loss is:
    chunk by chunk, and no [N, V] tensor outlives its chunk.
    """

    @staticmethod
    def forward(
        ctx: Any, hiddens: Tensor, teachers: Tensor, lm_head: LmHead, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        num_steps, num_tokens, _ = hiddens.shape
        losses = hiddens.new_zeros(num_steps, dtype=torch.float32)
        agreements = torch.zeros_like(losses)
        gradient = torch.empty_like(hiddens)
        chunk = max(_CHUNK_TOKENS, _CHUNK_BYTES // (4 * lm_head.weight.shape[0] * num_steps))
        for start in range(0, num_tokens, chunk):
            rows = slice(start, start + chunk)
            teacher_logits = lm_head(teachers[rows]).float()
            probabilities = teacher_logits.softmax(dim=-1)
            logits = lm_head(hiddens[:, rows].flatten(0, 1)).float()
            logits = logits.unflatten(0, (num_steps, -1))
            teacher_tokens = teacher_logits.argmax(dim=-1).expand(logits.shape[:2])
            at_teacher_tokens = logits.gather(2, teacher_tokens[:, :, None])[:, :, 0]
            agrees = (at_teacher_tokens == logits.amax(dim=-1)).float()
            log_probabilities = logits.log_softmax(dim=-1)
            row_losses = -(log_probabilities * probabilities).sum(dim=-1)
            losses += (row_losses * weights[:, rows]).sum(dim=1)
            agreements += (agrees * weights[:, rows]).sum(dim=1)
            residual = log_probabilities.exp_().sub_(probabilities).mul_(weights[:, rows, None])
            if lm_head.softcap is not None:  # the slope of c * tanh(x / c)
                residual.mul_(1 - (logits / lm_head.softcap).square())
            chunk_gradient = residual.to(hiddens.dtype).flatten(0, 1) @ lm_head.weight
            gradient[:, rows] = chunk_gradient.unflatten(0, (num_steps, -1))
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(agreements)
        return losses, agreements

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0][:, None, None].to(gradient.dtype), None, None, None
