"""Tuning of a lossy plan, against answers whose speed and quality are known."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.plan import BigLittle, Flush, Plan, PlansByTemperature, Tree
from polybasic.deploy.bench.lossy import BLOCK_TOKENS, Tuning, tune_lossy
from polybasic.deploy.planner.measuring.budget import Budget
from polybasic.deploy.runtime.request import Statistics
from polybasic.deploy.runtime.rounds.sampling import Sampling
from tests.deploy.bench.streams import FakeStream

TREE = Tree(depth=1, top_k=1, rows=2)
LOSSLESS = Plan(members=("target", "small"), tree=TREE, flush={"target": Flush(length=4)})
NUM_TOKENS = 100
PROMPTS = [(f"task {number % 2}", [number]) for number in range(12)]


class FakeChain:
    """Answers at a pace, and with as many strange tokens, as thresholds say.

    Lossless: 10 ms a token. Lossy: 8 ms, 1 less for each step of the rollback threshold, 1.1 more
    for each of the fallback threshold, and one strange token more, or less, for each.
    """

    folder = Path("chain")

    def __init__(self, verifying: tuple[str, ...] = ("target", "small")) -> None:
        self.manifest = SimpleNamespace(
            verifying=[SimpleNamespace(name=name) for name in verifying]
        )
        self.measured_plans = PlansByTemperature()
        self.asked: list[tuple[int, Plan]] = []
        self.seconds = 0.0

    def plan_at(self, temperature: float) -> Plan:
        assert temperature == 0
        return LOSSLESS

    def plan_of(self, members: tuple[str, ...]) -> Plan:
        return LOSSLESS.model_copy(update={"members": members})

    def cost(self, prompt: int, rule: BigLittle | None) -> tuple[float, int | None]:
        """Seconds a token, and strange tokens."""
        if rule is None:
            return 0.010, None
        if not rule.rollback_threshold:
            return 0.010, 0
        more = {1.0: 0, 2.0: 1, 4.0: 2, 8.0: 3}[rule.rollback_threshold]
        less = {0.2: 0, 0.5: 1, 0.8: 2}[rule.fallback_threshold]
        # what was not tuned on is a little worse
        strange = max(more - less + 1, 0) + prompt % 2
        return 0.008 - 0.001 * more + 0.0011 * less, strange

    def stream_ids(self, prompt: list[int], num_tokens: int, sampling: Sampling, plan: Plan) -> Any:
        assert sampling.is_greedy
        self.asked.append((prompt[0], plan))
        pace, strange = self.cost(prompt[0], plan.lossy)
        seconds = pace * (num_tokens - 1)
        self.seconds += seconds
        statistics = Statistics(
            num_prompt_tokens=1,
            num_tokens=num_tokens,
            seconds=seconds + 0.5,
            prefill_seconds=0.5,
            forward_passes={},
            seconds_by_member={},
            accepted_lengths={},
            stopped_by="length",
            num_first=1,
            num_tolerated=strange,
        )
        return FakeStream([strange or 0], statistics)


def tune(chain: FakeChain, quality: float, prompts: Any = PROMPTS, seconds: float = 1e6) -> Tuning:
    budget = Budget(seconds, lambda: chain.seconds)
    return tune_lossy(chain, prompts, quality, NUM_TOKENS, budget, lambda line: None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("quality", "rollback", "pace"), [(0.99, 1.0, 8), (0.97, 4.0, 6)])
def test_the_fastest_of_a_quality_is_measured_on_other_prompts(
    quality: float, rollback: float, pace: int
) -> None:
    chain = FakeChain()
    tuning = tune(chain, quality)
    assert tuning.plan.lossy == BigLittle(fallback_threshold=0.2, rollback_threshold=rollback)
    assert tuning.plan.flush["target"].length == BLOCK_TOKENS
    assert tuning.lossless == LOSSLESS
    assert tuning.speedup == pytest.approx(10 / pace)
    for found, (low, high) in (
        (tuning.speedup, tuning.speedup_bounds),
        (tuning.quality, tuning.quality_bounds),
    ):
        assert low <= found <= high
    # on prompts that chose nothing there is one more strange token, and what was found is said
    assert tuning.quality == pytest.approx(quality - 0.01)
    assert tuning.identical == 0
    assert tuning.num_prompts == (6, 6)
    # behind a quality that is too low no larger rollback is tried
    for fallback in (0.2, 0.5, 0.8):
        tried = [each.quality for each in tuning.tried if each.fallback_threshold == fallback]
        assert all(found >= quality for found in tried[:-1])
    assert all(each.identical == (each.quality == 1) for each in tuning.tried)
    # none is timed that was the first to run
    assert [prompt for prompt, _ in chain.asked[:3]] == [0, 0, 0]
    odd = [plan for prompt, plan in chain.asked if prompt % 2]
    assert odd == [LOSSLESS, tuning.plan] * 6
    assert tuning.to_json()["plan"]["lossy"]["rollback_threshold"] == rollback


def test_what_there_is_no_time_for_is_named() -> None:
    chain = FakeChain()
    tuning = tune(chain, 0.9, seconds=6.0)
    assert tuning.num_prompts[0] == 1
    assert len(tuning.left_out) >= 2
    assert "prompts to tune on" in tuning.left_out[0]
    assert chain.seconds < 9


@pytest.mark.parametrize(
    ("pace", "strange", "told"),
    [(0.005, 2, "quality=0.99; the nearest has 0.980 at 2.00x"), (0.011, 0, "has 1.000 at 0.91x")],
)
def test_nothing_is_chosen_that_does_not_pay(
    pace: float, strange: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cost(chain: FakeChain, prompt: int, rule: BigLittle | None) -> tuple[float, int | None]:
        return (0.010, None) if rule is None else (pace, strange)

    monkeypatch.setattr(FakeChain, "cost", cost)
    with pytest.raises(UserError, match=re.escape(told)):
        tune(FakeChain(), 0.99)


def test_what_cannot_be_tuned_is_refused() -> None:
    with pytest.raises(UserError, match="no member that could write blocks: chain has the target"):
        tune(FakeChain(("target",)), 0.9)
    with pytest.raises(UserError, match="too few prompts: 1"):
        tune(FakeChain(), 0.9, PROMPTS[:1])


def test_the_base_has_one_little_member_and_blocks_that_are_long() -> None:
    chain, flush = FakeChain(("target", "middle", "small")), {"target": Flush(length=32)}
    for members, length in (
        (("target", "middle", "small"), BLOCK_TOKENS),
        (("target", "middle"), 32),
    ):
        plan = LOSSLESS.model_copy(update={"members": members, "flush": flush})
        chain.plan_at = lambda temperature, plan=plan: plan  # type: ignore[misc]
        found = tune(chain, 0.97).plan
        assert found.flush["target"].length == length
        assert len(found.members) == 2
