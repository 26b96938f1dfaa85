"""Mistral. It has no biases, whatever its config says."""

from polybasic.chain.formats.families.family import Family, all_alike

MISTRAL = Family("mistral", layer_types=all_alike, autoawq="mistral")
