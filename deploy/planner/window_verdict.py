"""Why members see a part of the context, or all of it."""

from collections.abc import Mapping
from typing import Any

from polybasic.chain.formats.plan import Window
from polybasic.deploy.planner.measurements import Measurements
from polybasic.deploy.planner.search import MIN_GAIN, Choice


def windows_tried(choice: Choice) -> list[dict[str, Any]]:
    """What each window saves, as plain JSON."""
    return [
        {
            "members": str(one.best.members),
            "windows": {name: window.model_dump() for name, window in one.windows.items()},
            "seconds_per_token_without": one.without.seconds_per_token,
            "seconds_per_token_with": one.best.seconds_per_token,
            "is_taken": one.is_taken,
        }
        for one in choice.window_trials
    ]


def window_verdict(choice: Choice, measurements: Measurements) -> str | None:
    """Why members see a part of the context or all of it; None where there was no question."""
    if not choice.windows or all(len(one.names) == 1 for one in choice.by_members):
        return None
    if measurements.longest_text_tokens <= min(choice.windows):
        longest = f"{measurements.longest_text_tokens:,} tokens"
        return f"no windows: planning prompts with answers have at most {longest}"
    trials = [one for one in choice.window_trials if one.best.members == choice.best.members]
    if not trials:
        return None
    without = trials[0].without.milliseconds
    taken = next((one for one in trials if one.is_taken), None)
    if taken is not None:
        return f"{_shown_windows(taken.windows)}: if all saw everything, it would need {without}"
    best = min(trials, key=lambda one: one.best.seconds_per_token)
    if best.best.seconds_per_token <= best.without.seconds_per_token:
        return f"no windows: the best would save less than {MIN_GAIN:.0%} of the time"
    seconds = best.best.milliseconds
    return f"no windows: with the best, {_shown_windows(best.windows)}, it would need {seconds}"


def _shown_windows(windows: Mapping[str, Window]) -> str:
    return " and ".join(
        f"{name} sees the first {one.sinks} and the latest {one.tokens:,} tokens"
        for name, one in windows.items()
    )
