"""Which threshold of a judge is fast enough and still right, on questions that chose nothing."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.plan import Judge, Plan
from polybasic.deploy.bench.bootstrap import estimate
from polybasic.deploy.bench.judging.mining import answer_text
from polybasic.deploy.bench.judging.questions import Asked, CheckedQuestion
from polybasic.deploy.bench.lossy import Answered, Answering, Prompt
from polybasic.deploy.planner.measuring.budget import Budget
from polybasic.deploy.runtime.chain import Chain


@dataclass(frozen=True)
class Point:
    """What a threshold gives, beside the lossless plan in turns.

    Attributes:
        threshold: probability that a token matters, from which on it is replaced.
        speedup: of tokens a second after the prompt.
        score: questions that are answered rightly, and by the lossless plan.
        num_questions: that were asked.
        own: share of tokens that are the target's own.
        identical: share of answers that are the lossless plan's, to the last token.
        speedup_bounds, score_bounds: 95 % intervals over the questions, of the speedup and of the
            ratio of both scores.
    """

    threshold: float
    speedup: float
    score: tuple[int, int]
    num_questions: int
    own: float
    identical: float
    speedup_bounds: tuple[float, float]
    score_bounds: tuple[float, float]

    @property
    def quality(self) -> float:
        """Score over the lossless plan's."""
        ours, lossless = self.score
        return ours / lossless if lossless else 0.0


@dataclass(frozen=True)
class JudgeTuning:
    """The fastest threshold of a quality, and what it gave on questions that chose nothing.

    Attributes:
        plan: lossy.
        lossless: that it is compared with.
        measured: of the plan, on the last questions.
        curve: of all thresholds, on the questions that one was chosen by.
    """

    plan: Plan
    lossless: Plan
    measured: Point
    curve: tuple[Point, ...]

    def to_json(self) -> dict[str, Any]:
        """As plain JSON."""
        plans = {"plan": self.plan, "lossless": self.lossless}
        return asdict(self) | {name: plan.model_dump(mode="json") for name, plan in plans.items()}


class JudgeTuner:
    """Measures thresholds of a judge.

    Args:
        base: the plan that the judge is for, without it.
        file: of the judge.
        max_new_tokens: of an answer.
    """

    def __init__(self, chain: Chain, base: Plan, file: str, max_new_tokens: int) -> None:
        self._chain, self._base, self._file = chain, base, file
        self._answering = Answering(chain, max_new_tokens)
        self.lossless = chain.plan_at(0.0)

    def tune(
        self,
        thresholds: Sequence[float],
        quality: float,
        questions: tuple[Sequence[Asked], Sequence[Asked]],
        budget: Budget,
        share: float,
        say: Callable[[str], None],
    ) -> JudgeTuning:
        """Choose the fastest threshold by some questions, and measure it on others.

        Args:
            quality: least score over the lossless plan's.
            questions: to choose by, and to measure on.
            share: of the budget, at whose end a threshold is chosen.
            say: called with a line for each threshold where none is chosen.

        Raises:
            UserError: no threshold is faster at this quality, or no question could be answered.
        """
        chosen_by, measured_on = questions
        plans = [self.plan(threshold) for threshold in thresholds]
        curve = self._points(plans, budget.within(chosen_by, share, "questions to choose by"))
        good = [point for point in curve if point.quality >= quality and point.speedup > 1]
        if not good:
            for point in curve:
                ours, lossless = point.score
                say(
                    f"threshold {point.threshold:.3f}: {point.speedup:.2f}x, {ours} right where "
                    f"the lossless plan has {lossless}"
                )
            nearest = max(curve, key=lambda each: (min(each.quality, quality), each.speedup))
            raise UserError(
                "no threshold of the judge is faster than the lossless plan at this quality",
                f"quality={quality:g}; the nearest has {nearest.quality:.3f} at "
                f"{nearest.speedup:.2f}x",
                "ask for a lower one, or run the lossless plan",
            )
        plan = self.plan(max(good, key=lambda each: each.speedup).threshold)
        others = budget.within(measured_on, 1.0, "other questions")
        (measured,) = self._points([plan], others)
        return JudgeTuning(plan, self.lossless, measured, tuple(curve))

    def plan(self, threshold: float) -> Plan:
        """The plan with the judge."""
        judge = Judge(file=self._file, threshold=threshold)
        return self._base.model_copy(update={"lossy": judge})

    def _points(self, plans: Sequence[Plan], questions: Iterable[Asked]) -> list[Point]:
        asked: list[CheckedQuestion] = []

        def prompts() -> Iterator[Prompt]:
            for question, prompt in questions:
                asked.append(question)
                yield question.task, prompt

        exact, *lossy = self._answering.in_turns((self.lossless, *plans), prompts())
        scores = [self._right(asked, answers) for answers in (exact, *lossy)]
        return [
            _point(plan, answers, exact, right, scores[0], [question.task for question in asked])
            for plan, answers, right in zip(plans, lossy, scores[1:], strict=True)
        ]

    def _right(self, questions: list[CheckedQuestion], answers: Answered) -> list[bool]:
        return [
            question.is_right(answer_text(self._chain, tokens))
            for question, tokens in zip(questions, answers.token_ids, strict=True)
        ]


def _point(
    plan: Plan,
    lossy: Answered,
    exact: Answered,
    right: list[bool],
    right_exact: list[bool],
    tasks: list[str],
) -> Point:
    assert isinstance(plan.lossy, Judge)
    faster = estimate(np.hstack([lossy.paces, exact.paces]), (1, -1, -1, 1), tasks)
    counts = np.array([right, right_exact], dtype=np.float64).T
    # a score of none has no ratio
    score = estimate(counts, (1, -1), tasks).bounds if all(counts.sum(0)) else (0.0, 0.0)
    return Point(
        threshold=plan.lossy.threshold,
        speedup=faster.value,
        score=(sum(right), sum(right_exact)),
        num_questions=len(tasks),
        own=lossy.quality,
        identical=lossy.identical(exact),
        speedup_bounds=faster.bounds,
        score_bounds=score,
    )
