"""The six stages from conversations to a measured chain: what each depends on and does.

Heavy modules are imported where they run, so that a run with nothing to do answers at once.
"""

from pathlib import Path
from typing import Any

from polybasic.chain.files import sha256_of_file, write_json
from polybasic.recipes.pipeline import Stage, Workspace
from polybasic.recipes.provenance import git_commit, package_versions
from polybasic.recipes.schema import Recipe
from polybasic.recipes.sources import (
    CONVERSATIONS_NAME,
    PROMPTS_NAME,
    checkpoint_stamp,
    conversations_of,
    generator_digest,
    model_digests,
    prompts_of,
    source_digest,
    target_of,
)
from polybasic.train.settings import DataSettings

QUALITY_NAME = "quality.json"


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


def _target_inputs(workspace: Workspace) -> dict[str, Any]:
    recipe = workspace.recipe
    if recipe.target.model != "scratch":
        return {"model": recipe.target.model, **checkpoint_stamp(recipe.target.model)}
    return {
        "scratch": recipe.target.scratch.model_dump(exclude={"num_embedded_conversations"}),
        "data": recipe.data.model_dump(include={"limit", "num_heldout"}),
        "seed": recipe.seed,
        "conversations": workspace.identity("data")["conversations"],
    }


def _run_target(workspace: Workspace, folder: Path) -> dict[str, Any]:
    recipe = workspace.recipe
    if recipe.target.model != "scratch":
        return {"model": recipe.target.model}
    from polybasic.train.scratch import train_scratch_target

    training, _ = _split(workspace)
    train_scratch_target(training, recipe.target.scratch, recipe.seed, folder)
    return {"model": "scratch"}


def _identify_target(workspace: Workspace, folder: Path) -> dict[str, Any]:
    if workspace.recipe.target.model != "scratch":
        return checkpoint_stamp(workspace.recipe.target.model)
    return model_digests(folder)


def _draft_inputs(workspace: Workspace) -> dict[str, Any]:
    recipe = workspace.recipe
    return {
        "train": recipe.train.model_dump(mode="json", exclude={"save_every_steps", "log"}),
        **_learned_from(workspace, recipe),
    }


def _run_draft(workspace: Workspace, folder: Path) -> dict[str, Any]:
    from polybasic.train.head_training import train_head

    recipe = workspace.recipe
    return train_head(
        target=target_of(workspace),
        conversations=conversations_of(workspace),
        data=recipe.data,
        settings=recipe.train,
        seed=recipe.seed,
        out=folder,
    )


def _intermediate_inputs(workspace: Workspace) -> dict[str, Any]:
    recipe = workspace.recipe
    return {
        "quantize": recipe.quantize.model_dump(mode="json"),
        **_learned_from(workspace, recipe),
    }


def _run_intermediate(workspace: Workspace, folder: Path) -> dict[str, Any]:
    from transformers import AutoTokenizer

    from polybasic.quantize.awq import quantize_target
    from polybasic.quantize.quality import measure_quality

    recipe, target = workspace.recipe, target_of(workspace)
    tokenizer = AutoTokenizer.from_pretrained(target)
    training, heldout = _split(workspace)
    samples = _token_ids(tokenizer, training, recipe.data)
    quantize_target(target, samples, recipe.quantize, recipe.seed, folder)
    quality = measure_quality(
        target,
        folder,
        _token_ids(tokenizer, heldout, recipe.data),
        recipe.quantize.num_quality_tokens,
    )
    write_json(folder / QUALITY_NAME, quality)
    return quality


def _chain_inputs(workspace: Workspace) -> dict[str, Any]:
    recipe = workspace.recipe
    return {
        "target": workspace.identity("target"),
        "draft": workspace.identity("draft"),
        "intermediate": workspace.identity("intermediate"),
        "plan": recipe.plan.model_dump(mode="json"),
        "package": recipe.package.model_dump(mode="json"),
    }


def _run_chain(workspace: Workspace, folder: Path) -> dict[str, Any]:
    from polybasic.chain.manifest import Plan, Provenance
    from polybasic.chain.package import package_chain

    recipe, target = workspace.recipe, target_of(workspace)
    is_scratch = recipe.target.model == "scratch"
    draft, intermediate = workspace.record("draft"), workspace.record("intermediate")
    assert draft is not None
    assert intermediate is not None
    manifest = package_chain(
        out=folder,
        target=target,
        target_reference=str(target) if is_scratch else recipe.target.model,
        copy_target=recipe.package.copy_target,
        intermediate=workspace.folder("intermediate"),
        draft=workspace.folder("draft"),
        plan=Plan(
            members=("target", "intermediate", "draft"),
            tree=recipe.plan.tree,
            flush_length=recipe.plan.flush_length,
            rule=recipe.plan.rule,
        ),
        provenance=Provenance(
            recipe=recipe.model_dump(mode="json"),
            command=workspace.command,
            git_commit=git_commit(),
            package_versions=package_versions(),
            data_digests=workspace.identity("data"),
        ),
        quality=intermediate.summary,
        training=draft.summary,
    )
    return {
        "num_parameters": {member.name: member.num_parameters for member in manifest.members},
        "num_bytes": {member.name: member.num_bytes for member in manifest.members},
    }


def _identify_chain(workspace: Workspace, folder: Path) -> dict[str, Any]:
    # the report lies inside the chain: a chain that was packed again must be measured again
    return {"chain": sha256_of_file(folder / "chain.json")}


def _report_inputs(workspace: Workspace) -> dict[str, Any]:
    return {
        "bench": workspace.recipe.bench.model_dump(mode="json", exclude={"prompts"}),
        "chain": workspace.identity("chain"),
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


def _identify_model(workspace: Workspace, folder: Path) -> dict[str, Any]:
    return model_digests(folder)


STAGES = (
    Stage("data", (), _data_inputs, _run_data, _identify_data),
    Stage("target", ("data",), _target_inputs, _run_target, _identify_target, resumes=True),
    Stage("draft", ("data", "target"), _draft_inputs, _run_draft, _identify_model, resumes=True),
    Stage(
        "intermediate",
        ("data", "target"),
        _intermediate_inputs,
        _run_intermediate,
        _identify_model,
    ),
    Stage("chain", ("target", "draft", "intermediate"), _chain_inputs, _run_chain, _identify_chain),
    Stage("report", ("data", "chain"), _report_inputs, _run_report, _identify_report),
)


def _learned_from(workspace: Workspace, recipe: Recipe) -> dict[str, Any]:
    return {
        "data": recipe.data.model_dump(exclude={"conversations"}),
        "seed": recipe.seed,
        "conversations": workspace.identity("data")["conversations"],
        "target": workspace.identity("target"),
    }


def _split(workspace: Workspace) -> tuple[Any, Any]:
    from polybasic.train.conversations import load_conversations, split_conversations

    data = workspace.recipe.data
    dataset = load_conversations(conversations_of(workspace), data.limit)
    return split_conversations(dataset, data.num_heldout)


def _token_ids(tokenizer: Any, rows: Any, data: DataSettings) -> list[list[int]]:
    from polybasic.train.chat import encode_conversation

    return [
        encode_conversation(tokenizer, row["messages"], data.max_tokens).input_ids for row in rows
    ]
