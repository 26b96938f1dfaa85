"""transformers' loops get the same settings, and nothing of their own."""

from pathlib import Path
from typing import Any

import pytest
import torch

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.files import read_json, write_json
from polybasic.deploy import load_chain
from polybasic.deploy.bench.systems.compiled_loop import CompiledLoop
from polybasic.deploy.bench.systems.generate_loops import GenerateLoop, load_for_generate
from polybasic.deploy.bench.systems.system import TimedAnswer
from polybasic.deploy.runtime.rounds.sampling import Sampling
from tests.conftest import write_target
from tests.deploy.noisy_chain import write_noisy_copy

STOP = frozenset({63})
PROMPT = [5, 9, 2]
CPU = torch.device("cpu")
LOOKUP = {"prompt_lookup_num_tokens": 10}


def loop_of(folder: Path, assistant: Path | None = None, **settings: Any) -> GenerateLoop:
    models = [
        None if path is None else load_for_generate(path, torch.float32, CPU)
        for path in (folder, assistant)
    ]
    assert models[0] is not None
    return GenerateLoop("hf", "transformers", models[0], STOP, settings, models[1])


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
    expected = [token for new in chain.stream_ids(PROMPT, 40, sampling) for token in new]
    found = loop_of(tiny_chain / "target").answer(PROMPT, 40, sampling)
    assert found.token_ids == expected
    assert found.num_first == 1
    assert 0 < found.first_seconds < found.seconds
    if settings:
        assert expected != loop_of(tiny_chain / "target").answer(PROMPT, 40, Sampling()).token_ids
    drafted = loop_of(tiny_chain / "target", **LOOKUP).answer(PROMPT, 40, sampling)
    assert drafted.token_ids == expected


def test_all_truncations_are_passed_on(tiny_target: Path) -> None:
    """Each alone leaves one token: the greedy answer."""
    reference = loop_of(tiny_target)
    greedy = reference.answer(PROMPT, 30, Sampling()).token_ids
    for settings in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-6}):
        sampling = Sampling(**{"temperature": 1, "seed": 0, **settings})  # type: ignore[arg-type]
        assert reference.answer(PROMPT, 30, sampling).token_ids == greedy
    for settings in ({}, {"top_k": 0}, {"top_p": 1}, {"min_p": 0}):
        sampling = Sampling(**{"temperature": 2, "seed": 0, **settings})  # type: ignore[arg-type]
        assert reference.answer(PROMPT, 30, sampling).token_ids != greedy


def test_what_the_checkpoint_sets_does_not_leak_in(tiny_target: Path) -> None:
    plain = loop_of(tiny_target).answer(PROMPT, 30, Sampling()).token_ids
    path = tiny_target / "generation_config.json"
    leaking = {"do_sample": True, "repetition_penalty": 2.0, "no_repeat_ngram_size": 1}
    write_json(path, {**read_json(path, "generation config"), **leaking})
    assert len(set(plain)) < len(plain)
    assert loop_of(tiny_target).answer(PROMPT, 30, Sampling()).token_ids == plain


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_what_transformers_has_not_is_refused(tiny_target: Path, name: str) -> None:
    with pytest.raises(UserError, match=f"setting unknown to transformers: {name}=0.5; compare"):
        loop_of(tiny_target).answer([5], 3, Sampling(**{name: 0.5}))  # type: ignore[arg-type]


def test_answers_have_the_length_that_is_timed(tiny_target: Path) -> None:
    reference = loop_of(tiny_target)
    reference.stop_tokens = frozenset(range(63))
    assert len(reference.answer(PROMPT, 9, Sampling()).token_ids) == 1
    assert len(reference.answer(PROMPT, 9, Sampling(), 9).token_ids) == 9


class Passes:
    """Counts a model's passes and the rows of the first one."""

    def __init__(self, model: Any) -> None:
        self.rows: list[int] = []
        model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, model: Any, given: Any, named: dict[str, Any]) -> None:
        self.rows.append(named["input_ids"].shape[1])


def test_drafts_save_passes_and_change_no_greedy_token(tiny_target: Path, tmp_path: Path) -> None:
    write_noisy_copy(tmp_path / "near", tiny_target, 0.05)
    write_target(tmp_path / "other", seed=9)
    loops = {
        "plain": loop_of(tiny_target),
        "lookup": loop_of(tiny_target, **LOOKUP),
        "near": loop_of(tiny_target, tmp_path / "near"),
        "other": loop_of(tiny_target, tmp_path / "other"),
    }
    passes = {name: Passes(loop.model) for name, loop in loops.items()}
    # few tokens to choose from: texts repeat themselves
    sampling = Sampling(logit_bias=dict.fromkeys((1, 2), 100))
    prompt = [*PROMPT, *loops["plain"].answer(PROMPT, 40, sampling).token_ids]
    passes["plain"].rows.clear()
    found = {name: loop.answer(prompt, 40, sampling) for name, loop in loops.items()}
    for name, answer in found.items():
        assert answer.token_ids == found["plain"].token_ids, name
        assert 1 <= answer.num_first <= len(answer.token_ids)
        assert answer.first_seconds < answer.seconds
    num = {name: len(record.rows) for name, record in passes.items()}
    assert num["plain"] == len(found["plain"].token_ids) == 40
    assert num["lookup"] < 0.7 * num["plain"], "the answer repeats itself"
    assert num["near"] < 0.7 * num["plain"]
    assert num["near"] < num["other"], "another model's drafts are worth less"
    assert max(found["near"].num_first, found["lookup"].num_first) > 1, "a draft came with it"


@pytest.mark.parametrize("way", ["lookup", "assistant"])
def test_drafted_samples_are_drawn(tiny_target: Path, tmp_path: Path, way: str) -> None:
    write_noisy_copy(tmp_path / "near", tiny_target, 0.05)
    settings = LOOKUP if way == "lookup" else {"assistant": tmp_path / "near"}
    loop = loop_of(tiny_target, **settings)  # type: ignore[arg-type]
    seeds = [loop.answer(PROMPT, 20, Sampling(1.0, seed=seed)).token_ids for seed in (1, 1, 2)]
    assert seeds[0] == seeds[1] != seeds[2]
    assert seeds[0] != loop.answer(PROMPT, 20, Sampling()).token_ids


@pytest.mark.parametrize("way", ["plain", "lookup", "assistant"])
def test_logits_of_a_given_answer(tiny_target: Path, tmp_path: Path, way: str) -> None:
    """As the model's own pass over all of it gives them, stop tokens and unlikely ones included."""
    write_noisy_copy(tmp_path / "near", tiny_target, 0.05)
    settings = {"plain": {}, "lookup": LOOKUP, "assistant": {"assistant": tmp_path / "near"}}[way]
    loop = loop_of(tiny_target, **settings)  # type: ignore[arg-type]
    answer = [63, 1, 2, 63, 40, 1, 2, 63]
    token_ids = [*PROMPT, *answer]
    with torch.inference_mode():
        expected = loop.model(torch.tensor([token_ids])).logits[0]
    for num in (1, len(answer), len(token_ids)):
        found = loop.logits(token_ids, num)
        assert found.shape == (num, 64)
        torch.testing.assert_close(found, expected[-num:], atol=1e-4, rtol=1e-4)
    assert (loop.logits([*token_ids[:-1], 5], 1) - expected[-1:]).abs().max() > 0.1


@pytest.mark.parametrize("num_compiles", [0, 1, 2, 3])
def test_what_compiles_is_repeated(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch, num_compiles: int
) -> None:
    model = load_for_generate(tiny_target, torch.float32, CPU)
    compiled = CompiledLoop("hf_static", "transformers", model, STOP, 20)
    seconds: list[float] = []

    def answer(*_: Any) -> TimedAnswer:
        if len(seconds) < num_compiles:
            torch._dynamo.reset()
            torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
        seconds.append(float(len(seconds)))
        return TimedAnswer([1], seconds[-1], 1, 0.0)

    monkeypatch.setattr(GenerateLoop, "answer", answer)
    if num_compiles < 3:
        assert compiled.answer(PROMPT, 1, Sampling()).seconds == num_compiles
        return
    with pytest.raises(UserError, match="compiles for each answer: hf_static, prompt of 3 tokens"):
        compiled.answer(PROMPT, 1, Sampling())
