"""What the config.json of a 4-bit checkpoint says of its format. No torch in here."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.readable import alternatives

BITS = 4
GROUP_SIZES = (128, 64, 32)
"""Inputs of a 4-bit weight that may share a scale, from the fewest bytes to the most."""
GROUP_SIZE = GROUP_SIZES[0]
"""The paper's."""
DRAFT_GROUP_SIZE = 64
"""Inputs that share a scale where a head's weights are rounded to 4 bits."""
_FORMAT: dict[str, Any] = {
    "quant_method": "awq",
    "bits": BITS,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": None,
}


def quantization_config(group_size: int = GROUP_SIZE) -> dict[str, Any]:
    """What an AutoAWQ checkpoint's config.json says under quantization_config.

    Args:
        group_size: one of `GROUP_SIZES`.
    """
    return {**_FORMAT, "group_size": group_size}


def largest_group_size(in_sizes: Iterable[int]) -> int | None:
    """The largest of `GROUP_SIZES` that divides all these numbers of inputs; None if none does."""
    sizes = list(in_sizes)
    return next((group for group in GROUP_SIZES if not any(size % group for size in sizes)), None)


def read_quantization_config(config: dict[str, Any], where: str | Path) -> int:
    """Check that a checkpoint is in the one quantized format that is read here.

    Args:
        config: the content of config.json.
        where: its path, for errors.

    Returns:
        The group size.

    Raises:
        UserError: no quantization_config, or another format.
    """
    found = config.get("quantization_config")
    if not isinstance(found, dict):
        raise UserError(
            "not a 4-bit checkpoint",
            f"no quantization_config in {where}",
            "name the folder of an AutoAWQ checkpoint",
        )
    allowed = {
        "quant_method": ("awq",),
        "bits": (BITS,),
        "group_size": GROUP_SIZES,
        "zero_point": (True,),
        "version": ("gemm",),
    }
    for key, values in allowed.items():
        value = found.get(key)
        if (value.lower() if isinstance(value, str) else value) not in values:
            raise UserError(
                "unsupported quantization",
                f"quantization_config.{key} {value!r} in {where}",
                f"only {alternatives(map(repr, values))} is read; quantize with "
                "`polybasic quantize`",
            )
    return int(found["group_size"])
