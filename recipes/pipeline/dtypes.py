"""The dtype of a training whose recipe leaves it to this machine."""

from typing import Any

from polybasic.chain.formats.files import sha256_of_object
from polybasic.recipes.pipeline.running import Workspace
from polybasic.train.settings import HeadSettings


def settle_dtype(
    workspace: Workspace, stage: str, inputs: dict[str, Any], settings: HeadSettings
) -> dict[str, Any]:
    """`inputs` of a stage with the dtype that "auto" stands for.

    What was made or begun from inputs that are the same otherwise keeps its dtype, on whatever
    machine that was; else products are measured on this one.

    Args:
        workspace: of the run.
        stage: whose inputs they are.
        inputs: with `settings` as JSON content in their section "train".
        settings: of the training.
    """
    if settings.dtype != "auto":
        return inputs

    def in_dtype(dtype: str) -> dict[str, Any]:
        return {**inputs, "train": {**inputs["train"], "dtype": dtype}}

    for earlier in workspace.earlier_inputs(stage):
        dtype = earlier.get("train", {}).get("dtype")
        if dtype and sha256_of_object(in_dtype(dtype)) == sha256_of_object(earlier):
            return in_dtype(dtype)
    from polybasic.train.dtypes import settled

    return in_dtype(settled(settings).dtype)
