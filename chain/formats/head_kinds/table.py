"""The kinds of draft heads that there are, one a line."""

from typing import Any

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.extensions import Registry
from polybasic.chain.formats.head_kinds.block import BLOCK
from polybasic.chain.formats.head_kinds.dflash import DFLASH
from polybasic.chain.formats.head_kinds.eagle2 import EAGLE2
from polybasic.chain.formats.head_kinds.eagle3 import EAGLE3
from polybasic.chain.formats.head_kinds.early_exit import EARLY_EXIT
from polybasic.chain.formats.head_kinds.kind import HeadKind
from polybasic.chain.formats.head_kinds.medusa import HYDRA, MEDUSA
from polybasic.chain.formats.head_kinds.peagle import PEAGLE
from polybasic.chain.formats.head_kinds.steering import STEERING
from polybasic.chain.formats.origin import ORIGIN_KEY, recorded

HEAD_KINDS = Registry(
    "polybasic.drafters",
    "name",
    EAGLE2,
    PEAGLE,  # before EAGLE3, by whose layers it would be taken for one
    EAGLE3,
    BLOCK,
    DFLASH,
    MEDUSA,
    HYDRA,
    EARLY_EXIT,
    STEERING,
)
"""By name."""
KIND_KEY = "kind"
"""Where a head's config.json names its kind, beside the weights that it was trained for."""


def steers(kind: str) -> bool:
    """Whether members of a kind steer another member."""
    return kind in HEAD_KINDS and HEAD_KINDS[kind].steers


def head_kind_of(config: dict[str, Any], where: str) -> HeadKind:
    """The kind of a head: the one that it names, or as it was published; EAGLE-2 of all others.

    Args:
        config: content of its config.json.
        where: its path, for errors.

    Raises:
        UserError: it names a kind that there is not.
    """
    name = recorded(config, KIND_KEY)
    if name is None:
        return next((kind for kind in HEAD_KINDS.own if kind.recognizes(config)), EAGLE2)
    if name not in HEAD_KINDS:
        raise UserError(
            "unknown kind of draft head",
            f"{where} {ORIGIN_KEY}.{KIND_KEY} {name!r}, known: {', '.join(HEAD_KINDS)}",
            "install the package that adds it",
        )
    return HEAD_KINDS[name]
