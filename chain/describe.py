"""What `polybasic inspect` shows of a chain: its manifest, told shortly. Loads no weights."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from polybasic.chain.card import member_source, readable_bytes, readable_count
from polybasic.chain.manifest import SCHEMA, read_manifest

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
        }
        for member in manifest.members
    ]
    made, systems = manifest.provenance, (manifest.results or {}).get("systems", {})
    return {
        "chain": str(folder),
        "schema": SCHEMA,
        "members": members,
        "num_bytes": sum(member.num_bytes for member in manifest.members),
        "plan": manifest.plan.model_dump(mode="json"),
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
    plan = description["plan"]
    tree = plan["tree"]
    console.print(
        f"plan: {' → '.join(plan['members'])}, tree of depth {tree['depth']}, top {tree['top_k']}, "
        f"{tree['rows']} rows, flush length {plan['flush_length']}, {plan['rule']} verification"
    )
    for title in ("quality", "training"):
        if description[title]:
            console.print(f"{title}: {escape(_inline(description[title]))}")
    if description["results"]:
        console.print(_results_table(description["results"]))
    else:
        console.print(f"not measured yet: polybasic bench {escape(description['chain'])}")
    made = description["provenance"]
    commit = f" at {made['git_commit'][:12]}" if made["git_commit"] else ""
    console.print(f"made by: {escape(made['command'])}{commit}")


def _members_table(description: dict[str, Any]) -> Table:
    table = Table(title=escape(description["chain"]), title_justify="left")
    for column in ("member", "role", "kind", "where", "dtype"):
        table.add_column(column, overflow="fold")
    for column in ("parameters", "size"):
        table.add_column(column, justify="right")
    for member in description["members"]:
        table.add_row(
            *(escape(member[key]) for key in ("name", "role", "kind", "where", "dtype")),
            readable_count(member["num_parameters"]),
            readable_bytes(member["num_bytes"]),
        )
    table.add_section()
    table.add_row("all", "", "", "", "", "", readable_bytes(description["num_bytes"]))
    return table


def _results_table(results: dict[str, dict[str, Any]]) -> Table:
    table = Table("system")
    for column in ("tokens/s", "speedup", "tokens per target pass"):
        table.add_column(column, justify="right")
    for name, system in results.items():
        numbers = (system[key] for key in _RESULT_KEYS)
        shown = ("–" if number is None else f"{number:.2f}" for number in numbers)
        table.add_row(escape(name), *shown)
    return table


def _inline(content: dict[str, Any]) -> str:
    return ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in content.items()
        if isinstance(value, str | int | float)
    )
