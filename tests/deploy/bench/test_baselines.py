"""transformers' loop gets the same settings, and nothing of its own."""

from pathlib import Path
from typing import Any

import pytest
import torch

from polybasic.chain.errors import UserError
from polybasic.chain.formats.files import read_json, write_json
from polybasic.deploy import load_chain
from polybasic.deploy.bench import baselines
from polybasic.deploy.bench.baselines import (
    TransformersBaseline,
    candidate_dtypes,
    fastest_baseline,
)
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


class Pretended:
    """Answers in the time that it is said to take.

    Args:
        dtype: of its passes.
        first: seconds until the first token.
        each: seconds of every other one.
    """

    def __init__(self, dtype: torch.dtype, first: float, each: float) -> None:
        self.dtype, self.first, self.each = dtype, first, each

    def generate(
        self, token_ids: list[int], max_new_tokens: int, sampling: Sampling, min_new_tokens: int
    ) -> tuple[list[int], float]:
        assert min_new_tokens == max_new_tokens, "all systems answer as many tokens"
        return [0] * max_new_tokens, self.first + self.each * (max_new_tokens - 1)


@pytest.mark.parametrize(
    ("bfloat16", "float32", "new_tokens", "chosen"),
    [
        ((1.0, 0.02), (0.1, 0.03), 50, torch.float32),  # a prompt is read slowly
        ((1.0, 0.02), (0.1, 0.03), 200, torch.bfloat16),  # which long answers outweigh
        ((0.1, 0.02), (0.1, 0.0195), 96, torch.bfloat16),  # about equal: the target's own
        ((0.5, 0.02), (0.1, 0.02), 1, torch.float32),
    ],
)
def test_the_dtype_is_that_of_the_fastest_answer(
    bfloat16: tuple[float, float], float32: tuple[float, float], new_tokens: int, chosen: Any
) -> None:
    seconds = {torch.bfloat16: bfloat16, torch.float32: float32}

    def load(dtype: torch.dtype) -> Any:
        return Pretended(dtype, *seconds[dtype])

    baseline, answer = fastest_baseline(load, list(seconds), [1, 2, 3], new_tokens)
    assert baseline.dtype == chosen
    assert (answer.prompt_tokens, answer.new_tokens) == (3, new_tokens)
    whole = {name: first + (new_tokens - 1) * each for name, (first, each) in zip(
        ("bfloat16", "float32"), (bfloat16, float32), strict=True
    )}  # fmt: skip
    assert answer.seconds == pytest.approx(whole)


def test_only_what_can_be_faster_and_fits_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    fast = {torch.float32, torch.bfloat16}
    monkeypatch.setattr(baselines, "multiplies_fast", lambda dtype, device: dtype in fast)
    monkeypatch.setattr(baselines, "available_bytes", lambda device: 1e9)

    def tried(own: torch.dtype, device: torch.device, num_parameters: float = 1e8) -> Any:
        return candidate_dtypes(own, device, int(num_parameters))

    assert tried(torch.bfloat16, cpu) == ([torch.bfloat16, torch.float32], [])
    assert tried(torch.float16, cpu) == ([torch.float16, torch.bfloat16, torch.float32], [])
    assert tried(torch.float32, gpu) == ([torch.float32, torch.bfloat16], [])
    assert tried(torch.bfloat16, gpu) == ([torch.bfloat16], [])
    assert tried(torch.bfloat16, cpu, 2e8) == ([torch.bfloat16], ["float32"])
    fast.remove(torch.bfloat16)
    assert tried(torch.bfloat16, cpu) == ([torch.bfloat16, torch.float32], [])
    assert tried(torch.float32, cpu) == ([torch.float32], [])


def test_answers_have_the_length_that_is_timed(tiny_target: Path) -> None:
    reference = baseline(tiny_target)
    reference.stop_tokens = frozenset(range(63))
    assert len(reference.generate([5, 9, 2], 9, Sampling())[0]) == 1
    assert len(reference.generate([5, 9, 2], 9, Sampling(), 9)[0]) == 9
