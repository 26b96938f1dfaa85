"""The loss of quality by quantizing: intermediate against target on held-out text."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.progress import tracked
from polybasic.quantize.models import load_target

_WINDOW_TOKENS = 1024  # bounds the memory of the logits


def measure_quality(
    target: Path, intermediate: Path, heldout_token_ids: Sequence[Sequence[int]], num_tokens: int
) -> dict[str, float | int]:
    """Compare the next-token distributions of both in float32, from their files.

    Args:
        target: checkpoint folder.
        intermediate: folder of its copy in few bits, of the same vocabulary.
        heldout_token_ids: token-id rows that were used in neither training nor calibration.
        num_tokens: predicted tokens to measure at most; fewer if the rows hold fewer.

    Returns:
        As `compare_models`.

    Raises:
        UserError: a checkpoint that cannot be loaded, or no row with two tokens.
    """
    return compare_models(
        load_target(target), load_target(intermediate), heldout_token_ids, num_tokens
    )


def compare_models(
    reference: PreTrainedModel,
    model: PreTrainedModel,
    heldout_token_ids: Sequence[Sequence[int]],
    num_tokens: int,
) -> dict[str, float | int]:
    """Compare the next-token distributions of the target and of a model in its place.

    Args:
        reference: the target.
        model: the intermediate, on the target's device.
        heldout_token_ids: token-id rows.
        num_tokens: predicted tokens to measure at most.

    Returns:
        perplexity_target, perplexity_intermediate; mean_kl, the mean KL(target || intermediate)
        of a token in nats; top1_agreement, the share of tokens with equal argmax, 0 to 1;
        acceptance, the mean probability that the target keeps a token drawn by the intermediate,
        the sum of min(p, q) over the vocabulary, 0 to 1; num_tokens, how many were measured.

    Raises:
        UserError: no row with two tokens.
    """
    window_tokens = min(_WINDOW_TOKENS, reference.config.max_position_embeddings)
    windows = list(_windows(heldout_token_ids, window_tokens, num_tokens))
    if not windows:
        raise UserError(
            "no held-out text",
            f"{len(heldout_token_ids)} rows without two tokens in a row",
            "hold out more conversations (data.num_heldout)",
        )
    sums = torch.zeros(5, dtype=torch.float64)
    with torch.inference_mode():
        for window in tracked(windows, "measure quality"):
            token_ids = torch.tensor([window], device=reference.device)
            logits = reference(token_ids, use_cache=False).logits[0]
            other = model(token_ids, use_cache=False).logits[0]
            sums += _window_sums(logits, other, token_ids[0]).cpu()
    measured = sum(len(window) - 1 for window in windows)
    loss_target, loss_intermediate, divergence, agreement, kept = (sums / measured).tolist()
    return {
        "perplexity_target": math.exp(loss_target),
        "perplexity_intermediate": math.exp(loss_intermediate),
        "mean_kl": divergence,
        "top1_agreement": agreement,
        "acceptance": kept,
        "num_tokens": measured,
    }


def _window_sums(logits_TV: Tensor, other_TV: Tensor, token_ids: Tensor) -> Tensor:
    """Sums over a window: losses of target and model, KL, equal argmax, overlap."""
    next_ids = token_ids[1:]
    log_p = logits_TV[:-1].log_softmax(dim=-1)
    log_q = other_TV[:-1].log_softmax(dim=-1)
    return torch.stack(
        [
            F.nll_loss(log_p, next_ids, reduction="sum"),
            F.nll_loss(log_q, next_ids, reduction="sum"),
            F.kl_div(log_q, log_p, reduction="sum", log_target=True),
            (log_p.argmax(dim=-1) == log_q.argmax(dim=-1)).sum(),
            torch.minimum(log_p, log_q).exp().sum(),
        ]
    ).double()


def _windows(
    rows: Sequence[Sequence[int]], window_tokens: int, num_tokens: int
) -> Iterator[Sequence[int]]:
    """Cut rows into windows that together predict `num_tokens` (each all tokens but its first)."""
    remaining = num_tokens
    for row in rows:
        for start in range(0, len(row), window_tokens):
            window = row[start : min(start + window_tokens, start + remaining + 1)]
            if len(window) >= 2:
                remaining -= len(window) - 1
                yield window
