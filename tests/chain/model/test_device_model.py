"""Passes of decoders on the device path against eager ones: every family."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from polybasic.chain.formats.plan import Window
from polybasic.chain.kernels.rows import consecutive_rows
from polybasic.chain.kernels.torch.packed_weight import PackedWeight
from polybasic.chain.kernels.torch.rows import device_consecutive_rows
from polybasic.chain.model.device_model import DeviceLayer, DeviceModel
from tests.chain.family_cases import Folders, write_4bit
from tests.chain.kernels.cuda.device_models import (
    BEAMS,
    CAPACITY,
    CASES,
    FEATURE_LAYERS,
    PARENTS,
    SINKS_AND_LATEST,
    TOLERANCE,
    TOP_K,
    block,
    both_answers,
    cache_of,
    largest_differences,
    level_rows,
    load,
    load_eager,
    random_tokens,
    relative,
    tree,
)


@pytest.mark.parametrize("case", CASES)
def test_passes_are_those_of_the_eager_path(case: str, folders: Folders) -> None:
    differences = largest_differences(load_eager(folders(case)), load(folders(case)))
    assert max(differences.values()) < TOLERANCE, differences


@torch.inference_mode()
@pytest.mark.parametrize("case", ["llama3", "qwen-windows", "gemma2"])
def test_a_pass_continues_a_prompt_that_eager_operations_read(case: str, folders: Folders) -> None:
    expected, found = load_eager(folders(case)), load(folders(case))
    model, ids = found.device_model, random_tokens(80)
    assert model is not None
    caches = cache_of(expected), cache_of(found)
    theirs = expected.forward(ids, [caches[0].layers], consecutive_rows(0, 80))
    prompt = found.forward(ids[:75], [caches[1].layers], consecutive_rows(0, 75))
    after = model.forward(
        ids[75:], [caches[1].layers], device_consecutive_rows(torch.tensor(75), 5)
    )
    assert relative(torch.cat([prompt, after]) - theirs, theirs) < TOLERANCE
    assert relative(caches[1].block - caches[0].block, caches[0].block) < TOLERANCE


@torch.inference_mode()
@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, (torch.bfloat16, torch.float16)[place % 2]) for place, case in enumerate(CASES)],
)
def test_half_precision_rounds_no_more_than_the_eager_path(
    case: str, dtype: torch.dtype, folders: Folders
) -> None:
    """The measure is how far eager logits in this dtype are from those in float32."""
    passes = [block(0, 30), block(30, 31), tree(31, PARENTS)]
    exact, eager_decoder = load_eager(folders(case)), load_eager(folders(case), dtype)
    ids = random_tokens(60)
    expected, _, _, _ = both_answers(exact, load(folders(case)), passes, ids)
    theirs, ours, _, _ = both_answers(eager_decoder, load(folders(case), dtype), passes, ids)
    assert ours.dtype == dtype
    allowed = 1.5 * (theirs.float() - expected).pow(2).mean()
    assert (ours.float() - expected).pow(2).mean() < allowed


@torch.inference_mode()
@pytest.mark.parametrize(
    ("case", "start", "window"),
    [
        ("llama3", 3, None),
        ("mistral", 22, None),
        ("mistral", 60, SINKS_AND_LATEST),
        ("qwen-windows", 60, None),
        ("gemma2", 22, SINKS_AND_LATEST),
        ("gemma3", 60, None),
    ],
)
def test_a_draft_by_levels_is_its_whole_tree(
    case: str, start: int, window: Window | None, folders: Folders
) -> None:
    """Rows of a level see those of earlier levels, which were written by earlier passes."""
    expected, found = load_eager(folders(case)), load(folders(case))
    model, ids = found.device_model, random_tokens(CAPACITY)
    parents = [parent for beam in BEAMS for parent in beam]
    whole = [block(0, start, window), tree(start, parents, window)]
    logits, _, cache, _ = both_answers(expected, found, whole, ids)
    assert model is not None
    our_cache = cache_of(found)
    model.forward(
        ids[:start], [our_cache.layers], device_consecutive_rows(torch.tensor(0), start, window)
    )
    ours, shifted = [], []
    for level in range(len(BEAMS)):
        rows = level_rows(start, level, window)
        level_ids = ids[start + level * TOP_K :][:TOP_K]
        # a row that sees a cousin's path: the twin that must not be mistaken for it
        wrong = replace(rows, visible=rows.visible.roll(1, 0) | rows.visible)
        shifted.append(model.logits(model.forward(level_ids, [our_cache.layers], wrong)))
        ours.append(model.logits(model.forward(level_ids, [our_cache.layers], rows)))
    tolerance = TOLERANCE * logits.abs().max()
    assert (torch.cat(ours) - logits[start:]).abs().max() < tolerance
    assert relative(our_cache.block - cache.block, cache.block) < TOLERANCE
    assert (torch.cat(shifted) - logits[start:]).abs().max() > 100 * tolerance


@torch.inference_mode()
def test_rows_that_only_fill_up_change_nothing(folders: Folders) -> None:
    """A captured pass reads more rows than there are tokens: later ones see earlier ones."""
    found = load(folders("gemma3"))
    model, ids = found.device_model, random_tokens(40)
    assert model is not None
    caches = cache_of(found), cache_of(found)
    for one in caches:
        model.forward(ids[:30], [one.layers], device_consecutive_rows(torch.tensor(0), 30))
    exact = model.forward(
        ids[30:35], [caches[0].layers], device_consecutive_rows(torch.tensor(30), 5)
    )
    padded = model.forward(
        ids[30:38], [caches[1].layers], device_consecutive_rows(torch.tensor(30), 8)
    )
    torch.testing.assert_close(padded[:5], exact, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(caches[1].block[:, :, :35], caches[0].block[:, :, :35])
    assert caches[1].block[:, :, 35:38].abs().sum() > 0
    assert caches[1].block[:, :, 38:].abs().sum() == 0


@torch.inference_mode()
def test_inputs_of_layers_are_a_part_of_the_states(folders: Folders) -> None:
    expected, found = load_eager(folders("gemma2")), load(folders("gemma2"))
    expected.feature_layers = found.feature_layers = FEATURE_LAYERS
    model, ids = found.device_model, random_tokens(12)
    assert model is not None
    attend, rows = block(0, 12)
    theirs = expected.forward(ids, [cache_of(expected).layers], attend)
    ours = model.forward(ids, [cache_of(found).layers], rows, feature_layers=FEATURE_LAYERS)
    assert ours.shape == (12, found.states_width)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model.logits(ours), expected.logits(theirs), rtol=1e-4, atol=1e-4)
    other = model.forward(ids, [cache_of(found).layers], rows, feature_layers=(0, 1, 2))
    assert not torch.allclose(other, theirs, atol=1e-2)


# Controls: what a pass must not leave out


def changed_model(model: DeviceModel, parts: dict[str, Any], layer: dict[str, Any]) -> DeviceModel:
    layers = [replace(one, **layer) for one in model.parts.layers]
    return DeviceModel(replace(model.parts, layers=layers, **parts))


LEFT_OUT: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("gemma2", {"embedding_scale": None}, {}),
    ("gemma2", {"softcap": None}, {}),
    ("gemma2", {}, {"attention_post_norm": None}),
    ("gemma2", {}, {"mlp_post_norm": None}),
    ("gemma3", {}, {"kind": 0}),
    ("mistral", {}, {"input_norm": None}),
]


@torch.inference_mode()
@pytest.mark.parametrize(("case", "parts", "layer"), LEFT_OUT, ids=lambda value: str(value)[:40])
def test_a_part_left_out_shows(
    case: str, parts: dict[str, Any], layer: dict[str, Any], folders: Folders
) -> None:
    expected, found = load_eager(folders(case)), load(folders(case))
    assert found.device_model is not None
    vars(found)["device_model"] = changed_model(found.device_model, parts, layer)
    assert max(largest_differences(expected, found).values()) > 100 * TOLERANCE


@torch.inference_mode()
@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("gemma2", {"softcap": None}),
        ("gemma2", {"scale": 1.0}),
        ("gemma3", {"query_norm": None, "key_norm": None}),
        ("qwen3", {"query_norm": None, "key_norm": None}),
    ],
)
def test_a_dropped_feature_of_the_heads_shows(
    case: str, changes: dict[str, Any], folders: Folders
) -> None:
    expected, found = load_eager(folders(case)), load(folders(case))
    model = found.device_model
    assert model is not None
    layers: list[DeviceLayer] = [
        replace(one, heads=replace(one.heads, **changes)) for one in model.parts.layers
    ]
    vars(found)["device_model"] = DeviceModel(replace(model.parts, layers=layers))
    assert max(largest_differences(expected, found).values()) > 100 * TOLERANCE


@torch.inference_mode()
@pytest.mark.parametrize("change", [-1, 1])
def test_a_window_off_by_one_shows(change: int, folders: Folders) -> None:
    expected, found = load_eager(folders("mistral")), load(folders("mistral"))
    model = found.device_model
    assert model is not None
    (kind,) = model.parts.config.kinds
    assert kind.window is not None
    kinds = (replace(kind, window=kind.window + change),) * model.parts.config.num_layers
    config = replace(model.parts.config, layer_kinds=kinds)
    vars(found)["device_model"] = DeviceModel(replace(model.parts, config=config))
    differences = largest_differences(expected, found)
    shown = [name for name in differences if "None" in name and name != "tree after 2, None"]
    assert min(differences[name] for name in shown) > 10 * TOLERANCE, differences


# 4 bits


@pytest.mark.parametrize("case", ["llama-biases", "phi3", "gemma3"])
def test_a_4_bit_copy_computes_its_dequantized_weights(
    case: str, folders: Folders, tmp_path: Path
) -> None:
    write_4bit(tmp_path, folders(case))
    found, expected = load(tmp_path / "awq"), load_eager(tmp_path / "dense")
    assert isinstance(found.layers[0].qkv.weight, PackedWeight)  # type: ignore[attr-defined]
    differences = largest_differences(expected, found)
    assert max(differences.values()) < 2 * TOLERANCE, differences
    unrounded = largest_differences(load_eager(folders(case)), found)
    assert min(unrounded.values()) > 100 * TOLERANCE


# The host


@torch.inference_mode()
def test_the_prefix_is_read_when_a_pass_runs(folders: Folders) -> None:
    """The same tensors with other numbers in them are another pass, as a replayed graph has it."""
    found = load(folders("qwen-windows"))
    model, ids = found.device_model, random_tokens(64)
    assert model is not None
    cache, prefix = cache_of(found), torch.tensor(0)
    model.forward(ids, [cache.layers], device_consecutive_rows(prefix, 64))
    answers = {}
    for start in (10, 40):
        prefix.fill_(start)
        answers[start] = model.forward(
            ids[start : start + 4], [cache.layers], device_consecutive_rows(prefix, 4)
        )
    expected = found.forward(ids, [cache_of(found).layers], consecutive_rows(0, 64))
    for start, states in answers.items():
        torch.testing.assert_close(states, expected[start : start + 4], rtol=1e-4, atol=1e-4)
