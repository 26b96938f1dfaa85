"""Lossless staged speculative sampling: a language model made faster, not one probability changed.

    import polybasic

    chain = polybasic.load_chain("runs/smollm2-135m/chain")
    print(chain.generate("What is the capital of France?", max_tokens=64).text)

`polybasic.deploy` holds what a chain is asked with and what it answers.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polybasic.chain.errors import UserError
    from polybasic.deploy.chain import Chain, Sampling
    from polybasic.deploy.drafters.history import History
    from polybasic.deploy.grammar import Grammar
    from polybasic.deploy.live import Generation
    from polybasic.deploy.load import load_chain

    __version__: str

_MODULES = {
    "Chain": "deploy.chain",
    "Generation": "deploy.live",
    "Grammar": "deploy.grammar",
    "History": "deploy.drafters.history",
    "Sampling": "deploy.chain",
    "UserError": "chain.errors",
    "load_chain": "deploy.load",
}
__all__ = [
    "Chain",
    "Generation",
    "Grammar",
    "History",
    "Sampling",
    "UserError",
    "__version__",
    "load_chain",
]


def __getattr__(name: str) -> Any:
    # Imported when it is first asked for: the command line must not wait for torch.
    if name == "__version__":
        return version("polybasic")
    if name in _MODULES:
        return getattr(import_module(f"polybasic.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
