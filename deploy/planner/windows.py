"""Windows for the members below the target: measured alongside plans without them, and explained.

Whether a window pays depends on the length of the context, so it is judged on the planning prompts
as they are. Only what a window changes is measured again: the traces of answers longer than it, and
the costs of members that have one, in turns with the same plans without windows. These costs are
scaled to the first measurement, so that predictions can be compared.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from polybasic.chain.formats.plan import Plan, Tree, Window
from polybasic.deploy.planner.measuring.answers import Calibration
from polybasic.deploy.planner.measuring.budget import Budget
from polybasic.deploy.planner.measuring.costs import NUM_TURNS, RoundCosts, compare_costs
from polybasic.deploy.planner.measuring.measurements import (
    AcceptanceTrace,
    DraftCosts,
    Measurements,
    PassCosts,
)
from polybasic.deploy.planner.measuring.traces import Measured, Windows, trace_answer
from polybasic.deploy.planner.search import (
    MIN_GAIN,
    Candidate,
    PlanChoice,
    WindowTrial,
    choose_windows,
)

NUM_MEMBER_SETS = 2
"""How many of the best sets of members windows are tried with."""


def try_windows(
    measured: Measured,
    choice: PlanChoice,
    budget: Budget,
    say: Callable[[str], None],
) -> PlanChoice:
    """The same choice, with windows where they save enough.

    Each member of the best sets gets each window of the grid that is shorter than some text; the
    best windows of members for which one saves time are then tried together.

    Each is expected to take as long as the answers took without it.

    Args:
        measured: without windows, on which the choice is based. Its rule stays.
    """
    measurements, _ = measured.by_rule(choice.rule)
    calibration = replace(measured.calibration, rules=((choice.rule,),))
    tried = _sets_to_try(choice)
    single = _affordable(_single_windows(calibration, tried), measured, budget)
    if not single:
        return choice
    grid = calibration.grid
    say(f"plan: windows of {_listed(single)} tokens, and the same plans without")
    windowed = _measure(calibration, measurements, tried, single, say)
    chosen = choose_windows(choice, windowed, grid)
    if together := _affordable(_joint_windows(chosen.window_trials), measured, budget):
        windowed += _measure(calibration, measurements, tried, together, say)
        chosen = choose_windows(choice, windowed, grid)
    return chosen


def windows_tried(choice: PlanChoice) -> list[dict[str, Any]]:
    """The windows that were tried and what each saves, as plain JSON."""
    return [
        {
            "members": str(trial.best.members),
            "windows": {name: window.model_dump() for name, window in trial.windows.items()},
            "seconds_per_token_without": trial.without.seconds_per_token,
            "seconds_per_token_with": trial.best.seconds_per_token,
            "is_taken": trial.is_taken,
        }
        for trial in choice.window_trials
    ]


def window_verdict(choice: PlanChoice, measurements: Measurements) -> str | None:
    """Why members see part of the context or all of it; None if there was nothing to decide."""
    if not choice.windows or all(len(candidate.names) == 1 for candidate in choice.by_members):
        return None
    if measurements.longest_text_tokens <= min(choice.windows):
        longest = f"{measurements.longest_text_tokens:,} tokens"
        return f"no windows: planning prompts with answers have at most {longest}"
    trials = [trial for trial in choice.window_trials if trial.best.members == choice.best.members]
    if not trials:
        return None
    without = trials[0].without.milliseconds
    taken = next((trial for trial in trials if trial.is_taken), None)
    if taken is not None:
        return f"{_shown_windows(taken.windows)}: if all saw everything, it would need {without}"
    best = min(trials, key=lambda trial: trial.best.seconds_per_token)
    if best.best.seconds_per_token <= best.without.seconds_per_token:
        return f"no windows: the best would save less than {MIN_GAIN:.0%} of the time"
    seconds = best.best.milliseconds
    return f"no windows: with the best, {_shown_windows(best.windows)}, it would need {seconds}"


def _affordable(windows: Sequence[Windows], measured: Measured, budget: Budget) -> list[Windows]:
    """The first windows, as far as there is time."""
    num = sum(
        (place + 1) * measured.trace_seconds <= budget.left() for place in range(len(windows))
    )
    if num < len(windows):
        budget.leave_out(f"{len(windows) - num} of {len(windows)} windows")
    return list(windows[:num])


def _listed(windows: Sequence[Windows]) -> str:
    lengths = sorted({window.tokens for by_member in windows for window in by_member.values()})
    return " and ".join(map(str, lengths))


def _sets_to_try(choice: PlanChoice) -> list[Candidate]:
    """The best plan of each of the best sets of members, those with more than the target."""
    by_names: dict[tuple[str, ...], Candidate] = {}
    for candidate in choice.by_members:
        if len(candidate.names) > 1:
            by_names.setdefault(candidate.names, candidate)
    return list(by_names.values())[:NUM_MEMBER_SETS]


def _single_windows(calibration: Calibration, tried: Sequence[Candidate]) -> list[Windows]:
    names = dict.fromkeys(name for candidate in tried for name in candidate.names[1:])
    return [
        {name: Window(tokens=tokens)} for tokens in calibration.usable_windows for name in names
    ]


def _joint_windows(trials: Sequence[WindowTrial]) -> list[Windows]:
    """For each set of members, the best window of each member that saves time, if several do."""
    joint: list[Windows] = []
    for members in dict.fromkeys(trial.best.members for trial in trials):
        of_set = [trial for trial in trials if trial.best.members == members]
        together: dict[str, Window] = {}
        for trial in sorted(of_set, key=lambda trial: trial.best.seconds_per_token):
            if trial.best.seconds_per_token < trial.without.seconds_per_token:
                together = {**trial.windows, **together}
        if len(together) > 1 and together not in joint:
            joint.append(together)
    return joint


def _measure(
    calibration: Calibration,
    measurements: Measurements,
    tried: Sequence[Candidate],
    windows: Sequence[Windows],
    say: Callable[[str], None],
) -> list[Measurements]:
    """Measurements with each of the windows, except those that could not be timed."""
    top_ks = sorted(
        {candidate.plan.tree.top_k for candidate in tried if _drafter(candidate.plan, measurements)}
    )
    timed = compare_costs(
        calibration.engine,
        _prompts_of_all_lengths(calibration),
        [
            plan
            for candidate in tried
            for plan in _shapes(candidate.plan, calibration, measurements)
        ],
        windows,
        calibration.stop_tokens,
        calibration.sampling,
    )
    measured: list[Measurements] = []
    for by_name, (without, with_windows) in zip(windows, timed, strict=True):
        costs = _costs(measurements, by_name, without, with_windows, top_ks)
        if costs is None:
            say(
                f"plan: too few rounds to time a window for {' and '.join(by_name)}; it is left out"
            )
            continue
        traces = _traces(calibration, measurements, by_name, top_ks)
        rules = calibration.rules[0]
        measured.append(
            replace(measurements, traces=traces, windows=dict(by_name), rules=rules, **costs)
        )
    return measured


def _drafter(plan: Plan, measurements: Measurements) -> str | None:
    name = plan.members[-1]
    return name if name in measurements.drafters else None


def _shapes(plan: Plan, calibration: Calibration, measurements: Measurements) -> list[Plan]:
    """The plan, and the same with the smallest tree, to get costs over several row counts; trees of
    a plan are all as large."""
    largest = plan.tree.model_copy(update={"least_probability": 0.0})
    plan = plan.model_copy(update={"ngram": None, "tree": largest})
    if _drafter(plan, measurements) is None:
        return [plan]
    grid = calibration.grid
    least = Tree(depth=min(grid.depths), top_k=plan.tree.top_k, rows=min(grid.rows))
    return [plan, plan.model_copy(update={"tree": least})]


def _prompts_of_all_lengths(calibration: Calibration) -> list[list[int]]:
    """One prompt for each turn, spread evenly by length."""
    by_length = sorted((example.prompt for example in calibration.answered), key=len)
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
        name: DraftCosts({k: seconds for k, seconds in costs.by_top_k.items() if k in top_ks})
        for name, costs in measurements.drafts.items()
    }
    for name in windows:
        if name in passes:
            before, after = without.rounds(name), with_windows.rounds(name)
            rows = sorted(before.keys() & after.keys())
            if not rows:
                return None
            passes[name] = _scaled(
                passes[name], rows, [after[num_rows] / before[num_rows] for num_rows in rows]
            )
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
    """Costs times a ratio that was measured at some rows."""
    factors = np.interp(costs.rows, rows, ratios)
    seconds = (
        float(duration * factor) for duration, factor in zip(costs.seconds, factors, strict=True)
    )
    return PassCosts(costs.rows, tuple(seconds))


def _draft_ratio(without: RoundCosts, with_windows: RoundCosts, name: str) -> float | None:
    """Seconds of drafts with a window over those without, of the same shapes."""
    before, after = without.draft_means(name), with_windows.draft_means(name)
    shapes = before.keys() & after.keys()
    if not shapes:
        return None
    return sum(after[shape] for shape in shapes) / sum(before[shape] for shape in shapes)


def _traces(
    calibration: Calibration, measurements: Measurements, windows: Windows, top_ks: Sequence[int]
) -> list[AcceptanceTrace]:
    """Of all answers; traces of texts that no window shortens are reused."""
    shortest = min(window.tokens for window in windows.values())
    return [
        trace_answer(calibration, example, windows, top_ks)[0] if len(example) > shortest else trace
        for example, trace in zip(calibration.answered, measurements.traces, strict=True)
    ]


def _shown_windows(windows: Mapping[str, Window]) -> str:
    return " and ".join(
        f"{name} sees the first {window.sinks} and the latest {window.tokens:,} tokens"
        for name, window in windows.items()
    )
