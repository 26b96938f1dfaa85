"""Which members a recipe's chain has, and the plan that it is packed with."""

from collections.abc import Sequence

from polybasic.chain.formats.checkpoint import resolve_head
from polybasic.chain.formats.config import read_config
from polybasic.chain.formats.manifest import Kind
from polybasic.chain.formats.package import TARGET_NAME, Part
from polybasic.chain.formats.plan import Flush, Plan
from polybasic.deploy.settings import PlanSettings
from polybasic.recipes.pipeline.running import Workspace
from polybasic.recipes.pipeline.sources import checkpoint_of
from polybasic.recipes.schema.recipe import Recipe

DEFAULT_MEMBERS = (TARGET_NAME, "intermediate", "draft")
"""What runs until a plan is measured: all that is made of the target alone, as far as the drafter
drafts for the intermediate."""


def model_stages(recipe: Recipe) -> tuple[str, ...]:
    """Names of the stages whose results go into the chain."""
    stages = ["target", "draft", "intermediate"]
    if recipe.small is not None:
        stages.append("small" if recipe.small.quantize else "small_target")
        stages += ["small_draft"] if recipe.small.has_head else []
    return tuple(stages)


def last_chain(recipe: Recipe) -> str:
    """Name of the stage whose chain is planned, measured and handed to people."""
    return "chain" if recipe.grow.shape is None else "grown"


def parts_of(workspace: Workspace) -> list[Part]:
    """The members beside the target, in order; the stages that made them must be whole."""
    small = workspace.recipe.small
    intermediates = [Part("intermediate", "intermediate", "awq", workspace.folder("intermediate"))]
    drafters = [_head_part("draft", workspace)]
    if small is not None:
        part = _small_part(workspace)
        (intermediates if small.role == "intermediate" else drafters).append(part)
        if small.has_head:
            drafters.append(_head_part("small_draft", workspace))
    for name, source in workspace.recipe.package.heads.items():
        folder = resolve_head(source)
        drafters.append(Part(name, "drafter", read_config(folder).head.kind, folder))
    return intermediates + drafters


def packed_plan(
    settings: PlanSettings, parts: Sequence[Part], drafts_for_target_alone: bool = False
) -> Plan:
    """The plan that a chain is packed with.

    Each verifying member that can stand above another one has a flush length, so that any choice
    of members can run.

    Args:
        drafts_for_target_alone: of the drafter that is made of the target.
    """
    verifying = [TARGET_NAME, *(part.name for part in parts if part.role != "drafter")]
    flush = Flush(length=settings.flush_length)
    return Plan(
        members=(TARGET_NAME, "draft") if drafts_for_target_alone else DEFAULT_MEMBERS,
        tree=settings.tree,
        flush=dict.fromkeys(verifying[:-1], flush),
        rule=settings.packed_rule,
    )


def _head_part(stage: str, workspace: Workspace) -> Part:
    folder = workspace.folder(stage)
    return Part(stage, "drafter", read_config(folder).head.kind, folder)


def _small_part(workspace: Workspace) -> Part:
    small = workspace.recipe.small
    assert small is not None
    if small.quantize:
        return Part("small", small.role, "awq", workspace.folder("small"))
    folder = checkpoint_of(workspace, "small_target")
    config = read_config(folder).content
    kind: Kind = "awq" if config.get("quantization_config") else "decoder"
    return Part("small", small.role, kind, folder)
