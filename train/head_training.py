"""Train a draft head for a target, with the target's features taken as the batches come."""

import shutil
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from polybasic.chain.checkpoint import TOKENIZER_FILES
from polybasic.chain.digests import weights_digest
from polybasic.chain.eagle_config import eagle_config
from polybasic.chain.files import read_json, sha256_of_file, sha256_of_object, write_json
from polybasic.chain.lineage import ORIGIN_KEY, TRAINED_FOR_KEY
from polybasic.train.acceptance import HeldoutBatch, heldout_batches
from polybasic.train.batches import BatchStream
from polybasic.train.chat import check_chat_template
from polybasic.train.conversations import (
    data_digest,
    fit_to_template,
    load_conversations,
    split_conversations,
)
from polybasic.train.head import HeadShape
from polybasic.train.head_run import HeadRun
from polybasic.train.processes import is_first_process, process_device, process_group
from polybasic.train.settings import DataSettings, HeadSettings, LoraSettings
from polybasic.train.sharded_target import load_sharded_target
from polybasic.train.target import Target, load_target

_WITHOUT_EFFECT = {"log", "save_every_steps", "num_processes"}  # but for the rounding of sums
_PACKAGES = ("torch", "transformers", "deepspeed", "datasets", "peft")


def train_head(
    target: Path,
    conversations: str,
    data: DataSettings,
    settings: HeadSettings,
    seed: int,
    out: Path,
    tokenizer: Path | None = None,
    start: Path | None = None,
    lora: LoraSettings | None = None,
) -> dict[str, Any]:
    """Train a head, keep the weights of the evaluation with the longest accepted length.

    A run that was stopped continues from its last checkpoint in `out`; on a CPU the outcome is
    bit for bit that of a run without a stop. A finished run is not repeated. Called by each of
    the processes where there are several (`polybasic.train.launch`).

    Args:
        target: folder of a transformers checkpoint.
        conversations: as in `load_conversations`.
        data: limit, split and length of the conversations.
        settings: of the head and its training.
        seed: of initial weights, order and noise.
        out: working folder; in the end it has config.json, model.safetensors, training.json and
            metrics.jsonl.
        tokenizer: folder of a tokenizer with a chat template; default: the target's.
        start: folder of a ready head to train further, in EAGLE's layout; it is what is written
            if no evaluation is better than the one before the first step.
        lora: train a LoRA on the head, which is merged, instead of its own weights.

    Returns:
        The summary: simulated_accepted_length, accepted_by_depth, best_step, loss (of the last
        step), steps, tokens, seconds, parameters, and with `start` initial_accepted_length.

    Raises:
        UserError: unusable target, data or start, a checkpoint of another run, a loss that is
            not finite, or a full disk.
    """
    sources = _sources(target, conversations, tokenizer, start)
    identity = _identity(sources, data, settings, seed, lora)
    record = out / "training.json"
    if record.exists():
        finished = read_json(record, "training record")
        if finished["identity"] == identity:
            print(f"head is already trained: {out}", file=sys.stderr)
            return finished["summary"]
    with process_group():
        loaded, batches, heldout = _prepare(target, conversations, data, settings, seed, tokenizer)
        run = HeadRun(loaded, batches, heldout, settings, seed, identity, out, start, lora)
        summary = run.train()
        if is_first_process():
            run.export(out / "model.safetensors")
            shape = run.module.head.shape
            config = head_config(shape, sources["target_sha256"], settings.dtype)
            write_json(out / "config.json", config)
            written = {
                "identity": identity,
                **sources,
                "conversations": conversations,
                "seed": seed,
                "data": data.model_dump(mode="json"),
                "settings": settings.model_dump(mode="json"),
                "lora": None if lora is None else lora.model_dump(mode="json"),
                "versions": {package: version(package) for package in _PACKAGES},
                "summary": summary,
            }
            write_json(record, written)
            shutil.rmtree(out / "checkpoints")
    return summary


def _prepare(
    target: Path,
    conversations: str,
    data: DataSettings,
    settings: HeadSettings,
    seed: int,
    tokenizer: Path | None,
) -> tuple[Target, BatchStream, list[HeldoutBatch]]:
    rows = load_conversations(conversations, data.limit)
    training_rows, heldout_rows = split_conversations(rows, data.num_heldout)
    if settings.zero_stage == 3:
        loaded = load_sharded_target(target, tokenizer)
    else:
        loaded = load_target(target, process_device(), tokenizer)
    check_chat_template(loaded.tokenizer)
    training_rows = fit_to_template(training_rows, loaded.tokenizer)
    heldout_rows = fit_to_template(heldout_rows, loaded.tokenizer)
    batches = BatchStream(
        training_rows, loaded.tokenizer, settings.batch_size, data.max_tokens, seed
    )
    if settings.zero_stage < 3 and not is_first_process():
        return loaded, batches, []  # the first process evaluates; a sharded target answers in all
    with Console(stderr=True).status(f"the target answers {len(heldout_rows)} held-out prompts"):
        heldout = heldout_batches(
            loaded, heldout_rows, data.max_tokens, settings.eval_answer_tokens
        )
    return loaded, batches, heldout


def head_config(shape: HeadShape, target_sha256: str, dtype: str) -> dict[str, Any]:
    """The head's config.json: EAGLE's, and the weights that the head was trained for."""
    origin = {TRAINED_FOR_KEY: target_sha256}
    return {**eagle_config(shape, shape.has_qkv_bias, dtype), ORIGIN_KEY: origin}


def _sources(
    target: Path, conversations: str, tokenizer: Path | None, start: Path | None
) -> dict[str, str]:
    """Digests of all that a run reads; what is not given has none."""
    sources = {"target_sha256": weights_digest(target), "data_sha256": data_digest(conversations)}
    if tokenizer is not None:
        files = [tokenizer / name for name in TOKENIZER_FILES if (tokenizer / name).is_file()]
        sources["tokenizer_sha256"] = sha256_of_object(
            {path.name: sha256_of_file(path) for path in files}
        )
    if start is not None:
        config = read_json(start / "config.json", "head config")
        sources["start_sha256"] = weights_digest(start)
        sources["start_config_sha256"] = sha256_of_object(config)
    return sources


def _identity(
    sources: dict[str, str],
    data: DataSettings,
    settings: HeadSettings,
    seed: int,
    lora: LoraSettings | None,
) -> str:
    return sha256_of_object(
        {
            **sources,
            "seed": seed,
            "data": data.model_dump(mode="json", exclude={"conversations"}),
            "settings": settings.model_dump(mode="json", exclude=_WITHOUT_EFFECT),
            "lora": None if lora is None else lora.model_dump(mode="json"),
        }
    )
