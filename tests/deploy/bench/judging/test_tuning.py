"""Choice of a judge's threshold, against answers whose speed and score are known."""

from types import SimpleNamespace
from typing import Any

import pytest

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.plan import Flush, Judge, Plan, Tree
from polybasic.deploy.bench.judging.questions import CheckedQuestion
from polybasic.deploy.bench.judging.tuning import JudgeTuner, JudgeTuning
from polybasic.deploy.planner.measuring.budget import Budget
from polybasic.deploy.runtime.request import Statistics
from polybasic.deploy.runtime.rounds.sampling import Sampling
from tests.deploy.bench.streams import FakeStream

BASE = Plan(
    members=("target", "small"),
    tree=Tree(depth=1, top_k=1, rows=2),
    flush={"target": Flush(length=10)},
)
NUM_TOKENS = 50
THRESHOLDS = (0.1, 0.5, 0.9)
RIGHT = {0.1: 4, 0.5: 4, 0.9: 2}
"""Of five questions, by threshold; the lossless plan has 4."""
PACES = {0.1: 0.008, 0.5: 0.006, 0.9: 0.004}


class FakeChain:
    """Lossless 10 ms a token, lossy as `PACES` says; question n is right while n < `RIGHT`."""

    tokenizer = SimpleNamespace(decode=lambda tokens, skip_special_tokens: str(tokens[0]))

    def __init__(self) -> None:
        self.asked: list[tuple[int, float | None]] = []

    def plan_at(self, temperature: float) -> Plan:
        assert temperature == 0
        return BASE

    def stream_ids(self, prompt: list[int], num_tokens: int, sampling: Sampling, plan: Plan) -> Any:
        assert sampling.is_greedy
        threshold = plan.lossy.threshold if isinstance(plan.lossy, Judge) else None
        self.asked.append((prompt[0], threshold))
        pace, right = (0.010, 4) if threshold is None else (PACES[threshold], RIGHT[threshold])
        statistics = Statistics(
            num_prompt_tokens=1,
            num_tokens=num_tokens,
            seconds=pace * (num_tokens - 1) + 0.5,
            prefill_seconds=0.5,
            forward_passes={},
            seconds_by_member={},
            accepted_lengths={},
            stopped_by="length",
            num_first=1,
            num_tolerated=None if threshold is None else 5,
        )
        return FakeStream([int(prompt[0] % 5 < right)], statistics)


def tuned(chain: FakeChain, quality: float, said: list[str] | None = None) -> JudgeTuning:
    question = CheckedQuestion("numbers", "", float, 1)
    questions = [(question, [number]) for number in range(10)]
    tuner = JudgeTuner(chain, BASE, "judge.safetensors", NUM_TOKENS)  # type: ignore[arg-type]
    say = (lambda line: None) if said is None else said.append
    budget = Budget(1e9)
    return tuner.tune(THRESHOLDS, quality, (questions[:5], questions[5:]), budget, 0.8, say)


def test_the_fastest_threshold_of_the_quality_is_measured_on_other_questions() -> None:
    chain = FakeChain()
    found = tuned(chain, 0.99)
    assert found.plan.lossy == Judge(file="judge.safetensors", threshold=0.5)
    assert found.plan.flush == BASE.flush
    assert found.lossless == BASE
    assert [point.threshold for point in found.curve] == list(THRESHOLDS)
    assert [point.score for point in found.curve] == [(4, 4), (4, 4), (2, 4)]
    assert found.measured.speedup == pytest.approx(10 / 6)
    assert found.measured.score == (4, 4)
    assert found.measured.own == 0.9
    # five answers by each plan in turns, then five others by the chosen one and the lossless
    assert chain.asked[:4] == [(0, None), (0, 0.1), (0, 0.5), (0, 0.9)]
    assert chain.asked[20:] == [(n, plan) for n in range(5, 10) for plan in (None, 0.5)]
    assert tuned(FakeChain(), 0.5).measured.speedup == pytest.approx(10 / 4)
    assert tuned(FakeChain(), 0.5).measured.quality == 0.5
    assert found.to_json()["plan"]["lossy"]["threshold"] == 0.5


def test_nothing_is_chosen_that_is_slower_or_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setitem(RIGHT, 0.1, 3)
    monkeypatch.setitem(PACES, 0.5, 0.012)
    with pytest.raises(UserError, match=r"quality=0.99; the nearest has 1.000 at 0.83x"):
        tuned(FakeChain(), 0.99, said)
    assert said == [
        "threshold 0.100: 1.25x, 3 right where the lossless plan has 4",
        "threshold 0.500: 0.83x, 4 right where the lossless plan has 4",
        "threshold 0.900: 2.50x, 2 right where the lossless plan has 4",
    ]


def test_a_score_of_none_has_no_quality(monkeypatch: pytest.MonkeyPatch) -> None:
    for threshold in THRESHOLDS:
        monkeypatch.setitem(RIGHT, threshold, 0)
    with pytest.raises(UserError, match=r"the nearest has 0.000 at 2.50x"):
        tuned(FakeChain(), 0.9)
