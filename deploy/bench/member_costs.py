"""What the members of a plan did in the answers of a system, and what an inserted one gains."""

from collections.abc import Mapping, Sequence

from polybasic.deploy.bench.bench import Bench
from polybasic.deploy.bench.intervals import ratio
from polybasic.deploy.bench.schema import (
    Answers,
    InsertionReport,
    MemberCost,
    SystemReport,
)
from polybasic.deploy.bench.systems.chain_systems import ChainSystem
from polybasic.deploy.bench.totals import lengths_of, statistics_of
from polybasic.deploy.planner.theory import judge_insertion
from polybasic.deploy.runtime.request import Statistics
from polybasic.deploy.runtime.rounds.proposals import Proposals


def member_costs(bench: Bench, system: ChainSystem) -> dict[str, MemberCost]:
    """Of one repeat on average, by name: the plan's members in its order, then n-grams."""
    statistics = [statistics_of(taken) for repeat in bench.of(system) for taken in repeat]
    names = dict.fromkeys(
        (*system.plan.members, *(name for answer in statistics for name in answer.proposals))
    )
    return {name: _member_cost(name, bench, system, statistics) for name in names}


def _member_cost(
    name: str, bench: Bench, system: ChainSystem, statistics: Sequence[Statistics]
) -> MemberCost:
    verifying = [member.name for member in bench.chain.manifest.verifying]
    passes = sum(answer.forward_passes.get(name, 0) for answer in statistics)
    proposals = Proposals()
    for answer in statistics:
        proposals.add(answer.proposals.get(name, Proposals()))
    num_drafts, gained = proposals.num_drafts, _tokens_gained(name, statistics)
    return MemberCost(
        passes=passes / bench.num_repeats,
        seconds=sum(answer.seconds_by_member.get(name, 0.0) for answer in statistics)
        / bench.num_repeats,
        accepted_length=lengths_of(bench, system, name, range(len(bench.prompts)))
        if name in verifying
        else None,
        rows_per_token=(passes + _proposed_to(name, system, verifying, statistics)) / gained
        if gained
        else None,
        acceptance=[num / num_drafts for num in proposals.accepted] if num_drafts else [],
    )


def _tokens_gained(name: str, statistics: Sequence[Statistics]) -> int:
    return sum(sum(answer.accepted_lengths.get(name, [])) for answer in statistics)


def _proposed_to(
    name: str, system: ChainSystem, verifying: Sequence[str], statistics: Sequence[Statistics]
) -> int:
    """Tokens that a verifying member was asked about, each a row of its passes.

    By the members that ran in an answer: behind a long prompt that need not be all of the plan's.
    """
    num_tokens = 0
    for answer in statistics:
        ran = (member for member in system.plan.members if answer.forward_passes.get(member))
        asked = [member for member in ran if member in verifying]
        if name not in asked:
            continue
        below = asked[asked.index(name) + 1 :][:1]
        num_tokens += sum(
            proposals.num_tokens
            for proposer, proposals in answer.proposals.items()
            if (proposer in below if below else proposer not in verifying)
        )
    return num_tokens


def insertions(
    bench: Bench, answers: Mapping[str, Answers], reports: Mapping[str, SystemReport]
) -> list[InsertionReport]:
    """Every verifying member that ran in all answers of one system, and that another one lacks."""
    verifying = [member.name for member in bench.chain.manifest.verifying]
    by_members = {
        (system.plan.members, system.plan.ngram is not None): system
        for system in reversed(bench.systems.own)
        if system.plan.is_lossless
    }
    inserted = []
    for (members, copies), within in by_members.items():
        for place, name in enumerate(members[1:], 1):
            without = by_members.get(((*members[:place], *members[place + 1 :]), copies))
            if name not in verifying or without is None:
                continue
            if without.plan.members[-1] in verifying and not copies:
                continue  # nothing drafts without it
            above = members[place - 1]
            before, after = reports[without.name], reports[within.name]
            if not (before.members[above].passes and after.members[name].passes):
                continue
            if not _ran_always(bench, within, name):
                continue
            speedup = ratio(
                answers[within.name], answers[without.name], bench.described, decode=True
            )
            if speedup is None:
                continue
            measured = {
                "above_seconds": _seconds_a_pass(before.members[above]),
                "new_seconds": _seconds_a_pass(after.members[name]),
                "accepted": _finished_a_pass(bench, without, before.members[above]),
                "accepted_above_new": _finished_a_pass(bench, within, after.members[above]),
                "accepted_new": _finished_a_pass(bench, within, after.members[name]),
            }
            condition = judge_insertion(
                **measured, below_seconds=None, drafts_per_round=0
            ).fewer_passes_above
            inserted.append(
                InsertionReport(
                    member=name,
                    without=without.name,
                    within=within.name,
                    **measured,
                    left=condition.left,
                    right=condition.right,
                    speedup=speedup,
                )
            )
    return inserted


def _ran_always(bench: Bench, system: ChainSystem, name: str) -> bool:
    """Whether a member made passes in every answer that left room for its proposals."""
    statistics = (statistics_of(taken) for repeat in bench.of(system) for taken in repeat)
    return all(answer.forward_passes.get(name) for answer in statistics if answer.num_later > 1)


def _seconds_a_pass(cost: MemberCost) -> float:
    return cost.seconds / cost.passes


def _finished_a_pass(bench: Bench, system: ChainSystem, cost: MemberCost) -> float:
    """Tokens of the finished text for each pass after the prompt."""
    statistics = (statistics_of(taken) for repeat in bench.of(system) for taken in repeat)
    return sum(answer.num_later for answer in statistics) / bench.num_repeats / cost.passes
