"""The Muon optimizer (Jordan et al., 2024), as PyTorch has it, in a dtype of one's choice.

PyTorch's own takes its Newton-Schulz iterations in bfloat16, in which they are most of a step's
time where the processor multiplies that slowly.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

_QUINTIC = (3.4445, -4.7750, 2.0315)
_LEAST_NORM = 1e-7


class Muon(torch.optim.Optimizer):
    """Steps whose singular values are all about 1, with Nesterov's momentum.

    Args:
        matrices: [O, I], of any sizes.
        lr: of a matrix with at most as many outputs as inputs; larger by the root of O / I else.
        momentum: share of the older gradients.
        weight_decay: decoupled, a share of `lr`.
        num_iterations: of Newton and Schulz.
        dtype: of these iterations.
    """

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        lr: float,
        momentum: float,
        weight_decay: float,
        num_iterations: int,
        dtype: torch.dtype,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(matrices, defaults)
        self._num_iterations, self._dtype = num_iterations, dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Change all matrices that have a gradient."""
        for group in self.param_groups:
            changed = [matrix for matrix in group["params"] if matrix.grad is not None]
            for shape in dict.fromkeys(matrix.shape for matrix in changed):
                self._change([matrix for matrix in changed if matrix.shape == shape], group)

    def _change(self, matrices: list[Tensor], group: dict[str, Any]) -> None:
        """Matrices of one shape, whose iterations are taken together."""
        lr, (out_size, in_size) = group["lr"], matrices[0].shape
        ahead = torch.stack([self._ahead(matrix, group["momentum"]) for matrix in matrices])
        updates = orthogonalized(ahead.to(self._dtype), self._num_iterations)
        for matrix, update in zip(matrices, updates, strict=True):
            matrix.mul_(1 - lr * group["weight_decay"])
            matrix.add_(update, alpha=-lr * max(1, out_size / in_size) ** 0.5)

    def _ahead(self, matrix: Tensor, momentum: float) -> Tensor:
        """The gradient with Nesterov's momentum."""
        state, gradient = self.state[matrix], matrix.grad
        assert gradient is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        mean = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        return gradient.lerp(mean, momentum)


def orthogonalized(matrices: Tensor, num_iterations: int) -> Tensor:
    """Matrices [N, O, I] with singular values of about 1, by Newton and Schulz's iterations.

    These are in the dtype of `matrices`.
    """
    a, b, c = _QUINTIC
    is_tall = matrices.shape[1] > matrices.shape[2]
    found = matrices.mT.contiguous() if is_tall else matrices
    found = found / found.norm(dim=(1, 2), keepdim=True).clamp(min=_LEAST_NORM)
    for _ in range(num_iterations):
        gram = found @ found.mT
        products = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        found = torch.baddbmm(found, products, found, beta=a)
    return found.mT if is_tall else found
