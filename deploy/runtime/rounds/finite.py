"""Which part of a model computed no numbers, once its logits are none."""

from collections.abc import Sequence

import torch

from polybasic.chain.base.errors import UserError
from polybasic.chain.kernels.rows import consecutive_rows
from polybasic.deploy.runtime.rounds.verifier import Verifier

_NUM_TOKENS = 16
"""Latest ones that are read again."""


def not_finite(verifiers: Sequence[Verifier], tokens: Sequence[int]) -> UserError:
    """The error that names the first part of the first model whose results are no numbers.

    Args:
        verifiers: of a request, the first that drew first; their caches are free afterwards.
        tokens: that they had read when there was nothing to draw from.
    """
    for verifier in verifiers:
        with torch.inference_mode():
            place = _place(verifier, tokens)
        if place is not None:
            return _error(f"{place} of {verifier.name}")
    return _error(" or ".join(verifier.name for verifier in verifiers))


def _place(verifier: Verifier, tokens: Sequence[int]) -> str | None:
    model, cache = verifier.decoder, verifier.cache
    start = max(0, min(cache.length, len(tokens) - 1, len(tokens) - _NUM_TOKENS))
    ids = torch.tensor(tokens[start:], device=model.device)
    layers = tuple(range(len(model.weights.layers)))
    rows = consecutive_rows(start, len(ids), verifier.window)
    states = model.forward(ids, [cache.layers], [rows], feature_layers=layers)
    width = model.states_width()
    final, *inputs = states.split(width, -1)
    if not bool(inputs[0].isfinite().all()):
        return "embedding"
    for layer, values in enumerate([*inputs[1:], final]):
        if not bool(values.isfinite().all()):
            return f"layer {layer}" if layer < len(inputs) - 1 else "last layer or norm"
    return None if bool(model.logits(final).isfinite().all()) else "output projection"


def _error(where: str) -> UserError:
    return UserError(
        "a model computes no numbers",
        f"NaN or infinity from {where}",
        "fetch or train it again; float32 may do where a smaller dtype overflows (--dtype float32)",
    )
