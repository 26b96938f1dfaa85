"""Top-p on a CPU, which sorts no more than a row needs, beside a sort of everything."""

import pytest
import torch
from torch import Tensor

from polybasic.chain.kernels.torch.host_operations import HostOperations
from polybasic.chain.kernels.torch.operations import Operations

NUM_TOKENS = 3000


def rows() -> Tensor:
    """Logits from flat to peaked, with many equal ones, and not numbers."""
    generator = torch.Generator().manual_seed(0)
    usual = torch.randn(12, NUM_TOKENS, generator=generator)
    usual *= torch.linspace(0.0, 12.0, 12)[:, None]
    tied = (usual[4:8] * 2).round() / 2
    few = torch.full((1, NUM_TOKENS), float("-inf"))
    few[0, ::997] = 0.0
    nothing = torch.full((1, NUM_TOKENS), float("nan"))
    return torch.cat((usual, tied, few, nothing))


def kept_by_a_sort(probabilities: Tensor, top_p: float) -> Tensor:
    """In whole numbers, by Python's own sort, which keeps equal ones in order."""
    enough = max(1, int(torch.tensor(top_p) * 2.0**60))
    kept = torch.zeros(probabilities.shape, dtype=torch.bool)
    for row, values in enumerate(probabilities.tolist()):
        total = 0
        for token in sorted(range(len(values)), key=lambda token: -values[token]):
            kept[row, token] = total < enough
            total += int(values[token] * 2.0**60)
    return kept


@pytest.mark.parametrize("top_p", [1e-30, 0.3, 0.95, 1.0])
def test_kept_are_the_tokens_that_a_sort_keeps(top_p: float) -> None:
    logits = rows()
    probabilities, share = logits.softmax(-1), torch.tensor(top_p)
    kept = kept_by_a_sort(probabilities[:-1], top_p)
    for operations in (HostOperations(), Operations()):
        found = operations.without_tail(logits, probabilities, share)
        assert torch.equal(found[:-1] > float("-inf"), kept & (logits[:-1] > float("-inf")))
        assert torch.equal(found[:-1][kept], logits[:-1][kept])
        assert found[-1].isnan().all(), "a row of NaN is kept"


def test_a_peaked_row_is_not_sorted_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, sort = list[int](), Tensor.sort

    def counted(some: Tensor, **options: bool) -> object:
        sizes.append(len(some))
        return sort(some, **options)

    monkeypatch.setattr(Tensor, "sort", counted)
    logits = rows()[[11, 0]]
    HostOperations().without_tail(logits, logits.softmax(-1), torch.tensor(0.9))
    assert sizes[0] < NUM_TOKENS / 10
    assert sizes[1] == NUM_TOKENS, "a flat one is"
