"""The runtime: caches, trees, verification, stages, benchmark, server. Reads chains."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polybasic.deploy.runtime.chain import Chain, Options, Sampling
    from polybasic.deploy.runtime.live import Generation, LiveAnswer
    from polybasic.deploy.runtime.load import load_chain
    from polybasic.deploy.runtime.request import Piece, Statistics
    from polybasic.deploy.runtime.rounds.logprobs import TokenLogprobs
    from polybasic.deploy.runtime.slots import BusyError

_MODULES = {
    "BusyError": "slots",
    "Chain": "chain",
    "Generation": "live",
    "LiveAnswer": "live",
    "Options": "chain",
    "Piece": "request",
    "Sampling": "chain",
    "Statistics": "request",
    "TokenLogprobs": "rounds.logprobs",
    "load_chain": "load",
}
__all__ = [
    "BusyError",
    "Chain",
    "Generation",
    "LiveAnswer",
    "Options",
    "Piece",
    "Sampling",
    "Statistics",
    "TokenLogprobs",
    "load_chain",
]


def __getattr__(name: str) -> Any:
    # Imported when it is first asked for: the settings beside it must not wait for torch.
    if name in _MODULES:
        return getattr(import_module(f"polybasic.deploy.runtime.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
