"""Tables of what is true of a chain whatever its speed: exactness, rounding, memory, members."""

from typing import Any

from polybasic.chain.base.readable import readable_bytes
from polybasic.chain.base.tables import Table
from polybasic.deploy.bench.report.lines import differs, hardware_line, settings_line
from polybasic.deploy.bench.report.parts import (
    NOT_KNOWN,
    shown_milliseconds,
    shown_number,
    shown_ratio,
    shown_share,
)
from polybasic.deploy.bench.schema import Report

_SHOWN_SETTINGS = (
    "num_prompts",
    "repeats",
    "max_new_tokens",
    "temperature",
    "dtype",
    "num_questions_left_out_as_too_long",
    "prompts",
    "prompts_sha256",
)
"""That have words of their own."""


def exactness_table(report: Report) -> Table | None:
    """How many answers of each system are the target's."""
    rows = [
        [
            name,
            f"{agreement.answers}",
            f"{agreement.identical}",
            f"{agreement.near_ties}",
            f"{agreement.different}",
            f"{agreement.widest_near_tie:.3g}",
            f"{agreement.tolerance:.3g}",
            shown_number(agreement.tokens_before_parting, ".0f"),
        ]
        for name, system in report.systems.items()
        if (agreement := system.agreement) is not None
    ]
    if not rows:
        return None
    header = ["system", "answers", "identical", "near ties", "different", "widest tie"]
    notes = (
        "Near ties part from the target's answer where two candidates' logits differ by less than "
        "the tolerance, which is measured: see Rounding. Different: what rounding does not "
        "explain. In common: median of the tokens before they part.",
    )
    title = "Answers beside the target's, token for token"
    return Table(title, [*header, "tolerance", "in common"], rows, notes, is_detail=True)


def loss_table(report: Report) -> Table | None:
    """What lossy plans gain and lose; None where none ran."""
    rows = [
        [
            name,
            shown_ratio(loss.over_plan),
            f"{shown_share(loss.quality.value)} "
            f"({shown_share(loss.quality.low)}–{shown_share(loss.quality.high)})",
            f"{loss.identical}/{loss.answers}",
        ]
        for name, system in report.systems.items()
        if (loss := system.loss) is not None
    ]
    if not rows:
        return None
    notes = (
        "Over the plan: tokens over seconds, prefill included, against `polybasic`, which is "
        "lossless. Own: share of the tokens that the target would have drawn, given all before "
        "them; in brackets 95 % intervals.",
    )
    return Table("Not lossless", ["system", "over the plan", "own", "identical"], rows, notes)


def law_table(report: Report) -> Table | None:
    """Whether sampled tokens have the target's distribution."""
    rows = [
        [name, f"{law.tokens:,}", f"{law.cells}", f"{law.chi_square:.1f}", f"{law.p_value:.3g}"]
        for name, system in report.systems.items()
        if (law := system.law) is not None
    ]
    if not rows:
        return None
    notes = (
        "Chi-square of the sampled tokens' places in the target's distribution, cut into equally "
        "probable cells. p: such a deviation or a larger one is as probable for the target's own "
        "samples; a value near 0 speaks against the system.",
    )
    header = ["system", "tokens", "cells", "chi-square", "p"]
    return Table("The distribution of sampled tokens", header, rows, notes, is_detail=True)


def rounding_table(report: Report) -> Table | None:
    """How much the ways of computing logits change them.

    What computes in another dtype than the target is not wrong where it deviates by more.
    """
    rounding = report.rounding
    if not rounding:
        return None
    rows, own = [], report.systems["target"].dtype
    for name, change in (rounding["ways"] | rounding["others"]).items():
        numbers = (
            "not finite" if change[key] is None else f"{change[key]:.3g}"
            for key in ("from_one_row", "from_reference")
        )
        system = report.systems.get(name)
        dtype = own if system is None else system.dtype
        is_own = dtype == own
        verdict = "rounding" if change["is_sound"] else "another dtype"
        if is_own and not change["is_sound"]:
            is_wrong = differs(report, None if system is None else name)
            verdict = "WRONG" if is_wrong else "more than rounding"
        rows.append([name if is_own else f"{name} in {dtype}", *numbers, verdict])
    notes = (
        "Largest change in the difference of two leading candidates' logits, between passes as the "
        "systems run them and those of the target alone, which read 1 row, and between them and a "
        f"reference, from which the operations for prompts deviate by {rounding['usual']:.3g}. "
        "What deviates by several times as much is more than rounding and excuses no output; it is "
        "WRONG where outputs differ.",
    )
    header = ["passes in", "change from 1 row", "from the reference", "is"]
    return Table("Rounding", header, rows, notes)


def memory_table(stated: dict[str, Any]) -> Table:
    """Bytes of each member that stay, as they were stated."""
    rows = [
        [name, *(readable_bytes(parts[key]) for key in ("weights", "cache"))]
        for name, parts in stated["members"].items()
    ]
    notes = (
        "Stated before loading, by shapes alone. Caches: all that grows with the context, at its "
        "full length; verifying members of the same shapes share one.",
    )
    return Table("Memory", ["member", "weights", "caches"], rows, notes)


def adaptation_table(entries: list[dict[str, Any]]) -> Table | None:
    """Members that were adapted to their target."""
    if not entries:
        return None
    rows = [
        [
            entry["member"],
            entry["measure"],
            *(f"{entry[name]:.4g}" for name in ("before", "after")),
            "yes" if entry["is_kept"] else "no",
        ]
        for entry in entries
    ]
    notes = ("A ready-made head or a 4-bit copy, adapted to this target; on held-out text.",)
    header = ["member", "measure", "before", "after", "kept"]
    return Table("Adapted members", header, rows, notes, num_text_columns=2)


def draft_vocabulary_table(entries: list[dict[str, Any]]) -> Table | None:
    """Trimmed heads, two rows each: as it is, and over the whole vocabulary."""
    if not entries:
        return None
    rows = []
    for entry in entries:
        share = entry["coverage"]
        covered = NOT_KNOWN if share is None else shown_share(share)
        among = f"{entry['num_tokens']:,} tokens"
        rows.append([entry["member"], among, covered, *_gain_and_cost(entry["part"])])
        among = f"all {entry['vocab_size']:,}"
        rows.append([entry["member"], among, "100%", *_gain_and_cost(entry["whole"])])
    notes = (
        "A head that drafts among frequent tokens only, compared with itself over the whole "
        "vocabulary if it can draft that. Coverage: share of the answers' tokens that it can "
        "draft. This and tokens a round were simulated on held-out conversations when it was "
        "trained. Milliseconds: medians of drafts after one of the prompts, both ways in turns.",
    )
    header = ["head", "drafts among", "coverage", "tokens a round", "ms a draft pass"]
    return Table("Draft vocabulary", header, rows, notes, num_text_columns=2)


def origin_table(report: Report) -> Table:
    """What it takes to do the same again."""
    settings = report.settings
    other_settings = {
        name: value for name, value in settings.items() if name not in _SHOWN_SETTINGS
    }
    versions = [f"{name} {number}" for name, number in report.versions.items()]
    peers = dict.fromkeys(system.version for system in report.systems.values() if system.version)
    rows = [
        ["command", report.command],
        ["machine", hardware_line(report.hardware)],
        ["settings", settings_line(settings)],
        ["other settings", ", ".join(f"{name} {value}" for name, value in other_settings.items())],
        ["prompts", f"{settings['prompts']}, sha256 {settings['prompts_sha256'][:16]}"],
        ["chain", f"{report.chain}, digest {report.chain_digest[:16]}"],
        ["versions", ", ".join([*versions, *peers])],
        ["made", report.made],
    ]
    rows = [row for row in rows if row[1]]
    return Table("How it was made", ["what", "value"], rows, wraps=True)


def _gain_and_cost(drafting: dict[str, float | None]) -> list[str]:
    length = shown_number(drafting["accepted_length"])
    return [length, shown_milliseconds(drafting["seconds_per_pass"], 3)]
