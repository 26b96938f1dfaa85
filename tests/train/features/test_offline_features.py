"""Offline features: what is read is what a pass would give, and how they come onto the disk."""

import fcntl
import itertools
import shutil
import signal
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from torch import distributed

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.processes.group import process_group, process_index
from polybasic.train.data.batches import BatchStream
from polybasic.train.data.packing import positions_in_documents
from polybasic.train.features import offline_features
from polybasic.train.features.feature_plan import FeatureLayout, planned_shards
from polybasic.train.features.feature_shards import shard_path, shard_paths
from polybasic.train.features.offline_features import (
    OfflineFeatures,
    OnlineFeatures,
    write_features,
)
from polybasic.train.features.states import Features
from polybasic.train.features.target import load_target
from tests import forked
from tests.checkpoints import byte_level_tokenizer, write_family

CPU = torch.device("cpu")
IDENTITY = {"target_sha256": "a1", "data_sha256": "b2", "seed": 0}
LAYERS = (0, 1, 2)
SHARD_BYTES = 12_000
"""Of the small verifier: a few conversations."""
NUM_STEPS = 9


class SmallVerifier:
    """States that follow exactly from a token and its place, whatever else is in the pass."""

    device = CPU
    hidden_size = 16

    def __init__(self, dtype=torch.float32):
        random = torch.Generator().manual_seed(0)
        self.embedding = torch.randn(400, self.hidden_size, generator=random).to(dtype)
        self.num_passes = self.num_tokens = 0

    def features(self, token_ids, document_ids=None, feature_layers=None, num_top=0):
        self.num_passes += 1
        self.num_tokens += token_ids.numel()
        places = torch.arange(token_ids.shape[1])[None]
        if document_ids is not None:
            places = positions_in_documents(document_ids)
        states = self.embedding[token_ids] * (1 + places)[..., None]
        layers = None
        if feature_layers is not None:
            layers = torch.cat([states + layer for layer in feature_layers], dim=-1)
        if not num_top:
            return Features(states, layers)
        top = (token_ids[..., None] + torch.arange(num_top)).int()
        return Features(states, layers, top, (top / 400).half())


def batches(pack=False, seed=0, batch_size=2, tokenizer=None):
    messages = [
        [
            {"role": "user", "content": f"{number} " * (1 + number % 6)},
            {"role": "assistant", "content": f"{number} " * (1 + number % 9)},
        ]
        for number in range(30)
    ]
    messages.append(messages[0])  # one that is there twice
    rows = Dataset.from_dict({"id": [str(n) for n in range(31)], "messages": messages})
    return BatchStream(rows, tokenizer or byte_level_tokenizer(), batch_size, 96, seed, pack)


def written(verifier, folder, layers=None, identity=IDENTITY, num_steps=NUM_STEPS, **changes):
    return write_features(
        verifier, batches(**changes), num_steps, layers, identity, folder, SHARD_BYTES
    )


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


def times(folder):
    return {path.name: path.stat().st_mtime_ns for path in shard_paths(folder)}


def of_conversations(features, share):
    """Features without the padding."""
    for row, lengths in enumerate(share.lengths):
        yield features.states[row, : sum(lengths)]
        if features.layers is not None:
            yield features.layers[row, : sum(lengths)]


@pytest.mark.parametrize(
    ("pack", "layers", "dtype"),
    [
        (False, None, torch.float32),
        (False, LAYERS, torch.bfloat16),
        (True, None, torch.bfloat16),
        (True, LAYERS, torch.float32),
    ],
)
def test_what_is_read_is_what_was_computed(pack, layers, dtype, tmp_path):
    verifier = SmallVerifier(dtype)
    offline, online = (
        written(verifier, tmp_path, layers, pack=pack),
        OnlineFeatures(verifier, layers),
    )
    for step in range(NUM_STEPS):
        share = batches(pack).batch(step).share(step % 2, 2)
        found, expected = offline.of(step, share), online.of(step, share)
        assert found.states.shape == expected.states.shape
        assert found.states.dtype == dtype
        assert (found.layers is None) == (layers is None)
        parts = list(of_conversations(found, share))
        others = list(of_conversations(expected, share))
        assert len(parts) == (1 if layers is None else 2) * len(share.rows)
        assert all(map(torch.equal, parts, others))
        assert not found.states[share.token_ids == 0].any()
    assert len(shard_paths(tmp_path)) > 2


@pytest.mark.parametrize("pack", [False, True])
def test_features_of_a_model_are_online_ones(pack, tmp_path):
    write_family(tmp_path / "model", "llama2", dtype=torch.float32)
    target = load_target(tmp_path / "model", CPU)
    offline = write_features(
        target,
        batches(pack, tokenizer=target.tokenizer),
        2,
        (0, 1, 1),
        IDENTITY,
        tmp_path / "features",
    )
    online = OnlineFeatures(target, (0, 1, 1))
    for step in range(2):
        share = batches(pack, tokenizer=target.tokenizer).batch(step).share(0, 1)
        found, expected = offline.of(step, share), online.of(step, share)
        for part, other in zip(
            of_conversations(found, share), of_conversations(expected, share), strict=True
        ):
            assert torch.allclose(part, other, rtol=1e-5, atol=1e-5)
            assert other.std() > 0.1


def test_each_conversation_is_computed_once_whatever_the_epochs(tmp_path):
    verifier = SmallVerifier()
    written(verifier, tmp_path, num_steps=1000)
    keys = [key for path in shard_paths(tmp_path) for key in load_file(path)["keys"].tolist()]
    assert len(keys) == 30
    assert len({tuple(key) for key in keys}) == 30
    num_passes = verifier.num_passes
    written(verifier, tmp_path, num_steps=1000)
    assert verifier.num_passes == num_passes + 1, "one finds the layout"


def test_run_that_draws_few_conversations_writes_no_others(tmp_path):
    written(SmallVerifier(), tmp_path, num_steps=1, batch_size=1)
    assert sum(len(load_file(path)["lengths"]) for path in shard_paths(tmp_path)) == 8


def test_longer_run_adds_to_the_folder(tmp_path):
    written(SmallVerifier(), tmp_path / "long", num_steps=50)
    written(SmallVerifier(), tmp_path / "grown", num_steps=1, batch_size=1)
    before = times(tmp_path / "grown")
    assert len(before) > 1
    written(SmallVerifier(), tmp_path / "grown", num_steps=50)
    after = times(tmp_path / "grown")
    *kept, last = before
    assert after[last] != before[last], "it had room for more"
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
    assert contents(tmp_path / "grown") == contents(tmp_path / "long")
    written(SmallVerifier(), tmp_path / "grown", num_steps=1, batch_size=1)
    assert times(tmp_path / "grown") == after


def test_packed_and_unpacked_runs_share_a_folder(tmp_path):
    written(SmallVerifier(), tmp_path, num_steps=50)
    before = contents(tmp_path)
    written(SmallVerifier(), tmp_path, num_steps=50, pack=True, batch_size=3)
    assert contents(tmp_path) == before


def test_announced_bytes_are_those_of_the_files(tmp_path, capsys):
    verifier = SmallVerifier()
    written(verifier, tmp_path, LAYERS)
    layout = FeatureLayout.of(verifier, LAYERS)
    assert layout.token_bytes == 4 * 16 * 4
    shards = list(planned_shards(batches(), NUM_STEPS, layout.token_bytes, SHARD_BYTES))
    assert len(shards) == len(shard_paths(tmp_path)) > 2
    for shard in shards:
        path = shard_path(tmp_path, shard.index)
        header_bytes = 8 + int.from_bytes(path.read_bytes()[:8], "little")
        assert path.stat().st_size == shard.tensor_bytes + header_bytes
        assert path.stat().st_size <= shard.most_bytes
        is_small = shard.num_tokens * layout.token_bytes <= SHARD_BYTES
        assert is_small or len(shard.conversations) == 1
    total = sum(shard.tensor_bytes for shard in shards)
    assert f"{total:,} bytes, of which {total:,} are to be written" in capsys.readouterr().err


Usage = namedtuple("Usage", "total used free")


def test_too_little_disk_is_told_before_anything_is_written(tmp_path, monkeypatch):
    verifier, folder = SmallVerifier(), tmp_path / "deep" / "features"
    shards = list(planned_shards(batches(), NUM_STEPS, 64, SHARD_BYTES))
    needed = sum(shard.most_bytes for shard in shards) + (64 << 20)
    asked = []

    def usage(path):
        asked.append(path)
        return Usage(10**12, 0, free)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    free = needed - 1
    with pytest.raises(UserError) as raised:
        written(verifier, folder)
    assert f"{folder} ({needed:,} bytes needed with a margin, {free:,} bytes free)" in str(
        raised.value
    )
    assert asked == [tmp_path], "the folder that is there"
    assert not list(tmp_path.iterdir())
    free = needed
    written(verifier, folder)
    free = 0
    written(verifier, folder)  # nothing is left to write


@pytest.mark.parametrize(
    ("identity", "layers", "dtype", "reported"),
    [
        (IDENTITY | {"seed": 1}, None, torch.float32, "seed 0, not 1"),
        (IDENTITY | {"target_sha256": "c3"}, None, torch.float32, "target_sha256 'a1', not 'c3'"),
        ({"seed": 0, "data_sha256": "b2"}, None, torch.float32, "target_sha256 'a1', not None"),
        (IDENTITY, LAYERS, torch.float32, r"feature_layers None, not \[0, 1, 2\]"),
        (IDENTITY, None, torch.bfloat16, "dtype 'float32', not 'bfloat16'"),
    ],
)
def test_folder_of_another_run_is_refused(identity, layers, dtype, reported, tmp_path):
    written(SmallVerifier(), tmp_path)
    before = contents(tmp_path)
    with pytest.raises(UserError, match=rf"offline features of another run: .*\({reported}\)"):
        written(SmallVerifier(dtype), tmp_path, layers, identity)
    assert contents(tmp_path) == before


def test_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"is in use: .*\(notes.txt, and no features.json\)"):
        written(SmallVerifier(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_folder_in_which_another_run_writes_is_refused(tmp_path):
    with (tmp_path / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="are being written by another run"):
            written(SmallVerifier(), tmp_path)
    written(SmallVerifier(), tmp_path)


def test_damaged_shard_is_told(tmp_path):
    written(SmallVerifier(), tmp_path)
    path = shard_path(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(UserError, match=r"damaged feature shard: \S+00001"):
        OfflineFeatures(tmp_path)


def test_folder_without_features_is_told(tmp_path):
    with pytest.raises(UserError, match="manifest of offline features not found"):
        OfflineFeatures(tmp_path)


def test_conversation_that_is_not_there_is_told(tmp_path):
    features = written(SmallVerifier(), tmp_path, num_steps=1, batch_size=1)
    whole = batches(batch_size=30).batch(0).share(0, 1)
    with pytest.raises(UserError, match="conversation without offline features"):
        features.of(0, whole)


def test_shards_are_mapped(tmp_path):
    before = Path("/proc/self/maps").read_text()
    features = written(SmallVerifier(), tmp_path)
    after = Path("/proc/self/maps").read_text()
    for path in shard_paths(tmp_path):
        assert str(path) not in before
        assert str(path) in after
    del features
    assert str(shard_path(tmp_path, 0)) not in Path("/proc/self/maps").read_text()


def test_stopped_writer_continues_with_the_next_shard(tmp_path, monkeypatch):
    written(SmallVerifier(), tmp_path / "whole")
    write, folder = offline_features.write_shard, tmp_path / "stopped"

    def write_two(path, *arguments):
        if path.name.endswith("2.safetensors"):
            # what a writer that is killed leaves
            path.with_name(f".{path.name}.partial").write_bytes(b"half of it")
            raise KeyboardInterrupt
        write(path, *arguments)

    monkeypatch.setattr(offline_features, "write_shard", write_two)
    with pytest.raises(KeyboardInterrupt):
        written(SmallVerifier(), folder)
    before = times(folder)
    assert len(before) == 2
    monkeypatch.setattr(offline_features, "write_shard", write)
    written(SmallVerifier(), folder)
    after = times(folder)
    assert before.items() < after.items()
    assert contents(folder) == contents(tmp_path / "whole")


def test_a_shard_that_is_not_there_at_the_end_is_named(tmp_path, monkeypatch):
    write = offline_features.write_shard

    def write_some(path, *arguments):
        if not path.name.endswith("1.safetensors"):
            write(path, *arguments)

    monkeypatch.setattr(offline_features, "write_shard", write_some)
    with pytest.raises(UserError, match=rf"missing or short: {shard_path(tmp_path, 1)} \("):
        written(SmallVerifier(), tmp_path)


def write_as_one_of_two(folder, num_shards=None):
    """Leave behind how many passes were run; with `num_shards`, die once those are whole."""
    verifier = SmallVerifier()
    if num_shards is not None:
        whole, write = itertools.count(1), offline_features.write_shard

        def write_and_die(*arguments):
            write(*arguments)
            if next(whole) == num_shards:
                forked.kill_this_process()

        offline_features.write_shard = write_and_die
    with process_group():
        written(verifier, folder)
    (folder / f".passes-{process_index()}").write_text(str(verifier.num_passes))
    distributed.destroy_process_group()


def test_two_processes_write_what_one_does_also_after_a_kill(tmp_path):
    written(SmallVerifier(), tmp_path / "alone")
    alone, log = contents(tmp_path / "alone"), tmp_path / "log.txt"
    exit_codes = forked.run_two(write_as_one_of_two, tmp_path / "two", 1, log=log)
    assert -signal.SIGKILL in exit_codes, log.read_text()
    before = times(tmp_path / "two")
    assert 1 <= len(before) <= 2 < len(shard_paths(tmp_path / "alone"))
    exit_codes = forked.run_two(write_as_one_of_two, tmp_path / "two", log=log)
    assert exit_codes == [0, 0], log.read_text()
    two = contents(tmp_path / "two")
    assert before.items() < times(tmp_path / "two").items(), "what was whole is kept"
    assert {name: two[name] for name in alone} == alone
    first, second = (int(two[f".passes-{index}"]) for index in range(2))
    assert first == second > 1, "a partitioned verifier needs both in each pass"
