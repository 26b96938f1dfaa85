"""What `polybasic inspect` shows of a chain: its manifest, in short. Loads no weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from polybasic.chain.console import Console
from polybasic.chain.formats.card import grown_note, member_source, shown_loads, shown_plan
from polybasic.chain.formats.manifest import SCHEMA, read_manifest
from polybasic.chain.formats.plan import MeasuredPlan, Plan
from polybasic.chain.readable import readable_bytes, readable_count

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
    made, systems = manifest.provenance, (manifest.results or {}).get("systems", {})
    return {
        "chain": str(folder),
        "schema": SCHEMA,
        "grown": manifest.grown,
        "members": members,
        "num_bytes": sum(member.num_bytes for member in manifest.members),
        "plan": manifest.plan.model_dump(mode="json"),
        "plans": [
            measured.model_dump(mode="json", exclude={"explanation"}) for measured in manifest.plans
        ],
        "quality": manifest.quality,
        "training": manifest.training,
        "results": {
            name: {key: system.get(key) for key in _RESULT_KEYS} for name, system in systems.items()
        }
        or None,
        "provenance": {
            "recipe": made.recipe.get("name"),
            "command": made.command,
            "git_commit": made.git_commit,
            "package_versions": made.package_versions,
            "data_digests": made.data_digests,
        },
    }


def print_chain(description: dict[str, Any], console: Console) -> None:
    """Print what `describe_chain` returned as tables."""
    console.print(_members_table(description))
    if description["grown"]:
        console.print(grown_note(description["grown"]))
    verifying = [member["name"] for member in description["members"] if member["role"] != "drafter"]
    for content in description["plans"]:
        measured = MeasuredPlan.model_validate(content)
        console.print(
            f"plan for {measured.place}: {shown_plan(measured.plan, verifying)}; "
            f"predicted {1000 * measured.seconds_per_token:.2f} ms a token"
        )
        if by_load := shown_loads(measured, verifying):
            console.print(f"by number of sequences: {by_load}")
    elsewhere = " elsewhere" if description["plans"] else ""
    console.print(f"plan{elsewhere}: {_plan(description['plan'], verifying)}")
    for title in ("quality", "training"):
        for name, content in description[title].items():
            console.print(f"{title} of {name}: {_inline(content)}")
    if description["results"]:
        console.print(_results_table(description["results"]))
    else:
        console.print(f"not measured yet: polybasic bench {description['chain']}")
    made = description["provenance"]
    commit = f" at {made['git_commit'][:12]}" if made["git_commit"] else ""
    console.print(f"made by: {made['command']}{commit}")


def _plan(content: dict[str, Any], verifying: Sequence[str]) -> str:
    return shown_plan(Plan.model_validate(content), verifying)


def _members_table(description: dict[str, Any]) -> Table:
    table = Table(title=description["chain"], title_justify="left", box=box.SIMPLE)
    table.add_column("member", no_wrap=True)
    for column in ("role", "where", "dtype"):
        table.add_column(column, overflow="fold")
    for column in ("parameters", "size"):
        table.add_column(column, justify="right", no_wrap=True)
    for member in description["members"]:
        role = f"{member['role']} ({member['kind']})"
        if member["drafts_for"]:
            role = f"{member['kind']} for {' or '.join(member['drafts_for'])}"
        table.add_row(
            *(member["name"], role, member["where"], member["dtype"]),
            readable_count(member["num_parameters"]),
            readable_bytes(member["num_bytes"]),
        )
    table.add_section()
    table.add_row("all", "", "", "", "", readable_bytes(description["num_bytes"]))
    return table


def _results_table(results: dict[str, dict[str, Any]]) -> Table:
    table = Table("system", box=box.SIMPLE)
    for column in ("tokens/s", "speedup", "tokens per target pass"):
        table.add_column(column, justify="right")
    for name, system in results.items():
        numbers = (system[key] for key in _RESULT_KEYS)
        shown = ("–" if number is None else f"{number:.2f}" for number in numbers)
        table.add_row(name, *shown)
    return table


def _inline(content: dict[str, Any]) -> str:
    return ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in content.items()
        if isinstance(value, str | int | float)
    )
