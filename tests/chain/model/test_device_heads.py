"""Heads on every executor: against each other, in 4 bits, and in rounds that are captured."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.chain.formats.checkpoints.shapes import expected_shapes
from polybasic.chain.formats.plan import Window
from polybasic.chain.kernels.executor import Executor
from polybasic.chain.kernels.rows import consecutive_rows, tree_rows
from polybasic.chain.kernels.torch.executor import TorchExecutor
from polybasic.chain.kernels.torch.operations import DeviceLinear
from polybasic.chain.kernels.torch.packed_weight import PackedWeight
from polybasic.chain.kernels.torch.rows import device_consecutive_rows, device_tree_rows
from polybasic.chain.model.loading import load_decoder, load_head
from tests.chain.family_cases import Folders
from tests.chain.model.device_rows import (
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

HEADS = ["eagle2", "eagle2 with biases", "eagle3", "eagle3.1"]


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
    if case.startswith("eagle3"):
        variants = ("fc_norm", "norm_output") if case == "eagle3.1" else ()
        drafted = token_ids if trimmed else None
        write_eagle3(folder, target, drafted, FEATURE_LAYERS, variants=variants)
        return
    write_eagle2(folder, target, "biases" in case)
    if trimmed:
        trim(folder, token_ids)


def load_both(target: Path, folder: Path, dtype: torch.dtype) -> list[tuple[Executor, Executor]]:
    """Target and head as eager PyTorch runs them, and as GPUs keep them."""
    heads = []
    for path in (eager, device_path):
        with path():
            decoder = load_decoder(read_config(target), dtype, CPU, CAPACITY)
            heads.append((decoder, load_head(read_config(folder), decoder, CAPACITY)))
    return heads


def states_of(decoder: Executor, head: Executor, ids: Tensor) -> Tensor:
    return decoder.forward(
        ids,
        [cache_of(decoder).layers],
        [consecutive_rows(0, len(ids))],
        feature_layers=head.weights.feature_layers,
    )


@torch.inference_mode()
@pytest.mark.parametrize("window", [None, SINKS_AND_LATEST])
@pytest.mark.parametrize("trimmed", [False, True])
@pytest.mark.parametrize("head_kind", HEADS)
@pytest.mark.parametrize("family", ["llama3", "gemma2"])
def test_heads_draft_alike_on_all_executors(
    family: str,
    head_kind: str,
    trimmed: bool,
    window: Window | None,
    folders: Folders,
    tmp_path: Path,
) -> None:
    """A head reads the observed states of a text; then two levels follow its last row."""
    write_head(tmp_path / "head", folders(family), head_kind, trimmed)
    (target, expected), (_, found) = load_both(folders(family), tmp_path / "head", torch.float32)
    native_target = load_decoder(read_config(folders(family)), torch.float32, CPU, CAPACITY)
    native = load_head(read_config(tmp_path / "head"), native_target, CAPACITY)
    # the native executor has no norm between a head's passes
    name = "torch" if head_kind == "eagle3.1" else "cpu"
    assert (expected.name, native.name) == ("torch", name)
    ids, num, parents = random_tokens(40), 30, [-1, -1, -1, 0, 0, 2]
    read = expected.weights.select_inputs(states_of(target, expected, ids[:num]))
    prompt, beam = block(0, num, window), tree(num, parents, window)
    beam_ids = ids[: len(parents)]

    def run(head: Executor, place: int, shifted: bool = False) -> tuple[Tensor, Tensor]:
        cache = cache_of(head)
        features = head.forward(
            ids[1 : num + 1], [cache.layers], [prompt[place]], head.features(read)
        )
        beam_features = features[-len(parents) :]
        if shifted:
            beam_features = beam_features.roll(1, 0)
        states = head.forward(beam_ids, [cache.layers], [beam[place]], beam_features)
        return features, head.logits(states)

    features, logits = run(expected, 0)
    tolerance = TOLERANCE * float(logits.abs().max())
    for head, place in ((found, 1), (found, 0), (native, 0)):
        ours, our_logits = run(head, place)
        torch.testing.assert_close(ours, features, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(our_logits, logits, rtol=0, atol=2 * tolerance)
        assert our_logits.shape[1] == (64 if trimmed else VOCAB_SIZE)
        # features of other rows, and a model that forgets a head's own norm
        assert (run(head, place, shifted=True)[1] - logits).abs().max() > 100 * tolerance
        if head_kind.startswith("eagle3"):
            unnormed = head.over(replace(head.weights, final_norm=None))
            assert (run(unnormed, place)[1] - logits).abs().max() > 100 * tolerance
        elif family == "gemma2":
            uncapped = head.over(replace(head.weights, logit_softcap=None))
            assert (run(uncapped, place)[1] - logits).abs().max() > 100 * tolerance


@torch.inference_mode()
@pytest.mark.parametrize("head_kind", ["eagle2", "eagle3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_heads_in_half_precision_draft_from_weights_in_4_bits(
    head_kind: str, dtype: torch.dtype, folders: Folders, tmp_path: Path
) -> None:
    """Logits stay near those of dense weights, and passes on the device compute the same."""
    write_head(tmp_path / "head", folders("llama3"), head_kind, trimmed=False)
    (target, dense), (_, found) = load_both(folders("llama3"), tmp_path / "head", dtype)
    weights, ids = found.weights, random_tokens(21)
    linears = [weights.fc, weights.lm_head, *vars(weights.layers[0]).values()]
    packed = [
        linear for linear in linears if isinstance(getattr(linear, "weight", None), PackedWeight)
    ]
    assert len(packed) == 6
    read = dense.weights.select_inputs(states_of(target, dense, ids[:20]))
    known, rows = block(0, 20)

    def logits(head: Executor, own_rows: Any) -> Tensor:
        states = head.forward(ids[1:], [cache_of(head).layers], [own_rows], head.features(read))
        return head.logits(states).float()

    dense_logits, known_logits, ours = (
        logits(dense, known),
        logits(found, known),
        logits(found, rows),
    )
    rounding = (known_logits - dense_logits).pow(2).mean()
    assert (ours - known_logits).pow(2).mean() < 0.05 * rounding
    assert rounding < 0.1 * dense_logits.var()


@torch.inference_mode()
@pytest.mark.parametrize("case", ["qwen-windows", "gemma3"])
def test_a_captured_round_reads_its_tensors_when_it_runs(
    case: str, folders: Folders, tmp_path: Path
) -> None:
    """Target and head over a tree, captured once, replayed elsewhere."""
    write_head(tmp_path / "head", folders(case), "eagle3", trimmed=True)
    _, (target, head) = load_both(folders(case), tmp_path / "head", torch.float32)
    assert isinstance(target, TorchExecutor)
    assert isinstance(head, TorchExecutor)
    ids, layers = random_tokens(60), head.weights.feature_layers
    prefix, tokens = torch.tensor(10), torch.zeros(len(PARENTS), dtype=torch.int64)
    depths, ancestors = ancestors_of(PARENTS).sum(1) - 1, ancestors_of(PARENTS)
    logits = torch.zeros(len(PARENTS), head.weights.num_draft_tokens)
    caches = cache_of(target), cache_of(head)
    for cache, model in zip(caches, (target, head), strict=True):
        features = torch.ones(60, target.config.hidden_size) if model is head else None
        rows = device_consecutive_rows(torch.tensor(0), 60)
        model.forward(ids, [cache.layers], [rows], features)

    def logits_over(rows: Any) -> Tensor:
        assert isinstance(target, TorchExecutor)
        assert isinstance(head, TorchExecutor)
        states = target.forward(tokens, [caches[0].layers], [rows], feature_layers=layers)
        features = head.features(head.weights.select_inputs(states))
        return head.logits(head.forward(tokens, [caches[1].layers], [rows], features))

    def run_round() -> None:
        rows = device_tree_rows(prefix, depths, ancestors, SINKS_AND_LATEST)
        logits.copy_(logits_over(rows))

    graphs = RecordedGraphs(checked=True)
    for start in (10, 40, 25):
        prefix.fill_(start)
        tokens.copy_(ids[start : start + len(PARENTS)])
        graphs.run("round", run_round)
        theirs = logits_over(tree_rows(start, PARENTS, SINKS_AND_LATEST))
        torch.testing.assert_close(logits, theirs, rtol=0, atol=2e-5 * float(theirs.abs().max()))
    assert graphs.counts.replays == 2


def test_dense_weights_lie_there_once_as_they_were_stored(folders: Folders, tmp_path: Path) -> None:
    write_head(tmp_path / "head", folders("llama3"), "eagle2", trimmed=False)
    _, (target, head) = load_both(folders("llama3"), tmp_path / "head", torch.float32)
    stored = load_file(tmp_path / "head" / "model.safetensors")["fc.weight"]
    fc, lm_head = head.weights.fc, target.weights.lm_head
    assert isinstance(fc, DeviceLinear)
    assert torch.equal(fc.dense(torch.float32), stored)
    assert isinstance(lm_head, DeviceLinear)
    assert head.weights.lm_head is lm_head
