"""Checks of a head that others publish: sizes, tensors, and copies of its target's."""

from pathlib import Path

import torch
from torch import Tensor

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.config import check_feature_layers
from polybasic.chain.formats.checkpoints.decoder_config import DecoderConfig, HeadConfig
from polybasic.chain.formats.checkpoints.draft_vocabulary import IS_DRAFTED, OFFSETS
from polybasic.chain.formats.checkpoints.names import DRAFT_TABLES
from polybasic.chain.formats.checkpoints.shapes import expected_shapes
from polybasic.chain.kernels.product_times import DTYPES

EMBEDDING = "embed_tokens.weight"
_COMPARED_ROWS = 8192
# A copy may have been rounded to bfloat16 (8 bits) or float16 (least step 6e-8).
_RELATIVE_ROUNDING, _ABSOLUTE_ROUNDING = 2**-8, 2e-7


def check_sizes(where: str, head: HeadConfig, model: DecoderConfig, target: Path) -> None:
    """Check that a head is as wide as its target, and that this has the layers that it reads.

    Args:
        where: the head's config, for errors.
        model, target: config and folder of the target.

    Raises:
        UserError: it is for another model.
    """
    for key in ("hidden_size", "vocab_size"):
        found, expected = getattr(head, key), getattr(model, key)
        if found != expected:
            raise UserError(
                "head does not fit its target",
                f"{key} {found} in {where}, {expected} in {target / 'config.json'}",
                "name the model that the head was trained for, or a head for this one",
            )
    check_feature_layers(head, model.num_layers, where)


def check_tensors(
    folder: Path, tensors: dict[str, Tensor], head: HeadConfig, what: str = "head"
) -> None:
    """Check names, shapes and dtypes of a head's tensors; its embedding may be left out.

    Args:
        folder: of the head.
        tensors: all that is stored, under the names of a chain.
        head: what its config.json and its target say.
        what: the folder holds, in errors.

    Raises:
        UserError: one is missing or unknown, or has another shape or dtype.
    """
    expected = dict(expected_shapes(head.kind, head, None, tensors.keys()))
    if missing := [name for name in expected if name not in tensors and name != EMBEDDING]:
        raise UserError("missing tensor", f"{missing[0]} in {folder}", f"download the {what} again")
    for name, tensor in tensors.items():
        if name not in expected:
            raise UserError(
                f"unknown tensor in the {what}",
                f"{name} in {folder}",
                "name a folder that holds a head in a known layout",
            )
        if tuple(tensor.shape) != expected[name]:
            raise UserError(
                "tensor shape mismatch",
                f"{name} in {folder} is {list(tensor.shape)}, by its config.json and its target "
                f"{list(expected[name])}",
                f"download weights and config.json of the {what} again",
            )
        if name not in DRAFT_TABLES and tensor.dtype not in DTYPES.values():
            raise UserError(
                "unsupported dtype",
                f"{name} in {folder} is {tensor.dtype}",
                f"store the {what} in bfloat16, float16 or float32",
            )


def check_copy(source: Path, target: Path, name: str, found: Tensor, expected: Tensor) -> None:
    """Check a frozen copy of a matrix of the model that a head was trained for.

    Args:
        name: of the copy, for errors.
        found: the copy.
        expected: the target's matrix.

    Raises:
        UserError: they differ.
    """
    what = {EMBEDDING: "embedding"}.get(name, "output projection")
    difference = "in its shape"
    if found.shape == expected.shape:
        for rows in zip(found.split(_COMPARED_ROWS), expected.split(_COMPARED_ROWS), strict=True):
            copied, original = (part.float() for part in rows)
            if not torch.allclose(copied, original, _RELATIVE_ROUNDING, _ABSOLUTE_ROUNDING):
                difference = f"by up to {(copied - original).abs().max().item():.2g}"
                break
        else:
            return
    raise UserError(
        "head of another model",
        f"{name} in {source} differs from the {what} of {target} {difference}",
        "name the model that the head was trained for, or a head for this one",
    )


def without_whole_vocabulary(tensors: dict[str, Tensor], vocab_size: int) -> dict[str, Tensor]:
    """The tensors but for the tables of a whole vocabulary, which SpecForge always stores."""
    offsets = tensors.get(OFFSETS)
    if offsets is None or tuple(offsets.shape) != (vocab_size,) or offsets.any():
        return tensors
    return {name: each for name, each in tensors.items() if name not in (OFFSETS, IS_DRAFTED)}
