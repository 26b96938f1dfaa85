"""Mistral. It has no biases, whatever its config says."""

from polybasic.chain.formats.families.family import Family, all_alike

_DEFAULTS = {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}

MISTRAL = Family("mistral", layer_types=all_alike, autoawq="mistral", defaults=_DEFAULTS)
