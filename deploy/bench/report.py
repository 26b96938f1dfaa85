"""A benchmark's report as tables, for the terminal and as Markdown."""

from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from polybasic.chain.console import Console
from polybasic.chain.formats.card import grown_note
from polybasic.chain.formats.files import whole_file
from polybasic.chain.readable import readable_bytes

Rows = list[list[str]]
"""Of a table, the header first."""


def print_report(report: dict[str, Any], console: Console) -> None:
    """Print the systems and their speedups by task, with the machine and the plan."""
    console.print(f"\n{settings_line(report['settings'])}\n{hardware_line(report['hardware'])}")
    if grown := report.get("grown"):
        console.print(grown_note(grown))
    by_task = "speedup by task (tokens gained by a pass of the target)"
    systems = f"grown to {grown}" if grown else None
    for title, rows in ((systems, system_rows(report)), (by_task, task_rows(report))):
        table = Table(title=title, title_justify="left", box=box.SIMPLE)
        for index, name in enumerate(rows[0]):
            table.add_column(name, justify="left" if index == 0 else "right", no_wrap=True)
        for row in rows[1:]:
            table.add_row(*row)
        console.print(table)
    if answers := answers_line(report.get("target")):
        console.print(answers)
    for entry in report.get("adaptations", []):
        member, measure, before, after, kept = adaptation_rows([entry])[1]
        console.print(f"adapted {member}: {measure} {before} -> {after}, kept: {kept}")
    for entry in report.get("draft_vocabulary", []):
        console.print(draft_vocabulary_line(entry))
    console.print(f"rounding: {rounding_line(report)}")
    if line := baseline_line(report):
        console.print(line)
    console.print(f"plan: {plan_line(report)}")
    console.print(f"memory: {memory_line(report['memory'])}")


def write_markdown(path: Path, report: dict[str, Any]) -> None:
    """Write the report as Markdown, whole."""
    settings, hardware = report["settings"], report["hardware"]
    versions = ", ".join(f"{name} {number}" for name, number in report["versions"].items())
    grown = report.get("grown")
    lines = [
        f"# Speedup over the source target{f', grown to {grown}' if grown else ''}",
        "",
        *([grown_note(grown), ""] if grown else []),
        *_markdown_table(system_rows(report)),
        "",
        "Speedup: total tokens over total seconds, prefill included, against `target`, which is",
        "this runtime running the target alone; `vs hf`: against `hf_generate`. Systems took turns",
        "prompt by prompt. Tokens/pass: mean number of tokens gained by one forward pass of the",
        "target.",
        "Identical: outputs equal to `target`'s token for token, sampled ones for the same seed; a",
        "tie diverges at two tokens whose logits differ by less than their measured rounding.",
        "",
        *([f"{line}.", ""] if (line := baseline_line(report)) else []),
        *_rounding(report),
        "## By task",
        "",
        *_markdown_table(task_rows(report)),
        "",
        "Each cell: speedup over `target`, and tokens a pass of the target.",
        "",
        "## Forward passes and seconds, by member",
        "",
        *_markdown_table(member_rows(report)),
        "",
        "## Plans",
        "",
        *_markdown_table(plan_rows(report)),
        "",
        "Milliseconds a token, decode only; predictions are those of `polybasic plan`, made on",
        "other prompts.",
        "",
        *([f"{line}.", ""] if (line := answers_line(report.get("target"))) else []),
        *_adapted(report.get("adaptations", [])),
        *_draft_vocabulary(report.get("draft_vocabulary", [])),
        "## Memory",
        "",
        *_markdown_table(memory_rows(report["memory"]["stated"])),
        "",
        "Stated before loading, by shapes alone. Caches: all that grows with the context, at its",
        "full length; verifying members of the same shapes share one.",
        "",
        f"- {memory_line(report['memory'])}",
        "",
        "## Setting",
        "",
        f"- plan: {plan_line(report)}",
        f"- {settings_line(settings)}",
        f"- machine: {hardware_line(hardware)}",
        f"- versions: {versions}",
        f"- prompts: sha256 {settings['prompts_sha256'][:16]}…",
        "",
    ]
    with whole_file(path) as partial:
        partial.write_text("\n".join(lines), "utf-8")


def system_rows(report: dict[str, Any]) -> Rows:
    """Header and a row for each system."""
    rows = [["system", "tokens/s", "speedup", "vs hf", "tokens/pass", "identical"]]
    systems = report["systems"]
    library = systems.get("hf_generate")
    for name, system in systems.items():
        rate = system["tokens_per_second"]
        over_library = f"{rate / library['tokens_per_second']:.2f}x" if library else "-"
        rows.append(
            [
                name,
                f"{rate:.0f}",
                f"{system['speedup_vs_target']:.2f}x",
                over_library,
                f"{system['mean_accepted_length']:.2f}",
                _identical(system.get("identical_to_target")),
            ]
        )
    return rows


def baseline_line(report: dict[str, Any]) -> str | None:
    """In which dtype transformers answered, and why; None where it did not."""
    system = report["systems"].get("hf_generate")
    if system is None:
        return None
    chosen, own, answer = system["dtype"], report["settings"]["dtype"], system["answer"]
    seconds = dict(answer["seconds"])
    why = "as the target" if chosen == own else f"faster here than the target's {own}"
    line = (
        f"hf_generate computes in {chosen}, {why}: an answer of {answer['new_tokens']} tokens to a "
        f"prompt of {answer['prompt_tokens']} takes {seconds.pop(chosen):.2f} s"
    )
    for name, taken in seconds.items():
        line += f", in {name} {taken:.2f} s"
    for name in answer["left_out"]:
        line += f"; {name} was not tried, for want of memory"
    if chosen != own:
        line += "; other tokens than the target's can come of the other dtype"
    return line


def task_rows(report: dict[str, Any]) -> Rows:
    """Header and a row for each task: speedup and tokens a pass of each speculating system."""
    systems = {
        name: one
        for name, one in report["systems"].items()
        if name not in ("target", "hf_generate")
    }
    rows = [["task", *systems]]
    tasks = next(iter(report["systems"].values()))["tasks"]
    for task in tasks:
        of_task = [system["tasks"][task] for system in systems.values()]
        cells = [
            f"{one['speedup_vs_target']:.2f}x ({one['mean_accepted_length']:.1f})"
            for one in of_task
        ]
        rows.append([task, *cells])
    return rows


def member_rows(report: dict[str, Any]) -> Rows:
    """Header and a row for each member of each system."""
    rows = [["system", "member", "passes", "seconds", "ms a pass", "tokens a pass"]]
    for name, system in report["systems"].items():
        for member, num_passes in system["forward_passes"].items():
            seconds = system["seconds_by_member"][member]
            gained = system["mean_accepted_length_by_member"].get(member)
            rows.append(
                [
                    name,
                    member,
                    f"{num_passes:.0f}",
                    f"{seconds:.2f}",
                    f"{1e3 * seconds / num_passes:.2f}" if num_passes else "-",
                    "-" if gained is None else f"{gained:.2f}",
                ]
            )
    return rows


def plan_line(report: dict[str, Any]) -> str:
    """The plan that `polybasic` ran, in one line."""
    plan = report["plan"]
    seconds = plan["measured_seconds_per_token"]
    line = plan["shown"]
    if seconds is not None:
        line += f"; {1e3 * seconds:.2f} ms a token, decode only"
        if (predicted := plan["predicted_seconds_per_token"]) is not None:
            line += f", predicted {1e3 * predicted:.2f}"
    if plan["explanation"] is None:
        line += "; as packed, not measured on this machine: polybasic plan"
    return line


def plan_rows(report: dict[str, Any]) -> Rows:
    """Header and a row for each system of this runtime: its plan, prediction and measurement."""
    rows = [["system", "plan", "predicted ms a token", "measured", "off by"]]
    for name, system in report["systems"].items():
        if "plan" not in system:
            continue
        predicted, measured = system["seconds_per_token"].values()
        off = "-" if predicted is None else f"{100 * (predicted / measured - 1):+.0f}%"
        shown = "-" if predicted is None else f"{1e3 * predicted:.2f}"
        rows.append([name, system["shown_plan"], shown, f"{1e3 * measured:.2f}", off])
    return rows


def adaptation_rows(entries: list[dict[str, Any]]) -> Rows:
    """Header and a row for each member that was adapted to its target."""
    rows = [["member", "measure", "before", "after", "kept"]]
    for entry in entries:
        numbers = (f"{entry[name]:.4g}" for name in ("before", "after"))
        rows.append(
            [entry["member"], entry["measure"], *numbers, "yes" if entry["is_kept"] else "no"]
        )
    return rows


def draft_vocabulary_rows(entries: list[dict[str, Any]]) -> Rows:
    """Header and two rows for each trimmed head: as it is, and over the whole vocabulary."""
    rows = [["head", "drafts among", "of the answers' tokens", "tokens a round", "ms a draft pass"]]
    for entry in entries:
        part, whole = entry["part"], entry["whole"]
        share = entry["coverage"]
        covered = "-" if share is None else f"{100 * share:.1f}%"
        rows.append(
            [entry["member"], f"{entry['num_tokens']:,} tokens", covered, *_gain_and_cost(part)]
        )
        rows.append(
            [entry["member"], f"all {entry['vocab_size']:,}", "100%", *_gain_and_cost(whole)]
        )
    return rows


def draft_vocabulary_line(entry: dict[str, Any]) -> str:
    """A trimmed head, in one line."""
    (length, milliseconds), (whole_length, whole_milliseconds) = (
        _gain_and_cost(entry[name]) for name in ("part", "whole")
    )
    return (
        f"{entry['member']} drafts among {entry['num_tokens']:,} of {entry['vocab_size']:,} "
        f"tokens: {length} tokens a round ({whole_length} among all), {milliseconds} ms a draft "
        f"pass ({whole_milliseconds})"
    )


def rounding_line(report: dict[str, Any]) -> str:
    """The target's measured rounding, and the near ties that it excuses, in one line."""
    rounding = report["rounding"]
    systems = report["systems"].values()
    agreements = [one["identical_to_target"] for one in systems if "identical_to_target" in one]
    ties = sum(one["near_ties"] for one in agreements)
    line = (
        f"{rounding['dtype']} passes over different numbers of rows change the difference of two "
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


def rounding_rows(report: dict[str, Any]) -> Rows:
    """Header and a row for each way of computing logits.

    What computes in another dtype than the target is not wrong where it deviates by more.
    """
    rounding = report["rounding"]
    rows = [["passes in", "change from 1 row", "from the reference", "is"]]
    for name, change in (rounding["ways"] | rounding["others"]).items():
        numbers = (
            "not finite" if change[key] is None else f"{change[key]:.3g}"
            for key in ("from_one_row", "from_reference")
        )
        dtype = report["systems"].get(name, {}).get("dtype", rounding["dtype"])
        shown = name if dtype == rounding["dtype"] else f"{name} in {dtype}"
        fault = "WRONG" if dtype == rounding["dtype"] else "another dtype"
        rows.append([shown, *numbers, "rounding" if change["is_sound"] else fault])
    return rows


def rounding_notes(report: dict[str, Any]) -> list[str]:
    """What the rows mean, in Markdown."""
    usual = report["rounding"]["usual"]
    return [
        "Largest change in the difference of two leading candidates' logits, between passes as the",
        "systems run them and those of the target alone, which read 1 row, and between them and a",
        f"reference, from which the operations for prompts deviate by {usual:.3g}. What deviates",
        "by several times as much is not rounding but wrong; it excuses no output.",
        "",
        f"- {rounding_line(report)}",
    ]


def memory_rows(stated: dict[str, Any]) -> Rows:
    """Header and a row for each member: bytes that stay, as they were stated."""
    rows = [["member", "weights", "caches"]]
    for name, parts in stated["members"].items():
        rows.append([name, *(readable_bytes(parts[key]) for key in ("weights", "cache"))])
    return rows


def memory_line(memory: dict[str, Any]) -> str:
    """What a chain takes, in one line: as stated, and as measured if the system reports it."""
    stated, measured = memory["stated"], memory["measured"]
    line = stated_memory_line(stated)
    if measured is None:
        return f"{line}; not measured: this system does not report it"
    return (
        f"{line}; measured {readable_bytes(measured['staying_bytes'])} ({memory['ratio']:.2f}x), "
        f"at most {readable_bytes(measured['peak_bytes'])}"
    )


def stated_memory_line(stated: dict[str, Any]) -> str:
    """What a chain will take, in a line."""
    return (
        f"{readable_bytes(stated['staying_bytes'])} of weights and caches for "
        f"{stated['context_tokens']:,} tokens of context ({stated['device']}, {stated['dtype']}, "
        f"{stated['kernels']} kernels), at most {readable_bytes(stated['peak_bytes'])}; 1,000 "
        f"tokens take {readable_bytes(stated['bytes_per_1000_tokens'])}"
    )


def answers_line(answers: dict[str, Any] | None) -> str:
    """How well a target that was trained here answers, in a line; "" of a ready-made one."""
    if answers is None:
        return ""
    answers_by_task = answers["right_answers_by_task"]
    by_task = ", ".join(
        f"{task} {100 * share:.0f}% and {100 * answers_by_task[task]:.0f}%"
        for task, share in answers["right_tokens_by_task"].items()
    )
    return (
        f"target on held-out conversations: {answers['heldout_loss']:.3f} nats a token, "
        f"{answers['heldout_answer_loss']:.3f} in answers; right are "
        f"{100 * answers['right_tokens']:.1f}% of the answers' tokens and "
        f"{100 * answers['right_answers']:.1f}% of {answers['num_answers']} whole answers "
        f"({by_task})"
    )


def settings_line(settings: dict[str, Any]) -> str:
    """What was run, in one line."""
    line = (
        f"{settings['num_prompts']} prompts, {settings['repeats']} repeats, at most "
        f"{settings['max_new_tokens']} new tokens, temperature {settings['temperature']:g}, "
        f"{settings['dtype']}"
    )
    if num := settings["num_questions_left_out_as_too_long"]:
        line += f"; {num} questions are longer than the context and were not drawn from"
    return line


def hardware_line(hardware: dict[str, Any]) -> str:
    """The machine, in one line."""
    line = (
        f"{hardware['processor']}, {hardware['cores']} cores, {hardware['threads']} threads, "
        f"{hardware['memory_bytes'] / 2**30:.0f} GiB"
    )
    return f"{hardware['accelerator']}; {line}" if "accelerator" in hardware else line


def _adapted(entries: list[dict[str, Any]]) -> list[str]:
    if not entries:
        return []
    return [
        "## Adapted members",
        "",
        *_markdown_table(adaptation_rows(entries)),
        "",
        "Of a ready-made head or a 4-bit copy, adapted to this target, on held-out conversations.",
        "",
    ]


def _draft_vocabulary(entries: list[dict[str, Any]]) -> list[str]:
    if not entries:
        return []
    return [
        "## Draft vocabulary",
        "",
        *_markdown_table(draft_vocabulary_rows(entries)),
        "",
        "A head that drafts among frequent tokens only, compared with itself over the whole",
        "vocabulary if it can draft that. Of the answers' tokens: the share that it can draft, and",
        "tokens a round: simulated on held-out conversations when it was trained. Milliseconds:",
        "medians of drafts after one of the prompts, both ways in turns.",
        "",
    ]


def _rounding(report: dict[str, Any]) -> list[str]:
    rows, notes = rounding_rows(report), rounding_notes(report)
    return ["## Rounding", "", *_markdown_table(rows), "", *notes, ""]


def _gain_and_cost(drafting: dict[str, float | None]) -> list[str]:
    length, seconds = drafting["accepted_length"], drafting["seconds_per_pass"]
    return [
        "-" if length is None else f"{length:.2f}",
        "-" if seconds is None else f"{1e3 * seconds:.3f}",
    ]


def _identical(agreement: dict[str, float] | None) -> str:
    if agreement is None:
        return "-"
    text = f"{agreement['identical']}/{agreement['prompts']}"
    return f"{text} +{ties} ties" if (ties := agreement["near_ties"]) else text


def _markdown_table(rows: Rows) -> list[str]:
    header, *body = rows
    rule = ["---", *["---:"] * (len(header) - 1)]
    return [f"| {' | '.join(row)} |" for row in (header, rule, *body)]
