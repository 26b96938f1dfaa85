"""`--preset`: how long a recipe trains and measures, as shares of what it says itself."""

import math
from functools import reduce
from typing import Any

from polybasic.chain.base.errors import UserError
from polybasic.recipes.schema.loading import load_recipe

PRESETS = ("quick", "normal", "thorough")
"""Normal is the recipe as it is."""

_SHARES = {
    "data.num_heldout": (0.25, 2.5),
    "train.num_steps": (0.1, 4),
    "train.warmup_steps": (0.1, 4),
    "train.eval_every_steps": (0.2, 2),
    "quantize.num_calibration_samples": (0.25, 2),
    "quantize.num_quality_tokens": (0.25, 2),
    "plan.num_prompts_per_task": (1 / 3, 2),
    "plan.max_new_tokens": (0.5, 2),
    "plan.max_seconds": (0.25, 4),
    "bench.num_prompts_per_task": (1 / 3, 2),
    "bench.max_new_tokens": (0.5, 2),
    "bench.repeats": (0.5, 1.5),
}
"""Of a quick and of a thorough run."""


def preset_overrides(name_or_path: str, preset: str) -> list[str]:
    """What a preset changes in a recipe, to be given to `load_recipe` before the user's overrides.

    Args:
        name_or_path: of the recipe.
        preset: one of PRESETS.

    Raises:
        UserError: no preset of this name, or as `load_recipe`.
    """
    if preset not in PRESETS:
        raise UserError("unknown preset", f"--preset {preset}", f"use one of {', '.join(PRESETS)}")
    if preset == "normal":
        return []
    recipe: Any = load_recipe(name_or_path)
    overrides = []
    for key, shares in _SHARES.items():
        if key.startswith("quantize.") and recipe.quantize is None:
            continue
        value: float = reduce(getattr, key.split("."), recipe)
        share = shares[0] if preset == "quick" else shares[1]
        overrides.append(f"{key}={math.ceil(share * value)}")
    return overrides
