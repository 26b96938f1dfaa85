"""A small Llama trained from scratch on conversations and saved as an ordinary checkpoint."""

import itertools
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from polybasic.chain.errors import UserError
from polybasic.chain.formats.checkpoint import copy_files, tokenizer_files
from polybasic.chain.formats.config import read_config
from polybasic.chain.formats.files import (
    read_json,
    sha256_of_file,
    sha256_of_object,
    whole_file,
    whole_folder,
    write_json,
)
from polybasic.chain.kernels.product_times import DTYPES
from polybasic.chain.model.reference import quiet_transformers
from polybasic.chain.progress import ProgressReport
from polybasic.train.data.chat import encode_accepted
from polybasic.train.data.documents import (
    Document,
    PackedRows,
    document_batches,
    document_tensors,
    split_document,
)
from polybasic.train.data.tokenizer import train_tokenizer
from polybasic.train.deepening import deepen
from polybasic.train.dtypes import announce_cost, settled
from polybasic.train.engine import learning_rate_factor
from polybasic.train.fresh_model import build_model
from polybasic.train.heldout_answers import measure_answers
from polybasic.train.muon import Muon
from polybasic.train.settings import ScratchModelSettings, ScratchSettings

_SAVE_EVERY_STEPS = 60
_FINAL_SHARE = 0.1  # of the steps: their mean loss is reported
_STORED_DTYPE = torch.bfloat16
"""Of checkpoints, whatever they were trained in."""

#   R = rows of a batch, L = tokens of a row, H = hidden size,
#   V = vocabulary


def train_scratch_target(
    conversations: Sequence[Mapping[str, Any]],
    settings: ScratchSettings,
    seed: int,
    out: Path,
    heldout: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Train tokenizer and model into the working folder `out`.

    The loss counts every token of a conversation, `settings.prompt_weight` times where it is not
    the assistant's. Conversations share rows and do not attend to each other. A run that was
    stopped continues from its last checkpoint in `out` and ends in the same bytes (on the same
    machine, with the same number of threads).

    Args:
        conversations: rows with a "messages" column.
        settings: shape and schedule.
        seed: of weights and order.
        out: gets config.json, model.safetensors (in bfloat16), generation_config.json, the
            tokenizer's files and, last, training.json.
        heldout: conversations that tell how well the trained model answers.

    Returns:
        The summary: "loss" (nats a token, mean of the last tenth of the steps), "steps", "tokens",
        "seconds", "parameters", and what `measure_answers` says of the saved model.

    Raises:
        UserError: no conversations, settings that do not fit together, a loss that is not finite,
            a run in `out` that was interrupted with other settings, a disk that is full.
    """

    settings = settled(settings)

    def make_vocabulary(messages: list[list[dict[str, str]]]) -> _Vocabulary:
        tokenizer = train_tokenizer(messages, settings.vocab_size, settings.context_tokens)
        return _Vocabulary(tokenizer, settings.vocab_size, tokenizer.save_pretrained)

    origin = [settings.model_dump(), seed]
    return _train("target", conversations, settings, seed, out, origin, make_vocabulary, heldout)


def train_scratch_small(
    conversations: Sequence[Mapping[str, Any]],
    settings: ScratchModelSettings,
    target: Path,
    seed: int,
    out: Path,
    heldout: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Train a model of the target's vocabulary; as `train_scratch_target` in all else.

    Args:
        conversations: as there, as are settings, seed, out and heldout.
        target: checkpoint whose tokenizer is used and copied, byte by byte.

    Raises:
        UserError: as there, or a target without a fast tokenizer.
    """
    settings, names = settled(settings), tokenizer_files(target)

    def make_vocabulary(_: list[list[dict[str, str]]]) -> _Vocabulary:
        vocab_size = read_config(target).content["vocab_size"]
        return _Vocabulary(
            PreTrainedTokenizerFast.from_pretrained(target),
            vocab_size,
            lambda folder: copy_files(target, folder, names),
        )

    digests = {name: sha256_of_file(target / name) for name in names}
    origin = [settings.model_dump(), seed, digests]
    return _train("small", conversations, settings, seed, out, origin, make_vocabulary, heldout)


@dataclass(frozen=True)
class _Vocabulary:
    """A tokenizer, how many rows its embedding has, and what writes its files to a folder."""

    tokenizer: PreTrainedTokenizerFast
    size: int
    save: Callable[[Path], object]


def _train(
    section: str,
    conversations: Sequence[Mapping[str, Any]],
    settings: ScratchModelSettings,
    seed: int,
    out: Path,
    origin: list[Any],
    make_vocabulary: Callable[[list[list[dict[str, str]]]], _Vocabulary],
    heldout: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Train a model; `section` of the recipe names it, `origin` is what its bytes follow from."""
    _check(settings, section)
    messages = [list(row["messages"]) for row in conversations]
    if not messages:
        raise UserError("no conversations", "data.conversations", "name a file that has some")
    digest = sha256_of_object([*origin, messages, [list(row["messages"]) for row in heldout]])
    summary_path = out / "training.json"
    if summary_path.exists():
        finished = read_json(summary_path, "training summary")
        if finished["inputs_sha256"] == digest:
            return finished["summary"]
    announce_cost(f"{section}.scratch.dtype", settings)
    vocabulary = make_vocabulary(messages)
    run = _Run(section, settings, seed, digest, vocabulary, out / "training_state.pt")
    run.train(_encode(vocabulary.tokenizer, messages, settings))
    _save(run.model, vocabulary, out)
    summary = run.summary()
    nn.Module.to(run.model, DTYPES[settings.dtype])  # transformers wraps its own without types
    summary |= measure_answers(run.model, vocabulary.tokenizer, heldout, settings.context_tokens)
    if "right_answers" in summary:
        print(
            f"{section}: {summary['heldout_loss']:.3f} nats a token on held-out conversations, "
            f"{summary['heldout_answer_loss']:.3f} in answers; right are "
            f"{100 * summary['right_tokens']:.1f}% of the answers' tokens and "
            f"{100 * summary['right_answers']:.1f}% of whole answers",
            file=sys.stderr,
        )
    write_json(summary_path, {"inputs_sha256": digest, "summary": summary})
    run.state_path.unlink(missing_ok=True)
    return summary


class _Run:
    """One training run. The order of its data follows from seed and step, so neither is state."""

    def __init__(
        self,
        section: str,
        settings: ScratchModelSettings,
        seed: int,
        digest: str,
        vocabulary: _Vocabulary,
        state_path: Path,
    ) -> None:
        self.section, self.settings, self.seed, self.digest = section, settings, seed, digest
        self.state_path = state_path
        self.model = build_model(settings, vocabulary.tokenizer, vocabulary.size, seed)
        self.optimizers = _optimizers(self.model, settings)
        self.learning_rate = learning_rate_factor(
            settings.warmup_steps, settings.num_steps, settings.decay_share
        )
        self.losses: list[float] = []  # one a step
        self.num_tokens = 0
        self.seconds = 0.0

    def train(self, documents: list[Document]) -> None:
        """Take the steps that are left."""
        self._resume()
        settings, num_done = self.settings, len(self.losses)
        num_steps, num_rows = settings.num_steps, settings.batch_tokens // settings.row_tokens
        batches = document_batches(documents, settings.row_tokens, num_rows, self.seed)
        self.model.train()
        with ProgressReport(f"{self.section} model", num_steps, num_done) as progress:
            for step, rows in enumerate(itertools.islice(batches, num_done, num_steps), num_done):
                started = time.perf_counter()
                if step == settings.deepen_step:
                    self._deepen()
                loss, num_tokens = self._take_step(step, rows)
                self.losses.append(loss)
                self.num_tokens += num_tokens
                self.seconds += time.perf_counter() - started
                speed = self.num_tokens / self.seconds
                progress.step(f"loss {loss:.3f}  {speed:,.0f} tokens/s")
                if (step + 1) % _SAVE_EVERY_STEPS == 0:
                    self._save_state()
        self.model.eval()

    def summary(self) -> dict[str, Any]:
        """What the finished run reports."""
        last = self.losses[-max(1, round(_FINAL_SHARE * len(self.losses))) :]
        return {
            "loss": sum(last) / len(last),
            "steps": len(self.losses),
            "tokens": self.num_tokens,
            "seconds": round(self.seconds, 1),
            "parameters": self.model.num_parameters(),
        }

    def _take_step(self, step: int, rows: list[list[Document]]) -> tuple[float, int]:
        share = self.learning_rate(step)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * share
        settings, batch = self.settings, document_tensors(rows, self.settings.row_tokens)
        loss, num_tokens = _loss(self.model, batch, settings.prompt_weight, DTYPES[settings.dtype])
        if not math.isfinite(loss.item()):
            raise UserError(
                "loss is not finite",
                f"step {step} of the {self.section} model's training ({loss.item()})",
                f"lower {self.section}.scratch.learning_rate or raise "
                f"{self.section}.scratch.warmup_steps",
            )
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.item(), num_tokens

    def _deepen(self) -> None:
        """Go on with all layers; the optimizers keep what they know of those that were there."""
        deepen(self.model, self.settings.num_layers)
        before = self.optimizers
        self.optimizers = _optimizers(self.model, self.settings)
        for optimizer, known in zip(self.optimizers, before, strict=True):
            optimizer.state.update(known.state)

    def _save_state(self) -> None:
        state = {
            "digest": self.digest,
            "losses": self.losses,
            "num_tokens": self.num_tokens,
            "seconds": self.seconds,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        with whole_file(self.state_path) as partial:
            torch.save(state, partial)

    def _resume(self) -> None:
        if not self.state_path.exists():
            return
        state = torch.load(self.state_path, weights_only=True)
        if state["digest"] != self.digest:
            raise UserError(
                f"interrupted training of the {self.section} model with other settings, "
                "conversations or seed",
                str(self.state_path),
                "restore them to continue it, or remove it to start over",
            )
        deepen_step, num_done = self.settings.deepen_step, len(state["losses"])
        if deepen_step is not None and deepen_step < num_done:
            self._deepen()
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.losses, self.num_tokens = state["losses"], state["num_tokens"]
        self.seconds = state["seconds"]
        print(f"{self.section}: training continues at step {len(self.losses)}", file=sys.stderr)


def _loss(
    model: LlamaForCausalLM, batch: PackedRows, prompt_weight: float, dtype: torch.dtype
) -> tuple[torch.Tensor, int]:
    """Mean cross-entropy over the tokens that follow one of their own document, and their number.

    Tokens that are not the assistant's count `prompt_weight` times. Products are in `dtype`.
    """
    document_RL = batch.document_ids
    is_visible_RLL = (document_RL[:, :, None] == document_RL[:, None, :]).tril()
    mask_RLL = torch.zeros(is_visible_RLL.shape, dtype=dtype)
    mask_RLL.masked_fill_(~is_visible_RLL, torch.finfo(dtype).min)
    is_target_RL = (document_RL[:, 1:] == document_RL[:, :-1]) & (document_RL[:, 1:] > 0)
    weight_RL = torch.where(batch.is_assistant[:, 1:], 1.0, prompt_weight) * is_target_RL
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        states_RLH = model.model(
            input_ids=batch.token_ids, attention_mask=mask_RLL[:, None], use_cache=False
        ).last_hidden_state[:, :-1]
    projection_VH = model.lm_head.weight.to(dtype)
    # row by row: memory for all logits at once costs more than what is done with them
    loss_RL = torch.stack(
        [
            F.cross_entropy(F.linear(states_LH, projection_VH).float(), targets_L, reduction="none")
            for states_LH, targets_L in zip(
                states_RLH.to(dtype), batch.token_ids[:, 1:], strict=True
            )
        ]
    )
    return (loss_RL * weight_RL).sum() / weight_RL.sum(), int(is_target_RL.sum())


def _optimizers(
    model: LlamaForCausalLM, settings: ScratchModelSettings
) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for embedding, output projection and norms.

    Muon (Jordan et al., 2024) learns to copy from the prompt in a fraction of AdamW's steps.
    """
    layers = list(model.model.layers.parameters())
    matrices = [weight for weight in layers if weight.ndim == 2]
    in_layers = {id(weight) for weight in matrices}
    others = [weight for weight in model.parameters() if id(weight) not in in_layers]
    optimizers = [
        Muon(
            matrices,
            lr=settings.matrix_learning_rate,
            momentum=0.95,
            weight_decay=0.01,
            num_iterations=settings.muon_iterations,
            dtype=DTYPES[settings.dtype],
        ),
        torch.optim.AdamW(
            others, lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        ),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return optimizers


def _encode(
    tokenizer: PreTrainedTokenizerFast,
    messages: list[list[dict[str, str]]],
    settings: ScratchModelSettings,
) -> list[Document]:
    """Documents cut at the context; what is longer than a row goes on as another one."""
    encoded, refusal = encode_accepted(tokenizer, messages, settings.context_tokens)
    if refusal is not None:
        raise refusal
    return [piece for each in encoded for piece in split_document(each, settings.row_tokens)]


def _save(model: LlamaForCausalLM, vocabulary: _Vocabulary, out: Path) -> None:
    nn.Module.to(model, _STORED_DTYPE)
    tokenizer = vocabulary.tokenizer
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    files = out / "files"
    with whole_folder(files) as folder, quiet_transformers():
        model.save_pretrained(folder)
        vocabulary.save(folder)
    for path in sorted(files.iterdir()):
        path.replace(out / path.name)
    files.rmdir()


def _check(settings: ScratchModelSettings, section: str) -> None:
    """Refuse settings that do not fit together.

    Raises:
        UserError: which two, and what to change.
    """
    if settings.row_tokens > min(settings.batch_tokens, settings.context_tokens):
        where = (
            f"{section}.scratch.row_tokens {settings.row_tokens}, "
            f"batch_tokens {settings.batch_tokens}, context_tokens {settings.context_tokens}"
        )
        raise UserError("row is longer than batch or context", where, "lower row_tokens")
    if settings.warmup_steps >= settings.num_steps:
        where = (
            f"{section}.scratch.warmup_steps {settings.warmup_steps}, "
            f"num_steps {settings.num_steps}"
        )
        raise UserError("warm-up takes all steps", where, "lower warmup_steps")
