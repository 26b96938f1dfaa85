"""Products of the device path that are changed for some numbers of rows, for tests of rounding.

PyTorch's own operations, which read prompts, stay as they are.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from polybasic.chain.kernels.torch.executor import TorchExecutor
from polybasic.chain.kernels.torch.operations import Operations

Change = Callable[[int, Tensor], Tensor]
"""Rows of a pass, its products -> what takes their place."""


@contextmanager
def kernels_that(change: Change) -> Iterator[None]:
    """Passes on the device path multiply so inside."""

    class Changed(Operations):
        def product(self, linear: Any, x_RI: Tensor, *others: Any, **named: Any) -> Tensor:
            return change(len(x_RI), super().product(linear, x_RI, *others, **named))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchExecutor, "operations", Changed())
        yield


def rounds_otherwise(rows: int, found: Tensor) -> Tensor:
    """As kernels that add up in another order: over 4 rows or more, some numbers are the next."""
    if rows < 4:
        return found
    moved = torch.zeros_like(found)
    moved[:, ::7] = torch.finfo(found.dtype).eps
    return found * (1 + moved)
