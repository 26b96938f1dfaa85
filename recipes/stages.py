"""The pipeline from conversations to a measured chain: which stages a recipe has, and their order.

Heavy modules are imported where they run, so that a run with nothing to do answers at once.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polybasic.chain.files import sha256_of_file, write_json
from polybasic.chain.manifest import SCHEMA, Kind, Provenance
from polybasic.chain.package import Part, package_chain
from polybasic.recipes.members import model_stages, packed_plan, parts_of
from polybasic.recipes.model_stages import (
    DRAFT,
    INTERMEDIATE,
    SMALL,
    SMALL_DRAFT,
    SMALL_TARGET,
    TARGET,
)
from polybasic.recipes.pipeline import Stage, Workspace
from polybasic.recipes.provenance import git_commit, package_versions
from polybasic.recipes.schema import Recipe
from polybasic.recipes.sources import (
    CONVERSATIONS_NAME,
    PROMPTS_NAME,
    checkpoint_of,
    generator_digest,
    prompts_of,
    source_digest,
    write_calibration_prompts,
)

CALIBRATION_NAME = "calibration.jsonl"
PLAN_NAME = "plan.json"


def stages_of(recipe: Recipe) -> tuple[Stage, ...]:
    """The stages of a recipe in order; those of the smaller model only where it has one."""
    stages = [DATA, TARGET, DRAFT, INTERMEDIATE]
    if recipe.small is not None:
        stages.append(SMALL_TARGET)
        stages += [SMALL] if recipe.small.quantize else []
        stages += [SMALL_DRAFT] if recipe.small.has_head else []
    chain = Stage("chain", model_stages(recipe), _chain_inputs, _run_chain, _identify_chain)
    return (*stages, chain, PLAN, REPORT)


def _data_inputs(workspace: Workspace) -> dict[str, Any]:
    recipe = workspace.recipe
    inputs: dict[str, Any] = {"data": recipe.data.model_dump(include={"limit", "num_heldout"})}
    if recipe.data.conversations == "embedded":
        inputs["conversations"] = {
            "num": recipe.target.scratch.num_embedded_conversations,
            "seed": recipe.seed,
            "generator": generator_digest(),
        }
    else:
        inputs["conversations"] = source_digest(recipe.data.conversations)
    if recipe.bench.prompts == "embedded":
        inputs["prompts"] = {
            "num_per_task": recipe.bench.num_prompts_per_task,
            "seed": recipe.seed,
            "generator": generator_digest(),
        }
    else:
        inputs["prompts"] = sha256_of_file(Path(recipe.bench.prompts))
    return inputs


def _run_data(workspace: Workspace, folder: Path) -> dict[str, Any]:
    from polybasic.recipes.embedded.conversations import write_conversations, write_prompts
    from polybasic.train.conversations import load_conversations, split_conversations

    recipe = workspace.recipe
    source = recipe.data.conversations
    if source == "embedded":
        source = str(folder / CONVERSATIONS_NAME)
        num = recipe.target.scratch.num_embedded_conversations
        write_conversations(Path(source), num, recipe.seed)
    if recipe.bench.prompts == "embedded":
        write_prompts(folder / PROMPTS_NAME, recipe.bench.num_prompts_per_task, recipe.seed)
    training, heldout = split_conversations(
        load_conversations(source, recipe.data.limit), recipe.data.num_heldout
    )
    return {"num_training": len(training), "num_heldout": len(heldout)}


def _identify_data(workspace: Workspace, folder: Path) -> dict[str, Any]:
    recipe = workspace.recipe
    conversations, prompts = folder / CONVERSATIONS_NAME, folder / PROMPTS_NAME
    if recipe.data.conversations != "embedded":
        conversations_sha256 = source_digest(recipe.data.conversations)
    else:
        conversations_sha256 = sha256_of_file(conversations)
    if recipe.bench.prompts != "embedded":
        prompts = Path(recipe.bench.prompts)
    return {"conversations": conversations_sha256, "prompts": sha256_of_file(prompts)}


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
    }


def _run_chain(workspace: Workspace, folder: Path) -> dict[str, Any]:
    recipe, target = workspace.recipe, checkpoint_of(workspace, "target")
    is_scratch = recipe.target.model == "scratch"
    parts = parts_of(workspace)
    manifest = package_chain(
        out=folder,
        target=target,
        target_reference=str(target) if is_scratch else recipe.target.model,
        copy_target=recipe.package.copy_target,
        parts=parts,
        plan=packed_plan(recipe.plan, parts),
        provenance=Provenance(
            recipe=recipe.model_dump(mode="json"),
            command=workspace.command,
            git_commit=git_commit(),
            package_versions=package_versions(),
            data_digests=workspace.identity("data"),
        ),
        quality=_summaries(workspace, parts, "awq"),
        training=_summaries(workspace, parts, "eagle2"),
    )
    return {
        "num_parameters": {member.name: member.num_parameters for member in manifest.members},
        "num_bytes": {member.name: member.num_bytes for member in manifest.members},
    }


def _identify_chain(workspace: Workspace, folder: Path) -> dict[str, Any]:
    # the report lies inside the chain: a chain that was packed again must be measured again
    return {"chain": sha256_of_file(folder / "chain.json")}


def _summaries(workspace: Workspace, parts: Sequence[Part], kind: Kind) -> dict[str, Any]:
    """Summaries of the stages that made members of this kind, by member."""
    summaries = {}
    for part in parts:
        if part.kind == kind and part.folder == workspace.folder(part.name):
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
    if settings.prompts == "embedded":
        return {**inputs, "generator": generator_digest()}
    return {**inputs, "prompts": sha256_of_file(Path(settings.prompts))}


def _run_plan(workspace: Workspace, folder: Path) -> dict[str, Any]:
    from polybasic.deploy.planning import plan_chain

    settings = workspace.recipe.plan
    if settings.prompts == "embedded":
        prompts = folder / CALIBRATION_NAME
        write_calibration_prompts(prompts, settings.num_prompts_per_task, workspace.recipe.seed)
        settings = settings.model_copy(update={"prompts": str(prompts)})

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    measured = plan_chain(workspace.folder("chain"), settings, say).measured
    say(f"plan: {measured.explanation['decision']}")
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
    from polybasic.deploy.benchmark import bench_chain

    prompts = str(prompts_of(workspace))
    settings = workspace.recipe.bench.model_copy(update={"prompts": prompts})
    report = bench_chain(workspace.folder("chain"), settings)
    return {
        "speedup_vs_target": {
            name: system["speedup_vs_target"] for name, system in report["systems"].items()
        }
    }


def _identify_report(workspace: Workspace, folder: Path) -> dict[str, Any]:
    return {"report": sha256_of_file(workspace.folder("chain") / "report" / "report.json")}


DATA = Stage("data", (), _data_inputs, _run_data, _identify_data)
PLAN = Stage("plan", ("chain",), _plan_inputs, _run_plan, _identify_plan)
REPORT = Stage("report", ("data", "chain", "plan"), _report_inputs, _run_report, _identify_report)
