"""What the members of a plan did in the answers of a system, and what an inserted one gains."""

from collections.abc import Mapping, Sequence

from polybasic.deploy.bench.bench import Bench
from polybasic.deploy.bench.chain_systems import ChainSystem
from polybasic.deploy.bench.intervals import ratio
from polybasic.deploy.bench.schema import (
    Answers,
    InsertionReport,
    MemberCost,
    SystemReport,
)
from polybasic.deploy.bench.totals import lengths_of, statistics_of
from polybasic.deploy.request import Statistics
from polybasic.deploy.rounds.stages import Proposals
from polybasic.deploy.theory import judge_insertion


def member_costs(bench: Bench, system: ChainSystem) -> dict[str, MemberCost]:
    """Of one repeat on average, by name: the plan's members in its order, then n-grams."""
    found = [statistics_of(one) for repeat in bench.of(system) for one in repeat]
    names = dict.fromkeys(
        (*system.plan.members, *(name for one in found for name in one.proposals))
    )
    return {name: _member_cost(name, bench, system, found) for name in names}


def _member_cost(
    name: str, bench: Bench, system: ChainSystem, found: Sequence[Statistics]
) -> MemberCost:
    verifying = [member.name for member in bench.chain.manifest.verifying]
    passes = sum(one.forward_passes.get(name, 0) for one in found)
    proposals = Proposals()
    for one in found:
        proposals.add(one.proposals.get(name, Proposals()))
    num_drafts, gained = proposals.num_drafts, _tokens_gained(name, found)
    return MemberCost(
        passes=passes / bench.num_repeats,
        seconds=sum(one.seconds_by_member.get(name, 0.0) for one in found) / bench.num_repeats,
        accepted_length=lengths_of(bench, system, name, range(len(bench.prompts)))
        if name in verifying
        else None,
        rows_per_token=(passes + _proposed_to(name, system, verifying, found)) / gained
        if gained
        else None,
        acceptance=[num / num_drafts for num in proposals.accepted] if num_drafts else [],
    )


def _tokens_gained(name: str, found: Sequence[Statistics]) -> int:
    return sum(sum(one.accepted_lengths.get(name, [])) for one in found)


def _proposed_to(
    name: str, system: ChainSystem, verifying: Sequence[str], found: Sequence[Statistics]
) -> int:
    """Tokens that a verifying member was asked about, each a row of its passes."""
    asked = [one for one in system.plan.members if one in verifying]
    below = asked[asked.index(name) + 1 :][:1]
    return sum(
        proposals.num_tokens
        for one in found
        for proposer, proposals in one.proposals.items()
        if (proposer in below if below else proposer not in verifying)
    )


def insertions(
    bench: Bench, answers: Mapping[str, Answers], reports: Mapping[str, SystemReport]
) -> list[InsertionReport]:
    """Every verifying member that one measured system has and another one lacks."""
    verifying = [member.name for member in bench.chain.manifest.verifying]
    by_members = {one.plan.members: one for one in reversed(bench.systems.own)}
    found = []
    for members, within in by_members.items():
        for place, name in enumerate(members[1:], 1):
            without = by_members.get((*members[:place], *members[place + 1 :]))
            if name not in verifying or without is None or without.plan.members[-1] in verifying:
                continue
            above = members[place - 1]
            before, after = reports[without.name], reports[within.name]
            if not (before.members[above].passes and after.members[name].passes):
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
            found.append(
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
    return found


def _seconds_a_pass(cost: MemberCost) -> float:
    return cost.seconds / cost.passes


def _finished_a_pass(bench: Bench, system: ChainSystem, cost: MemberCost) -> float:
    """Tokens of the finished text for each pass after the prompt."""
    found = (statistics_of(one) for repeat in bench.of(system) for one in repeat)
    return sum(one.num_later for one in found) / bench.num_repeats / cost.passes
