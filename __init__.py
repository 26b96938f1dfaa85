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
    from polybasic.chain.base.errors import UserError
    from polybasic.deploy.runtime.chain import Chain, Sampling
    from polybasic.deploy.runtime.drafters.history import History
    from polybasic.deploy.runtime.grammar import Grammar
    from polybasic.deploy.runtime.live import Generation
    from polybasic.deploy.runtime.load import load_chain

    __version__: str

_MODULES = {
    "Chain": "deploy.runtime.chain",
    "Generation": "deploy.runtime.live",
    "Grammar": "deploy.runtime.grammar",
    "History": "deploy.runtime.drafters.history",
    "Sampling": "deploy.runtime.chain",
    "UserError": "chain.base.errors",
    "load_chain": "deploy.runtime.load",
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
