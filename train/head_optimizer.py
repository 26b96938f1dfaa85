"""The optimizer of a head that lies whole in each process: Muon and AdamW on float32 weights."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from polybasic.chain.kernels.product_times import DTYPES
from polybasic.train.muon import Muon
from polybasic.train.settings import HeadSettings

_MUON_MOMENTUM = 0.95
_LOGITS = {"lm_head", "lm_heads"}
_MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")


def matrices_between_states(module: nn.Module) -> list[nn.Parameter]:
    """The trained weights [O, I] of linear layers, less those that give logits of tokens.

    Muon is for maps between states; embeddings, output projections, tables and norms are
    AdamW's (Jordan et al., 2024).
    """
    linear = {name for name, each in module.named_modules() if isinstance(each, nn.Linear)}
    return [
        weight
        for name, weight in module.named_parameters()
        if weight.requires_grad
        and name.removesuffix(".weight") in linear
        and not _LOGITS & set(name.split("."))
    ]


class HeadOptimizer(torch.optim.Optimizer):
    """Steps on float32 copies of the weights, which the weights then take, in their own dtype.

    Its first group are the matrices that Muon changes, if there are any, its second one the rest;
    a schedule sets the `lr` of both.

    Args:
        matrices: that Muon changes; empty for AdamW alone.
        others: that AdamW changes.
        settings: of the training: rates, betas, weight decay.
    """

    def __init__(
        self,
        matrices: Sequence[nn.Parameter],
        others: Sequence[nn.Parameter],
        settings: HeadSettings,
    ) -> None:
        self._copies = {
            weight: weight if weight.dtype == torch.float32 else nn.Parameter(weight.float())
            for weight in (*matrices, *others)
        }
        self._steps: list[torch.optim.Optimizer] = []
        groups = []
        if matrices:
            muon = Muon(
                [self._copies[weight] for weight in matrices],
                lr=settings.matrix_learning_rate,
                momentum=_MUON_MOMENTUM,
                weight_decay=settings.weight_decay,
                num_iterations=settings.muon_iterations,
                dtype=DTYPES[settings.dtype],
            )
            self._steps.append(muon)
            groups.append({"params": list(matrices), "lr": settings.matrix_learning_rate})
        if others:
            adamw = torch.optim.AdamW(
                [self._copies[weight] for weight in others],
                lr=settings.learning_rate,
                betas=settings.adam_betas,
                weight_decay=settings.weight_decay,
            )
            self._steps.append(adamw)
            groups.append({"params": list(others), "lr": settings.learning_rate})
        super().__init__(groups, {})
        for optimizer in self._steps:
            optimizer.state = self.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Change all weights that have a gradient."""
        for weight, copy in self._copies.items():
            if copy is not weight:
                copy.grad = None if weight.grad is None else weight.grad.float()
        for optimizer, group in zip(self._steps, self.param_groups, strict=True):
            optimizer.param_groups[0]["lr"] = group["lr"]
            optimizer.step()
        for weight, copy in self._copies.items():
            if copy is not weight:
                weight.copy_(copy)

    def learned(self, weight: nn.Parameter) -> dict[str, Tensor]:
        """The float32 weight, named "", and its moments after a step, by name; none is a copy."""
        copy = self._copies[weight]
        state = self.state[copy]
        return {"": copy.data, **{key: state[key] for key in _MOMENTS if key in state}}
