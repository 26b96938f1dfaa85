"""The ways in which a chain answers, and the prompts that it is asked."""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.card import shown_flush, shown_members, shown_tree
from polybasic.chain.formats.plan import Plan
from polybasic.deploy import Chain
from polybasic.deploy.bench.systems.chain_systems import NAMES, chain_system, usual_systems
from polybasic.deploy.planner.prompts import choose_fitting, read_questions
from polybasic.deploy.planner.settings import BenchSettings, PlanSettings
from polybasic.deploy.runtime.chain import checked_plan
from polybasic.recipes.pipeline.prompts import bench_prompts, plan_prompts
from polybasic.train.settings import SHIPPED

QUESTIONS_PER_TASK = 64
"""Read of a question file to choose prompts of a length from, and to fill contexts with."""


def system_plans(chain: Chain) -> dict[str, Plan]:
    """What runs in each of the usual systems of `polybasic bench` that are this runtime's.

    `polybasic` is left out where the chain's plan is that of another one.
    """
    *others, _ = (name for name in usual_systems(chain) if name in NAMES)
    plans = {name: chain_system(name, chain).plan for name in others}
    if chain.plan not in plans.values():
        plans["polybasic"] = chain.plan
    return plans


@contextmanager
def plan_settings(arguments: argparse.Namespace, **given: Any) -> Iterator[PlanSettings]:
    """Settings of a plan on the shipped calibration prompts, which exist as long as the block."""
    with tempfile.TemporaryDirectory() as folder:
        calibration = Path(folder) / "calibration.jsonl"
        plan_prompts(PlanSettings(prompts=SHIPPED), "").write(calibration)
        yield PlanSettings(
            prompts=str(calibration),
            max_new_tokens=arguments.max_new_tokens,
            temperature=arguments.temperature,
            **given,
        )


def chosen_plans(
    chain: Chain, names: Sequence[str] = (), members: Sequence[str] = ()
) -> dict[str, Plan]:
    """Some of `system_plans`, or all; and a plan of other members.

    Args:
        names: of systems; none for all.
        members: comma-separated names of the members of a further plan each, which then names it.

    Raises:
        UserError: a system that the chain has no members for, or members that cannot run.
    """
    plans = system_plans(chain)
    for name in names:
        if name not in plans:
            raise UserError(
                "system without members", f"{name} for {chain.folder}", f"use {', '.join(plans)}"
            )
    chosen = {name: plans[name] for name in names} if names or members else plans
    for group in members:
        chosen = chosen | {group: chain.plan_of(group.split(","))}
        checked_plan(chosen[group], chain.manifest)
    return chosen


def shown_plan(plan: Plan, chain: Chain) -> str:
    """Members, tree and block lengths for people."""
    verifying = [member.name for member in chain.manifest.verifying]
    parts = [shown_members(plan, verifying)]
    if plan.members[-1] not in verifying:
        parts.append(shown_tree(plan.tree))
    if sum(name in verifying for name in plan.members) > 1:
        parts.append(shown_flush(plan, verifying))
    return "; ".join(parts)


def prompts_of(arguments: argparse.Namespace, chain: Chain) -> list[list[int]]:
    """Those that the shared options ask for; see `read_prompts`."""
    num_per_task, max_new_tokens = arguments.num_prompts_per_task, arguments.max_new_tokens
    return read_prompts(chain, arguments.prompts, num_per_task, max_new_tokens)


def read_prompts(
    chain: Chain, path: Path | None, num_per_task: int, max_new_tokens: int
) -> list[list[int]]:
    """First turns as token ids, spread evenly over each task of the file.

    Args:
        path: Spec-Bench's question format; None for shipped prompts that were held out when a
            chain's head learned from the shipped conversations.
        max_new_tokens: of an answer, which must fit the context behind the prompt.

    Raises:
        UserError: a malformed file, or no prompt that fits.
    """
    settings = BenchSettings(
        prompts=SHIPPED if path is None else str(path),
        num_prompts_per_task=num_per_task,
        max_new_tokens=max_new_tokens,
    )
    with tempfile.TemporaryDirectory() as folder:
        source = bench_prompts(settings, "").write(Path(folder) / "prompts.jsonl")
        questions = read_questions(source)

    def encoded(question: Any) -> list[int]:
        return chain.encode(question.turns[0])

    chosen, _ = choose_fitting(
        questions,
        lambda question: len(encoded(question)),
        chain.engine.context_tokens,
        settings,
        "bench",
    )
    return [encoded(question) for question in chosen]


def prompts_of_length(
    chain: Chain, path: Path | None, length: int, num: int, max_new_tokens: int
) -> list[list[int]]:
    """So many prompts of about `length` tokens.

    Short prompts are questions as they are, those whose lengths are nearest. Where the questions
    are all much shorter, other ones stand before each, one after the other, and the first of them
    is cut; then the length is exact.

    Args:
        path: as `read_prompts` takes it.

    Raises:
        UserError: a malformed file, or no prompt that fits the context.
    """
    questions = read_prompts(chain, path, QUESTIONS_PER_TASK, max_new_tokens)
    nearest = sorted(questions, key=lambda question: abs(len(question) - length))[:num]
    if all(4 * len(question) >= 3 * length for question in nearest):
        return nearest
    last = sorted(questions, key=lambda question: len(question) > length)[:num]
    return [_filled(questions, number, question, length) for number, question in enumerate(last)]


def _filled(questions: Sequence[list[int]], number: int, last: list[int], length: int) -> list[int]:
    """Other questions, from another one on for each number, and `last` after them."""
    needed = length - len(last)
    before: list[int] = []
    for place in count(number * len(questions) // 3 + 1):
        if len(before) >= needed:
            break
        before += questions[place % len(questions)]
    return [*before[len(before) - needed :], *last]
