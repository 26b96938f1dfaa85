"""Windows on the members below the target: measured beside plans without them, and chosen alike.

A window pays by the length of the context, hence it is judged on the planning prompts as they are.
What is measured anew is what a window changes: the traces of answers that are longer than it, and
the costs of the members that have one, in turns with the same plans without windows. These costs
are put on the scale of the first measurement, so that one prediction can be held against another.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from polybasic.chain.formats.plan import Plan, Tree, Window
from polybasic.deploy.planner.costs import NUM_TURNS, RoundCosts, compare_costs
from polybasic.deploy.planner.measurements import DraftCosts, Measurements, PassCosts, Trace
from polybasic.deploy.planner.search import Candidate, Choice, WindowTrial, choose_windows
from polybasic.deploy.planner.traces import Calibration, Windows, trace_answer

NUM_MEMBER_SETS = 2
"""The best sets of members with which windows are tried."""


def try_windows(
    calibration: Calibration,
    measurements: Measurements,
    choice: Choice,
    say: Callable[[str], None],
) -> Choice:
    """The same choice, with windows where they save enough.

    Each member of the best sets is given each window of the grid that hides something of a text;
    of the members for which one saves time, the best windows are then tried together.

    Args:
        measurements: without windows, from which was chosen.
    """
    tried = _sets_to_try(choice)
    single = _single_windows(calibration, tried)
    if not single:
        return choice
    grid = calibration.grid
    say(f"plan: windows of {_listed(calibration)} tokens, beside the same plans without")
    windowed = _measure(calibration, measurements, tried, single, say)
    found = choose_windows(choice, windowed, grid)
    if together := _joint_windows(found.window_trials):
        windowed += _measure(calibration, measurements, tried, together, say)
        found = choose_windows(choice, windowed, grid)
    return found


def usable_windows(calibration: Calibration) -> list[int]:
    """Windows of the grid that are shorter than the longest text."""
    longest = max(map(len, calibration.answered), default=0)
    return [tokens for tokens in sorted(calibration.grid.windows) if tokens < longest]


def _listed(calibration: Calibration) -> str:
    return " and ".join(str(tokens) for tokens in usable_windows(calibration))


def _sets_to_try(choice: Choice) -> list[Candidate]:
    """The best plan of each of the best sets of members that has one below the target."""
    by_names: dict[tuple[str, ...], Candidate] = {}
    for one in choice.by_members:
        if len(one.names) > 1:
            by_names.setdefault(one.names, one)
    return list(by_names.values())[:NUM_MEMBER_SETS]


def _single_windows(calibration: Calibration, tried: Sequence[Candidate]) -> list[Windows]:
    names = dict.fromkeys(name for one in tried for name in one.names[1:])
    return [
        {name: Window(tokens=tokens)} for tokens in usable_windows(calibration) for name in names
    ]


def _joint_windows(trials: Sequence[WindowTrial]) -> list[Windows]:
    """For each set of members, the best window of each member that saves time, if several do."""
    found: list[Windows] = []
    for members in dict.fromkeys(one.best.members for one in trials):
        of_set = [one for one in trials if one.best.members == members]
        together: dict[str, Window] = {}
        for one in sorted(of_set, key=lambda one: one.best.seconds_per_token):
            if one.best.seconds_per_token < one.without.seconds_per_token:
                together = {**one.windows, **together}
        if len(together) > 1 and together not in found:
            found.append(together)
    return found


def _measure(
    calibration: Calibration,
    measurements: Measurements,
    tried: Sequence[Candidate],
    windows: Sequence[Windows],
    say: Callable[[str], None],
) -> list[Measurements]:
    """What was measured, with each of the windows; without those that could not be timed."""
    top_ks = sorted({one.plan.tree.top_k for one in tried if _drafter(one.plan, measurements)})
    timed = compare_costs(
        calibration.engine,
        _prompts_of_all_lengths(calibration),
        [plan for one in tried for plan in _shapes(one.plan, calibration, measurements)],
        windows,
        calibration.stop_tokens,
        calibration.sampling,
    )
    found: list[Measurements] = []
    for one, (without, with_windows) in zip(windows, timed, strict=True):
        costs = _costs(measurements, one, without, with_windows, top_ks)
        if costs is None:
            say(f"plan: too few rounds to time a window for {' and '.join(one)}; it is left out")
            continue
        traces = _traces(calibration, measurements, one, top_ks)
        found.append(replace(measurements, traces=traces, windows=dict(one), **costs))
    return found


def _drafter(plan: Plan, measurements: Measurements) -> str | None:
    name = plan.members[-1]
    return name if name in measurements.drafters else None


def _shapes(plan: Plan, calibration: Calibration, measurements: Measurements) -> list[Plan]:
    """The plan, and the same with the smallest tree: costs are needed over more rows than one."""
    plan = plan.model_copy(update={"ngram": None})
    if _drafter(plan, measurements) is None:
        return [plan]
    grid = calibration.grid
    least = Tree(depth=min(grid.depths), top_k=plan.tree.top_k, rows=min(grid.rows))
    return [plan, plan.model_copy(update={"tree": least})]


def _prompts_of_all_lengths(calibration: Calibration) -> list[list[int]]:
    """As many as there are turns, spread evenly over the prompts by length."""
    by_length = sorted((one.prompt for one in calibration.answered), key=len)
    places = (np.arange(NUM_TURNS) + 0.5) / NUM_TURNS * len(by_length)
    return [by_length[int(place)] for place in places]


def _costs(
    measurements: Measurements,
    windows: Windows,
    without: RoundCosts,
    with_windows: RoundCosts,
    top_ks: Sequence[int],
) -> dict[str, Any] | None:
    """Costs of passes and drafts under windows; None if too few rounds were timed."""
    passes = dict(measurements.passes)
    drafts = {
        name: DraftCosts({k: one for k, one in costs.by_top_k.items() if k in top_ks})
        for name, costs in measurements.drafts.items()
    }
    for name in windows:
        if name in passes:
            before, after = without.rounds(name), with_windows.rounds(name)
            rows = sorted(before.keys() & after.keys())
            if not rows:
                return None
            passes[name] = _scaled(passes[name], rows, [after[one] / before[one] for one in rows])
        else:
            ratio = _draft_ratio(without, with_windows, name)
            if ratio is None:
                return None
            drafts[name] = DraftCosts(
                {
                    k: (first * ratio, each * ratio)
                    for k, (first, each) in drafts[name].by_top_k.items()
                }
            )
    return {"passes": passes, "drafts": drafts}


def _scaled(costs: PassCosts, rows: list[int], ratios: list[float]) -> PassCosts:
    """Costs times a ratio that is known at some rows."""
    factors = np.interp(costs.rows, rows, ratios)
    seconds = (float(one * factor) for one, factor in zip(costs.seconds, factors, strict=True))
    return PassCosts(costs.rows, tuple(seconds))


def _draft_ratio(without: RoundCosts, with_windows: RoundCosts, name: str) -> float | None:
    """Seconds of drafts with a window over those without, of the same shapes."""
    before, after = without.draft_means(name), with_windows.draft_means(name)
    shapes = before.keys() & after.keys()
    if not shapes:
        return None
    return sum(after[one] for one in shapes) / sum(before[one] for one in shapes)


def _traces(
    calibration: Calibration, measurements: Measurements, windows: Windows, top_ks: Sequence[int]
) -> list[Trace]:
    """Of all answers; those of texts that no window cuts are as they were."""
    shortest = min(window.tokens for window in windows.values())
    return [
        trace_answer(calibration, one, windows, top_ks) if len(one) > shortest else trace
        for one, trace in zip(calibration.answered, measurements.traces, strict=True)
    ]
