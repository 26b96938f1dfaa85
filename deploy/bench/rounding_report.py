"""What a report says of rounding: the measured changes, and the outputs that they excuse."""

from typing import Any

Rows = list[list[str]]
"""Of a table, the header first."""


def rounding_line(report: dict[str, Any]) -> str:
    """What was measured of the target's rounding, and what it excused, in a line."""
    rounding = report["rounding"]
    agreements = [one["identical_to_target"] for one in report["systems"].values()]
    ties = sum(one["near_ties"] for one in agreements)
    line = (
        f"{rounding['dtype']} passes over other numbers of rows change the difference of two "
        f"logits by up to {rounding['tolerance']:.3g}, at {rounding['num_positions']} positions of "
        f"the target's answers, of which {100 * rounding['close_share']:.1f}% have two best tokens "
        f"that close; {ties} near ties"
    )
    if ties:
        line += f", the widest {max(one['widest_near_tie'] for one in agreements):.3g}"
    unsound = [name for name, change in rounding["ways"].items() if not change["is_sound"]]
    if unsound:
        line += f"; WRONG, not rounding, and excused by nothing: passes in {', '.join(unsound)}"
    return line


def rounding_rows(rounding: dict[str, Any]) -> Rows:
    """Header and a row for each way in which logits were computed."""
    rows = [["passes in", "change from 1 row", "from the reference", "is"]]
    for name, change in (rounding["ways"] | rounding["others"]).items():
        numbers = (
            "not finite" if change[key] is None else f"{change[key]:.3g}"
            for key in ("from_one_row", "from_reference")
        )
        rows.append([name, *numbers, "rounding" if change["is_sound"] else "WRONG"])
    return rows


def rounding_notes(report: dict[str, Any]) -> list[str]:
    """What the rows say, in Markdown."""
    usual = report["rounding"]["usual"]
    return [
        "Largest change of the difference of two leading candidates' logits, between passes as the",
        "systems run them and those of the target alone, which read 1 row, and between them and a",
        f"reference, from which the operations of prompts depart by {usual:.3g}. What departs",
        "by several times as much does not round, it is wrong; it excuses no output.",
        "",
        f"- {rounding_line(report)}",
    ]
