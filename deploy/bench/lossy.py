"""Thresholds of a lossy plan, tuned on some prompts and measured on others.

The quality of an answer is the share of its tokens that are the target's own, given all before
them. Both thresholds act alike: the more is kept, the faster and the worse. So for each probability
of falling back, the most surprising token that may be kept grows until the quality is too low.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.card import shown_rule
from polybasic.chain.formats.plan import BigLittle, Flush, Plan
from polybasic.deploy.bench.bootstrap import Array, estimate
from polybasic.deploy.planner.measuring.budget import Budget
from polybasic.deploy.runtime.chain import Chain
from polybasic.deploy.runtime.request import Statistics
from polybasic.deploy.runtime.rounds.sampling import Sampling

FALLBACKS = (0.5, 0.2, 0.8)
ROLLBACKS = (1.0, 2.0, 4.0, 8.0)
BLOCK_TOKENS = 10
"""That the little member may write before the target is asked, if the lossless plan has no more."""
LOSSLESS_SHARE, TUNING_SHARE = 0.08, 0.75
"""Of the time, until the lossless answers are there that are tuned against, and until thresholds
are tried; what is left measures the choice on other prompts."""
WARM_UP_TOKENS = 8

Prompt = tuple[str, list[int]]
"""Its task, and its tokens."""


@dataclass(frozen=True)
class Answered:
    """Greedy answers to some prompts, in their order."""

    prompts: list[Prompt] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)
    statistics: list[Statistics] = field(default_factory=list)

    @property
    def paces(self) -> Array:
        """[prompts, 2]: tokens after the prompt's own, and their seconds."""
        costs = self.statistics
        return np.array([[cost.num_later, cost.seconds - cost.prefill_seconds] for cost in costs])

    @property
    def own(self) -> Array:
        """[prompts, 2]: tokens that are the target's own, and all of them."""
        costs = self.statistics
        return np.array([[cost.num_own, cost.num_tokens] for cost in costs], dtype=np.float64)

    @property
    def seconds_per_token(self) -> float:
        """Of all tokens after the prompts' own."""
        tokens, seconds = self.paces.sum(0)
        return float(seconds / tokens)

    @property
    def quality(self) -> float:
        """Share of all tokens that are the target's own."""
        own, num = self.own.sum(0)
        return float(own / num)

    def identical(self, other: "Answered") -> float:
        """Share of answers that are the same."""
        pairs = zip(self.token_ids, other.token_ids, strict=True)
        return sum(ours == theirs for ours, theirs in pairs) / len(self.token_ids)


@dataclass(frozen=True)
class Tried:
    """What a pair of thresholds gave on the prompts that were tuned on."""

    fallback_threshold: float
    rollback_threshold: float
    speedup: float
    quality: float
    identical: float


@dataclass(frozen=True)
class Tuning:
    """The fastest lossy plan of a quality, and what it gave on prompts that chose nothing.

    Attributes:
        plan: lossy.
        lossless: that it is compared with.
        speedup: of its tokens a second after the prompt, over the lossless plan's, in turns.
        quality: share of its tokens that are the target's own.
        speedup_bounds, quality_bounds: 95 % intervals over the prompts.
        identical: share of its answers that are the lossless plan's, to the last token.
        num_prompts: that it was tuned on, and that it was measured on.
        tried: the thresholds on the prompts that were tuned on.
        left_out: what there was no time for, in words.
    """

    plan: Plan
    lossless: Plan
    speedup: float
    speedup_bounds: tuple[float, float]
    quality: float
    quality_bounds: tuple[float, float]
    identical: float
    num_prompts: tuple[int, int]
    tried: tuple[Tried, ...]
    left_out: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """As plain JSON."""
        plans = {"plan": self.plan, "lossless": self.lossless}
        return asdict(self) | {name: plan.model_dump(mode="json") for name, plan in plans.items()}


def tune_lossy(
    chain: Chain,
    prompts: Sequence[Prompt],
    quality: float,
    max_new_tokens: int,
    budget: Budget,
    say: Callable[[str], None],
) -> Tuning:
    """Find the thresholds that are fastest while a share of the tokens are the target's own.

    Args:
        prompts: every other one is tuned on, those between measure the choice.
        quality: the share, over 0 and at most 1.
        say: called with each line of progress.

    Raises:
        UserError: no member between target and drafter, fewer than two prompts, or no thresholds
            of this quality that are faster than the lossless plan.
    """
    if len(prompts) < 2:
        raise UserError("too few prompts", f"{len(prompts)}", "give at least two")
    lossless = chain.plan_at(0.0)
    base = _in_long_blocks(proposing_plan(chain, lossless))
    answer = Answering(chain, max_new_tokens)
    # what the first answers prepare is not timed
    Answering(chain, WARM_UP_TOKENS).in_turns((lossless, _with(base, 0.0, 0.0)), prompts[:1])
    begun = budget.within(prompts[::2], LOSSLESS_SHARE, "prompts to tune on")
    (exact,) = answer.in_turns((lossless,), begun)
    tried: list[Tried] = []
    for fallback in budget.within(FALLBACKS, TUNING_SHARE, "fallback thresholds"):
        for rollback in ROLLBACKS:
            plan = _with(base, fallback, rollback)
            plans = (lossless, plan) if rollback == ROLLBACKS[0] else (plan,)
            *others, lossy = answer.in_turns(plans, exact.prompts)
            exact = others[0] if others else exact  # the machine may have changed its pace
            speedup = exact.seconds_per_token / lossy.seconds_per_token
            tried.append(Tried(fallback, rollback, speedup, lossy.quality, lossy.identical(exact)))
            if lossy.quality < quality or not budget.left(TUNING_SHARE):
                break
    good = [each for each in tried if each.quality >= quality and each.speedup > 1]
    if not good:
        nearest = max(tried, key=lambda each: (min(each.quality, quality), each.speedup))
        raise UserError(
            "no lossy plan is faster than the lossless one at this quality",
            f"quality={quality:g}; the nearest has {nearest.quality:.3f} at {nearest.speedup:.2f}x",
            "ask for a lower one, or run the lossless plan",
        )
    best = max(good, key=lambda each: each.speedup)
    plan = _with(base, best.fallback_threshold, best.rollback_threshold)
    say(f"plan: {shown_rule(plan)}; measures that on other prompts")
    num_tuned_on, begun = len(exact.prompts), budget.within(prompts[1::2], 1.0, "other prompts")
    exact, lossy = answer.in_turns((lossless, plan), begun)
    tasks = [task for task, _ in exact.prompts]
    rates = np.hstack([lossy.paces, exact.paces])
    faster, kept = estimate(rates, (1, -1, -1, 1), tasks), estimate(lossy.own, (1, -1), tasks)
    return Tuning(
        plan=plan,
        lossless=lossless,
        speedup=faster.value,
        speedup_bounds=faster.bounds,
        quality=kept.value,
        quality_bounds=kept.share_bounds,
        identical=lossy.identical(exact),
        num_prompts=(num_tuned_on, len(exact.prompts)),
        tried=tuple(tried),
        left_out=tuple(budget.left_out),
    )


class Answering:
    """Answers prompts greedily, one after the other."""

    def __init__(self, chain: Chain, max_new_tokens: int) -> None:
        self._chain, self._max_new_tokens = chain, max_new_tokens

    def in_turns(self, plans: Sequence[Plan], prompts: Iterable[Prompt]) -> list[Answered]:
        """Answers by each plan, which take turns at every prompt."""
        found = [Answered() for _ in plans]
        for task, prompt in prompts:
            for plan, answers in zip(plans, found, strict=True):
                stream = self._chain.stream_ids(prompt, self._max_new_tokens, Sampling(0.0), plan)
                answers.prompts.append((task, prompt))
                answers.token_ids.append([token for tokens in stream for token in tokens])
                answers.statistics.append(stream.statistics)
        return found


def proposing_plan(chain: Chain, lossless: Plan) -> Plan:
    """The chain's fastest plan of the target and one member that proposes blocks.

    Raises:
        UserError: it has none.
    """
    verifying = [member.name for member in chain.manifest.verifying]
    if len(verifying) < 2:
        raise UserError(
            "no member that could write blocks",
            f"{chain.folder} has the target and drafters alone",
            "give it a smaller model, as by --small",
        )
    measured = chain.measured_plans.at(0.0)
    plans = [lossless, *(other.plan for other in (measured.others if measured else ()))]
    for plan in (*plans, chain.plan_of((verifying[0], verifying[-1]))):
        littles = [name for name in plan.members[1:] if name in verifying]
        if len(littles) == 1:
            return plan
    raise AssertionError("the last plan has one")


def _in_long_blocks(plan: Plan) -> Plan:
    """Blocks end where the little member is unsure, and nowhere before."""
    target = plan.members[0]
    length = max(plan.flush[target].length, BLOCK_TOKENS)
    return plan.model_copy(update={"flush": {target: Flush(length=length)}})


def _with(plan: Plan, fallback: float, rollback: float) -> Plan:
    lossy = BigLittle(fallback_threshold=fallback, rollback_threshold=rollback)
    return plan.model_copy(update={"lossy": lossy})
