"""Features taken as the batches come, or written to a folder before training and mapped.

Offline features are computed conversation by conversation, in passes over conversations of like
length that follow from the shard alone. They equal online features to the rounding of the
verifier's dtype, because a pass over other rows sums in another order. A folder that was written
in several goes, or by several processes, is bit for bit the one written without a stop.
"""

import itertools
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.processes.group import (
    is_first_process,
    num_processes,
    process_index,
    wait_for_all,
)
from polybasic.chain.base.progress import tracked
from polybasic.chain.formats.files import free_bytes
from polybasic.train.data.batches import BatchStream, LocalBatch
from polybasic.train.features.feature_plan import (
    FeatureLayout,
    PlannedShard,
    planned_shards,
)
from polybasic.train.features.feature_shards import (
    check_identity,
    conversation_key,
    folder_to_write,
    open_shard,
    read_manifest,
    shard_path,
    shard_paths,
    write_shard,
)
from polybasic.train.features.head_shape import FeatureLayers
from polybasic.train.features.states import Features
from polybasic.train.features.target import Target

SHARD_BYTES = 512 << 20
TOP_TOKENS = 64
"""That are kept of the verifier's distribution after each token."""
_MARGIN_BYTES = 64 << 20


class OnlineFeatures:
    """A `FeatureSource` that runs the verifier on each share; all processes ask for it together.

    Args:
        verifier: whose features the head learns.
        feature_layers: of an EAGLE-3 head; None for an EAGLE-2 head.
    """

    def __init__(self, verifier: Target, feature_layers: FeatureLayers | None = None) -> None:
        self._verifier, self._feature_layers = verifier, feature_layers

    def of(self, step: int, share: LocalBatch) -> Features:
        """Features of a share, whatever the step."""
        return self._verifier.features(share.token_ids, share.document_ids, self._feature_layers)


class OfflineFeatures:
    """A `FeatureSource` that reads what `write_features` wrote. Shards are mapped, never loaded.

    Args:
        folder: of the features.

    Raises:
        UserError: there are none, or a shard is damaged.
    """

    def __init__(self, folder: Path) -> None:
        read_manifest(folder)
        self._folder = folder
        self._shards = [open_shard(path) for path in shard_paths(folder)]
        self._places: dict[bytes, tuple[int, int]] = {}  # shard, first row
        for index, shard in enumerate(self._shards):
            starts = itertools.accumulate(shard.lengths, initial=0)
            for key, start in zip(shard.keys, starts, strict=False):
                self._places[key] = (index, start)

    def of(self, step: int, share: LocalBatch) -> Features:
        """Features of a share, whatever the step; zeros in the padding.

        Raises:
            UserError: the folder lacks a conversation of the share.
        """
        num_rows, num_tokens = share.token_ids.shape
        assert len(share.lengths) == num_rows
        shape, device = (num_rows, num_tokens), share.token_ids.device
        made = self._shards[0].features.map(lambda of: of.new_zeros(*shape, of.shape[-1]))
        for row, token_ids in enumerate(share.token_ids.tolist()):
            ends = itertools.accumulate(share.lengths[row], initial=0)
            for start, end in itertools.pairwise(ends):
                for name, tensor in self._find(token_ids[start:end]).tensors().items():
                    made.tensors()[name][row, start:end] = tensor
        return made.map(lambda of: of.to(device))

    def _find(self, token_ids: Sequence[int]) -> Features:
        place = self._places.get(conversation_key(token_ids))
        if place is None:
            raise UserError(
                "conversation without offline features",
                f"{self._folder} (one of {len(token_ids)} tokens; {len(self._places):,} are there)",
                "remove the folder and run again",
            )
        index, start = place
        return self._shards[index].features[start : start + len(token_ids)]


def write_features(
    verifier: Target,
    batches: BatchStream,
    num_steps: int,
    feature_layers: FeatureLayers | None,
    identity: Mapping[str, Any],
    folder: Path,
    shard_bytes: int = SHARD_BYTES,
    num_top: int = 0,
) -> OfflineFeatures:
    """Write the features of a run's conversations that a folder lacks, each once.

    All processes call this together, inside `process_group`; the shards are dealt out to them.
    What it takes is announced on stderr and compared with the free disk before anything is
    written. A writer that was stopped continues with the next shard, a longer run of the same
    identity adds to the folder.

    Args:
        verifier: whose features the head learns.
        batches: of the run, packed or not.
        num_steps: of the run.
        feature_layers: of an EAGLE-3 head; None for an EAGLE-2 head.
        identity: as JSON, what features follow from: digests of the verifier's weights, of the
            tokenizer and of the data, settings of the data, the seed. Layers and dtype are added.
        folder: for the features; where there are several nodes, one that all of them see.
        shard_bytes: of a file, about; a process holds one shard in memory.
        num_top: K, of the most probable next tokens that are kept, so that a step need not make the
            verifier's distribution; 0: none.

    Returns:
        The source to train from.

    Raises:
        UserError: too little free disk; a folder of another identity, with other files, with a
            damaged shard, or in which another run is writing; no conversation to train on; a shard
            that another process wrote elsewhere.
    """
    layout = FeatureLayout.of(verifier, feature_layers, num_top)
    identity = {**identity, **layout.identity()}
    check_identity(folder, identity)
    shards = list(planned_shards(batches, num_steps, layout.token_bytes, shard_bytes))
    missing = [shard for shard in shards if not shard.is_written(folder)]
    if is_first_process():
        _announce(folder, shards, missing)
    _check_disk(folder, missing)
    wait_for_all()  # each has seen what is missing before one writes
    with folder_to_write(folder, identity) if is_first_process() else nullcontext():
        wait_for_all()
        _write(verifier, layout, folder, missing)
        wait_for_all()
    for shard in missing:
        if not shard.is_written(folder):
            raise UserError(
                "shard of offline features is missing or short",
                f"{shard_path(folder, shard.index)} ({len(shard.conversations):,} conversations)",
                "let all hosts write to one shared folder, train.features_folder, and run again",
            )
    return OfflineFeatures(folder)


def _announce(
    folder: Path, shards: Sequence[PlannedShard], missing: Sequence[PlannedShard]
) -> None:
    num_conversations = sum(len(shard.conversations) for shard in shards)
    num_tokens = sum(shard.num_tokens for shard in shards)
    all_bytes, missing_bytes = (
        sum(shard.tensor_bytes for shard in some) for some in (shards, missing)
    )
    print(
        f"offline features of {num_conversations:,} conversations ({num_tokens:,} tokens): "
        f"{all_bytes:,} bytes, of which {missing_bytes:,} are to be written to {folder}",
        file=sys.stderr,
    )


def _check_disk(folder: Path, missing: Sequence[PlannedShard]) -> None:
    if not missing:
        return
    needed = sum(shard.most_bytes for shard in missing) + _MARGIN_BYTES
    free = free_bytes(folder)
    if free < needed:
        raise UserError(
            "not enough disk for offline features",
            f"{folder} ({needed:,} bytes needed with a margin, {free:,} bytes free)",
            "free some space, set train.features_folder to another disk, or set train.features "
            "to online",
        )


def _write(
    verifier: Target, layout: FeatureLayout, folder: Path, missing: Sequence[PlannedShard]
) -> None:
    """Write the shards of this process.

    Round by round each process has a shard, and all run equally many passes: a partitioned
    verifier gathers its weights in all of them at once.
    """
    count = num_processes()
    rounds = [missing[start : start + count] for start in range(0, len(missing), count)]
    for number, shards in enumerate(rounds, start=1):
        num_passes = max(len(shard.passes()) for shard in shards)
        for shard in shards[process_index() : process_index() + 1]:
            passes = shard.passes()
            num_passes -= len(passes)
            what = f"features, part {number} of {len(rounds)}"
            shown = tracked(passes, what) if is_first_process() else passes
            features = _compute(verifier, layout, shard, shown)
            path = shard_path(folder, shard.index)
            write_shard(path, features, shard.lengths, list(shard.conversations))
        for _ in range(num_passes):
            FeatureLayout.of(verifier, layout.feature_layers)


def _compute(
    verifier: Target, layout: FeatureLayout, shard: PlannedShard, passes: Iterable[Sequence[int]]
) -> Features:
    """Features of a shard's tokens on the CPU, without a batch dimension.

    Args:
        passes: numbers of its conversations, those that share a pass together.
    """
    conversations, lengths = list(shard.conversations.values()), shard.lengths
    starts = list(itertools.accumulate(lengths, initial=0))
    made = layout.one.map(lambda of: of.new_empty(shard.num_tokens, of.shape[-1], device="cpu"))
    for numbers in passes:
        token_ids = torch.zeros(len(numbers), max(lengths[each] for each in numbers)).long()
        for row, number in enumerate(numbers):
            token_ids[row, : lengths[number]] = torch.tensor(conversations[number])
        features = verifier.features(
            token_ids.to(verifier.device), None, layout.feature_layers, layout.num_top
        )
        for row, number in enumerate(numbers):
            place = slice(starts[number], starts[number + 1])
            for name, tensor in features[row, : lengths[number]].tensors().items():
                made.tensors()[name][place] = tensor
    return made
