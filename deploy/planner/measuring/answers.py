"""The target answers the prompts that a chain is measured along."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from polybasic.chain.formats.plan import Plan, Rule, Tree
from polybasic.deploy.planner.measuring.budget import Budget
from polybasic.deploy.planner.settings import PlanGrid
from polybasic.deploy.runtime.engine import Engine
from polybasic.deploy.runtime.request import Request
from polybasic.deploy.runtime.rounds.sampling import Sampling

ANSWERED_TOGETHER = 8
"""Prompts at a time: a pass over so many rows costs little more than one over a single row."""
MIN_TOKENS = 8
"""Answers are not cut shorter than this."""
ANSWERS_SHARE = 0.3
"""Of the budget, by whose end prompts are answered."""


@dataclass(frozen=True)
class CalibrationPrompt:
    """A prompt of known task, and the target's answer to it.

    Attributes:
        max_tokens: most tokens that the answer could have had.
    """

    task: str
    prompt: list[int]
    answer: list[int]
    max_tokens: int

    def cut(self, num_tokens: int) -> "CalibrationPrompt":
        """With an answer that ends after so many tokens, at the latest."""
        if num_tokens >= len(self.answer):
            return self
        return replace(self, answer=self.answer[:num_tokens], max_tokens=num_tokens)

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)


@dataclass(frozen=True)
class Calibration:
    """A chain, the answers that it is measured along, and the settings.

    Attributes:
        engine: of the chain.
        answered: prompts with answers of at least two tokens.
        stop_tokens: end an answer.
        sampling: of the answers; a plan is valid for its temperature.
        grid: the shapes to measure.
        rules: of the plans to choose from, those that draw alike together, as
            `polybasic.deploy.planner.rules` gives them.
    """

    engine: Engine
    answered: list[CalibrationPrompt]
    stop_tokens: frozenset[int]
    sampling: Sampling
    grid: PlanGrid
    rules: tuple[tuple[Rule, ...], ...]

    @property
    def num_tasks(self) -> int:
        return len({example.task for example in self.answered})

    @property
    def usable_windows(self) -> list[int]:
        """Windows of the grid that are shorter than the longest text."""
        longest = max(map(len, self.answered), default=0)
        return [tokens for tokens in sorted(self.grid.windows) if tokens < longest]


def answer_prompts(
    engine: Engine,
    prompts: Sequence[tuple[str, list[int]]],
    stop_tokens: frozenset[int],
    max_new_tokens: int,
    sampling: Sampling,
    grid: PlanGrid,
    rules: tuple[tuple[Rule, ...], ...],
    budget: Budget,
    say: Callable[[str], None],
) -> Calibration:
    """Let the target answer the prompts that a chain is measured along.

    Args:
        prompts: (task, token ids) of each; not those that the plan will be judged on. The first
            ones are answered where there is no time for all.
        rules: see `Calibration`.
        say: called with each line of progress.
    """
    say("plan: the target answers the calibration prompts")
    num_tasks = len({task for task, _ in prompts})
    most = max(min(ANSWERED_TOGETHER, engine.slots.num_fitting(share=0.5)), 1)
    groups = [prompts[first : first + most] for first in range(0, len(prompts), most)]
    what = "prompts" if most == 1 else f"groups of {most} prompts"
    target = next(iter(engine.verifiers))
    plan = Plan(members=(target,), tree=Tree(depth=1, top_k=1, rows=2))
    answered: list[CalibrationPrompt] = []
    for group in budget.within(groups, ANSWERS_SHARE, what, -(-num_tasks // most)):
        requests = [
            Request(prompt, max_new_tokens, sampling, stop_tokens, plan) for _, prompt in group
        ]
        answers = _answers(engine, requests, lambda: not budget.left(ANSWERS_SHARE))
        for (task, prompt), answer in zip(group, answers, strict=True):
            is_cut = len(answer) < max_new_tokens and answer[-1] not in stop_tokens
            if len(answer) > 1:
                max_tokens = len(answer) if is_cut else max_new_tokens
                answered.append(CalibrationPrompt(task, prompt, answer, max_tokens))
    if engine.models.encoder is not None:  # over whose source there are no windows
        grid = grid.model_copy(update={"windows": ()})
    return Calibration(engine, answered, stop_tokens, sampling, grid, rules)


def _answers(
    engine: Engine, requests: Sequence[Request], is_late: Callable[[], bool]
) -> list[list[int]]:
    """The answers to several requests at a time, cut where it is late and each has begun."""
    running = [engine.begin(request, runs_ahead=True) for request in requests]
    answers: list[list[int]] = [[] for _ in running]
    try:
        while engine.step():
            for answer, sequence in zip(answers, running, strict=True):
                if sequence.error is not None:
                    raise sequence.error
                answer += [token for piece in sequence.take() for token in piece.token_ids]
            are_begun = all(
                len(answer) >= MIN_TOKENS or sequence.is_over
                for answer, sequence in zip(answers, running, strict=True)
            )
            if are_begun and is_late():
                break
    finally:
        for sequence in running:
            sequence.close()
    return answers
