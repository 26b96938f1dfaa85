"""The runtime: caches, trees, verification, stages, benchmark. Reads chains."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polybasic.deploy.chain import Chain, Generation, Options, Piece, Sampling, Statistics
    from polybasic.deploy.load import load_chain

__all__ = ["Chain", "Generation", "Options", "Piece", "Sampling", "Statistics", "load_chain"]


def __getattr__(name: str) -> Any:
    # Imported when it is first asked for: the settings beside it must not wait for torch.
    if name in __all__:
        from polybasic.deploy import chain, load

        return getattr(load if name == "load_chain" else chain, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
