"""The reference over rows that only the device knows: what the same rows give that the host knows.

That these are right is what tests/chain/model/test_families.py compares with transformers.
"""

from dataclasses import replace

import pytest
import torch

from polybasic.chain.formats.plan import Window
from polybasic.chain.kernels.rows import consecutive_rows
from polybasic.chain.kernels.torch.rows import device_consecutive_rows
from tests.chain.family_cases import Folders
from tests.chain.model.device_rows import (
    BEAMS,
    CAPACITY,
    FEATURE_LAYERS,
    SINKS_AND_LATEST,
    TOLERANCE,
    TOP_K,
    block,
    both_answers,
    cache_of,
    level_rows,
    load,
    passes_of,
    random_tokens,
    relative,
    tree,
)

CASES = ["llama3", "mistral", "phi3", "qwen-windows", "gemma2", "gemma3"]


@torch.inference_mode()
@pytest.mark.parametrize("window", [None, SINKS_AND_LATEST], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_passes_are_those_over_rows_that_the_host_knows(
    case: str, window: Window | None, folders: Folders
) -> None:
    model, ids = load(folders(case)), random_tokens(CAPACITY)
    for name, passes in passes_of(window).items():
        logits, ours, cache, our_cache = both_answers(model, passes, ids)
        assert relative(ours - logits, logits) < TOLERANCE, name
        assert relative(our_cache.block - cache.block, cache.block) < TOLERANCE, name


@torch.inference_mode()
@pytest.mark.parametrize("case", ["llama3", "qwen-windows", "gemma2"])
def test_a_pass_continues_a_prompt_that_the_host_knows(case: str, folders: Folders) -> None:
    model, ids = load(folders(case)), random_tokens(80)
    caches = cache_of(model), cache_of(model)
    whole = model.forward(ids, [caches[0].layers], [consecutive_rows(0, 80)])
    prompt = model.forward(ids[:75], [caches[1].layers], [consecutive_rows(0, 75)])
    after = device_consecutive_rows(torch.tensor(75), 5)
    following = model.forward(ids[75:], [caches[1].layers], [after])
    assert relative(torch.cat([prompt, following]) - whole, whole) < TOLERANCE
    assert relative(caches[1].block - caches[0].block, caches[0].block) < TOLERANCE


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
    model, ids = load(folders(case)), random_tokens(CAPACITY)
    parents = [parent for beam in BEAMS for parent in beam]
    whole = [block(0, start, window), tree(start, parents, window)]
    logits, _, cache, our_cache = both_answers(model, whole, ids)
    our_cache.block.zero_()
    prompt = device_consecutive_rows(torch.tensor(0), start, window)
    model.forward(ids[:start], [our_cache.layers], [prompt])
    ours, known, shifted = [], [], []
    for level in range(len(BEAMS)):
        rows = level_rows(start, level, window)
        level_ids = ids[start + level * TOP_K :][:TOP_K]
        assert rows.visible is not None
        # a row that sees a cousin's path: the twin that must not be mistaken for it
        wrong = replace(rows, visible=rows.visible.roll(1, 0) | rows.visible)
        for found, variant in (
            (shifted, wrong),
            (known, replace(rows, known_prefix=start)),
            (ours, rows),
        ):
            states = model.forward(level_ids, [our_cache.layers], [variant])
            found.append(model.logits(states))
    tolerance = TOLERANCE * logits.abs().max()
    assert (torch.cat(ours) - logits[start:]).abs().max() < tolerance
    assert (torch.cat(known) - logits[start:]).abs().max() < tolerance
    assert relative(our_cache.block - cache.block, cache.block) < TOLERANCE
    assert (torch.cat(shifted) - logits[start:]).abs().max() > 100 * tolerance


@torch.inference_mode()
def test_rows_that_only_fill_up_change_nothing(folders: Folders) -> None:
    """A captured pass reads more rows than there are tokens: later ones see earlier ones."""
    model, ids = load(folders("gemma3")), random_tokens(40)
    caches = cache_of(model), cache_of(model)
    for cache in caches:
        prompt = device_consecutive_rows(torch.tensor(0), 30)
        model.forward(ids[:30], [cache.layers], [prompt])
    exact, padded = (
        model.forward(
            ids[30 : 30 + num_rows],
            [cache.layers],
            [device_consecutive_rows(torch.tensor(30), num_rows)],
        )
        for cache, num_rows in zip(caches, (5, 8), strict=True)
    )
    torch.testing.assert_close(padded[:5], exact, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(caches[1].block[:, :, :35], caches[0].block[:, :, :35])
    assert caches[1].block[:, :, 35:38].abs().sum() > 0
    assert caches[1].block[:, :, 38:].abs().sum() == 0


@torch.inference_mode()
def test_inputs_of_layers_are_a_part_of_the_states(folders: Folders) -> None:
    model, ids = load(folders("gemma2")), random_tokens(12)
    known, rows = block(0, 12)
    theirs, ours, other = (
        model.forward(ids, [cache_of(model).layers], [own_rows], feature_layers=layers)
        for own_rows, layers in ((known, FEATURE_LAYERS), (rows, FEATURE_LAYERS), (rows, (0, 1, 2)))
    )
    assert ours.shape == (12, model.states_width(FEATURE_LAYERS))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model.logits(ours), model.logits(theirs), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(other, theirs, atol=1e-2)
    # the first layer reads the embedding
    scale = model.weights.embedding_scale
    assert scale is not None
    embedded = model.weights.embedding[ids] * scale
    torch.testing.assert_close(
        ours[:, model.config.hidden_size :][:, : embedded.shape[1]], embedded
    )


@torch.inference_mode()
@pytest.mark.parametrize("change", [-1, 1])
def test_a_window_off_by_one_shows(change: int, folders: Folders) -> None:
    model, ids = load(folders("mistral")), random_tokens(CAPACITY)
    (kind,) = model.config.kinds
    assert kind.window is not None
    kinds = (replace(kind, window=kind.window + change),) * model.config.num_layers
    config = replace(model.config, layer_kinds=kinds)
    other = model.over(replace(model.weights, config=config))
    for name, passes in passes_of(None).items():
        if name == "tree after 2":
            continue
        logits, _, _, _ = both_answers(model, passes, ids)
        _, ours, _, _ = both_answers(other, passes, ids)
        assert relative(ours - logits, logits) > 10 * TOLERANCE, name


@torch.inference_mode()
def test_the_prefix_is_read_when_a_pass_runs(folders: Folders) -> None:
    """The same tensors with other numbers in them are another pass, as a replayed graph has it."""
    model, ids = load(folders("qwen-windows")), random_tokens(64)
    cache, prefix = cache_of(model), torch.tensor(0)
    model.forward(ids, [cache.layers], [device_consecutive_rows(prefix, 64)])
    answers = {}
    for start in (10, 40):
        prefix.fill_(start)
        rows = device_consecutive_rows(prefix, 4)
        answers[start] = model.forward(ids[start : start + 4], [cache.layers], [rows])
    expected = model.forward(ids, [cache_of(model).layers], [consecutive_rows(0, 64)])
    for start, states in answers.items():
        torch.testing.assert_close(states, expected[start : start + 4], rtol=1e-4, atol=1e-4)
