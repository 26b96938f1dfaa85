"""The pipeline from conversations to a measured chain: which stages a recipe has, and their order.

Heavy modules are imported where they run, so that a run with nothing to do answers at once.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from polybasic.chain.base.terminal import say
from polybasic.chain.formats.checkpoints.kinds import is_head
from polybasic.chain.formats.files import sha256_of_file, write_json
from polybasic.chain.formats.manifest import SCHEMA, Provenance
from polybasic.chain.formats.package import Part, package_chain
from polybasic.deploy.planner.prompts import write_first_turns
from polybasic.recipes.pipeline.members import model_stages, packed_plan, parts_of
from polybasic.recipes.pipeline.model_stages import head_stage, quantized_stage
from polybasic.recipes.pipeline.prompts import (
    PLAN_PROMPTS_NAME,
    PROMPTS_NAME,
    PromptSource,
    bench_prompts,
    plan_prompts,
    with_prompts,
)
from polybasic.recipes.pipeline.provenance import git_commit, package_versions
from polybasic.recipes.pipeline.regenerated_stage import SELF_PROMPTED_STAGE, regenerated_stage
from polybasic.recipes.pipeline.running import PipelineStage, Workspace
from polybasic.recipes.pipeline.source_stages import SMALL_TARGET, TARGET
from polybasic.recipes.pipeline.sources import (
    checkpoint_stamp,
    head_stamp,
    packed_target_of,
    source_digest,
    tokenizer_of,
)
from polybasic.recipes.schema.recipe import Recipe

PLAN_NAME = "plan.json"


def stages_of(recipe: Recipe) -> tuple[PipelineStage, ...]:
    """The stages of a recipe in order; those of the smaller model only where it has one."""
    stages = [DATA, TARGET]
    stages += [SELF_PROMPTED_STAGE] if recipe.data.self_prompted is not None else []
    stages += [regenerated_stage(recipe)] if recipe.data.regenerate is not None else []
    copies = [quantized_stage(recipe, "intermediate", source="target")] if recipe.quantize else []
    heads = []
    if recipe.has_head:
        draft = head_stage(recipe, "draft", source="target", copy="intermediate")
        stages += [SMALL_TARGET] if SMALL_TARGET.name in draft.needs else []
        heads.append(draft)
    learns_from_copy = any(copy.name in head.needs for copy in copies for head in heads)
    stages += [*copies, *heads] if learns_from_copy else [*heads, *copies]
    if recipe.small is not None:
        stages += [] if SMALL_TARGET in stages else [SMALL_TARGET]
        if recipe.small.quantize:
            stages.append(quantized_stage(recipe, "small", source="small_target"))
        if recipe.small_has_head:
            stages.append(head_stage(recipe, "small_draft", source="small_target", copy="small"))
    needs = ("data", *model_stages(recipe))
    stages.append(PipelineStage("chain", needs, _chain_inputs, _run_chain, _identify_chain))
    return (*stages, PLAN, REPORT)


def _data_inputs(workspace: Workspace) -> dict[str, Any]:
    recipe = workspace.recipe
    inputs: dict[str, Any] = {
        "data": recipe.data.model_dump(include={"limit", "num_heldout"}),
        "conversations": source_digest(recipe.data.conversations),
    }
    bench, plan = _prompts(recipe)
    if bench.file is not None:
        inputs["prompts"] = sha256_of_file(bench.file)
    if heldout := [source.key for source in (plan, bench) if source.is_heldout]:
        inputs["heldout_prompts"] = heldout
    written = [source for source in (bench, plan) if source.is_url or source.is_shipped]
    return inputs | {source.key: source.named for source in written}


def _prompts(recipe: Recipe) -> tuple[PromptSource, PromptSource]:
    """Those of the report, and those of the plan."""
    conversations = recipe.data.conversations
    return bench_prompts(recipe.bench, conversations), plan_prompts(recipe.plan, conversations)


def _run_data(workspace: Workspace, folder: Path) -> dict[str, Any]:
    from polybasic.train.data.conversations import load_conversations, split_conversations

    recipe = workspace.recipe
    bench, plan = _prompts(recipe)
    if not bench.is_heldout:
        bench.write(folder / PROMPTS_NAME)
    if plan.is_url or plan.is_shipped:
        plan.write(folder / PLAN_PROMPTS_NAME)
    training, heldout = split_conversations(
        load_conversations(recipe.data.conversations, recipe.data.limit), recipe.data.num_heldout
    )
    files = {folder / PLAN_PROMPTS_NAME: plan, folder / PROMPTS_NAME: bench}
    asked = [path for path, prompts in files.items() if prompts.is_heldout]
    write_first_turns(heldout, asked)
    return {"num_training": len(training), "num_heldout": len(heldout)}


def _identify_data(workspace: Workspace, folder: Path) -> dict[str, Any]:
    recipe = workspace.recipe
    bench, plan = _prompts(recipe)
    identity = {
        "conversations": source_digest(recipe.data.conversations),
        "prompts": sha256_of_file(bench.file or folder / PROMPTS_NAME),
    }
    if plan.is_kept:
        identity["plan_prompts"] = sha256_of_file(folder / PLAN_PROMPTS_NAME)
    return identity


def _chain_inputs(workspace: Workspace) -> dict[str, Any]:
    recipe = workspace.recipe
    inputs: dict[str, Any] = {stage: workspace.identity(stage) for stage in model_stages(recipe)}
    if recipe.small is not None:
        inputs["role_of_small"] = recipe.small.role
    return {
        **inputs,
        "schema": SCHEMA,
        "plan": recipe.plan.model_dump(mode="json", include={"tree", "flush_length", "rule"}),
        "package": recipe.package.model_dump(mode="json"),
        "heads": {name: head_stamp(source) for name, source in recipe.package.heads.items()},
        "intermediates": {
            name: checkpoint_stamp(source) for name, source in recipe.package.intermediates.items()
        },
    }


def _run_chain(workspace: Workspace, folder: Path) -> dict[str, Any]:
    recipe, target = workspace.recipe, packed_target_of(workspace)
    parts = parts_of(workspace)
    manifest = package_chain(
        out=folder,
        target=target,
        target_reference=recipe.target.model if recipe.target.adapter is None else str(target),
        tokenizer=tokenizer_of(workspace),
        copy_target=recipe.package.copy_target,
        parts=parts,
        plan=packed_plan(recipe.plan, parts, recipe.trains_exit_of_target),
        provenance=Provenance(
            recipe=recipe.model_dump(mode="json"),
            command=workspace.command,
            git_commit=git_commit(),
            package_versions=package_versions(),
            data_digests=workspace.identity("data"),
        ),
        quality=_summaries(workspace, (part for part in parts if not is_head(part.kind))),
        training=_summaries(workspace, (part for part in parts if is_head(part.kind))),
    )
    return {
        "num_parameters": {member.name: member.num_parameters for member in manifest.members},
        "num_bytes": {member.name: member.num_bytes for member in manifest.members},
    }


def _identify_chain(workspace: Workspace, folder: Path) -> dict[str, Any]:
    # the report lies inside the chain: a chain that was packed again must be measured again
    return {"chain": sha256_of_file(folder / "chain.json")}


def _summaries(workspace: Workspace, parts: Iterable[Part]) -> dict[str, Any]:
    """Summaries of the stages that made members here, by member."""
    summaries = {}
    for part in parts:
        if part.folder == workspace.folder(part.name):
            record = workspace.record(part.name)
            assert record is not None, f"{part.name} is packed and not whole"
            summaries[part.name] = record.summary
    return summaries


def _plan_inputs(workspace: Workspace) -> dict[str, Any]:
    settings = workspace.recipe.plan
    inputs = {
        "plan": settings.model_dump(mode="json", exclude={"prompts"}),
        "chain": workspace.identity("chain"),
        "seed": workspace.recipe.seed,
    }
    _, source = _prompts(workspace.recipe)
    kept = workspace.folder("data") / PLAN_PROMPTS_NAME
    return {**inputs, "prompts": sha256_of_file(source.file or kept)}


def _run_plan(workspace: Workspace, folder: Path) -> dict[str, Any]:
    from polybasic.chain.formats.plan import decision_lines
    from polybasic.deploy.planner.run import plan_chain

    _, source = _prompts(workspace.recipe)
    path = source.file or workspace.folder("data") / PLAN_PROMPTS_NAME
    settings = with_prompts(workspace.recipe.plan, source, path)
    measured = plan_chain(workspace.folder("chain"), settings, say, source.shown).measured
    for line in decision_lines(measured.explanation):
        say(f"plan: {line}")
    write_json(folder / PLAN_NAME, measured.model_dump(mode="json"))
    return {
        "hardware": measured.hardware,
        "seconds_per_token": measured.seconds_per_token,
        "plan": measured.plan.model_dump(mode="json"),
    }


def _identify_plan(workspace: Workspace, folder: Path) -> dict[str, Any]:
    return {"plan": sha256_of_file(folder / PLAN_NAME)}


def _report_inputs(workspace: Workspace) -> dict[str, Any]:
    return {
        "bench": workspace.recipe.bench.model_dump(mode="json", exclude={"prompts"}),
        "chain": workspace.identity("chain"),
        "plan": workspace.identity("plan"),
        "prompts": workspace.identity("data")["prompts"],
    }


def _run_report(workspace: Workspace, folder: Path) -> dict[str, Any]:
    from polybasic.deploy.bench.running import bench_chain

    bench, _ = _prompts(workspace.recipe)
    path = bench.file or workspace.folder("data") / PROMPTS_NAME
    settings = with_prompts(workspace.recipe.bench, bench, path)
    command = f"polybasic run {workspace.recipe.name}"
    chain = workspace.folder("chain")
    report = bench_chain(chain, settings, say, command=command, prompts_named=bench.shown)
    return {
        "speedup_vs_target": {
            name: system.totals.speedup.value for name, system in report.systems.items()
        }
    }


def _identify_report(workspace: Workspace, folder: Path) -> dict[str, Any]:
    return {"report": sha256_of_file(workspace.folder("chain") / "report" / "report.json")}


DATA = PipelineStage("data", (), _data_inputs, _run_data, _identify_data)
PLAN = PipelineStage("plan", ("data", "chain"), _plan_inputs, _run_plan, _identify_plan)
REPORT = PipelineStage(
    "report", ("data", "chain", "plan"), _report_inputs, _run_report, _identify_report
)
