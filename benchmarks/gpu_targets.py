"""What the figures are to be, beside what a record says they are."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpu_budget import DONE
from gpu_names import (
    CUBLAS,
    DECODING,
    EAGLE2,
    HF_GENERATE,
    RUNTIME,
    TARGET,
    THREE,
    WHOLE,
    answers_part,
)
from rich.table import Table

HOST_GAPS = "host gaps of a round"


@dataclass(frozen=True)
class Figure:
    """One figure of the table.

    Attributes:
        wanted: "<= 1.15" or ">= 4.43"; "" for a figure that nothing is asked of.
        measured: None where it was not.
        beside: the same, measured in another way.
    """

    name: str
    wanted: str
    measured: float | None
    beside: str = ""

    @property
    def is_met(self) -> bool | None:
        """None where there is nothing to say."""
        if self.measured is None or not self.wanted:
            return None
        sign, bound = self.wanted.split()
        return self.measured <= float(bound) if sign == "<=" else self.measured >= float(bound)

    def to_json(self) -> dict[str, Any]:
        """As a record holds it."""
        return {**vars(self), "is_met": self.is_met}


def figures(parts: Mapping[str, Mapping[str, Any]], short: int) -> list[Figure]:
    """The figures of the parts of a record.

    Args:
        short: tokens of context behind which answers count.
    """
    passes = _at(parts, "gpu-7b passes", "found", "passes")
    dense = _pass(passes, 0, RUNTIME, 1)
    int4 = _pass(passes, 1, RUNTIME, 24)
    level = _draft_level(parts)
    cublas = _pass(passes, 0, CUBLAS, 1)
    gaps = _at(parts, "gpu-7b timeline", "found")
    others = [name for name in parts if name.startswith(f"{answers_part('gpu-7b', short, 0)}, ")]
    return [
        Figure(
            "gpu-7b: bf16 pass of 1 row, times its bound",
            "<= 1.15",
            _at(dense, "times_bound"),
            _shown("{:.3f} ms", _at(dense, "milliseconds", "median"))
            + _shown("; cuBLAS {:.3f} ms", _at(cublas, "milliseconds", "median")),
        ),
        _over("gpu-7b: 4-bit pass of 24 rows over it", "<= 0.40", int4, dense),
        _over("gpu-7b: a level of a draft over it", "<= 0.06", level, dense),
        Figure(
            f"gpu-7b: {HOST_GAPS}",
            "<= 0.05",
            _at(gaps, "host_gaps"),
            _shown("{:.3f} without the profiler", _at(gaps, "host_gaps_without_profiler")),
        ),
        *_speedups(parts, answers_part("gpu-7b", short, 0), "4.43", "1.15"),
        *(figure for name in others for figure in _speedups(parts, name, "4.43", "1.15")),
        *_speedups(parts, answers_part("gpu-8b", short, 0), "3.87", ""),
    ]


def table_of(found: list[Figure]) -> Table:
    """For people."""
    table = Table("figure", title="targets", title_justify="left")
    for column in ("wanted", "measured", "met", "beside it"):
        table.add_column(column, justify="right")
    for figure in found:
        measured = "not measured" if figure.measured is None else f"{figure.measured:.3f}"
        met = {None: "", True: "yes", False: "no"}[figure.is_met]
        table.add_row(figure.name, figure.wanted, measured, met, figure.beside)
    return table


def left_out(parts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line for each part that is not whole."""
    lines = []
    for name, part in parts.items():
        if part["status"] != DONE:
            why = part.get("error") or ", ".join(part.get("left_out", []))
            lines.append(f"{name}: {part['status']}{f' ({why[:160]})' if why else ''}")
    return lines


def _speedups(
    parts: Mapping[str, Any], part: str, over_target: str, over_eagle2: str
) -> list[Figure]:
    wanted = {TARGET: over_target, EAGLE2: over_eagle2, HF_GENERATE: ""}
    shape, source = part.partition(" ")[0], _at(parts, part, "found", "prompts")
    speedups = _at(parts, part, "found", "speedups")
    figures = []
    for other, bound in wanted.items():
        key = f"{THREE} over {other}"
        decoding = _shown("{:.2f}x behind the first round", _at(speedups, DECODING, key))
        shown = f"{shape}: three models over {other}{f' ({source})' if source else ''}"
        measured = _at(speedups, WHOLE, key)
        figures.append(Figure(shown, f">= {bound}" if bound else "", measured, decoding))
    return figures


def _pass(passes: Any, place: int, kernels: str, rows: int) -> Any:
    """The cost of a pass of a member, behind the shortest context."""
    members = list(passes or ())
    by_context = _at(passes, members[place], kernels) if place < len(members) else None
    if not by_context:
        return None
    return _at(by_context, min(by_context, key=int), str(rows))


def _draft_level(parts: Mapping[str, Any]) -> Any:
    """A level of the three models' drafts, or of the first shape that was measured."""
    drafts = next(iter((_at(parts, "gpu-7b passes", "found", "drafts") or {}).values()), None)
    if not drafts:
        return None
    tree = _at(parts, "gpu-7b plans", "found", "chosen", THREE, "tree") or {}
    shape = f"{tree.get('depth')}x{tree.get('top_k')}"
    return {"milliseconds": drafts.get(shape, next(iter(drafts.values())))["milliseconds_a_level"]}


def _over(name: str, wanted: str, one: Any, other: Any) -> Figure:
    mine, its = _at(one, "milliseconds", "median"), _at(other, "milliseconds", "median")
    ratio = mine / its if mine is not None and its else None
    return Figure(name, wanted, ratio, _shown("{:.3f} ms", mine))


def _shown(text: str, value: float | None) -> str:
    return "" if value is None else text.format(value)


def _at(content: Any, *keys: str) -> Any:
    """What lies under the keys; None where something on the way is not there."""
    for key in keys:
        if not isinstance(content, Mapping) or key not in content:
            return None
        content = content[key]
    return content
