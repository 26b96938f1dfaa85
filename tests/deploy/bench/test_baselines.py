"""transformers' loop gets the same settings, and nothing of its own."""

from pathlib import Path
from typing import Any

import pytest
import torch

from polybasic.chain.errors import UserError
from polybasic.chain.formats.files import read_json, write_json
from polybasic.deploy import load_chain
from polybasic.deploy.bench.baselines import TransformersBaseline
from polybasic.deploy.rounds.sampling import Sampling

STOP = frozenset({63})


def baseline(folder: Path) -> TransformersBaseline:
    return TransformersBaseline(folder, torch.float32, torch.device("cpu"), STOP)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"repetition_penalty": 1.3},
        {"logit_bias": {11: 2, 63: -100}},
        {"repetition_penalty": 0.9, "logit_bias": {7: 1.5}},
    ],
    ids=str,
)
def test_greedy_settings_mean_the_same(tiny_chain: Path, settings: dict[str, Any]) -> None:
    chain = load_chain(tiny_chain, dtype="float32")
    chain.stop_tokens = STOP
    sampling = Sampling(**settings)
    expected = [token for new in chain.stream_ids([5, 9, 2], 40, sampling) for token in new]
    found, seconds = baseline(tiny_chain / "target").generate([5, 9, 2], 40, sampling)
    assert found == expected
    assert seconds > 0
    if settings:
        assert found != baseline(tiny_chain / "target").generate([5, 9, 2], 40, Sampling())[0]


def test_all_truncations_are_passed_on(tiny_target: Path) -> None:
    """Each alone leaves one token: the greedy answer."""
    reference = baseline(tiny_target)
    greedy, _ = reference.generate([5, 9, 2], 30, Sampling())
    for settings in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-6}):
        sampling = Sampling(**{"temperature": 1, "seed": 0, **settings})  # type: ignore[arg-type]
        assert reference.generate([5, 9, 2], 30, sampling)[0] == greedy
    for settings in ({}, {"top_k": 0}, {"top_p": 1}, {"min_p": 0}):
        sampling = Sampling(**{"temperature": 2, "seed": 0, **settings})  # type: ignore[arg-type]
        assert reference.generate([5, 9, 2], 30, sampling)[0] != greedy


def test_what_the_checkpoint_sets_does_not_leak_in(tiny_target: Path) -> None:
    plain, _ = baseline(tiny_target).generate([5, 9, 2], 30, Sampling())
    path = tiny_target / "generation_config.json"
    leaking = {"do_sample": True, "repetition_penalty": 2.0, "no_repeat_ngram_size": 1}
    write_json(path, {**read_json(path, "generation config"), **leaking})
    assert len(set(plain)) < len(plain)
    assert baseline(tiny_target).generate([5, 9, 2], 30, Sampling())[0] == plain


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_what_transformers_has_not_is_refused(tiny_target: Path, name: str) -> None:
    with pytest.raises(UserError, match=f"setting unknown to transformers: {name}=0.5; compare"):
        baseline(tiny_target).generate([5], 3, Sampling(**{name: 0.5}))  # type: ignore[arg-type]
