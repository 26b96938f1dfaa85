"""Train a draft head for a target, with the target's features taken as the batches come."""

import shutil
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from polybasic.chain.digests import weights_digest
from polybasic.chain.files import read_json, sha256_of_object, write_json
from polybasic.train.acceptance import heldout_batches
from polybasic.train.batches import BatchStream
from polybasic.train.conversations import data_digest, load_conversations, split_conversations
from polybasic.train.engine import single_process
from polybasic.train.head import HeadShape
from polybasic.train.head_run import HeadRun
from polybasic.train.settings import DataSettings, HeadSettings
from polybasic.train.target import load_target

_WITHOUT_EFFECT = {"log", "save_every_steps"}
_PACKAGES = ("torch", "transformers", "deepspeed", "datasets")


def train_head(
    target: Path,
    conversations: str,
    data: DataSettings,
    settings: HeadSettings,
    seed: int,
    out: Path,
) -> dict[str, Any]:
    """Train a head, keep the weights of the evaluation with the longest accepted length.

    A run that was stopped continues from its last checkpoint in `out`; on a CPU the outcome is
    bit for bit that of a run without a stop. A finished run is not repeated.

    Args:
        target: folder of a transformers checkpoint with a chat template.
        conversations: as in `load_conversations`.
        data: limit, split and length of the conversations.
        settings: of the head and its training.
        seed: of initial weights, order and noise.
        out: working folder; in the end it has config.json, model.safetensors, training.json and
            metrics.jsonl.

    Returns:
        The summary: simulated_accepted_length, accepted_by_depth, best_step, loss (of the last
        step), steps, tokens, seconds, parameters.

    Raises:
        UserError: unusable target or data, a checkpoint of another run, a loss that is not
            finite, or a full disk.
    """
    sources = {"target_sha256": weights_digest(target), "data_sha256": data_digest(conversations)}
    identity = _identity(sources, data, settings, seed)
    record = out / "training.json"
    if record.exists():
        finished = read_json(record, "training record")
        if finished["identity"] == identity:
            print(f"head is already trained: {out}", file=sys.stderr)
            return finished["summary"]
    with single_process():
        run = _prepare(target, conversations, data, settings, seed, identity, out)
        summary = run.train()
    run.export(out / "model.safetensors")
    config = head_config(run.module.head.shape, sources["target_sha256"], settings.dtype)
    write_json(out / "config.json", config)
    written = {
        "identity": identity,
        **sources,
        "conversations": conversations,
        "seed": seed,
        "data": data.model_dump(mode="json"),
        "settings": settings.model_dump(mode="json"),
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
    identity: str,
    out: Path,
) -> HeadRun:
    rows = load_conversations(conversations, data.limit)
    training_rows, heldout_rows = split_conversations(rows, data.num_heldout)
    loaded = load_target(target, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    batches = BatchStream(
        training_rows, loaded.tokenizer, settings.batch_size, data.max_tokens, seed
    )
    with Console(stderr=True).status(f"the target answers {len(heldout_rows)} held-out prompts"):
        heldout = heldout_batches(
            loaded, heldout_rows, data.max_tokens, settings.eval_answer_tokens
        )
    return HeadRun(loaded, batches, heldout, settings, seed, identity, out)


def head_config(shape: HeadShape, target_sha256: str, dtype: str) -> dict[str, Any]:
    """The head's config.json, in the style of the Llama family as EAGLE's own."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "bias": True,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": shape.context_tokens,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "polybasic": {"target_sha256": target_sha256},
    }


def _identity(
    sources: dict[str, str], data: DataSettings, settings: HeadSettings, seed: int
) -> str:
    return sha256_of_object(
        {
            **sources,
            "seed": seed,
            "data": data.model_dump(mode="json", exclude={"conversations"}),
            "settings": settings.model_dump(mode="json", exclude=_WITHOUT_EFFECT),
        }
    )
