"""Train a draft head for a target: what a run is made of, and what it leaves."""

import itertools
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.processes.coordinator import broadcast_from_first
from polybasic.chain.base.processes.group import is_first_process, process_device, process_group
from polybasic.chain.formats.checkpoints.checkpoint import TOKENIZER_FILES
from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.chain.formats.files import read_json, sha256_of_file, sha256_of_object, write_json
from polybasic.chain.formats.lineage import weights_digest
from polybasic.chain.kernels.executor import Executor
from polybasic.chain.kernels.product_times import DTYPES
from polybasic.chain.model.loading import load_decoder
from polybasic.chain.model.reference import load_reference_model
from polybasic.train.data.batches import BatchStream, LocalBatch
from polybasic.train.data.chat import check_chat_template
from polybasic.train.data.conversations import (
    data_digest,
    fit_to_template,
    load_conversations,
    split_conversations,
)
from polybasic.train.data.draft_vocabulary import (
    choose_draft_vocabulary,
    count_answer_tokens,
    coverage,
)
from polybasic.train.dtypes import announce_cost, settled, verifier_dtype
from polybasic.train.features.head_shape import HeadShape
from polybasic.train.features.offline_features import (
    TOP_TOKENS,
    OnlineFeatures,
    write_features,
)
from polybasic.train.features.sharded_target import load_sharded_target
from polybasic.train.features.states import FeatureSource
from polybasic.train.features.target import Target, load_intermediate, load_target
from polybasic.train.head.acceptance import HeldoutBatch, heldout_batches, simulate
from polybasic.train.head.copied_layer import (
    ROWS_PER_UNKNOWN,
    copy_last_layer,
    has_copied_layer,
    has_qkv_biases,
)
from polybasic.train.head.eagle2 import Eagle2Head
from polybasic.train.head.early_exit import EarlyExit
from polybasic.train.head.scales import ChannelScales, channel_scales
from polybasic.train.head.start import new_head
from polybasic.train.head.steering import Steering
from polybasic.train.run.loop import HeadRun, Parts
from polybasic.train.settings import DataSettings, HeadSettings, LoraSettings

_FEATURES_NAME = "features"
_OF_TEXT = ("data_sha256", "tokenizer_sha256")
_PACKAGES = ("polybasic", "torch", "transformers", "deepspeed", "datasets", "peft", "safetensors")


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
    intermediate: Path | None = None,
    provenance: dict[str, Any] | None = None,
    drafter: Path | None = None,
) -> dict[str, Any]:
    """Train a head, keep the weights of the evaluation with the longest accepted length.

    A run that was stopped continues from its last checkpoint in `out`; on a CPU the outcome is
    bit for bit that of a run without a stop. A finished run is not repeated. Called by each of
    the processes where there are several (`polybasic.chain.base.processes`).

    Args:
        target: folder of a transformers checkpoint.
        conversations: as in `load_conversations`.
        data: limit, split and length of the conversations.
        settings: of the head and its training.
        seed: of initial weights, order and noise.
        out: working folder; at the end it has config.json, model.safetensors, training.json and
            metrics.jsonl, and `checkpoints` where `settings.keep_every_steps` keeps some. While
            the run goes on `checkpoints` holds the last one and, as a head that can be loaded,
            `best`, each with a run.json.
        tokenizer: folder of a tokenizer with a chat template; default: the target's.
        start: folder of a ready head to train further, in the layout of its kind; it is what is
            written if no evaluation is better than the one before the first step.
        lora: train a LoRA on the head, which is merged, instead of its own weights.
        intermediate: folder of the target's 4-bit copy. Where `settings.features_from` says so the
            head learns its states and distribution, and evaluations draft for its answers.
        provenance: JSON content on what started the run, kept beside checkpoints and head.
        drafter: folder of the smaller model that is steered, where `settings.kind` says so.

    Returns:
        The summary: simulated_accepted_length, accepted_by_depth, accepted_by_task, best_step,
        loss (of the last step), steps, tokens, seconds, parameters; with `start`
        initial_accepted_length; with a draft vocabulary draft_vocabulary_coverage, a share of the
        answers' tokens, and of an EAGLE-2 head untrimmed_accepted_length, with which the same
        weights draft among all tokens.

    Raises:
        UserError: unusable target, data or start, a batch that the processes cannot share evenly,
            a checkpoint of another run, a loss that is not finite, or a full disk.
        Interrupted: by a signal during the steps; a checkpoint is saved first.
    """
    with process_group() as place:
        if settings.batch_size % place.world_size:
            raise UserError(
                "processes cannot share a batch evenly",
                f"train.batch_size = {settings.batch_size}, processes {place.world_size}",
                "choose a multiple, or start fewer",
            )
        # by timings, which differ from process to process
        dtype = broadcast_from_first(lambda: settled(settings).dtype)
        given = _Given(
            target,
            conversations,
            data,
            settings.model_copy(update={"dtype": dtype}),
            seed,
            out,
            tokenizer,
            start,
            lora,
            intermediate if settings.features_from == "intermediate" else None,
            drafter if settings.kind == "steering" else None,
        )
        return _train(given, provenance)


def _train(given: "_Given", provenance: dict[str, Any] | None) -> dict[str, Any]:
    settings, out = given.settings, given.out
    # reading all weights takes minutes of a large target, and one process's disk
    sources = broadcast_from_first(lambda: _sources(given))
    identity = _identity(given, sources)
    finished = out / "training.json"
    if broadcast_from_first(finished.exists):
        written = read_json(finished, "training record")
        if written["identity"] == identity:
            print(f"head is already trained: {out}", file=sys.stderr)
            summary: dict[str, Any] = written["summary"]
            return summary
    record = {
        "identity": identity,
        **sources,
        "conversations": given.conversations,
        "seed": given.seed,
        "data": given.data.model_dump(mode="json"),
        "settings": settings.model_dump(mode="json"),
        "lora": None if given.lora is None else given.lora.model_dump(mode="json"),
        "versions": {package: version(package) for package in _PACKAGES},
        "provenance": provenance,
    }
    if is_first_process():
        announce_cost(settings)
    prepared = _prepare(given, sources)
    run = HeadRun(prepared.parts, settings, given.seed, record, out, prepared.is_random)
    summary = run.train()
    if is_first_process():
        run.export()
        summary |= _draft_vocabulary_summary(prepared, run, given)
        write_json(finished, {**record, "summary": summary})
        run.remove_checkpoints()
        if settings.features_folder is None:
            shutil.rmtree(out / _FEATURES_NAME, ignore_errors=True)
    return summary


@dataclass(frozen=True)
class _Given:
    """What a run is asked for, as `train_head` describes it."""

    target: Path
    conversations: str
    data: DataSettings
    settings: HeadSettings
    seed: int
    out: Path
    tokenizer: Path | None
    start: Path | None
    lora: LoraSettings | None
    intermediate: Path | None  # None too where the head learns from the target
    drafter: Path | None  # of a steering alone


class _Prepared(NamedTuple):
    """What a run is made of, and by what its draft vocabulary is judged."""

    parts: Parts
    shape: HeadShape  # of a random head
    answer_counts: Tensor | None  # where the settings ask for a draft vocabulary
    is_random: bool  # whether the head knows nothing before the first step


def _prepare(given: _Given, sources: dict[str, str]) -> _Prepared:
    data, settings, seed = given.data, given.settings, given.seed
    rows = load_conversations(given.conversations, data.limit)
    training_rows, heldout_rows = split_conversations(rows, data.num_heldout)
    if settings.num_conversations is not None:
        training_rows = _first(training_rows, settings.num_conversations)
    verifier = _load_verifier(given)
    tokenizer = verifier.tokenizer
    check_chat_template(tokenizer)
    training_rows = fit_to_template(training_rows, tokenizer)
    heldout_rows = fit_to_template(heldout_rows, tokenizer)
    shape = verifier.head_shape(settings)
    if settings.kind == "steering":
        shape = _steered_shape(shape, given, sources)
    is_copied = settings.start == "auto" and given.start is None and settings.zero_stage < 3
    is_copied = is_copied and has_copied_layer(verifier, shape)
    if is_copied:
        shape = replace(shape, has_qkv_bias=has_qkv_biases(verifier))
    counts, drafted = None, None
    if settings.draft_vocab_size is not None:
        counts = count_answer_tokens(training_rows, tokenizer, shape.vocab_size, data, seed)
        drafted = choose_draft_vocabulary(counts, tokenizer, settings.draft_vocab_size)
    head = new_head(
        shape,
        verifier.embedding,
        settings,
        seed,
        given.start,
        given.lora,
        verifier.lm_head,
        drafted,
    )
    batches = BatchStream(
        training_rows, tokenizer, settings.batch_size, data.max_tokens, seed, settings.pack
    )
    if isinstance(head, Eagle2Head) and is_copied:
        copy_last_layer(head, verifier, _shares(batches, shape.hidden_size))
    if settings.start == "auto" and is_first_process():
        what = "its verifier's last layer" if is_copied else "random weights or those given"
        print(f"the draft head starts from {what}", file=sys.stderr)
    if isinstance(head, Steering):
        head.set_drafter(*_drafter(given))
    if isinstance(head, EarlyExit):
        head.set_model(_first_layers(given, shape))
    heldout = _heldout(verifier, heldout_rows, given, shape)
    features = _features(verifier, batches, given, shape, sources)
    scales = broadcast_from_first(lambda: [each.tolist() for each in channel_scales(head, heldout)])
    parts = Parts(
        head,
        verifier.lm_head,
        features,
        batches,
        heldout,
        ChannelScales(*(torch.tensor(each) for each in scales)),
    )
    return _Prepared(parts, shape, counts, given.start is None and not is_copied)


def _shares(batches: BatchStream, hidden_size: int) -> Iterator[LocalBatch]:
    """Of the first steps, with as many rows that count as a map of 2H columns is found from, or
    with all conversations."""
    num_left, seen = ROWS_PER_UNKNOWN * 2 * hidden_size, set[str]()
    for step in itertools.count():
        share = batches.batch(step).share(0, 1, process_device())
        drawn = set(itertools.chain(*share.conversation_ids))
        if num_left <= 0 or drawn <= seen:
            return
        yield share
        num_left -= int(share.is_assistant.sum())
        seen |= drawn


def _load_verifier(given: _Given) -> Target:
    """The model whose states and distribution the head learns."""
    settings, tokenizer = given.settings, given.tokenizer
    if settings.features_from == "target":
        if settings.zero_stage == 3:
            return load_sharded_target(given.target, tokenizer, _verifier_dtype(given))
        return load_target(given.target, process_device(), tokenizer, _verifier_dtype(given))
    if given.intermediate is None:
        raise UserError(
            "no intermediate to learn from",
            "train.features_from = intermediate",
            "quantize the target first, or set train.features_from=target",
        )
    if settings.zero_stage == 3:
        raise UserError(
            "only a target is partitioned over processes",
            "train.features_from = intermediate, train.zero_stage = 3",
            "set train.zero_stage=2; the intermediate then lies whole in each process",
        )
    return load_intermediate(
        given.intermediate, tokenizer or given.target, process_device(), _verifier_dtype(given)
    )


def _steered_shape(shape: HeadShape, given: _Given, sources: dict[str, str]) -> HeadShape:
    if given.drafter is None:
        raise UserError(
            "no model to steer",
            "train.kind = steering",
            "give the recipe a smaller model that drafts (small.role=drafter)",
        )
    drafter = read_config(given.drafter).decoder
    if drafter.vocab_size != shape.vocab_size:
        raise UserError(
            "drafter with another vocabulary",
            f"{given.drafter} {drafter.vocab_size} tokens, target {shape.vocab_size}",
            "steer a model of the target's family",
        )
    return replace(
        shape,
        steered_layers=drafter.num_layers,
        steered_size=drafter.hidden_size,
        steered_sha256=sources["drafter_sha256"],
    )


def _drafter(given: _Given) -> tuple[PreTrainedModel, Executor]:
    """The model that is steered, to train with and as it is served."""
    assert given.drafter is not None
    dtype, device = DTYPES[given.settings.dtype], process_device()
    model = load_reference_model(given.drafter, dtype, device)
    return model, load_decoder(read_config(given.drafter), dtype, device, 1)


def _first_layers(given: _Given, shape: HeadShape) -> Executor:
    """Those that an early exit runs when an evaluation drafts, as they are served."""
    file, dtype = read_config(given.intermediate or given.target), DTYPES[given.settings.dtype]
    # each evaluation has rotary tables of its own length
    return load_decoder(file, dtype, process_device(), 1, first_layers=shape.exit_layer)


def _heldout(
    verifier: Target, rows: Dataset, given: _Given, shape: HeadShape
) -> list[HeldoutBatch]:
    settings = given.settings
    if settings.eval_conversations is not None:
        num = min(settings.eval_conversations, len(rows))
        # from all over the file, which may list its tasks one after the other
        rows = rows.select([index * len(rows) // num for index in range(num)])
    if settings.zero_stage < 3 and not is_first_process():
        return []  # the first process evaluates; a sharded target answers in all
    if is_first_process():
        print(f"{len(rows)} held-out prompts are answered", file=sys.stderr)
    found = heldout_batches(
        verifier, rows, given.data.max_tokens, settings.eval_answer_tokens, shape.feature_layers
    )
    return found if is_first_process() else []


def _first(rows: Dataset, num: int) -> Dataset:
    return rows.select(range(min(num, len(rows))))


def _features(
    verifier: Target,
    batches: BatchStream,
    given: _Given,
    shape: HeadShape,
    sources: dict[str, str],
) -> FeatureSource:
    """Those of the settings; offline features are written first and hold on to no verifier."""
    settings = given.settings
    if settings.features == "online":
        return OnlineFeatures(verifier, shape.feature_layers)
    identity = {
        "verifier_sha256": sources.get("intermediate_sha256", sources["target_sha256"]),
        **{name: sources[name] for name in _OF_TEXT if name in sources},
        "data": given.data.decisive(),
        "num_conversations": settings.num_conversations,
        "seed": given.seed,
    }
    folder = Path(settings.features_folder or given.out / _FEATURES_NAME)
    # a reverse KL needs all of the distribution
    num_top = 0 if settings.token_loss == "reverse_kl" else TOP_TOKENS
    num_top = min(num_top, len(verifier.lm_head.weight))
    return write_features(
        verifier,
        batches,
        settings.num_steps,
        shape.feature_layers,
        identity,
        folder,
        num_top=num_top,
    )


def _draft_vocabulary_summary(prepared: _Prepared, run: HeadRun, given: _Given) -> dict[str, Any]:
    """What trimming leaves, of the head that was written; nothing where it drafts all tokens."""
    parts, found = prepared.parts, dict[str, Any]()
    drafted = parts.head.draft_token_ids
    if drafted is None:
        return found
    if prepared.answer_counts is not None:
        share = coverage(prepared.answer_counts, drafted.cpu())
        found["draft_vocabulary_coverage"] = round(share, 4)
    if prepared.shape.kind == "eagle2":
        embedding = parts.head.embed_tokens.weight
        best = new_head(prepared.shape, embedding, given.settings, 0, given.out, None)
        best = best.to(embedding.device, parts.head.dtype)
        whole = simulate(best, parts.lm_head, parts.heldout, run.tree, trimmed=False)
        found["untrimmed_accepted_length"] = round(whole.accepted_length, 4)
    return found


def _verifier_dtype(given: _Given) -> torch.dtype:
    """Of the passes of the target, or of its copy."""
    stored = DTYPES[read_config(given.target).dtype]
    return verifier_dtype(stored, given.settings)


def _sources(given: _Given) -> dict[str, str]:
    """Digests of all that a run reads; what is not given has none."""
    sources = {
        "target_sha256": weights_digest(given.target),
        "data_sha256": data_digest(given.conversations),
    }
    if (tokenizer := given.tokenizer) is not None:
        files = [tokenizer / name for name in TOKENIZER_FILES if (tokenizer / name).is_file()]
        sources["tokenizer_sha256"] = sha256_of_object(
            {path.name: sha256_of_file(path) for path in files}
        )
    if given.drafter is not None:
        sources["drafter_sha256"] = weights_digest(given.drafter)
    if given.intermediate is not None:
        sources["intermediate_sha256"] = weights_digest(given.intermediate)
    if given.start is not None:
        config = read_config(given.start).content
        sources["start_sha256"] = weights_digest(given.start)
        sources["start_config_sha256"] = sha256_of_object(config)
    return sources


def _identity(given: _Given, sources: dict[str, str]) -> str:
    return sha256_of_object(
        {
            **sources,
            "seed": given.seed,
            "data": given.data.decisive(),
            "settings": given.settings.decisive(),
            "lora": None if given.lora is None else given.lora.model_dump(mode="json"),
        }
    )
