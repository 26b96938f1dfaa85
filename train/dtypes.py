"""Which dtype a training computes in: the one that its settings name, or the fastest here."""

import sys

import torch

from polybasic.chain.base.processes.group import process_device
from polybasic.chain.kernels.product_times import (
    DTYPES,
    evaluation_dtype,
    name_of,
    training_dtype,
    training_slowdown,
)
from polybasic.train.settings import HeadSettings

_WORTH_SAYING = 1.5
"""Times the products of the fastest dtype."""


def settled(settings: HeadSettings) -> HeadSettings:
    """`settings` with the dtype that "auto" stands for on this machine; others as they are."""
    if settings.dtype != "auto":
        return settings
    return settings.model_copy(update={"dtype": name_of(training_dtype(process_device()))})


def announce_cost(settings: HeadSettings) -> None:
    """Say on stderr what a slow dtype costs; nothing of one that is fast enough.

    Args:
        settings: settled.
    """
    device = process_device()
    slowdown = training_slowdown(DTYPES[settings.dtype], device)
    if slowdown >= _WORTH_SAYING:
        print(
            f"train.dtype {settings.dtype}: products take {slowdown:.1f} times as long as in "
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
