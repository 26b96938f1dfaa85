"""Tables of a draft vocabulary: worked examples, and files that are not right."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.draft_vocabulary import draft_tables, draft_token_ids

Tables = dict[str, Tensor]
TOKEN_IDS = torch.tensor([1, 2, 5, 7])


def tables() -> Tables:
    return draft_tables(TOKEN_IDS, 8)


def test_tables_are_offsets_and_flags() -> None:
    made = tables()
    assert made["d2t"].dtype == torch.int64
    assert made["d2t"].tolist() == [1, 1, 3, 4]
    assert made["t2d"].dtype == torch.bool
    assert made["t2d"].tolist() == [False, True, True, False, False, True, False, True]


def test_tables_are_read_back() -> None:
    found = draft_token_ids({"fc.weight": torch.zeros(1), **tables()})
    assert found is not None
    assert found.tolist() == TOKEN_IDS.tolist()
    assert draft_token_ids({"fc.weight": torch.zeros(1)}) is None
    whole = draft_token_ids(draft_tables(torch.arange(8), 8))
    assert whole is not None
    assert whole.tolist() == list(range(8))


@pytest.mark.parametrize("token_ids", [[2, 1], [1, 1], [-1, 3], [3, 8]])
def test_token_ids_must_be_in_order_and_in_the_vocabulary(token_ids: list[int]) -> None:
    with pytest.raises(AssertionError):
        draft_tables(torch.tensor(token_ids), 8)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda made: {"d2t": made["d2t"]}, "d2t without t2d in here"),
        (lambda made: {"t2d": made["t2d"]}, "t2d without d2t in here"),
        (lambda made: made | {"d2t": made["d2t"].int()}, r"d2t in here is \[4\] of torch.int32"),
        (lambda made: made | {"t2d": made["t2d"].byte()}, "t2d in here is .* of torch.uint8"),
        (lambda made: made | {"t2d": made["t2d"][None]}, r"t2d in here is \[1, 8\]"),
        (lambda made: made | {"d2t": made["d2t"] + 1}, "d2t in here leads to token 8 of 8"),
        (lambda made: made | {"d2t": made["d2t"] - 2}, "d2t in here leads to token -1 of 8"),
        # the same tokens, one of them twice
        (lambda made: made | {"d2t": torch.tensor([1, 0, 3, 4])}, "name different tokens"),
        (lambda made: made | {"t2d": made["t2d"].roll(1)}, "name different tokens"),
        (lambda made: made | {"t2d": torch.ones(8, dtype=torch.bool)}, "name different tokens"),
    ],
)
def test_malformed_tables_are_refused(spoil: Callable[[Tables], Tables], message: str) -> None:
    with pytest.raises(UserError, match=f"malformed draft vocabulary: .*{message}"):
        draft_token_ids(spoil(tables()), "here")
