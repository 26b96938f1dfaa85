"""README.md of a chain: its model card, written from the manifest alone."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.readable import counted, readable_bytes, readable_count
from polybasic.chain.formats.checkpoints.block_types import BLOCK_TYPES
from polybasic.chain.formats.checkpoints.kinds import is_head
from polybasic.chain.formats.files import whole_file
from polybasic.chain.formats.head_kinds.table import HEAD_KINDS
from polybasic.chain.formats.manifest import (
    Manifest,
    Member,
    check_plan,
    read_manifest,
    write_manifest,
)
from polybasic.chain.formats.plan import Flush, Judge, MeasuredPlan, Plan, Tree, Window

CARD_NAME = "README.md"

_LIMITS = """\
- The output distribution is the target's own, whatever the members below it propose; their
  quality decides the speed alone.
- Speeds hold for one stream at a time, except where a number of sequences is named.
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
    """Put measured results (what `bench` keeps of a report) into manifest and card.

    Raises:
        UserError: `folder` is no chain; the disk is full or not writable.
    """
    return _record(folder, read_manifest(folder).model_copy(update={"results": results}))


def record_plan(folder: Path, measured: MeasuredPlan) -> Manifest:
    """Put a measured plan into manifest and card; it replaces the one of the same conditions.

    Raises:
        UserError: `folder` is no chain, or one whose members cannot run so; the disk is full or
            not writable.
    """
    manifest = read_manifest(folder)
    try:
        for plan in measured.all_plans:
            check_plan(plan, manifest.members)
    except ValueError as error:
        raise UserError(
            "plan does not fit the chain", f"{folder} ({error})", "plan with its own members"
        ) from error
    others = (plan for plan in manifest.plans if plan.conditions != measured.conditions)
    return _record(folder, manifest.model_copy(update={"plans": (*others, measured)}))


def render_card(manifest: Manifest) -> str:
    """The card as Markdown with the hub's front matter."""
    sections = [
        _front_matter(manifest),
        f"# {manifest.provenance.recipe.get('name', 'A polybasic chain')}",
        "A [polybasic](https://arxiv.org/abs/2510.26527) chain: models that speed up one target by "
        "staged speculative sampling without changing any of its probabilities.",
        *([f"**{grown_note(manifest.grown)}**"] if manifest.grown else []),
        _use(),
        "## Members\n\n" + _members(manifest),
        "## Lineage\n\n" + _lineage(manifest),
        "## Plan\n\n" + _plans(manifest),
    ]
    if manifest.results is not None:
        sections.append("## Results\n\n" + _results(manifest.results))
    for title, records in (
        ("Quality of the intermediates", manifest.quality),
        ("Training", manifest.training),
    ):
        if records:
            tables = (f"### {name}\n\n{_pairs(content)}" for name, content in records.items())
            sections.append(f"## {title}\n\n" + "\n\n".join(tables))
    sections.append("## Limits\n\n" + _LIMITS)
    return "\n\n".join(sections) + "\n"


def grown_note(shape_name: str) -> str:
    """What must be known of anything that a grown chain gave."""
    return (
        f"Grown to the shapes of {shape_name}: a small chain inside the shapes of a large one. "
        "Answers and acceptance are the small chain's, time and memory the large shape's."
    )


def weight_notes(manifest: Manifest) -> list[str]:
    """A sentence for a target in 4 bits, and for each member whose weights are, or are a copy of,
    those of GGUF files."""
    notes = []
    for member in manifest.members:
        if member.gguf is None:
            if member.role == "target" and member.kind == "awq":
                notes.append(
                    f"The weights of {member.name} are in 4 bits, in groups of "
                    f"{member.group_size} inputs, multiplied as they are stored; lossless means "
                    "with respect to these weights."
                )
            continue
        files = ", ".join(f"{name} (sha256 {digest})" for name, digest in member.gguf.files.items())
        types = ", ".join(member.gguf.types)
        if member.kind == "awq" or member.is_copy:
            copy = "4-bit copy" if member.kind == "awq" else f"copy in {member.dtype}"
            note = f"{member.name} is a {copy} of the weights of {files}, in {types}"
            if member.repeats_codes:
                note += (
                    f"; its groups of {member.group_size} inputs are not larger than the file's, "
                    "whose codes it can repeat: what it gains says nothing of models that were not "
                    "in 4 bits before"
                )
        else:
            note = f"The weights of {member.name} are those of {files}, in {types}, "
            if member.dtype in BLOCK_TYPES:
                note += "multiplied as they are stored, on a CPU by rows in 8 bits"
            else:
                note += f"held in {member.dtype}"
        if member.role == "target":
            note += "; lossless means with respect to these weights"
        notes.append(f"{note}.")
    return notes


def member_source(member: Member) -> str:
    """Where a member lies, for people."""
    reference = member.reference
    if reference.path is not None:
        return f"{reference.path}/"
    return f"{reference.source}" + (f"@{reference.revision}" if reference.revision else "")


def shown_members(plan: Plan, verifying: Iterable[str]) -> str:
    """A plan's members for people: "target → intermediate (sees 4 + 1,024) → draft + n-grams".

    What a member with a window sees are its sinks and its latest tokens.

    Args:
        plan: any plan of the chain.
        verifying: names of the chain's verifying members.
    """
    shown = " → ".join(name + _sees(plan.windows.get(name)) for name in plan.members)
    if plan.ngram is None:
        return shown
    return f"{shown} {'→' if plan.members[-1] in verifying else '+'} n-grams"


def shown_plan(plan: Plan, verifying: Sequence[str]) -> str:
    """All that a plan says of its members, for people, in a line; as `shown_members`."""
    members = shown_members(plan, verifying)
    if len(plan.members) == 1 and plan.ngram is None:
        return f"{members} alone, no drafting"
    parts = [members]
    if plan.members[-1] not in verifying or plan.ngram is not None:
        parts.append(f"tree of {shown_tree(plan.tree)}")
    if flush := shown_flush(plan, verifying):
        parts.append(f"verification: {flush}")
    return "; ".join([*parts, shown_rule(plan)])


def shown_rule(plan: Plan) -> str:
    """How a plan's tokens are drawn and kept, for people."""
    if plan.lossy is None:
        return f"rule: {plan.rule}"
    if isinstance(plan.lossy, Judge):
        return f"lossy: keeps what matters with a probability under {plan.lossy.threshold:.3g}"
    return (
        f"lossy: falls back under {plan.lossy.fallback_threshold:g}, takes back over "
        f"{plan.lossy.rollback_threshold:g}"
    )


def shown_tree(tree: Tree) -> str:
    """A draft tree for people: "depth 7, top 4, 12 rows, least probability 0.05"."""
    shown = f"depth {tree.depth}, top {tree.top_k}, {tree.rows} rows"
    least = tree.least_probability
    return f"{shown}, least probability {least:g}" if least else shown


def shown_flush(plan: Plan, verifying: Iterable[str]) -> str:
    """When a plan's verifying members are asked, for people, or ""; as `shown_members`."""
    above = [name for name in plan.members if name in verifying][:-1]
    return "; ".join(f"{name} {_flush(plan.flush[name])}" for name in above)


def shown_loads(measured: MeasuredPlan, verifying: Collection[str]) -> dict[str, str]:
    """Plans by load for people: {"1 or more": "target → draft (depth 5, top 2, 6 rows)", "9 or
    more": "target"}; empty if there are none that look different.

    Args:
        verifying: as `shown_members`.
    """
    shown: dict[str, str] = {}
    first = 1
    for plan, group in groupby(
        measured.by_load, lambda load: _members_and_tree(load.plan, verifying)
    ):
        shown[f"{first} or more"] = plan
        first = max(load.sequences for load in group) + 1
    return shown if len(shown) > 1 else {}


def shown_contexts(measured: MeasuredPlan, verifying: Collection[str]) -> dict[str, str]:
    """Plans by context for people: {"at once": "target → draft (depth 5, top 4, 16 rows)", "from
    5,793 tokens on": "target"}; empty if there are none that look different.

    Args:
        verifying: as `shown_members`.
    """
    shown: dict[str, str] = {}
    for plan, group in groupby(
        measured.context_starts, lambda start: _members_and_tree(start[1], verifying)
    ):
        first, _ = next(group)
        shown[f"from {first:,} tokens on" if first > 1 else "at once"] = plan
    return shown if len(shown) > 1 else {}


def shown_early(measured: MeasuredPlan, verifying: Collection[str]) -> dict[str, str]:
    """The early plan for people: {"begun behind 300 tokens or more": "target → n-grams"}; empty if
    there is none.

    Args:
        verifying: as `shown_members`.
    """
    if measured.early is None:
        return {}
    plan = _members_and_tree(measured.early.plan, verifying)
    first = measured.early.most_at_once(measured.seconds_per_token) + 1
    return {f"begun behind {first:,} tokens or more": plan}


def _listed(plans: Mapping[str, str]) -> str:
    return "; ".join(f"{where}: {plan}" for where, plan in plans.items())


def _members_and_tree(plan: Plan, verifying: Collection[str]) -> str:
    drafts = plan.members[-1] not in verifying
    return shown_members(plan, verifying) + (f" ({shown_tree(plan.tree)})" if drafts else "")


def _sees(window: Window | None) -> str:
    return "" if window is None else f" (sees {window.sinks} + {window.tokens:,})"


def _flush(flush: Flush) -> str:
    length = f"{counted(flush.length, 'token')}{' at most, adaptive' if flush.adaptive else ''}"
    return f"after {length}"


def _record(folder: Path, manifest: Manifest) -> Manifest:
    write_manifest(folder, manifest)
    write_card(folder, manifest)
    return manifest


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
            _what_it_is(member),
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
        *(f"- {note}" for note in weight_notes(manifest)),
    ]
    return "\n".join(lines)


def _what_it_is(member: Member) -> str:
    if member.role == "target":
        return "the model whose distribution is kept"
    if member.role == "intermediate":
        bits = "model in 4 bits (AWQ, GEMM layout)" if member.kind == "awq" else "smaller model"
        return f"{bits}: verifies drafts, proposes to the member above it"
    if is_head(member.kind):
        name = HEAD_KINDS[member.kind].title
        if HEAD_KINDS[member.kind].steers:
            return f"{name}: steers a small model by the states of {' or '.join(member.drafts_for)}"
        if HEAD_KINDS[member.kind].shares_cache:
            return f"{name}: drafts trees with the first layers of {' or '.join(member.drafts_for)}"
        return f"{name} head: drafts trees from the features of {' or '.join(member.drafts_for)}"
    bits = "small model in 4 bits" if member.kind == "awq" else "small model"
    return f"{bits}: drafts trees for {' or '.join(member.drafts_for)}"


def _plans(manifest: Manifest) -> str:
    verifying = [member.name for member in manifest.verifying]
    parts = [f"{shown_plan(manifest.plan, verifying)}."]
    if manifest.plans:
        header = ("hardware", "plan", "predicted ms a token")
        rows = [
            (
                measured.place,
                shown_plan(measured.plan, verifying),
                f"{1000 * measured.seconds_per_token:.2f}",
            )
            for measured in manifest.plans
        ]
        by_load = [
            f"- {measured.place}, by {what}: {_listed(shown)}."
            for measured in manifest.plans
            for what, shown in (
                ("number of sequences", shown_loads(measured, verifying)),
                ("context", shown_contexts(measured, verifying)),
                ("length of the prompt", shown_early(measured, verifying)),
            )
            if shown
        ]
        parts = [
            "Chosen by measurement, one for each kind of machine, dtype and temperature:",
            _table(header, rows),
            *(["\n".join(by_load)] if by_load else []),
            f"Elsewhere: {parts[0]}",
        ]
    return "\n\n".join(parts)


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
    parts.append("All of it: `report/report.html`, `report/report.md`, `report/report.json`.")
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
