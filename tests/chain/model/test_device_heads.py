"""Passes of draft heads on the device path against eager ones."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from polybasic.chain.formats.config import read_config
from polybasic.chain.formats.plan import Window
from polybasic.chain.formats.shapes import expected_shapes
from polybasic.chain.kernels.executor import Executor
from polybasic.chain.kernels.rows import consecutive_rows, tree_rows
from polybasic.chain.kernels.torch.packed_weight import PackedWeight
from polybasic.chain.kernels.torch.rows import device_consecutive_rows, device_tree_rows
from polybasic.chain.model.device_model import DeviceModel
from polybasic.chain.model.loading import load_decoder, load_head
from tests.chain.family_cases import Folders
from tests.chain.kernels.cuda.device_models import (
    CAPACITY,
    CPU,
    FEATURE_LAYERS,
    PARENTS,
    SINKS_AND_LATEST,
    TOLERANCE,
    ancestors_of,
    block,
    cache_of,
    device_path,
    random_tokens,
    tree,
)
from tests.chain.native_models import eager
from tests.checkpoints import VOCAB_SIZE
from tests.deploy.recorded_graphs import RecordedGraphs
from tests.head_kinds import trim, write_eagle3

HEADS = ["eagle2", "eagle2 with biases", "eagle3"]


def write_eagle2(folder: Path, target: Path, with_biases: bool = False) -> None:
    """A random EAGLE-2 head of the target's shape."""
    folder.mkdir()
    config = json.loads((target / "config.json").read_text()) | {"num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(7)
    head = read_config(folder).head
    tensors = {
        name: torch.randn(size, generator=generator) / size[-1] ** (0.5 if len(size) > 1 else 0)
        for name, size in expected_shapes("eagle2", head, None, set())
    }
    if with_biases:
        attention = [f"layers.0.self_attn.{part}_proj" for part in "qkv"]
        for name in ("fc", "layers.0.mlp.down_proj", *attention):
            size = len(tensors[f"{name}.weight"])
            tensors[f"{name}.bias"] = torch.randn(size, generator=generator)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def write_head(folder: Path, target: Path, case: str, trimmed: bool) -> None:
    token_ids = torch.arange(0, VOCAB_SIZE, 5)
    if case == "eagle3":
        write_eagle3(folder, target, token_ids if trimmed else None, FEATURE_LAYERS)
        return
    write_eagle2(folder, target, "biases" in case)
    if trimmed:
        trim(folder, token_ids)


def load_both(target: Path, folder: Path, dtype: torch.dtype) -> list[tuple[Executor, Executor]]:
    with eager():
        expected = load_decoder(read_config(target), dtype, CPU, CAPACITY)
        heads = [(expected, load_head(read_config(folder), expected, CAPACITY))]
    with device_path():
        found = load_decoder(read_config(target), dtype, CPU, CAPACITY)
        heads.append((found, load_head(read_config(folder), found, CAPACITY)))
    for decoder, head in heads:
        decoder.feature_layers = head.feature_layers
    return heads


def states_of(decoder: Executor, ids: Tensor) -> Tensor:
    return decoder.forward(ids, [cache_of(decoder).layers], consecutive_rows(0, len(ids)))


@torch.inference_mode()
@pytest.mark.parametrize("window", [None, SINKS_AND_LATEST])
@pytest.mark.parametrize("trimmed", [False, True])
@pytest.mark.parametrize("head_kind", HEADS)
@pytest.mark.parametrize("family", ["llama3", "gemma2"])
def test_heads_draft_as_on_the_eager_path(
    family: str,
    head_kind: str,
    trimmed: bool,
    window: Window | None,
    folders: Folders,
    tmp_path: Path,
) -> None:
    """A head reads the observed states of a text; then two levels follow its last row."""
    write_head(tmp_path / "head", folders(family), head_kind, trimmed)
    both = load_both(folders(family), tmp_path / "head", torch.float32)
    (expected_target, expected), (_, found) = both
    model, ids, num = found.device_model, random_tokens(40), 30
    assert model is not None
    states = states_of(expected_target, ids[:num])
    read = expected.select_inputs(states)
    torch.testing.assert_close(model.features(read), expected.features(read), rtol=1e-4, atol=1e-5)
    caches = cache_of(expected), cache_of(found)

    parents = [-1, -1, -1, 0, 0, 2]
    attend, rows = block(0, num, window)
    features = expected.forward(
        ids[1 : num + 1], expected.features(read), caches[0].layers[0], attend
    )
    ours = model.forward(ids[1 : num + 1], [caches[1].layers], rows, model.features(read))
    torch.testing.assert_close(ours, features, rtol=1e-4, atol=1e-4)

    attend, rows = tree(num, parents, window)
    beam, beam_features = ids[: len(parents)], features[-len(parents) :]
    theirs = expected.forward(beam, beam_features, caches[0].layers[0], attend)
    ours = model.forward(beam, [caches[1].layers], rows, beam_features)
    logits, our_logits = expected.logits(theirs), model.logits(ours)
    tolerance = TOLERANCE * float(logits.abs().max())
    torch.testing.assert_close(our_logits, logits, rtol=0, atol=tolerance)
    assert our_logits.shape[1] == (64 if trimmed else VOCAB_SIZE)
    # features of other rows, and a model that forgets a head's own norm
    other = model.logits(model.forward(beam, [caches[1].layers], rows, beam_features.roll(1, 0)))
    assert (other - logits).abs().max() > 100 * tolerance
    if head_kind == "eagle3":
        unnormed = DeviceModel(replace(model.parts, final_norm=None))
        assert (unnormed.logits(ours) - logits).abs().max() > 100 * tolerance


@torch.inference_mode()
@pytest.mark.parametrize("head_kind", ["eagle2", "eagle3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_heads_in_half_precision_draft_from_weights_in_4_bits(
    head_kind: str, dtype: torch.dtype, folders: Folders, tmp_path: Path
) -> None:
    """Logits stay near those of dense weights, and the eager pass computes the same."""
    write_head(tmp_path / "head", folders("llama3"), head_kind, trimmed=False)
    (target, dense), (_, found) = load_both(folders("llama3"), tmp_path / "head", dtype)
    model, ids = found.device_model, random_tokens(21)
    assert model is not None
    linears = [model.parts.fc, model.parts.lm_head, *vars(model.parts.layers[0]).values()]
    packed = [one for one in linears if isinstance(getattr(one, "weight", None), PackedWeight)]
    assert len(packed) == 6
    read = dense.select_inputs(states_of(target, ids[:20]))
    attend, rows = block(0, 20)
    answers = [
        one.logits(one.forward(ids[1:], one.features(read), cache_of(one).layers[0], attend))
        for one in (dense, found)
    ]
    ours = model.logits(
        model.forward(ids[1:], [cache_of(found).layers], rows, model.features(read))
    )
    dense_logits, eager_logits, ours = answers[0].float(), answers[1].float(), ours.float()
    rounding = (eager_logits - dense_logits).pow(2).mean()
    assert (ours - eager_logits).pow(2).mean() < 0.05 * rounding
    assert rounding < 0.1 * dense_logits.var()


@torch.inference_mode()
@pytest.mark.parametrize("case", ["qwen-windows", "gemma3"])
def test_a_captured_round_reads_its_tensors_when_it_runs(
    case: str, folders: Folders, tmp_path: Path
) -> None:
    """Target and head over a tree, captured once, replayed elsewhere."""
    write_head(tmp_path / "head", folders(case), "eagle3", trimmed=True)
    (expected, expected_head), (target, head) = load_both(
        folders(case), tmp_path / "head", torch.float32
    )
    model, head_model, ids = target.device_model, head.device_model, random_tokens(60)
    assert model is not None
    assert head_model is not None
    prefix, tokens = torch.tensor(10), torch.zeros(len(PARENTS), dtype=torch.int64)
    depths, ancestors = ancestors_of(PARENTS).sum(1) - 1, ancestors_of(PARENTS)
    logits = torch.zeros(len(PARENTS), head_model.parts.lm_head.shape[0])
    caches = cache_of(target), cache_of(head)
    for one, run in ((caches[0], model), (caches[1], head_model)):
        features = torch.ones(60, target.config.hidden_size) if run is head_model else None
        run.forward(ids, [one.layers], device_consecutive_rows(torch.tensor(0), 60), features)

    def run_round() -> None:
        rows = device_tree_rows(prefix, depths, ancestors, SINKS_AND_LATEST)
        states = model.forward(
            tokens, [caches[0].layers], rows, feature_layers=target.feature_layers
        )
        features = head_model.features(head.select_inputs(states))
        states = head_model.forward(tokens, [caches[1].layers], rows, features)
        logits.copy_(head_model.logits(states))

    graphs = RecordedGraphs(checked=True)
    for start in (10, 40, 25):
        prefix.fill_(start)
        tokens.copy_(ids[start : start + len(PARENTS)])
        graphs.run("round", run_round)
        attend = tree_rows(start, PARENTS, SINKS_AND_LATEST)
        states = expected.forward(tokens, [caches[0].layers], attend)
        features = expected_head.features(expected_head.select_inputs(states))
        states = expected_head.forward(tokens, features, caches[1].layers[0], attend)
        theirs = expected_head.logits(states)
        torch.testing.assert_close(logits, theirs, rtol=0, atol=2e-5 * float(theirs.abs().max()))
    assert graphs.counts.replays == 2


def test_models_of_other_paths_have_no_passes_on_the_device(
    folders: Folders, tmp_path: Path
) -> None:
    write_head(tmp_path / "head", folders("llama3"), "eagle2", trimmed=False)
    (decoder, head), (found_target, found) = load_both(
        folders("llama3"), tmp_path / "head", torch.float32
    )
    assert decoder.device_model is None
    assert head.device_model is None
    assert found.device_model is not None
    # dense weights lie there once, as they were stored
    parts = found.device_model.parts
    stored = load_file(tmp_path / "head" / "model.safetensors")["fc.weight"]
    assert parts.fc is not None
    assert torch.equal(parts.fc.dense(torch.float32), stored)
    target = found_target.device_model
    assert target is not None
    assert parts.lm_head is target.parts.lm_head
    assert parts.embedding is target.parts.embedding
