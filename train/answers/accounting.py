"""An account of every row that was given: done, failed or skipped, and why."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

_NUM_LISTED = 3
"""Reasons that a line for people names; the accounting names all."""


@dataclass
class Outcome:
    """What became of one row of the source.

    Attributes:
        row: its number in the source, from 0.
        id: its own.
        status: "failed" is what could be asked again with success, "skipped" what could not.
        reason: of all but "done".
        num_turns_left_out: last turns that nobody would read, or that do not fit the context.
    """

    row: int
    id: str
    status: Literal["done", "failed", "skipped"]
    reason: str | None = None
    num_answers: int = 0
    num_cut_answers: int = 0
    num_turns_left_out: int = 0

    def line(self) -> dict[str, Any]:
        """What the accounting says of the row; zeros are not said."""
        stated = {key: value for key, value in vars(self).items() if value}
        return {"row": self.row, **stated}


def counts_of(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """How many rows ended in which way, and what was done for them."""
    statuses = Counter(outcome.status for outcome in outcomes)
    return {
        "num_inputs": len(outcomes),
        "num_done": statuses["done"],
        "num_failed": statuses["failed"],
        "num_skipped": statuses["skipped"],
        "num_answers": sum(outcome.num_answers for outcome in outcomes),
        "num_cut_answers": sum(outcome.num_cut_answers for outcome in outcomes),
        "num_turns_left_out": sum(outcome.num_turns_left_out for outcome in outcomes),
    }


def reasons_of(outcomes: Sequence[Outcome], status: str) -> dict[str, int]:
    """How often each reason was given for a status, the most frequent first."""
    found = Counter(str(each.reason) for each in outcomes if each.status == status)
    return dict(found.most_common())


def listed(reasons: Mapping[str, int]) -> str:
    """The most frequent reasons in one line."""
    parts = [f"{reason} ({count:,})" for reason, count in reasons.items()]
    return ", ".join(parts[:_NUM_LISTED] + ["..."] * (len(parts) > _NUM_LISTED))


def account_in_words(outcomes: Sequence[Outcome]) -> str:
    """The accounting in one line for people."""
    counts = counts_of(outcomes)
    parts = [
        f"answered {counts['num_done']:,} of {counts['num_inputs']:,} conversations again, "
        f"{counts['num_answers']:,} turns"
    ]
    if counts["num_cut_answers"]:
        parts.append(f"{counts['num_cut_answers']:,} answers were cut by their length")
    if counts["num_turns_left_out"]:
        parts.append(f"{counts['num_turns_left_out']:,} turns at the ends were left out")
    for status in ("failed", "skipped"):
        if counts[f"num_{status}"]:
            parts.append(
                f"{status} {counts[f'num_{status}']:,}: {listed(reasons_of(outcomes, status))}"
            )
    return "; ".join(parts)
