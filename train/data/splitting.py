"""Which conversations are held out: by hash, so that the order of a file plays no part."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from polybasic.train.settings import SELF_PROMPTED


def heldout_indices(rows: Iterable[Mapping[str, Any]], num: int) -> tuple[list[int], int]:
    """Choose by SHA-256 of the group, or where there is none of the first user turn.

    Conversations of one group, or with the same first user turn, stay together. Those of task
    `SELF_PROMPTED` are never held out: what is does not depend on how many of them there are.

    Args:
        rows: with `task`, `group` and `messages` (role, content).
        num: of rows to hold out, at least.

    Returns:
        Indices in order, fewer than `num` where there are not so many, and the number of groups.
    """
    groups: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        if row["task"] != SELF_PROMPTED:
            asked = (each["content"] for each in row["messages"] if each["role"] == "user")
            first: str = row["group"] or next(asked)
            groups.setdefault(hashlib.sha256(first.encode("utf-8")).hexdigest(), []).append(index)
    heldout: list[int] = []
    for digest in sorted(groups):
        if len(heldout) >= num:
            break
        heldout += groups[digest]
    return sorted(heldout), len(groups)
