"""Which members a recipe's chain has, and the plan that it is packed with."""

from collections.abc import Sequence

from polybasic.chain.formats.bare import ALONE
from polybasic.chain.formats.checkpoints.checkpoint import resolve_head
from polybasic.chain.formats.checkpoints.config import read_config
from polybasic.chain.formats.checkpoints.kinds import Kind
from polybasic.chain.formats.checkpoints.models import resolve_model
from polybasic.chain.formats.package import TARGET_NAME, Part
from polybasic.chain.formats.plan import Flush, Plan
from polybasic.deploy.planner.settings import PlanSettings
from polybasic.recipes.pipeline.running import Workspace
from polybasic.recipes.pipeline.sources import checkpoint_of
from polybasic.recipes.schema.recipe import Recipe

COPY_NAME, DRAFT_NAME = "intermediate", "draft"
"""Members that are made of the target: with it, all that runs until a plan is measured, as far as
the drafter drafts for the intermediate. Without a head n-grams draft for all that verify."""


def model_stages(recipe: Recipe) -> tuple[str, ...]:
    """Names of the stages whose results go into the chain."""
    stages = ["target"]
    stages += ["draft"] if recipe.has_head else []
    stages += ["intermediate"] if recipe.quantize else []
    if recipe.small is not None:
        stages.append("small" if recipe.small.quantize else "small_target")
        stages += ["small_draft"] if recipe.small_has_head else []
    return tuple(stages)


def parts_of(workspace: Workspace) -> list[Part]:
    """The members beside the target, in order; the stages that made them must be whole."""
    recipe, small = workspace.recipe, workspace.recipe.small
    intermediates, drafters = [], []
    if recipe.quantize:
        folder = workspace.folder("intermediate")
        intermediates.append(Part("intermediate", "intermediate", "awq", folder))
    if recipe.has_head:
        drafters.append(_head_part("draft", workspace))
    if small is not None:
        part = _small_part(workspace)
        (intermediates if small.role == "intermediate" else drafters).append(part)
        if recipe.small_has_head:
            drafters.append(_head_part("small_draft", workspace))
    for name, source in recipe.package.intermediates.items():
        folder = resolve_model(source)
        intermediates.append(Part(name, "intermediate", read_config(folder).kind, folder))
    for name, source in recipe.package.heads.items():
        folder = resolve_head(source)
        drafters.append(Part(name, "drafter", read_config(folder).head.kind, folder))
    return intermediates + drafters


def packed_plan(
    settings: PlanSettings, parts: Sequence[Part], drafts_for_target_alone: bool = False
) -> Plan:
    """The plan that a chain is packed with.

    Each verifying member that can stand above another one has a block length, so that any choice
    of members can run.

    Args:
        drafts_for_target_alone: of the drafter that is made of the target.
    """
    verifying = [TARGET_NAME, *(part.name for part in parts if part.role != "drafter")]
    flush = dict.fromkeys(verifying[:-1], Flush(length=settings.flush_length))
    changes = {"flush": flush, "rule": settings.packed_rule}
    names = {part.name for part in parts}
    if DRAFT_NAME not in names:
        return ALONE.model_copy(update={"members": tuple(verifying), **changes})
    above = () if drafts_for_target_alone or COPY_NAME not in names else (COPY_NAME,)
    return Plan(members=(TARGET_NAME, *above, DRAFT_NAME), tree=settings.tree, **changes)


def _head_part(stage: str, workspace: Workspace) -> Part:
    folder = workspace.folder(stage)
    return Part(stage, "drafter", read_config(folder).head.kind, folder)


def _small_part(workspace: Workspace) -> Part:
    small = workspace.recipe.small
    assert small is not None
    if small.quantize:
        kind: Kind = "awq" if workspace.recipe.quantize else "decoder"
        return Part("small", small.role, kind, workspace.folder("small"))
    folder = checkpoint_of(workspace, "small_target")
    return Part("small", small.role, read_config(folder).kind, folder)
