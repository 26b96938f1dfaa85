"""A small Llama trained from scratch on conversations and saved as an ordinary checkpoint."""

import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

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
from polybasic.train.data.tokenizer import train_tokenizer
from polybasic.train.dtypes import announce_cost, settled
from polybasic.train.engine import learning_rate_factor
from polybasic.train.muon import Muon
from polybasic.train.settings import ScratchModelSettings, ScratchSettings

_SAVE_EVERY_STEPS = 60
_NUM_OPEN_ROWS = 16
_IGNORED = -100
_FINAL_SHARE = 0.1  # of the steps: their mean loss is reported
_STORED_DTYPE = torch.bfloat16
"""Of checkpoints, whatever they were trained in."""

#   R = rows of a batch, L = tokens of a row, V = vocabulary

Document = list[int]
"""Token ids of one conversation, or of a piece of a long one."""


def train_scratch_target(
    conversations: Sequence[Mapping[str, Any]], settings: ScratchSettings, seed: int, out: Path
) -> dict[str, Any]:
    """Train tokenizer and model into the working folder `out`.

    The loss counts every token of a conversation. Conversations share rows and do not attend to
    each other. A run that was stopped continues from its last checkpoint in `out` and ends in the
    same bytes (on the same machine, with the same number of threads).

    Args:
        conversations: rows with a "messages" column.
        settings: shape and schedule.
        seed: of weights and order.
        out: gets config.json, model.safetensors (in bfloat16), generation_config.json, the
            tokenizer's files and, last, training.json.

    Returns:
        The summary: "loss" (nats a token, mean of the last tenth of the steps), "steps", "tokens",
        "seconds", "parameters".

    Raises:
        UserError: no conversations, settings that do not fit together, a loss that is not finite,
            a run in `out` that was interrupted with other settings, a disk that is full.
    """

    settings = settled(settings)

    def make_vocabulary(messages: list[list[dict[str, str]]]) -> _Vocabulary:
        tokenizer = train_tokenizer(messages, settings.vocab_size, settings.context_tokens)
        return _Vocabulary(tokenizer, settings.vocab_size, tokenizer.save_pretrained)

    origin = [settings.model_dump(), seed]
    return _train("target", conversations, settings, seed, out, origin, make_vocabulary)


def train_scratch_small(
    conversations: Sequence[Mapping[str, Any]],
    settings: ScratchModelSettings,
    target: Path,
    seed: int,
    out: Path,
) -> dict[str, Any]:
    """Train a model of the target's vocabulary; as `train_scratch_target` in all else.

    Args:
        conversations: as there, as are settings, seed and out.
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
    return _train("small", conversations, settings, seed, out, origin, make_vocabulary)


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
) -> dict[str, Any]:
    """Train a model; `section` of the recipe names it, `origin` is what its bytes follow from."""
    _check(settings, section)
    messages = [list(row["messages"]) for row in conversations]
    if not messages:
        raise UserError("no conversations", "data.conversations", "name a file that has some")
    digest = sha256_of_object([*origin, messages])
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
    write_json(summary_path, {"inputs_sha256": digest, "summary": run.summary()})
    run.state_path.unlink(missing_ok=True)
    return run.summary()


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
        self.learning_rate = learning_rate_factor(settings.warmup_steps, settings.num_steps)
        self.losses: list[float] = []  # one a step
        self.num_tokens = 0
        self.seconds = 0.0

    def train(self, documents: list[Document]) -> None:
        """Take the steps that are left."""
        self._resume()
        num_done, num_steps = len(self.losses), self.settings.num_steps
        batches = _batches(documents, self.settings, self.seed)
        self.model.train()
        with ProgressReport(f"{self.section} model", num_steps, num_done) as progress:
            for step, rows in enumerate(itertools.islice(batches, num_done, num_steps), num_done):
                started = time.perf_counter()
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
        loss, num_tokens = _loss(
            self.model, *_tensors(rows, self.settings.row_tokens), DTYPES[self.settings.dtype]
        )
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
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.losses, self.num_tokens = state["losses"], state["num_tokens"]
        self.seconds = state["seconds"]
        print(f"{self.section}: training continues at step {len(self.losses)}", file=sys.stderr)


def build_model(
    settings: ScratchModelSettings,
    tokenizer: PreTrainedTokenizerFast,
    vocab_size: int,
    seed: int,
) -> LlamaForCausalLM:
    """A Llama of the settings' shape with fresh float32 weights."""
    config = LlamaConfig(
        vocab_size=vocab_size,
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
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # Eager attention is faster than sdpa on a CPU for short rows with a mask.
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    residual_scale = (2 * settings.num_layers) ** -0.5
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(residual_scale)
            layer.mlp.down_proj.weight.mul_(residual_scale)
    return model


def pack_documents(documents: list[Document], row_tokens: int) -> list[list[Document]]:
    """Place each document whole in the fullest of a few open rows in which it fits.

    Returns:
        Rows of documents; the lengths of a row sum to at most `row_tokens`.
    """
    closed: list[list[Document]] = []
    open_rows: list[tuple[int, list[Document]]] = []  # (free tokens, documents)
    for document in documents:
        open_rows.sort(key=lambda row: row[0])
        fitting = (i for i, (free, _) in enumerate(open_rows) if free >= len(document))
        index = next(fitting, None)
        if index is None:
            if len(open_rows) == _NUM_OPEN_ROWS:
                closed.append(open_rows.pop(0)[1])
            open_rows.append((row_tokens - len(document), [document]))
        else:
            free, row = open_rows[index]
            open_rows[index] = (free - len(document), [*row, document])
    return closed + [row for _, row in open_rows]


def _batches(
    documents: list[Document], settings: ScratchModelSettings, seed: int
) -> Iterator[list[list[Document]]]:
    """Batches without end: epoch after epoch, each in an order of its own."""
    num_rows = settings.batch_tokens // settings.row_tokens
    rows: list[list[Document]] = []
    for epoch in itertools.count():
        order = list(documents)
        Random(f"{seed} {epoch}").shuffle(order)
        rows += pack_documents(order, settings.row_tokens)
        for start in range(0, len(rows) - num_rows + 1, num_rows):
            yield rows[start : start + num_rows]
        rows = rows[len(rows) // num_rows * num_rows :]


def _tensors(rows: list[list[Document]], row_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and, beside each, the number of its document in the row; 0 marks padding."""
    input_ids_RL = torch.zeros(len(rows), row_tokens, dtype=torch.long)
    document_RL = torch.zeros_like(input_ids_RL)
    for index, row in enumerate(rows):
        end = 0
        for number, document in enumerate(row, 1):
            start, end = end, end + len(document)
            input_ids_RL[index, start:end] = torch.tensor(document)
            document_RL[index, start:end] = number
    return input_ids_RL, document_RL


def _loss(
    model: LlamaForCausalLM,
    input_ids_RL: torch.Tensor,
    document_RL: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, int]:
    """Mean cross-entropy over all tokens that follow a token of their own document.

    Products are in `dtype`.
    """
    is_visible_RLL = (document_RL[:, :, None] == document_RL[:, None, :]).tril()
    mask_RLL = torch.zeros(is_visible_RLL.shape, dtype=dtype)
    mask_RLL.masked_fill_(~is_visible_RLL, torch.finfo(dtype).min)
    is_target_RL = (document_RL[:, 1:] == document_RL[:, :-1]) & (document_RL[:, 1:] > 0)
    targets_RL = input_ids_RL[:, 1:].masked_fill(~is_target_RL, _IGNORED)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        logits_RLV = model(
            input_ids=input_ids_RL, attention_mask=mask_RLL[:, None], use_cache=False
        ).logits[:, :-1]
    loss = F.cross_entropy(logits_RLV.float().flatten(0, 1), targets_RL.flatten())
    return loss, int(is_target_RL.sum())


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
    """Token ids, cut at the context; what is longer than a row goes on as another document."""
    documents = []
    texts = tokenizer.apply_chat_template(messages, tokenize=False)
    for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]:
        ids = ids[: settings.context_tokens]
        starts = range(0, len(ids), settings.row_tokens)
        documents += [ids[start : start + settings.row_tokens] for start in starts]
    return documents


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
