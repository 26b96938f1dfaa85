"""README.md of a chain: its model card, written from the manifest alone."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from polybasic.chain.files import whole_file
from polybasic.chain.manifest import Manifest, Member, read_manifest, write_manifest

CARD_NAME = "README.md"

_HOW = {
    "decoder": "the model whose distribution is kept",
    "awq": "the target in 4 bits (AWQ, GEMM layout): verifies drafts, proposes to the target",
    "eagle2": "EAGLE-2 head: drafts trees from the target's features",
}
_LIMITS = """\
- The output distribution is the target's own, whatever the members below it propose; their
  quality decides the speed alone.
- One stream at a time: speeds hold for batch size 1.
- Speeds hold for the hardware, prompts and settings named here. `polybasic bench` measures yours.
- The target's licence and terms of use hold for the chain."""


def write_card(folder: Path, manifest: Manifest) -> None:
    """Write `folder`/README.md, whole.

    Raises:
        UserError: the disk is full or not writable.
    """
    with whole_file(folder / CARD_NAME) as partial:
        partial.write_text(render_card(manifest), "utf-8")


def record_results(folder: Path, results: dict[str, Any]) -> Manifest:
    """Put measured results (a report of schema polybasic.report/1) into manifest and card.

    The members that the report found fastest (`plan.members`) become the chain's plan.

    Raises:
        UserError: `folder` is no chain; the disk is full or not writable.
    """
    manifest = read_manifest(folder)
    members = tuple(results.get("plan", {}).get("members", manifest.plan.members))
    plan = manifest.plan.model_copy(update={"members": members})
    manifest = manifest.model_copy(update={"results": results, "plan": plan})
    write_manifest(folder, manifest)
    write_card(folder, manifest)
    return manifest


def render_card(manifest: Manifest) -> str:
    """The card as Markdown with the hub's front matter."""
    sections = [
        _front_matter(manifest),
        f"# {manifest.provenance.recipe.get('name', 'A polybasic chain')}",
        "A [polybasic](https://arxiv.org/abs/2510.26527) chain: models that speed up one target by "
        "staged speculative sampling without changing any of its probabilities.",
        _use(),
        "## Members\n\n" + _members(manifest),
        "## Lineage\n\n" + _lineage(manifest),
        "## Plan\n\n" + _plan(manifest),
    ]
    if manifest.results is not None:
        sections.append("## Results\n\n" + _results(manifest.results))
    if manifest.quality is not None:
        sections.append("## Quality of the intermediate\n\n" + _pairs(manifest.quality))
    if manifest.training is not None:
        sections.append("## Training of the draft head\n\n" + _pairs(manifest.training))
    sections.append("## Limits\n\n" + _LIMITS)
    return "\n\n".join(sections) + "\n"


def readable_bytes(num_bytes: int) -> str:
    """12_345_678 -> "12.3 MB"."""
    return _scaled(num_bytes, ("B", "kB", "MB", "GB", "TB"), " ")


def readable_count(count: int) -> str:
    """12_345_678 -> "12.3M"."""
    return _scaled(count, ("", "k", "M", "B", "T"), "")


def member_source(member: Member) -> str:
    """Where a member lies, for people."""
    reference = member.reference
    if reference.path is not None:
        return f"{reference.path}/"
    return f"{reference.source}" + (f"@{reference.revision}" if reference.revision else "")


def _scaled(value: float, units: tuple[str, ...], space: str) -> str:
    exponent = 0
    while value >= 999.95 and exponent < len(units) - 1:
        value, exponent = value / 1000, exponent + 1
    return f"{value:.1f}{space}{units[exponent]}" if exponent else f"{value:.0f}{space}{units[0]}"


def _hub_id(manifest: Manifest) -> str | None:
    source = manifest.members[0].reference.source
    return None if source is None or source.startswith((".", "/")) else source


def _front_matter(manifest: Manifest) -> str:
    content: dict[str, Any] = {
        "library_name": "polybasic",
        "tags": ["polybasic", "speculative-decoding", "eagle", "awq"],
    }
    if (base_model := _hub_id(manifest)) is not None:
        content["base_model"] = base_model
    return "---\n" + yaml.safe_dump(content, sort_keys=False) + "---"


def _use() -> str:
    return """\
```bash
polybasic generate CHAIN -p "Why is the sky blue?"
```

```python
from polybasic.deploy import load_chain

chain = load_chain("CHAIN")
print(chain.generate("Why is the sky blue?").text)
```

`CHAIN` is this folder or its hub id. `polybasic verify CHAIN` checks every file's digest."""


def _members(manifest: Manifest) -> str:
    rows = [
        (
            member.name,
            _HOW[member.kind],
            member_source(member),
            member.dtype,
            readable_count(member.num_parameters),
            readable_bytes(member.num_bytes),
        )
        for member in manifest.members
    ]
    return _table(("member", "what it is", "where", "dtype", "parameters", "size"), rows)


def _lineage(manifest: Manifest) -> str:
    made = manifest.provenance
    lines = [
        f"- Target: `{_hub_id(manifest) or member_source(manifest.members[0])}`",
        f"- Command: `{made.command}`",
        f"- Git commit: {f'`{made.git_commit}`' if made.git_commit else 'not known'}",
        "- Versions: " + ", ".join(f"{k} {v}" for k, v in made.package_versions.items()),
        *(f"- Data: `{name}`, sha256 `{digest}`" for name, digest in made.data_digests.items()),
        "- Recipe: `provenance.recipe` in `chain.json`",
    ]
    return "\n".join(lines)


def _plan(manifest: Manifest) -> str:
    plan = manifest.plan
    line = (
        f"{' → '.join(plan.members)}; draft tree of depth {plan.tree.depth}, "
        f"top {plan.tree.top_k}, {plan.tree.rows} rows"
    )
    if len(plan.members) > 2:
        line += f"; flush length {plan.flush_length} tokens; {plan.rule} verification"
    return f"{line}."


def _results(results: dict[str, Any]) -> str:
    systems = results.get("systems", {})
    rows = [
        (
            name,
            _number(system.get("tokens_per_second")),
            _number(system.get("speedup_vs_target")),
            _number(system.get("mean_accepted_length")),
        )
        for name, system in systems.items()
    ]
    header = ("system", "tokens/s", "speedup over target", "tokens per target pass")
    parts = [_table(header, rows)]
    for key in ("hardware", "settings"):
        if results.get(key):
            parts.append(f"{key.capitalize()}: {_inline(results[key])}.")
    parts.append("All of it: `report/report.md`, `report/report.json`.")
    return "\n\n".join(parts)


def _pairs(content: dict[str, Any]) -> str:
    rows = [
        (name.replace("_", " "), _value(value))
        for name, value in content.items()
        if isinstance(value, str | int | float)
    ]
    return _table(("", ""), rows)


def _inline(content: Any) -> str:
    if isinstance(content, dict):
        return ", ".join(f"{key.replace('_', ' ')} {_value(v)}" for key, v in content.items())
    return _value(content)


def _number(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, int | float) else "–"


def _value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    def lines() -> Iterator[str]:
        yield "| " + " | ".join(header) + " |"
        yield "|" + "---|" * len(header)
        for row in rows:
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"

    return "\n".join(lines())
