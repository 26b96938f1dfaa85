"""An EAGLE-2 head that starts as the verifier's last layer.

The head guesses the state after the next token from the token and the state before it. If it knew
what enters the verifier's last layer there, that layer would give the state. So its layer begins as
a copy of this one, and its fc as the linear map that comes closest to the input, by ridge
regression over some of the training's rows.

A head works on states after the final norm, w * h / |h| by channel, where h leaves the last layer,
w are the norm's weights and |h| is a root mean square. Where the verifier's residual stream is u
the head's is taken to be w * u / |h|, and the copied matrices are scaled to read and write that;
ratios of root mean squares, which differ from token to token, are replaced by their means.

Shapes: B = batch, T = tokens, N = rows, H = hidden size.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from polybasic.train.data.batches import LocalBatch
from polybasic.train.features.head_shape import HeadShape
from polybasic.train.features.target import Target
from polybasic.train.head.eagle2 import Eagle2Head

ROWS_PER_UNKNOWN = 32
"""Of the least squares: for each of the 2H columns of fc."""

_RIDGES = (1e-3, 1e-2, 0.03, 0.1, 0.3, 1.0)
"""Shares of the mean squares of what is read, of which the best one is found on other rows."""
_CHECKED_SHARE = 5  # every fifth share is left out to find it
_LEAST_WEIGHT = 0.01  # of the final norm's median one: a channel below it is nearly closed
_BIASES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_MATRICES = (*_BIASES, "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_NORMS = ("input_layernorm", "post_attention_layernorm")


def has_copied_layer(verifier: Target, shape: HeadShape) -> bool:
    """Whether a head of this shape can start as the verifier's last layer.

    Not where that has norms that heads lack (Qwen3, Gemma), another activation or MLP size, or
    weights that are divided among processes.
    """
    config, layer = verifier.model.config, _last_layer(verifier)
    weights = dict(layer.named_parameters())
    biases = {f"{name}.bias" for name in _BIASES} & weights.keys()
    names = {f"{name}.weight" for name in (*_MATRICES, *_NORMS)} | biases
    return (
        shape.kind == "eagle2"
        and weights.keys() == names
        and len(biases) in (0, len(_BIASES))
        and config.hidden_act == "silu"
        and weights["mlp.gate_proj.weight"].shape == (shape.intermediate_size, shape.hidden_size)
    )


def has_qkv_biases(verifier: Target) -> bool:
    """Whether the verifier's last layer has biases on queries, keys and values."""
    return _last_layer(verifier).self_attn.q_proj.bias is not None


@torch.no_grad()
def copy_last_layer(head: Eagle2Head, verifier: Target, shares: Iterable[LocalBatch]) -> None:
    """Set a head's weights to those of the verifier's last layer, and to the map to its input.

    Args:
        head: for which `has_copied_layer` holds; in float32.
        verifier: whose states it learns.
        shares: of training batches, as many as the map is found from.
    """
    layer, norm = _last_layer(verifier), _final_norm(verifier)
    closing = norm.weight.float()
    fit, check, ratios = _LeastSquares(), _LeastSquares(), list[Tensor]()
    for number, share in enumerate(shares, start=1):
        read, entering, between, leaving = _rows(verifier, head, share)
        rows = fit if number % _CHECKED_SHARE else check
        rows.add(read, entering * closing / leaving)
        amid = _size(between * closing / leaving) / _size(between)
        ratios.append(torch.cat((leaving / _size(entering), 1 / leaving, leaving * amid), dim=1))
    ridge = min(_RIDGES, key=lambda each: check.error(fit.solution(each)))
    head.fc.weight.copy_(fit.with_rows_of(check).solution(ridge))
    on_entry, on_leaving, amid = torch.cat(ratios).mean(dim=0)
    size = closing.abs()
    opening = torch.where(size > _LEAST_WEIGHT * size.median(), 1 / closing, 0.0)
    reading = opening * layer.input_layernorm.weight.float() * on_entry
    writing = closing * on_leaving
    copied: Any = head.layers[0]
    copied.post_attention_layernorm.weight.copy_(
        opening * layer.post_attention_layernorm.weight.float() * amid
    )
    for name in _MATRICES:
        ours, theirs = copied.get_submodule(name), layer.get_submodule(name)
        weight = theirs.weight.float()
        if name in _BIASES:
            weight = weight * reading
            if theirs.bias is not None:
                ours.bias.copy_(theirs.bias)
        elif name.endswith(("o_proj", "down_proj")):
            weight = weight * writing[:, None]
        ours.weight.copy_(weight)


def _last_layer(verifier: Target) -> Any:
    model: Any = verifier.model.model
    return model.layers[-1]


def _final_norm(verifier: Target) -> Any:
    model: Any = verifier.model.model
    return model.norm


def _size(states: Tensor) -> Tensor:
    """Root mean squares [N, 1]."""
    return states.square().mean(dim=-1, keepdim=True).sqrt()


def _rows(verifier: Target, head: Eagle2Head, share: LocalBatch) -> tuple[Tensor, ...]:
    """Of the rows whose prediction counts, float32: what fc reads [N, 2H]; of the token after, the
    last layer's input, its stream between attention and MLP, [N, H], and the size of its output
    [N, 1]."""
    layer = _last_layer(verifier)
    modules = (layer, layer.post_attention_layernorm, _final_norm(verifier))
    states, inputs = verifier.states_with_inputs(modules, share.token_ids, share.document_ids)
    counted = share.is_assistant[:, 2:]
    embedded = head.embed_tokens(share.token_ids[:, 1:-1][counted])
    read = torch.cat((embedded.float(), states[:, :-2][counted].float()), dim=-1)
    entering, between, leaving = (tensor[:, 1:-1][counted].float() for tensor in inputs)
    return read, entering, between, _size(leaving)


class _LeastSquares:
    """The matrix [O, I] that makes of rows [N, I] what is closest to [N, O], in float64."""

    def __init__(self) -> None:
        # of what is read, of that with what is wanted, of what is wanted by channel
        self._sums = [torch.zeros(()), torch.zeros(()), torch.zeros(())]

    def add(self, read: Tensor, wanted: Tensor) -> None:
        """Take further rows into account."""
        read, wanted = read.double(), wanted.double()
        further = (read.T @ read, read.T @ wanted, wanted.square().sum(dim=0))
        self._sums = [
            ours.to(read) + theirs for ours, theirs in zip(self._sums, further, strict=True)
        ]

    def with_rows_of(self, other: "_LeastSquares") -> "_LeastSquares":
        """The same of the rows of both."""
        both = _LeastSquares()
        both._sums = [ours + theirs for ours, theirs in zip(self._sums, other._sums, strict=True)]
        return both

    def solution(self, ridge: float) -> Tensor:
        squares, products, _ = self._sums
        return torch.linalg.solve(squares + ridge * torch.diag(squares.diagonal()), products).T

    def error(self, matrix: Tensor) -> float:
        """Mean over the channels of the squared error as a share of the channel's square; without
        rows 0."""
        squares, products, wanted = self._sums
        if not squares.dim():
            return 0.0
        found = matrix.T
        away = wanted - 2 * (found * products).sum(dim=0) + (found * (squares @ found)).sum(dim=0)
        return (away / wanted.clamp(min=1e-30)).mean().item()
