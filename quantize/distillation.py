"""Bring the 4-bit intermediate closer to its target, and keep the result only if it pays.

The measure is acceptance: the probability that the target keeps a token drawn by the intermediate.
The loss is KL(target || intermediate) of each next token on the recipe's conversations.
"""

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from polybasic.chain.base.console import Console
from polybasic.chain.base.errors import UserError
from polybasic.chain.base.progress import ProgressReport
from polybasic.chain.formats.checkpoints.awq import packed_weight
from polybasic.chain.formats.checkpoints.checkpoint import copy_checkpoint, load_tensors
from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.chain.formats.checkpoints.writing_checkpoints import write_checkpoint
from polybasic.chain.formats.files import whole_folder
from polybasic.chain.formats.lineage import QUANTIZED_FROM_KEY, weights_digest
from polybasic.chain.formats.origin import ORIGIN_KEY, recorded
from polybasic.quantize.awq import check_token_ids
from polybasic.quantize.limits import check_context
from polybasic.quantize.models import load_dequantized, load_target
from polybasic.quantize.quality import compare_models
from polybasic.quantize.rounding import RoundedLinear, adapt_linears
from polybasic.quantize.settings import DistillSettings
from polybasic.quantize.shared_cache import shared_cache
from polybasic.quantize.unrounded import unrounded_weights


def distill_intermediate(
    target: Path,
    intermediate: Path,
    training_token_ids: Sequence[Sequence[int]],
    heldout_token_ids: Sequence[Sequence[int]],
    settings: DistillSettings,
    num_quality_tokens: int,
    seed: int,
    out: Path,
    shares_cache: bool = True,
) -> dict[str, float | int | bool]:
    """Write the intermediate to `out`, distilled if that raises its acceptance, else as it is.

    Training and measurement run as in a chain with the target: past tokens have the target's keys
    and values. Trained on its own, the intermediate would learn to compensate errors of its cache
    that do not occur in the chain, and would gain little there. k_proj and v_proj (or a fused
    qkv_proj) are left unchanged: only a token's own key and value come from them.

    Args:
        target: checkpoint folder.
        intermediate: folder that `quantize_target` wrote for it; may be `out`.
        training_token_ids: token-id rows of any length, joined and cut to rows of one length.
        heldout_token_ids: token-id rows that were used in neither training nor calibration.
        settings: steps, batches, learning rate, LoRA.
        num_quality_tokens: held-out tokens to measure at most, the same before and after.
        seed: of the order of rows and the LoRA's initial weights.
        out: folder to write; an older one of this name is replaced.
        shares_cache: False for a copy whose target is not a member of the chain: it attends to its
            own keys and values, and acceptance is that of `measure_quality`.

    Returns:
        acceptance_before, acceptance_after (0 to 1), mean_kl_before, mean_kl_after (nats),
        num_tokens measured, is_kept, steps, and seconds of training.

    Raises:
        UserError: an intermediate of another target, too little text, token ids outside of the
            vocabulary, rows beyond the context, a loss that is not finite, a full disk.
    """
    _check_origin(target, intermediate)
    _check_rows(target, settings, training_token_ids, heldout_token_ids)
    rows = packed_rows(training_token_ids, settings.row_tokens, seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    reference, model = load_target(target), load_dequantized(intermediate)
    for each in (reference, model):
        nn.Module.to(each, device)
    with shared_cache(reference, model) if shares_cache else nullcontext():
        before = compare_models(reference, model, heldout_token_ids, num_quality_tokens)
        linears = _adapt(reference, model, intermediate, settings, seed)
        began = time.monotonic()
        _train(reference, model, rows, settings)
        seconds = time.monotonic() - began
        after = compare_models(reference, model, heldout_token_ids, num_quality_tokens)
    is_kept = after["acceptance"] > before["acceptance"]
    with whole_folder(out) as folder:
        if is_kept:
            _write_merged(linears, intermediate, folder)
        else:
            copy_checkpoint(intermediate, folder)
    change = f"acceptance {before['acceptance']:.4f} before, {after['acceptance']:.4f} after"
    kept = "kept" if is_kept else "does not pay, the intermediate stays as it was"
    Console(stderr=True).print(f"distillation: {change}; {kept}", soft_wrap=True)
    return {
        "acceptance_before": before["acceptance"],
        "acceptance_after": after["acceptance"],
        "mean_kl_before": before["mean_kl"],
        "mean_kl_after": after["mean_kl"],
        "num_tokens": before["num_tokens"],
        "is_kept": is_kept,
        "steps": settings.num_steps,
        "seconds": seconds,
    }


def packed_rows(token_ids: Sequence[Sequence[int]], row_tokens: int, seed: int) -> list[list[int]]:
    """Shuffle and join rows of token ids and cut them to rows of `row_tokens`; drop the rest.

    Raises:
        UserError: they do not fill one row.
    """
    shuffled = list(token_ids)
    random.Random(seed).shuffle(shuffled)
    joined = list(itertools.chain.from_iterable(shuffled))
    num_rows = len(joined) // row_tokens
    if not num_rows:
        raise UserError(
            "too little text to distill on",
            f"{len(joined)} tokens in {len(shuffled)} conversations, one row has {row_tokens}",
            "give more conversations or lower quantize.distill.row_tokens",
        )
    return [joined[row * row_tokens : (row + 1) * row_tokens] for row in range(num_rows)]


def _adapt(
    reference: PreTrainedModel,
    model: PreTrainedModel,
    intermediate: Path,
    settings: DistillSettings,
    seed: int,
) -> dict[str, RoundedLinear]:
    tensors, adapted = load_tensors(intermediate), {}
    model.requires_grad_(False)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = zip(reference.model.layers, model.model.layers, strict=True)
        for index, (exact, rounded) in enumerate(layers):
            prefix = f"model.layers.{index}"
            unrounded = dict(unrounded_weights(exact, rounded))
            weights = {name: packed_weight(tensors, f"{prefix}.{name}") for name in unrounded}
            linears = adapt_linears(rounded, weights, unrounded, settings)
            adapted.update({f"{prefix}.{name}": linear for name, linear in linears.items()})
    return adapted


def _train(
    reference: PreTrainedModel,
    model: PreTrainedModel,
    rows: list[list[int]],
    settings: DistillSettings,
) -> None:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=settings.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(
        optimizer, start_factor=1.0, end_factor=0.0, total_iters=settings.num_steps
    )
    if settings.recompute_layers:
        model.activation_checkpointing_enable({"use_reentrant": False})
        model.train()
    batches = _batches(rows, settings.batch_tokens // settings.row_tokens, reference.device)
    num_tokens = 0
    with ProgressReport("distillation", settings.num_steps) as progress:
        for step, token_ids in enumerate(itertools.islice(batches, settings.num_steps)):
            with torch.no_grad():
                expected = _log_probabilities(reference, token_ids)
            actual = _log_probabilities(model, token_ids)
            loss = F.kl_div(actual, expected, reduction="batchmean", log_target=True)
            if not torch.isfinite(loss):
                raise UserError(
                    "distillation diverged",
                    f"loss {loss.item()} at step {step} of {settings.num_steps}",
                    "lower quantize.distill.learning_rate",
                )
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, settings.max_gradient_norm)
            optimizer.step()
            schedule.step()
            num_tokens += token_ids.numel()
            speed = progress.per_second(num_tokens)
            progress.step(f"loss {loss.item():.4f}  {speed:,.0f} tokens/s")
    model.eval()


def _log_probabilities(model: PreTrainedModel, token_ids: Tensor) -> Tensor:
    """[rows, tokens] -> [rows x tokens, vocabulary]."""
    logits: Tensor = model(token_ids, use_cache=False).logits
    return logits.flatten(0, 1).log_softmax(dim=-1)


def _batches(rows: list[list[int]], rows_of_batch: int, device: torch.device) -> Iterator[Tensor]:
    """Batches of rows in order, starting again after the last."""
    endless = itertools.cycle(rows)
    while True:
        yield torch.tensor(list(itertools.islice(endless, rows_of_batch)), device=device)


def _write_merged(linears: dict[str, RoundedLinear], intermediate: Path, folder: Path) -> None:
    tensors = load_tensors(intermediate)
    for name, linear in linears.items():
        tensors[f"{name}.qweight"] = linear.merged().pack(name)[0].contiguous()
    config = read_config(intermediate).content
    write_checkpoint(tensors, config, intermediate, folder)


def _check_origin(target: Path, intermediate: Path) -> None:
    config = read_config(intermediate)
    found, digest = recorded(config.content, QUANTIZED_FROM_KEY), weights_digest(target)
    if found != digest:
        raise UserError(
            "intermediate of another target",
            f"{ORIGIN_KEY}.{QUANTIZED_FROM_KEY} {found} in {config.path}, {target} has {digest}",
            "quantize this target",
        )


def _check_rows(
    target: Path, settings: DistillSettings, *token_ids: Sequence[Sequence[int]]
) -> None:
    config = read_config(target)
    for rows in token_ids:
        check_token_ids(rows, config.content["vocab_size"], target)
    check_context(config, "rows", "quantize.distill.row_tokens", settings.row_tokens)
