"""Statements of a report, each one of a line."""

from typing import Any

from polybasic.chain.base.readable import counted, readable_bytes
from polybasic.chain.formats.card import grown_note
from polybasic.chain.formats.describe import processor_line
from polybasic.chain.formats.plan import decision_lines
from polybasic.deploy.bench.report.parts import (
    shown_interval,
    shown_milliseconds,
    shown_rate,
    shown_share,
    shown_times,
)
from polybasic.deploy.bench.schema import Report, SystemReport

UNLIKELY = 1e-4
"""A p-value below which samples are said not to have the target's distribution."""


def status_lines(report: Report) -> list[str]:
    """What must be known before any figure: that it is partial, grown, or what its notes say."""
    lines = []
    if not report.complete:
        lines.append(
            f"Partial: the run was interrupted after {report.answered} of {report.planned} turns. "
            "All figures are of these alone; the same command continues it."
        )
    if report.grown:
        lines.append(grown_note(report.grown))
    return lines + report.notes + report.noise.warnings


def headline_lines(report: Report) -> list[str]:
    """What was gained, over the target alone and beside the fastest of other runtimes."""
    systems = report.systems

    def speed(name: str) -> float:
        return systems[name].totals.tokens_per_second

    ours = {
        name: system
        for name, system in systems.items()
        if system.runtime == "polybasic" and system.loss is None
    }
    name = "polybasic" if "polybasic" in ours else max(ours, key=speed)
    if name == "polybasic" and report.repeating:
        copies = " and ".join(f"`{member}`" for member in report.repeating)
        lines = [
            f"No headline: {copies} can repeat the 4-bit codes of the target's own file. The "
            "tables say what was gained."
        ]
    elif name == "target":
        lines = [f"`target` answers at {_rate(ours[name])} tokens/s."]
    else:
        totals = ours[name].totals
        ratio = totals.speedup
        line = f"`{name}` is {shown_times(ratio.value)} times as fast as the target alone"
        line += f" ({shown_interval(ratio)})"
        if ratio.remedy is None:
            if totals.over_hf is not None and totals.over_hf.is_conclusive:
                line += f" and {shown_times(totals.over_hf.value)} times as fast as `hf_generate`"
            lines = [f"{line}, prefill included."]
        else:
            lines = [f"{line}, prefill included: not conclusive. What would help: {ratio.remedy}."]
    others = [other for other, system in systems.items() if system.runtime != "polybasic"]
    if others:
        best = max(others, key=speed)
        lines.append(
            f"Of other runtimes the fastest is `{best}` in {systems[best].dtype}, with "
            f"{_rate(systems[best])} tokens/s beside the {_rate(systems[name])} of `{name}`."
        )
        dtype = systems["target"].dtype
        alike = [other for other in others if systems[other].dtype == dtype]
        if alike and best not in alike:
            best = max(alike, key=speed)
            lines.append(
                f"The fastest in {dtype}, as the target's, is `{best}`, with "
                f"{_rate(systems[best])} tokens/s."
            )
    return [*lines, *_slow_lines(report)]


def _slow_lines(report: Report) -> list[str]:
    """That transformers computes the target faster than this runtime, and what to try."""
    beside = report.systems["target"].totals.over_hf
    if beside is None or beside.high >= 1:
        return []
    line = (
        f"This runtime is slow on this processor: `target`, without drafts, is "
        f"{shown_times(beside.value)} times as fast as `hf_generate` ({shown_interval(beside)})."
    )
    if report.memory["stated"]["kernels"] == "native":
        line += (
            " POLYBASIC_KERNELS=eager computes by PyTorch's operations, as transformers does: "
            "measure with it too, and keep what is faster. `polybasic doctor` names the kernels."
        )
    return [line]


def noise_line(report: Report) -> str:
    """How steady the machine was."""
    rates = ", ".join(shown_rate(rate) for rate in report.noise.repeat_tokens_per_second)
    if not rates:
        return "No repeat was completed: how steady the machine was is not known."
    if len(report.noise.repeat_tokens_per_second) == 1:
        return f"target answered at {rates} tokens/s in the only repeat: no drift can be seen."
    return (
        f"target answered at {rates} tokens/s, repeat by repeat: a spread of "
        f"{shown_share(report.noise.spread)}."
    )


def exactness_line(report: Report) -> str:
    """Whether the outputs are the target's."""
    agreements = {
        name: system.agreement
        for name, system in report.systems.items()
        if system.agreement is not None and name != "target"
    }
    ours = [
        agreement
        for name, agreement in agreements.items()
        if report.systems[name].runtime == "polybasic"
    ]
    parts = []
    if ours:
        answers, identical, ties, different = (
            sum(getattr(agreement, name) for agreement in ours)
            for name in ("answers", "identical", "near_ties", "different")
        )
        excused = f", {ties} part at near ties" if ties else ""
        faults = f", {different} DIFFER beyond rounding" if different else ""
        parts.append(
            f"{identical} of {answers} answers of this runtime's systems are identical to the "
            f"target's{excused}{faults}."
        )
    differing = [
        f"{name} {agreement.different}"
        for name, agreement in agreements.items()
        if report.systems[name].runtime != "polybasic" and agreement.different
    ]
    if differing:
        parts.append(
            f"Answers of other runtimes that differ beyond rounding: {', '.join(differing)}."
        )
    laws = {name: system.law for name, system in report.systems.items() if system.law is not None}
    if laws:
        wrong = [name for name, law in laws.items() if law.p_value < UNLIKELY]
        least = min(law.p_value for law in laws.values())
        parts.append(
            f"Sampled tokens do NOT have the target's distribution: {', '.join(wrong)}."
            if wrong
            else "Sampled tokens are consistent with the target's distribution "
            f"(smallest p-value {least:.3g}, of {counted(len(laws), 'system')})."
        )
    return " ".join(parts) or "No answers were compared with the target's."


def plan_line(report: Report) -> str:
    """The plan that `polybasic` ran."""
    plan = report.plan
    seconds = plan["measured_seconds_per_token"]
    line = plan["shown"]
    if seconds is not None:
        line += f"; {shown_milliseconds(seconds)} ms a token, decode only"
        if (predicted := plan["predicted_seconds_per_token"]) is not None:
            line += f", predicted {shown_milliseconds(predicted)}"
    if plan["explanation"] is None:
        line += "; as packed, not measured on this machine: polybasic plan"
    return line


def decided_lines(report: Report) -> list[str]:
    """Why the planner chose it; empty of a plan that was not measured."""
    explanation = report.plan["explanation"]
    return [] if explanation is None else decision_lines(explanation)


def rounding_line(report: Report) -> str:
    """The target's measured rounding, and the near ties that it excuses."""
    rounding = report.rounding
    agreements = [
        system.agreement for system in report.systems.values() if system.agreement is not None
    ]
    ties = sum(agreement.near_ties for agreement in agreements)
    line = (
        f"{rounding['dtype']} passes over different numbers of rows change the difference of two "
        f"logits by up to {rounding['tolerance']:.3g}, at {rounding['num_positions']} positions of "
        f"the target's answers, of which {shown_share(rounding['close_share'])} have two best "
        f"tokens that close; {ties} near ties"
    )
    if ties:
        line += f", the widest {max(agreement.widest_near_tie for agreement in agreements):.3g}"
    unsound = [name for name, change in rounding["ways"].items() if not change["is_sound"]]
    if unsound:
        line += f"; more than rounding, and it excuses no output: passes in {', '.join(unsound)}"
        line += ", where outputs are WRONG" if differs(report, None) else ", no output differs"
    return line


def differs(report: Report, name: str | None) -> bool:
    """Whether outputs differ from the target's by more than rounding explains.

    Args:
        name: of a system; None for all of this runtime.
    """
    return any(
        (system.agreement is not None and system.agreement.different > 0)
        or (system.law is not None and system.law.p_value < UNLIKELY)
        for key, system in report.systems.items()
        if (system.runtime == "polybasic" if name is None else key == name)
    )


def memory_line(memory: dict[str, Any]) -> str:
    """What a chain takes: as stated, and as measured if the system reports it."""
    stated, measured = memory["stated"], memory["measured"]
    line = stated_memory_line(stated)
    if measured is None:
        return f"{line}; not measured: this system does not report it"
    return (
        f"{line}; measured {readable_bytes(measured['staying_bytes'])} ({memory['ratio']:.2f}x), "
        f"at most {readable_bytes(measured['peak_bytes'])}"
    )


def stated_memory_line(stated: dict[str, Any]) -> str:
    """What a chain will take."""
    num_others = stated.get("num_parts", 1) - 1
    followers = f"; each of {num_others} other processes at most " if num_others else ""
    followers += readable_bytes(stated["follower_bytes"]) if num_others else ""
    return (
        f"{readable_bytes(stated['staying_bytes'])} of weights and caches for "
        f"{stated['context_tokens']:,} tokens of context ({stated['device']}, {stated['dtype']}, "
        f"{stated['kernels']} kernels), at most {readable_bytes(stated['peak_bytes'])}; 1,000 "
        f"tokens take {readable_bytes(stated['bytes_per_1000_tokens'])}{followers}"
    )


def settings_line(settings: dict[str, Any]) -> str:
    """What was run."""
    source = f" ({settings['prompts']})" if settings["prompts"] else ""
    line = (
        f"{counted(settings['num_prompts'], 'prompt')}{source}, "
        f"{counted(settings['repeats'], 'repeat')}, at most "
        f"{counted(settings['max_new_tokens'], 'new token')}, "
        f"temperature {settings['temperature']:g}, {settings['dtype']}"
    )
    if num := settings["num_questions_left_out_as_too_long"]:
        were = (
            "question is longer than the context and was"
            if num == 1
            else ("questions are longer than the context and were")
        )
        line += f"; {num} {were} not drawn from"
    return line


def hardware_line(hardware: dict[str, Any]) -> str:
    """The machine."""
    line = (
        f"{processor_line(hardware)}, {hardware['cores']} cores, {hardware['threads']} threads, "
        f"{hardware['memory_bytes'] / 2**30:.0f} GiB"
    )
    return f"{hardware['accelerator']}; {line}" if "accelerator" in hardware else line


def _rate(system: SystemReport) -> str:
    return shown_rate(system.totals.tokens_per_second)
