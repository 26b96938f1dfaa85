"""A small Llama trained from scratch on conversations and saved as an ordinary checkpoint."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from polybasic.chain.errors import UserError
from polybasic.chain.files import read_json, sha256_of_object, whole_file, whole_folder, write_json
from polybasic.train.settings import ScratchSettings
from polybasic.train.tokenizer import train_tokenizer

_SAVE_EVERY_STEPS = 60
_NUM_OPEN_ROWS = 16
_IGNORED = -100

#   R = rows of a batch, L = tokens of a row, V = vocabulary


@dataclass(frozen=True)
class _Rows:
    """Documents packed into rows of equal length."""

    input_ids_RL: torch.Tensor  # int64
    document_RL: torch.Tensor  # int64, counts from 1 in each row; 0 is padding


def train_scratch_target(
    conversations: Sequence[Mapping[str, Any]], settings: ScratchSettings, seed: int, out: Path
) -> dict[str, Any]:
    """Train tokenizer and model into the working folder `out`.

    The loss counts every token of a conversation. Documents share rows and do not see each other.
    A run that was stopped continues from its last checkpoint and ends in the same bytes.

    Args:
        conversations: rows with a "messages" column.
        settings: shape and schedule.
        seed: of weights and order.
        out: gets config.json, model.safetensors (bfloat16), generation_config.json, the
            tokenizer's files and, last, training.json.

    Returns:
        The summary: "loss" (nats a token, mean of the last tenth of the steps), "steps", "tokens",
        "seconds", "parameters".

    Raises:
        UserError: no conversations, settings that do not fit together, a loss that is not finite,
            a disk that is full.
    """
    _check(conversations, settings)
    messages = [row["messages"] for row in conversations]
    digest = sha256_of_object([settings.model_dump(), seed, messages])
    summary_path = out / "training.json"
    if summary_path.exists():
        summary = read_json(summary_path, "training summary")
        if summary["inputs_sha256"] == digest:
            return summary
        summary_path.unlink()
    tokenizer = train_tokenizer(messages, settings.vocab_size, settings.context_tokens)
    documents = _encode(tokenizer, messages, settings)
    run = _Run(settings, seed, digest, tokenizer, out)
    run.train(documents)
    summary = {**run.summary(), "inputs_sha256": digest}
    _save(run.model, tokenizer, out)
    write_json(summary_path, summary)
    run.state_path.unlink(missing_ok=True)
    return summary


class _Run:
    """The state of one training run: everything that its checkpoint holds."""

    def __init__(
        self,
        settings: ScratchSettings,
        seed: int,
        digest: str,
        tokenizer: PreTrainedTokenizerFast,
        out: Path,
    ) -> None:
        self.settings, self.seed, self.digest = settings, seed, digest
        self.state_path = out / "training_state.pt"
        self.model = build_model(settings, tokenizer, seed)
        self.optimizer = _optimizer(self.model, settings)
        self.step = 0
        self.num_tokens = 0
        self.seconds = 0.0
        self.losses: list[float] = []

    def train(self, documents: list[list[int]]) -> None:
        """Take the steps that are left."""
        self._resume()
        settings, model = self.settings, self.model
        batches = _Batches(documents, settings, self.seed)
        model.train()
        with _progress() as progress:
            bar = progress.add_task(
                "target", total=settings.num_steps, completed=self.step, note=""
            )
            while self.step < settings.num_steps:
                started = time.perf_counter()
                rows = batches.at(self.step)
                for group in self.optimizer.param_groups:
                    group["lr"] = group["peak_lr"] * learning_rate_share(self.step, settings)
                loss, num_tokens = _loss(model, rows)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
                self._record(loss.item(), num_tokens, time.perf_counter() - started)
                speed = self.num_tokens / self.seconds
                note = f"loss {self.losses[-1]:.3f}  {speed:,.0f} tokens/s"
                progress.update(bar, completed=self.step, note=note)
                if self.step % _SAVE_EVERY_STEPS == 0 and self.step < settings.num_steps:
                    self._save_state()
        model.eval()

    def summary(self) -> dict[str, Any]:
        """What the finished run reports."""
        last = self.losses[-max(1, len(self.losses) // 10) :]
        return {
            "loss": sum(last) / len(last),
            "steps": self.step,
            "tokens": self.num_tokens,
            "seconds": round(self.seconds, 1),
            "parameters": sum(weight.numel() for weight in self.model.parameters()),
        }

    def _record(self, loss: float, num_tokens: int, seconds: float) -> None:
        if not math.isfinite(loss):
            raise UserError(
                "loss is not finite",
                f"step {self.step} of the target's training ({loss})",
                "lower target.learning_rate or raise target.warmup_steps",
            )
        self.step += 1
        self.losses.append(loss)
        self.num_tokens += num_tokens
        self.seconds += seconds

    def _save_state(self) -> None:
        state = {
            "digest": self.digest,
            "step": self.step,
            "num_tokens": self.num_tokens,
            "seconds": self.seconds,
            "losses": self.losses,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        with whole_file(self.state_path) as partial:
            torch.save(state, partial)

    def _resume(self) -> None:
        if not self.state_path.exists():
            return
        state = torch.load(self.state_path, weights_only=True)
        console = Console(stderr=True)
        if state["digest"] != self.digest:
            console.print("target: settings or conversations changed, training starts over")
            return
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.num_tokens = state["step"], state["num_tokens"]
        self.seconds, self.losses = state["seconds"], state["losses"]
        console.print(f"target: continues at step {self.step}")


def learning_rate_share(step: int, settings: ScratchSettings) -> float:
    """Share of the peak learning rate at `step`: linear warm-up, then linear to zero."""
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    return (settings.num_steps - step) / max(1, settings.num_steps - settings.warmup_steps)


def build_model(
    settings: ScratchSettings, tokenizer: PreTrainedTokenizerFast, seed: int
) -> LlamaForCausalLM:
    """A Llama of the settings' shape with fresh float32 weights."""
    config = LlamaConfig(
        vocab_size=settings.vocab_size,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.num_heads,
        num_key_value_heads=settings.num_kv_heads,
        max_position_embeddings=settings.context_tokens,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation="eager",  # on a CPU faster than sdpa for short rows with a mask
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    residual_scale = (2 * settings.num_layers) ** -0.5
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(residual_scale)
            layer.mlp.down_proj.weight.mul_(residual_scale)
    return model


def _optimizer(model: LlamaForCausalLM, settings: ScratchSettings) -> torch.optim.Optimizer:
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    vectors = [weight for weight in model.parameters() if weight.ndim == 1]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": 0.1, "peak_lr": settings.learning_rate},
            {"params": vectors, "weight_decay": 0.0, "peak_lr": settings.learning_rate},
        ],
        lr=settings.learning_rate,
        betas=(0.9, 0.95),
        fused=True,
    )


def _loss(model: LlamaForCausalLM, rows: _Rows) -> tuple[torch.Tensor, int]:
    """Mean cross-entropy over all tokens that follow a token of their own document."""
    document_RL = rows.document_RL
    num_tokens_L = document_RL.shape[1]
    same_RLL = document_RL[:, :, None] == document_RL[:, None, :]
    causal_LL = torch.ones(num_tokens_L, num_tokens_L, dtype=torch.bool).tril()
    mask_R1LL = torch.zeros(same_RLL.shape, dtype=torch.bfloat16)
    mask_R1LL.masked_fill_(~(same_RLL & causal_LL), torch.finfo(torch.bfloat16).min)
    is_target_RL = (document_RL[:, 1:] == document_RL[:, :-1]) & (document_RL[:, 1:] > 0)
    targets_RL = rows.input_ids_RL[:, 1:].masked_fill(~is_target_RL, _IGNORED)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits_RLV = model(
            input_ids=rows.input_ids_RL, attention_mask=mask_R1LL[:, None], use_cache=False
        ).logits[:, :-1]
    loss = F.cross_entropy(logits_RLV.float().flatten(0, 1), targets_RL.flatten())
    return loss, int(is_target_RL.sum())


class _Batches:
    """Batches by step: epoch after epoch, each in an order that follows from seed and epoch."""

    def __init__(self, documents: list[list[int]], settings: ScratchSettings, seed: int) -> None:
        self._documents, self._seed = documents, seed
        self._row_tokens = settings.row_tokens
        self._num_rows = max(1, settings.batch_tokens // settings.row_tokens)
        self._first_step, self._epoch = 0, 0
        self._rows = self._pack(0)

    def at(self, step: int) -> _Rows:
        """The batch of a step; steps are asked for in rising order."""
        while (step - self._first_step + 1) * self._num_rows > len(self._rows):
            steps = max(1, len(self._rows) // self._num_rows)
            if step - self._first_step < steps:
                break
            self._first_step += steps
            self._epoch += 1
            self._rows = self._pack(self._epoch)
        start = (step - self._first_step) * self._num_rows
        rows = self._rows[start : start + self._num_rows]
        ids = torch.zeros(len(rows), self._row_tokens, dtype=torch.long)
        documents = torch.zeros_like(ids)
        for index, row in enumerate(rows):
            end = 0
            for number, document in enumerate(row, 1):
                start, end = end, end + len(document)
                ids[index, start:end] = torch.tensor(document)
                documents[index, start:end] = number
        return _Rows(ids, documents)

    def _pack(self, epoch: int) -> list[list[list[int]]]:
        order = list(self._documents)
        Random(f"{self._seed} {epoch}").shuffle(order)
        return pack_documents(order, self._row_tokens)


def pack_documents(documents: list[list[int]], row_tokens: int) -> list[list[list[int]]]:
    """Place each document in the fullest of a few open rows in which it fits whole.

    Returns:
        Rows of documents; the lengths of a row sum to at most `row_tokens`.
    """
    closed: list[list[list[int]]] = []
    open_rows: list[tuple[int, list[list[int]]]] = []  # (free tokens, documents)
    for document in documents:
        fitting = [index for index, (free, _) in enumerate(open_rows) if free >= len(document)]
        if fitting:
            index = min(fitting, key=lambda row: open_rows[row][0])
            free, row = open_rows.pop(index)
        else:
            if len(open_rows) == _NUM_OPEN_ROWS:
                fullest = min(range(_NUM_OPEN_ROWS), key=lambda row: open_rows[row][0])
                closed.append(open_rows.pop(fullest)[1])
            free, row = row_tokens, []
        open_rows.append((free - len(document), [*row, document]))
    return closed + [row for _, row in open_rows]


def _encode(
    tokenizer: PreTrainedTokenizerFast,
    messages: list[list[dict[str, str]]],
    settings: ScratchSettings,
) -> list[list[int]]:
    """Token ids, cut at the context; what is longer than a row is continued as a new document."""
    documents = []
    for ids in tokenizer.apply_chat_template(messages, return_dict=False):
        ids = ids[: settings.context_tokens]
        for start in range(0, len(ids), settings.row_tokens):
            piece = ids[start : start + settings.row_tokens]
            if len(piece) > 1:
                documents.append(piece)
    return documents


def _save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    model.bfloat16()
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with whole_folder(out / "files") as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    for path in sorted((out / "files").iterdir()):
        path.replace(out / path.name)
    (out / "files").rmdir()


def _check(conversations: Sequence[Mapping[str, Any]], settings: ScratchSettings) -> None:
    if len(conversations) == 0:
        raise UserError("no conversations", "data.conversations", "name a file that has some")


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
