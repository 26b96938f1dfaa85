"""Top-p without a sort: the tokens that the reference keeps, and kernels compiled for GPUs."""

import itertools

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from polybasic.chain.kernels.cuda.nucleus_kernels import without_tail
from polybasic.chain.kernels.torch.operations import Operations
from tests.chain.kernels.cuda.compiling import CAPABILITIES, Request, compiled

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def rows_of(num_outputs: int) -> Tensor:
    """Logits of rows that are peaked, flat, full of equal numbers, and not numbers at all."""
    generator = torch.Generator().manual_seed(num_outputs)
    usual = torch.randn(4, num_outputs, generator=generator)
    usual *= torch.tensor([0.1, 1.0, 3.0, 30.0])[:, None]
    tied = usual[2:].mul(2).round() / 2
    same = torch.zeros(1, num_outputs)
    few = torch.full((2, num_outputs), float("-inf"))
    few[0, -1], few[1, ::3] = 0.0, 1.0
    tails = torch.full((1, num_outputs), -40.0)
    tails[0, num_outputs // 2] = 0.0
    return torch.cat([usual, tied, same, few, tails]).to(DEVICE)


def assert_as_the_reference(num_outputs: int, top_p: float) -> set[int]:
    """How many tokens of rows are kept."""
    logits = rows_of(num_outputs)
    given = torch.tensor([0.0, top_p], device=DEVICE)[1]
    found = without_tail(logits, logits.softmax(-1), given)
    assert torch.equal(found, Operations().without_tail(logits, logits.softmax(-1), given))
    return set(found.isfinite().sum(-1).tolist())


def test_kept_are_the_tokens_that_the_reference_keeps() -> None:
    assert len(assert_as_the_reference(2500, 0.9)) > 4


@pytest.mark.proof
@pytest.mark.parametrize("num_outputs", [1, 7, 2048, 9001])
def test_kept_are_the_tokens_that_the_reference_keeps_whatever_the_share(num_outputs: int) -> None:
    seen = set()
    for top_p in (1e-30, 0.1, 1 / 3, 0.5, 0.9, 0.999, 1.0):
        seen |= assert_as_the_reference(num_outputs, top_p)
    assert len(seen) > min(num_outputs, 40) / 2


def test_where_all_are_equal_the_first_are_kept() -> None:
    """Shares of a quarter and an eighth are exact, and so is the share that they reach."""
    logits = torch.tensor([[0.0, 0, 0, 0], [0.0, -1e9, 0, -1e9]], device=DEVICE)
    shares = torch.tensor([[0.25] * 4, [0.5, 0, 0.5, 0]], device=DEVICE)
    for operation, (top_p, kept) in itertools.product(
        (without_tail, Operations().without_tail),
        ((0.5, [[1, 1, 0, 0], [1, 0, 0, 0]]), (0.50001, [[1, 1, 1, 0], [1, 0, 1, 0]])),
    ):
        found = operation(logits, shares, torch.tensor(top_p, device=DEVICE))
        assert found.isfinite().int().tolist() == kept


def test_what_is_no_number_is_left_for_others_to_find() -> None:
    logits = torch.tensor([[1.0, float("nan"), 2.0], [3.0, 1.0, 2.0]], device=DEVICE)
    top_p = torch.tensor(0.1, device=DEVICE)
    for sign in (1, -1):
        shares = logits.softmax(-1).copysign(torch.tensor(float(sign)))
        shares[1] = logits[1].softmax(-1)
        for operation in (without_tail, Operations().without_tail):
            found = operation(logits, shares, top_p)
            assert found[0].isnan().tolist() == [False, True, False]
            assert found[0, 2] == 2
            assert found[1].isfinite().tolist() == [True, False, False]


def requests(capability: int) -> list[Request]:
    """Of Llama 3's vocabulary."""
    module = "polybasic.chain.kernels.cuda.nucleus_kernels"
    row = {"probabilities": "*fp32", "stride": "i32", "num_outputs": "i32"}
    sums = {"sums": "*i64"}
    place, early = {"PLACE_BITS": 17}, {"IS_EARLY": capability >= 90}
    given = {
        "sum_levels": ({**row, **sums}, {"CHUNK": 2048}, 4),
        "gather_keys": (
            {**row, "top_p": "*fp32", **sums, "keys": "*i64"},
            {**place, "CHUNK": 2048},
            4,
        ),
        "search_keys": (
            {"keys": "*i64", "num_outputs": "i32", "top_p": "*fp32", **sums, "least": "*i64"},
            {**place, "BLOCK": 2048},
            8,
        ),
        "drop_tail": (
            {"logits": "*fp32", **row, "least": "*i64", "out": "*fp32"},
            {**place, "CHUNK": 2048},
            4,
        ),
    }
    counters = {name: {} if name == "drop_tail" else {"counters": "i32"} for name in given}
    return [
        Request(
            module,
            name,
            {**signature, **counters[name]},
            {**constants, **early},
            ("top_p", "counters"),
            capability,
            {"num_warps": num_warps},
        )
        for name, (signature, constants, num_warps) in given.items()
    ]


@pytest.mark.proof
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernels_fit_a_gpu(capability: int) -> None:
    for kernel in compiled(requests(capability)):
        # triton 3.6 takes 103 for sm_80, 3.7 fewer
        assert kernel.registers <= 104
        assert kernel.stack_bytes == 0
        assert kernel.shared_bytes <= 48 * 1024
