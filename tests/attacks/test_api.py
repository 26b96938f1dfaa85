"""Calls of the Python interface with arguments of every wrong kind."""

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from polybasic.deploy import load_chain
from polybasic.deploy.runtime.chain import Chain
from polybasic.deploy.runtime.rounds.sampling import Sampling
from tests.attacks import outcomes
from tests.conftest import ChainParts

NO_NUMBERS = [math.nan, math.inf, 2.5, "4", True, [4], {}]
REFUSED: dict[str, list[Any]] = {
    "max_new_tokens": [*NO_NUMBERS, 0, -1, 4.0],
    "stop": [3, None, [None], [3], ["a", None], b"x", {"a": 1}, ""],
    "members": ["target", ["target", 3], 3, [], ["other"]],
    "plan": ["plan", {}, 3],
    "rule": ["other", 3],
    "temperature": ["1", math.nan, math.inf, 1e300, 1e-30, -1, [1], True],
    "top_k": [2.5, "3", -1, True, 1 << 80],
    "top_p": [1e-46, 0, 1.5, math.nan, "1"],
    "min_p": [-1, 1.0000001, math.nan, "1"],
    "repetition_penalty": ["1", math.nan, 0, 1e300],
    "presence_penalty": ["1", math.nan, 1e300],
    "frequency_penalty": ["1", math.nan, 1e300],
    "logit_bias": [[1, 2], [(1, 2.0)], "1", {1.5: 2}, {1: "2"}, {1: math.nan}, {True: 1}, {99: 1}],
    "seed": [-1, 1.5, "1", -(10**26), 1 << 64],
    "choice": [2.5, -1, 1 << 32],
}
PROMPTS: list[Any] = [
    None,
    3,
    b"w1",
    "half a pair \ud800",
    [],
    [{}],
    ["w1"],
    {"role": "user", "content": "w1"},
    [{"role": "user"}],
    [{"role": "user", "content": None}],
    [{"role": "user", "content": ["w1"]}],
    [{"role": "user", "content": [{"type": "text", "text": "w1"}]}],
    [{"role": 3, "content": "w1"}],
]
TOKEN_IDS: list[Any] = [
    [1.0, 2.0],
    [1.5],
    [True, False],
    [np.int64(3)],
    ["1"],
    [None],
    [[1, 2]],
    "12",
    (1, 2),
    None,
    torch.tensor([1, 2]),
    np.array([1, 2]),
    [1 << 70],
    [-1],
    [64],
    [],
]
LOADING: dict[str, list[Any]] = {
    "context_tokens": [100.5, "100", math.nan, True, 0, -1, 1 << 70],
    "device": ["other", 3, "cuda:99", "meta", ""],
    "dtype": ["other", 3, ["float32"], ""],
    "plan": [3, "plan", {}],
    "graphs": ["no", 3],
}


@pytest.fixture(scope="module")
def chain(_tiny_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    folder = tmp_path_factory.mktemp("attacked")
    models = shutil.copytree(_tiny_models, folder / "models")
    parts = ChainParts(models / "target", models / "intermediate", models / "draft")
    parts.package(folder / "chain")
    return load_chain(folder / "chain", dtype="float32")


def names_of(table: dict[str, list[Any]]) -> list[Any]:
    return [
        pytest.param(name, value, id=f"{name}-{ascii(value)[:30]}")
        for name, values in table.items()
        for value in values
    ]


@pytest.mark.parametrize(("name", "value"), names_of(REFUSED))
def test_options_are_refused_by_name(chain: Chain, name: str, value: Any) -> None:
    options: Any = {"temperature": 1.0, "max_new_tokens": 3} | {name: value}
    line = outcomes.of_call(lambda: chain.generate("w1", **options))
    assert line is not None
    assert name in line or name in ("stop", "members")


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: ascii(prompt)[:40])
def test_prompts_are_refused(chain: Chain, prompt: Any) -> None:
    assert outcomes.of_call(lambda: chain.generate(prompt, max_new_tokens=3))


@pytest.mark.parametrize("ids", TOKEN_IDS, ids=lambda ids: ascii(ids)[:40])
def test_token_ids_are_refused(chain: Chain, ids: Any) -> None:
    assert outcomes.of_call(lambda: list(chain.stream_ids(ids, 3, Sampling())))


@pytest.mark.parametrize(("name", "value"), names_of(LOADING))
def test_ways_of_loading_are_refused(chain: Chain, name: str, value: Any) -> None:
    options: Any = {name: value}
    assert outcomes.of_call(lambda: load_chain(chain.folder, digests=False, **options))


@pytest.mark.parametrize("path", [None, 3, "", "\0", "x" * 5000, "a/../b", "\x1b[31m", "a" * 300])
def test_paths_are_refused(path: Any) -> None:
    assert outcomes.of_call(lambda: load_chain(path))


def test_a_chain_answers_after_all_refusals(chain: Chain) -> None:
    answers = [chain.generate("w1 w2", max_new_tokens=8, seed=3, temperature=1.0) for _ in range(2)]
    assert answers[0].token_ids == answers[1].token_ids
    assert len(answers[0].token_ids) == 8


def _divides_by_zero() -> None:
    raise ZeroDivisionError


def test_other_exceptions_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError):
        outcomes.of_call(_divides_by_zero)
    planted: Callable[..., None] = lambda name: _divides_by_zero()  # noqa: E731
    monkeypatch.setattr("polybasic.recipes.schema.loading.find_recipe", planted)
    with pytest.raises(AssertionError, match="exit code 1"):
        outcomes.of_command("recipes", "show", "base")
