"""Tokens that a draft head can draft where they are a part of the vocabulary: its two tables.

A head's file holds them as EAGLE-3's does: `d2t` int64 [D] gives the offset of each draft id (the
token is draft id + d2t[draft id]), `t2d` bool [V] tells which tokens there are. A head that drafts
all tokens has neither.

#   D = tokens that can be drafted, V = vocabulary
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.names import DRAFT_TABLES

OFFSETS, IS_DRAFTED = DRAFT_TABLES


def draft_tables(token_ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """The tables of a draft vocabulary, by name.

    Args:
        token_ids: int64 [D], ascending.
        vocab_size: V.
    """
    assert (token_ids.diff() > 0).all(), "in ascending order, each once"
    assert token_ids[0] >= 0 and token_ids[-1] < vocab_size, f"{vocab_size} tokens"  # noqa: PT018
    is_drafted = torch.zeros(vocab_size, dtype=torch.bool)
    is_drafted[token_ids] = True
    return {OFFSETS: token_ids - torch.arange(len(token_ids)), IS_DRAFTED: is_drafted}


def draft_token_ids(tensors: Mapping[str, Tensor], where: str = "the head") -> Tensor | None:
    """The token of each draft id, int64 [D]; None where all tokens can be drafted.

    Args:
        tensors: of a head, by name.
        where: the head, for errors.

    Raises:
        UserError: one table without the other, tables of other types, tokens outside of the
            vocabulary, or tables that disagree.
    """
    given = [name for name in (OFFSETS, IS_DRAFTED) if name in tensors]
    if not given:
        return None
    for name, dtype in ((OFFSETS, torch.int64), (IS_DRAFTED, torch.bool)):
        if name not in tensors:
            raise _malformed(f"{given[0]} without {name} in {where}")
        if tensors[name].dtype != dtype or tensors[name].dim() != 1:
            found = f"{list(tensors[name].shape)} of {tensors[name].dtype}"
            raise _malformed(f"{name} in {where} is {found}")
    offsets, is_drafted = tensors[OFFSETS], tensors[IS_DRAFTED]
    token_ids = offsets + torch.arange(len(offsets), device=offsets.device)
    outside = token_ids[(token_ids < 0) | (token_ids >= len(is_drafted))]
    if len(outside):
        raise _malformed(f"{OFFSETS} in {where} leads to token {outside[0]} of {len(is_drafted)}")
    expected = torch.zeros_like(is_drafted)
    expected[token_ids] = True
    if len(token_ids) != is_drafted.sum() or (expected != is_drafted).any():
        raise _malformed(f"{OFFSETS} and {IS_DRAFTED} in {where} name different tokens")
    return token_ids


def _malformed(where: str) -> UserError:
    return UserError("malformed draft vocabulary", where, "fetch or train the head again")
