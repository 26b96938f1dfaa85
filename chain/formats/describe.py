"""What `polybasic inspect` shows of a chain: its manifest, in short. Loads no weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polybasic.chain.base.console import Console
from polybasic.chain.base.readable import readable_bytes, readable_count
from polybasic.chain.base.tables import Table, print_table
from polybasic.chain.formats.card import (
    grown_note,
    member_source,
    shown_contexts,
    shown_early,
    shown_loads,
    shown_plan,
    weight_notes,
)
from polybasic.chain.formats.manifest import SCHEMA, read_manifest
from polybasic.chain.formats.plan import MeasuredPlan, Plan

_RESULT_KEYS = ("tokens_per_second", "speedup_vs_target", "mean_accepted_length")


def describe_chain(folder: Path) -> dict[str, Any]:
    """A JSON-able summary; nothing is checked but the manifest itself (see `check_chain`).

    Raises:
        UserError: `folder` is no chain or its manifest is malformed.
    """
    manifest = read_manifest(folder)
    members = [
        {
            "name": member.name,
            "role": member.role,
            "kind": member.kind,
            "where": member_source(member),
            "dtype": member.dtype,
            "num_parameters": member.num_parameters,
            "num_bytes": member.num_bytes,
            "num_files": len(member.files),
            "drafts_for": list(member.drafts_for),
        }
        for member in manifest.members
    ]
    made, results = manifest.provenance, manifest.results or {}
    return {
        "chain": str(folder),
        "schema": SCHEMA,
        "grown": manifest.grown,
        "members": members,
        "weights": weight_notes(manifest),
        "num_bytes": sum(member.num_bytes for member in manifest.members),
        "plan": manifest.plan.model_dump(mode="json"),
        "plans": [
            measured.model_dump(mode="json", exclude={"explanation"}) for measured in manifest.plans
        ],
        "quality": manifest.quality,
        "training": manifest.training,
        "results": {
            name: {key: system.get(key) for key in _RESULT_KEYS}
            for name, system in results.get("systems", {}).items()
        }
        or None,
        "results_of": results.get("hardware", {})
        and {
            "hardware": measured_on(results),
            "settings": _settings(results),
        },
        "further_reports": [
            str(path.parent.relative_to(folder))
            for path in sorted(folder.glob("report/*/report.json"))
            if path.parent.name != "partial"
        ],
        "provenance": {
            "recipe": made.recipe.get("name"),
            "command": made.command,
            "git_commit": made.git_commit,
            "package_versions": made.package_versions,
            "data_digests": made.data_digests,
        },
    }


def measured_on(report: dict[str, Any]) -> str:
    """The machine of a report's content, or of what a manifest keeps of it, as plans name it."""
    return machine_name(report.get("hardware", {}), _settings(report).get("tensor_parallel", 1))


def machine_name(hardware: dict[str, Any], num_parts: int) -> str:
    """What a measured plan holds for: the accelerator, or the processor, its instruction set and
    torch's threads.

    Args:
        hardware: as `polybasic.deploy.runtime.hardware.describe_hardware` tells it.
        num_parts: processes that models are divided among, which share the threads.
    """
    accelerator = hardware.get("accelerator")
    name = f"{accelerator or processor_line(hardware)}"
    if num_parts > 1:
        return f"{name}, tensor parallel {num_parts}"
    return name if accelerator else f"{name}, {hardware.get('threads')} threads"


def processor_line(hardware: dict[str, Any]) -> str:
    """The processor and its instruction set, which several processors of one name may differ in."""
    parts = (hardware.get(key) for key in ("processor", "instruction_set"))
    return ", ".join(part for part in parts if part is not None)


def _settings(report: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = report.get("settings", {})
    return found


def print_chain(description: dict[str, Any], console: Console) -> None:
    """Print what `describe_chain` returned as tables."""
    console.print(description["chain"], style="bold", soft_wrap=True, highlight=False)
    print_table(_members_table(description), console)
    if description["grown"]:
        console.print(grown_note(description["grown"]))
    for note in description["weights"]:
        console.print(note, highlight=False)
    verifying = [member["name"] for member in description["members"] if member["role"] != "drafter"]
    for content in description["plans"]:
        print_table(_plans_table(MeasuredPlan.model_validate(content), verifying), console)
    elsewhere = " elsewhere" if description["plans"] else ""
    console.print(f"plan{elsewhere}: {_plan(description['plan'], verifying)}")
    for title in ("quality", "training"):
        for name, content in description[title].items():
            console.print(f"{title} of {name}: {_inline(content)}")
    if description["results"]:
        print_table(_results_table(description["results"]), console)
        if description["results_of"]:
            console.print(f"measured on {_conditions(**description['results_of'])}")
    else:
        console.print(f"not measured yet: polybasic bench {description['chain']}")
    if description["further_reports"]:
        console.print(f"further reports: {', '.join(description['further_reports'])}")
    made = description["provenance"]
    commit = f" at {made['git_commit'][:12]}" if made["git_commit"] else ""
    console.print(f"made by: {made['command']}{commit}")


def _plan(content: dict[str, Any], verifying: Sequence[str]) -> str:
    return shown_plan(Plan.model_validate(content), verifying)


def _plans_table(measured: MeasuredPlan, verifying: Sequence[str]) -> Table:
    predicted = f"predicted {1000 * measured.seconds_per_token:.2f} ms a token"
    by_load, by_context = shown_loads(measured, verifying), shown_contexts(measured, verifying)
    rows = [
        ["one", f"{shown_plan(measured.plan, verifying)}; {predicted}"],
        *([f"{number} at a time", plan] for number, plan in by_load.items()),
        *([since, plan] for since, plan in by_context.items()),
        *([behind, plan] for behind, plan in shown_early(measured, verifying).items()),
    ]
    header = ["answers", "members and drafts"]
    return Table(f"Plan for {measured.place}", header, rows, wraps=True)


def _members_table(description: dict[str, Any]) -> Table:
    rows = []
    for member in description["members"]:
        role = f"{member['role']} ({member['kind']})"
        if member["drafts_for"]:
            role = f"{member['kind']} for {' or '.join(member['drafts_for'])}"
        rows.append(
            [
                member["name"],
                member["dtype"],
                readable_count(member["num_parameters"]),
                readable_bytes(member["num_bytes"]),
                role,
                member["where"],
            ]
        )
    header = ["member", "dtype", "parameters", "size", "role", "where"]
    rows.append(["all", "", "", readable_bytes(description["num_bytes"]), "", ""])
    return Table("", header, rows, text_columns=("dtype", "role"), wraps=True)


def _results_table(results: dict[str, dict[str, Any]]) -> Table:
    rows = []
    for name, system in results.items():
        numbers = (system[key] for key in _RESULT_KEYS)
        rows.append([name, *("–" if number is None else f"{number:.2f}" for number in numbers)])
    header = ["system", "tokens/s", "speedup", "tokens per target pass"]
    return Table("", header, rows)


def _conditions(hardware: str, settings: dict[str, Any]) -> str:
    """What the figures of a report hold for."""
    parts = [hardware]
    if "dtype" in settings:
        parts.append(f"{settings['dtype']}")
    if "temperature" in settings:
        parts.append(f"temperature {settings['temperature']:g}")
    if settings.get("rule", "auto") != "auto":
        parts.append(f"rule {settings['rule']}")
    if "num_prompts" in settings:
        num = settings["num_prompts"]
        parts.append(f"{num} prompt{'' if num == 1 else 's'} ({settings.get('prompts')})")
    if "max_new_tokens" in settings:
        parts.append(f"{settings['max_new_tokens']} new tokens")
    return ", ".join(parts)


def _inline(content: dict[str, Any]) -> str:
    return ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in content.items()
        if isinstance(value, str | int | float)
    )
