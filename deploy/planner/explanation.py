"""Why a plan was chosen: measurements, theory and simulation side by side.

The decision compares simulated times. The theory is shown beside them, computed from the simulated
numbers: an accepted length counts tokens of the finished answer for each pass of a member, so that
rejected tokens count as cost, and a pass time is the mean over the rows of the plan's passes.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from polybasic.chain.base.readable import counted
from polybasic.chain.formats.card import shown_tree
from polybasic.chain.formats.plan import BETWEEN_REASONS, EarlyPlan, Plan
from polybasic.deploy.planner.measuring.agreement import acceptance_between, candidates_by_depth
from polybasic.deploy.planner.measuring.measurements import Measurements, PassCosts
from polybasic.deploy.planner.prediction import Predicted
from polybasic.deploy.planner.rules import rule_verdict, rules_compared
from polybasic.deploy.planner.search import MIN_GAIN, Candidate, PlanChoice
from polybasic.deploy.planner.theory import (
    Condition,
    accepted_length_moments,
    judge_insertion,
    seconds_of_chain,
)
from polybasic.deploy.planner.windows import window_verdict, windows_tried


def explain(
    choice: PlanChoice,
    measurements: Measurements,
    budget: dict[str, Any] | None = None,
    loads: Sequence[dict[str, Any]] = (),
    contexts: Sequence[dict[str, Any]] = (),
    early: EarlyPlan | None = None,
) -> dict[str, Any]:
    """All reasons for and against a choice, as plain JSON.

    Args:
        budget: what `Budget.report` returned, and how often close plans were `timed_again`; None
            if there was no limit.
        loads, contexts: what `polybasic.deploy.planner.alternatives.compared` returned of each.
        early: how an answer begins behind a prompt that not all members read at once.
    """
    best, runner_up, alone = choice.best, choice.runner_up, choice.alone
    return {
        "machine": {
            "hardware": measurements.hardware,
            "dtype": measurements.dtype,
            "temperature": measurements.temperature,
        },
        "link": _link(best, measurements),
        "num_traces": len(measurements.traces),
        "num_tokens": measurements.num_tokens,
        "num_plans": choice.num_simulated,
        "budget": budget,
        "pass_seconds": {
            name: {
                str(rows): seconds for rows, seconds in zip(costs.rows, costs.seconds, strict=True)
            }
            for name, costs in _passes(best, measurements).items()
        },
        "draft_seconds": {
            name: {
                str(top_k): {"first_level": first, "further_level": further}
                for top_k, (first, further) in costs.by_top_k.items()
            }
            for name, costs in measurements.drafts.items()
        },
        "acceptance": _acceptance(best.plan, best.measurements),
        "lemma_3_1": _lemma(best, measurements),
        "accepted_length": _moments(best),
        "insertions": [
            insertion
            for name in measurements.verifying[1:]
            if (insertion := _insertion(name, choice, measurements)) is not None
        ],
        "by_members": [
            {
                "members": str(candidate.members),
                "shape": describe_shape(candidate.plan, measurements),
                "seconds_per_token": candidate.seconds_per_token,
                "speedup_over_target": alone.seconds_per_token / candidate.seconds_per_token,
                "tokens_per_target_pass": candidate.predicted.tokens_per_pass[measurements.target],
            }
            for candidate in choice.by_members
        ],
        "rules": rules_compared(choice),
        "windows": windows_tried(choice),
        "loads": list(loads),
        "contexts": list(contexts),
        "runner_up": None if runner_up is None else str(runner_up.members),
        "plan": best.plan.model_dump(mode="json"),
        "decision": decide(choice, measurements, early),
    }


def shown_budget(budget: dict[str, Any]) -> str:
    """How long the measurements took and what was left out, in one line."""
    parts = [
        f"measured for {budget['seconds']:.0f} seconds (max_seconds {budget['max_seconds']:g})"
    ]
    if budget["timed_again"]:
        timings = counted(sum(budget["timed_again"].values()), "more timing")
        parts.append(f"{timings} of {counted(len(budget['timed_again']), 'plan')}")
    parts.append(f"left out: {', '.join(budget['left_out']) or 'nothing'}")
    if budget["is_rough"]:
        parts.append("the plan is rough, raise max_seconds for a better one")
    return "; ".join(parts)


def decide(choice: PlanChoice, measurements: Measurements, early: EarlyPlan | None = None) -> str:
    """The choice, with a reason for each member of the chain, divided by `BETWEEN_REASONS`."""
    best, alone = choice.best, choice.alone
    members = f"{best.members} alone" if best is alone else str(best.members)
    parts = [f"run {members} at {best.milliseconds} a token"]
    if best is not alone:
        speedup = alone.seconds_per_token / best.seconds_per_token
        parts[0] += f", {speedup:.2f} times as fast as {measurements.target} alone"
    if (link := _link(best, measurements)) is not None:
        parts.append(_link_verdict(link))
    if (about_rules := rule_verdict(choice)) is not None:
        parts.append(about_rules)
    for name in (*measurements.verifying[1:], *measurements.drafters):
        with_it = choice.best_with(name)
        if with_it is None:
            parts.append(f"leave {name} out: nothing of it was measured")
        else:
            cost = _cost_beside_above(name, with_it)
            runs = name in best.names
            parts.append(_verdict(name, runs, with_it, choice.best_without(name), cost))
    with_ngram, without_ngram = choice.best_by_ngram(True), choice.best_by_ngram(False)
    if with_ngram is not None and without_ngram is not None:
        runs = best.members.has_ngram
        parts.append(_verdict("n-grams", runs, with_ngram, without_ngram, ""))
    if (about_windows := window_verdict(choice, measurements)) is not None:
        parts.append(about_windows)
    if early is not None:
        parts.append(_early_verdict(early, best))
    return BETWEEN_REASONS.join(parts)


def _verdict(name: str, runs: bool, with_it: Candidate, without: Candidate, cost: str) -> str:
    """Why a member runs or does not."""
    if runs:
        return f"keep {name}: without it the best plan needs " + without.milliseconds
    if with_it.seconds_per_token <= without.seconds_per_token:
        return f"leave {name} out: it would save less than {MIN_GAIN:.0%} of the time"
    return (
        f"leave {name} out: {cost}with it the best plan needs "
        f"{with_it.milliseconds} a token, without it "
        f"{without.milliseconds}"
    )


def _early_verdict(early: EarlyPlan, best: Candidate) -> str:
    saved = early.seconds_per_token - best.seconds_per_token
    late = " and ".join(name for name in best.names if name not in early.plan.members)
    num_at_once = early.most_at_once(best.seconds_per_token)
    return (
        f"begin without {late} behind prompts of more than {num_at_once:,} tokens: to read a "
        f"token of them takes {1e3 * early.reading_seconds:.2g} ms, and {1e3 * saved:.2g} ms are "
        "saved in one of the answer"
    )


def describe_shape(plan: Plan, measurements: Measurements) -> str:
    """Tree and block lengths in a few words."""
    parts: list[str] = []
    if plan.members[-1] not in measurements.verifying:
        parts.append(f"tree of {shown_tree(plan.tree)}")
    for name in plan.members:
        if name in plan.flush:
            flush = plan.flush[name]
            bound = "flush" if flush.adaptive is None else "adaptive flush, at most"
            parts.append(f"{bound} {flush.length} for {name}")
    if plan.ngram is not None:
        where = ", behind drafts, too" if plan.ngram.extends else ""
        parts.append(f"n-grams from {plan.ngram.min_match} tokens on{where}")
    parts += [f"window of {window.tokens:,} for {name}" for name, window in plan.windows.items()]
    return "; ".join(parts) or "alone, no drafting"


def _acceptance(plan: Plan, measurements: Measurements) -> dict[str, Any]:
    """Acceptance between neighbouring verifying members of chain or plan, and of drafters."""
    running = [name for name in plan.members if name in measurements.verifying]
    pairs = dict.fromkeys([*pairwise(measurements.verifying), *pairwise(running)])
    return {
        "verifying": [
            {"above": above, "below": below, "kept": acceptance_between(measurements, above, below)}
            for above, below in pairs
        ],
        "drafters": [
            {
                "drafter": drafter,
                "verifying": name,
                "top_k": top_k,
                "by_depth": candidates_by_depth(measurements, drafter, name, top_k),
            }
            for drafter, drafts_for in measurements.drafters.items()
            for name in drafts_for
            for top_k in measurements.measured_depths(drafter, name)
        ],
    }


def _lemma(best: Candidate, measurements: Measurements) -> dict[str, Any]:
    """Lemma 3.1 term by term; what it leaves out is reported separately."""
    predicted = best.predicted
    names = _verifying(best, measurements)
    innermost, drafter = names[-1], best.plan.members[-1]
    lengths = [1 / predicted.passes[name] for name in names]
    drafts_per_round, draft_seconds = 0.0, 0.0
    if drafter not in names:
        drafts_per_round = predicted.passes[drafter] / predicted.passes[innermost]
        draft_seconds = _pass_seconds(predicted, drafter) or 0.0
    pass_seconds = [_pass_seconds(predicted, name) or 0.0 for name in names]
    return {
        "terms": [
            {
                "member": name,
                "passes_per_token": predicted.passes[name],
                "rows_per_pass": predicted.rows_per_pass.get(name),
                "pass_seconds": _pass_seconds(predicted, name),
                "seconds_per_token": predicted.seconds_by_member[name],
            }
            for name in best.plan.members
        ],
        "accepted_lengths": lengths,
        "drafts_per_round": drafts_per_round,
        "seconds_per_token": seconds_of_chain(
            1, lengths, [*pass_seconds, draft_seconds], drafts_per_round
        ),
        "beside_passes_seconds": predicted.overhead_seconds
        + predicted.link_seconds
        - predicted.saved_seconds
        + sum(
            seconds
            for name, seconds in predicted.seconds_by_member.items()
            if name not in best.plan.members
        ),
        "simulated_seconds_per_token": predicted.seconds_per_token,
    }


def _link(best: Candidate, measurements: Measurements) -> dict[str, Any] | None:
    """What the way to the target costs; None where it runs beside the others."""
    if measurements.link is None:
        return None
    predicted, target = best.predicted, measurements.target
    in_turns = predicted.seconds_per_token + predicted.saved_seconds
    return {
        "link": str(measurements.link),
        "seconds_per_pass": predicted.link_seconds / predicted.passes[target],
        "tokens_per_pass": 1 / predicted.passes[target],
        "share_of_round": predicted.link_seconds / in_turns,
        "is_optimistic": measurements.is_optimistic,
        "saved_share": predicted.saved_seconds / in_turns,
    }


def _link_verdict(link: dict[str, Any]) -> str:
    verdict = (
        f"the link of {link['link']} takes {link['share_of_round']:.0%} of a round, once for "
        f"{link['tokens_per_pass']:.1f} tokens"
    )
    if link["is_optimistic"]:
        verdict += f", and drafting on while it does saves {link['saved_share']:.0%}"
    return verdict


def _passes(best: Candidate, measurements: Measurements) -> dict[str, PassCosts]:
    """Costs of passes, including those of members with windows."""
    with_windows = {
        f"{name}, window": best.measurements.passes[name]
        for name in best.plan.windows
        if name in measurements.passes
    }
    return measurements.passes | with_windows


def _moments(best: Candidate) -> list[dict[str, Any]]:
    """Theorem 3.3, corrected, for blocks of the mean simulated length."""
    moments = []
    for above, below in pairwise(best.plan.members):
        if above not in best.plan.flush:
            continue
        acceptance = acceptance_between(best.measurements, above, below)
        max_tokens = 1 + round(best.predicted.block_tokens[above])
        mean, variance = accepted_length_moments(acceptance, max_tokens)
        moments.append(
            {
                "above": above,
                "below": below,
                "acceptance": acceptance,
                "max_tokens": max_tokens,
                "mean": float(mean),
                "variance": float(variance),
                "simulated_mean": best.predicted.tokens_per_pass[above],
            }
        )
    return moments


def _insertion(name: str, choice: PlanChoice, measurements: Measurements) -> dict[str, Any] | None:
    """Theorem 3.2 for an intermediate inserted into the best plan without it.

    None if it cannot be inserted there because nothing of that kind was measured.
    """
    without = choice.best_without(name)
    wanted = {*_verifying(without, measurements), name}
    inserted = next(
        (
            candidate
            for candidate in choice.by_members
            if set(_verifying(candidate, measurements)) == wanted
        ),
        None,
    )
    if inserted is None:
        return None
    names = _verifying(without, measurements)
    order = measurements.verifying
    above = [member for member in names if order.index(member) < order.index(name)][-1]
    place = without.names.index(above) + 1
    below = without.names[place] if place < len(without.names) else None
    before, after = without.predicted, inserted.predicted
    new_seconds, above_seconds = _pass_seconds(after, name), _pass_seconds(before, above)
    assert new_seconds is not None
    assert above_seconds is not None
    below_seconds = (_pass_seconds(before, below) or None) if below is not None else None
    beta = before.passes[below] / before.passes[above] if below is not None else 0.0
    numbers = {
        "accepted": 1 / before.passes[above],
        "accepted_above_new": 1 / after.passes[above],
        "accepted_new": 1 / after.passes[name],
    }
    judged = judge_insertion(
        above_seconds, new_seconds, below_seconds, **numbers, drafts_per_round=beta
    )
    return {
        "inserted": name,
        "below": above,
        "into": str(without.members),
        "giving": str(inserted.members),
        "above_seconds": above_seconds,
        "new_seconds": new_seconds,
        "below_seconds": below_seconds,
        "drafts_per_round": beta,
        **numbers,
        "fewer_passes_above": _condition(judged.fewer_passes_above),
        "fewer_drafts": _condition(judged.fewer_drafts),
        "seconds_per_token_without": without.seconds_per_token,
        "seconds_per_token_with": inserted.seconds_per_token,
        "pays": inserted.seconds_per_token < without.seconds_per_token,
    }


def _condition(condition: Condition | None) -> dict[str, Any] | None:
    if condition is None:
        return None
    return {"left": condition.left, "right": condition.right, "holds": bool(condition.holds)}


def _pass_seconds(predicted: Predicted, name: str) -> float | None:
    """Mean seconds of a member's pass; None if it made none."""
    passes = predicted.passes[name]
    return predicted.seconds_by_member[name] / passes if passes else None


def _cost_beside_above(name: str, with_it: Candidate) -> str:
    """The cost of a verifying member's pass relative to the model above, over the same rows."""
    measurements = with_it.measurements
    if name not in measurements.verifying:
        return ""
    above = with_it.names[with_it.names.index(name) - 1]
    rows = round(with_it.predicted.rows_per_pass[name])
    ratio = measurements.passes[name].at(rows) / measurements.passes[above].at(rows)
    width = "1 row" if rows == 1 else f"{rows} rows"
    return f"a pass of it over {width} costs {ratio:.2f} of one of {above}, and "


def _verifying(candidate: Candidate, measurements: Measurements) -> list[str]:
    return [name for name in candidate.names if name in measurements.verifying]
