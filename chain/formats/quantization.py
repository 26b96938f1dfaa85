"""What the config.json of a 4-bit checkpoint says of its format. No torch in here."""

from pathlib import Path
from typing import Any

from polybasic.chain.errors import UserError

BITS = 4
GROUP_SIZE = 128
QUANTIZATION_CONFIG: dict[str, Any] = {
    "quant_method": "awq",
    "bits": BITS,
    "group_size": GROUP_SIZE,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": None,
}
"""What an AutoAWQ checkpoint's config.json says under quantization_config."""


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
    for key in ("quant_method", "bits", "group_size", "zero_point", "version"):
        value = found.get(key)
        if (value.lower() if isinstance(value, str) else value) != QUANTIZATION_CONFIG[key]:
            raise UserError(
                "unsupported quantization",
                f"quantization_config.{key} {value!r} in {where}",
                f"only {QUANTIZATION_CONFIG[key]!r} is read; quantize with `polybasic quantize`",
            )
    return GROUP_SIZE
