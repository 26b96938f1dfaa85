"""Which dtype a training computes in: the one that its settings name, or the fastest here."""

import sys
from typing import TypeVar

import torch

from polybasic.chain.kernels.product_times import (
    DTYPES,
    evaluation_dtype,
    name_of,
    training_dtype,
    training_slowdown,
)
from polybasic.chain.processes.group import process_device
from polybasic.train.settings import HeadSettings, TrainingSettings

SettingsT = TypeVar("SettingsT", bound=TrainingSettings)

_WORTH_SAYING = 1.5
"""Times the products of the fastest dtype."""


def settled(settings: SettingsT) -> SettingsT:
    """`settings` with the dtype that "auto" stands for on this machine; others as they are."""
    return settings.model_copy(update={"dtype": _settled_dtype(settings)})


def announce_cost(key: str, settings: TrainingSettings) -> None:
    """Say on stderr what a slow dtype costs; nothing of one that is fast enough.

    Args:
        key: of the recipe, that names it.
        settings: settled.
    """
    device = _device_of(settings)
    slowdown = training_slowdown(DTYPES[settings.dtype], device)
    if slowdown >= _WORTH_SAYING:
        print(
            f"{key} {settings.dtype}: products take {slowdown:.1f} times as long as in "
            f"{name_of(training_dtype(device))} on this CPU",
            file=sys.stderr,
        )


def verifier_dtype(stored: torch.dtype, settings: HeadSettings) -> torch.dtype:
    """Of the passes of a frozen model that a head learns: its own, or float32 where that is slow.

    Args:
        stored: its own.
        settings: settled; a slow dtype that they name is theirs to choose.
    """
    if name_of(stored) == settings.dtype:
        return stored
    return evaluation_dtype(stored, process_device())


def _settled_dtype(settings: TrainingSettings) -> str:
    if settings.dtype != "auto":
        return settings.dtype
    return name_of(training_dtype(_device_of(settings)))


def _device_of(settings: TrainingSettings) -> torch.device:
    """Where a training takes place: that of a model from scratch on the CPU."""
    return process_device() if isinstance(settings, HeadSettings) else torch.device("cpu")
