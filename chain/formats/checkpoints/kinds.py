"""Kinds of a chain's members: whole models, and draft heads."""

from typing import Annotated

from pydantic import AfterValidator

from polybasic.chain.formats.head_kinds.table import HEAD_KINDS

MODEL_KINDS = ("awq", "decoder")
"""Whole models, in 4 bits and as they are; all other kinds are draft heads."""


def is_head(kind: str) -> bool:
    """Whether members of a kind are draft heads, which read their verifier's states."""
    return kind not in MODEL_KINDS


def _known(kind: str) -> str:
    if is_head(kind) and kind not in HEAD_KINDS:
        known = ", ".join((*MODEL_KINDS, *HEAD_KINDS))
        raise ValueError(f"known kinds: {known}; others come with the package that adds them")
    return kind


Kind = Annotated[str, AfterValidator(_known)]
"""One of `MODEL_KINDS` or of `HEAD_KINDS`."""
