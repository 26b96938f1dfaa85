"""Tables of what the members of a plan did."""

from dataclasses import dataclass

from polybasic.chain.base.tables import Table
from polybasic.deploy.bench.report.parts import (
    NOT_KNOWN,
    shown_milliseconds,
    shown_number,
    shown_share,
)
from polybasic.deploy.bench.report.rows import speculating
from polybasic.deploy.bench.schema import Lengths, Report, SystemReport

_LENGTH_BINS = ((1, 1), (2, 2), (3, 3), (4, 4), (5, 6), (7, 8), (9, 12), (13, 16), (17, 24))
PREFILL, REST = "prefill", "rest"


@dataclass(frozen=True)
class Spent:
    """Seconds of a system for each new token, by what they went to: prefill, members, rest."""

    seconds: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def spent(system: SystemReport, num_prompts: int) -> Spent | None:
    """Where the time of a system goes; None of another runtime.

    Args:
        num_prompts: of a whole repeat.
    """
    if system.prefill_seconds is None:
        return None
    totals = system.totals
    repeats = totals.num_answers / num_prompts
    parts = {PREFILL: system.prefill_seconds}
    parts |= {name: member.seconds for name, member in system.members.items()}
    seconds = {name: part * repeats / totals.tokens for name, part in parts.items()}
    rest = totals.seconds / totals.tokens - sum(seconds.values())
    return Spent(seconds | {REST: max(rest, 0.0)})


def spent_by_system(report: Report) -> dict[str, Spent]:
    """Of the systems of which it is known."""
    costs = {name: spent(system, len(report.prompts)) for name, system in report.systems.items()}
    return {name: cost for name, cost in costs.items() if cost is not None}


def spent_table(report: Report) -> Table | None:
    """Where the time goes, in milliseconds for each new token."""
    by_system = spent_by_system(report)
    if not by_system:
        return None
    parts = part_names(by_system)
    rows = [
        [
            name,
            *(shown_milliseconds(cost.seconds.get(part)) for part in parts),
            shown_milliseconds(cost.total),
        ]
        for name, cost in by_system.items()
    ]
    notes = (
        "Milliseconds for each new token. Rest: everything beside prefill and passes, such as "
        "drawing, verifying and the text.",
    )
    return Table("Time for each token, by member", ["system", *parts, "total"], rows, notes)


def part_names(by_system: dict[str, Spent]) -> list[str]:
    """Prefill first, members in the plans' order, the rest last."""
    longest_first = sorted(by_system.values(), key=lambda cost: -len(cost.seconds))
    names = dict.fromkeys(name for cost in longest_first for name in cost.seconds)
    return [*(name for name in names if name != REST), REST]


def member_table(report: Report) -> Table | None:
    """Passes and seconds of each member of each system, in one repeat."""
    rows = [
        [
            name,
            member,
            f"{cost.passes:.0f}",
            f"{cost.seconds:.2f}",
            shown_milliseconds(cost.seconds / cost.passes if cost.passes else None),
            NOT_KNOWN if cost.accepted_length is None else f"{cost.accepted_length.mean:.2f}",
            shown_number(cost.rows_per_token),
        ]
        for name, system in report.systems.items()
        for member, cost in system.members.items()
    ]
    if not rows:
        return None
    header = ["system", "member", "passes", "seconds", "ms a pass", "tokens a pass"]
    notes = (
        "In all answers of one repeat, without the prefill. Tokens a pass: gained by a verifying "
        "member. Rows a token: that it read for each token that it gained.",
    )
    title = "Passes and seconds, by member"
    return Table(title, [*header, "rows a token"], rows, notes, num_text_columns=2)


def length_table(report: Report) -> Table | None:
    """Accepted length of each verifying member of the systems that draft."""
    measured = verifier_lengths(report)
    if not measured:
        return None
    longest = max(_longest(lengths) for _, _, lengths in measured)
    bins = [bounds for bounds in _LENGTH_BINS if bounds[0] <= longest]
    if longest > _LENGTH_BINS[-1][1]:
        bins.append((_LENGTH_BINS[-1][1] + 1, longest))
    rows = [
        [
            system,
            member,
            f"{lengths.mean:.2f} ({lengths.low:.2f}–{lengths.high:.2f})",
            f"{lengths.variance:.2f}",
            *(_share_of_passes(lengths, low, high) for low, high in bins),
        ]
        for system, member, lengths in measured
    ]
    shown = [f"{low}" if low == high else f"{low}–{high}" for low, high in bins]
    notes = (
        "Tokens gained by a pass of a verifying member: mean with its 95 % interval, variance over "
        "passes, and the share of passes that gained so many tokens.",
    )
    header = ["system", "member", "mean", "variance", *shown]
    return Table("Accepted length", header, rows, notes, num_text_columns=2)


def verifier_lengths(report: Report) -> list[tuple[str, str, Lengths]]:
    """Of each verifying member of each system that drafts: system, member, accepted lengths."""
    return [
        (name, member, cost.accepted_length)
        for name, system in speculating(report).items()
        for member, cost in system.members.items()
        if cost.accepted_length is not None
    ]


def acceptances(report: Report, of_blocks: bool) -> dict[str, list[float]]:
    """Share of proposals that is accepted, by place, of each proposing member of each system.

    Args:
        of_blocks: of verifying members, which propose blocks, by place in the block; else of
            drafters, by depth in the tree.
    """
    return {
        f"{name}: {member}": cost.acceptance
        for name, system in speculating(report).items()
        for member, cost in system.members.items()
        if cost.acceptance and (cost.accepted_length is not None) == of_blocks
    }


def acceptance_table(report: Report, of_blocks: bool) -> Table | None:
    """Those of `acceptances`."""
    by_name = acceptances(report, of_blocks)
    if not by_name:
        return None
    places = range(max(map(len, by_name.values())))
    rows = [
        [
            name,
            *(
                shown_share(shares[place], 0) if place < len(shares) else NOT_KNOWN
                for place in places
            ),
        ]
        for name, shares in by_name.items()
    ]
    title = "Acceptance by place in the block" if of_blocks else "Acceptance by depth of the tree"
    what = "blocks whose token at this place" if of_blocks else "trees of which a token this deep"
    notes = (f"Share of the {what} was accepted by the member above.",)
    return Table(title, ["proposed by", *(f"{place + 1}" for place in places)], rows, notes)


def prediction_table(report: Report) -> Table | None:
    """Plans, and what they were predicted and measured to take."""
    alone = report.systems.get("target")
    rows = []
    for name, system in report.systems.items():
        if system.measured_seconds_per_token is None:
            continue
        predicted, measured = system.predicted_seconds_per_token, system.measured_seconds_per_token
        off = NOT_KNOWN if predicted is None else f"{100 * (predicted / measured - 1):+.0f}%"
        cells = [shown_milliseconds(predicted), shown_milliseconds(measured), off]
        cells += [
            _speedup(alone.predicted_seconds_per_token if alone else None, predicted),
            _speedup(alone.measured_seconds_per_token if alone else None, measured),
        ]
        rows.append([name, *cells, system.shown_plan or NOT_KNOWN])
    if not rows:
        return None
    notes = (
        "Milliseconds a token, decode only; predictions are those of `polybasic plan`, made on "
        "other prompts, and there is none at another temperature or dtype than the plan's. "
        "Speedups are over `target`: where the machine is faster or slower than when the plan was "
        "made, they say more.",
    )
    header = ["system", "predicted, ms", "measured, ms", "off by"]
    header += ["predicted speedup", "measured speedup", "plan"]
    return Table("Plans, predicted and measured", header, rows, notes, wraps=True)


def _speedup(alone: float | None, seconds: float | None) -> str:
    return f"{alone / seconds:.2f}x" if alone and seconds else NOT_KNOWN


def _longest(lengths: Lengths) -> int:
    return max((length for length, count in enumerate(lengths.counts) if count), default=0)


def _share_of_passes(lengths: Lengths, low: int, high: int) -> str:
    return shown_share(sum(lengths.counts[low : high + 1]) / sum(lengths.counts), 0)
