"""Noise in Triton: the bits of the reference, interpreted and as it is compiled."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from polybasic.chain.kernels import noise
from polybasic.chain.kernels.cuda import noise_kernels
from polybasic.chain.kernels.cuda.draft_operations import DraftOperations
from polybasic.chain.kernels.cuda.graphs import Graphs
from polybasic.chain.kernels.cuda.noise_kernels import gumbel_noise
from tests.chain.kernels.cuda.compiling import CAPABILITIES, Request, compiled
from tests.deploy.recorded_graphs import RecordedGraphs

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
POSITIONS = torch.tensor([0, 2**31, 2**32 - 1], device=DEVICE)


def bits(values: Tensor) -> Tensor:
    return values.view(torch.int32)


def key_of(seed: int, choice: int = 0) -> Tensor:
    return noise.noise_key(seed, choice).to(DEVICE)


@pytest.mark.parametrize(
    ("seed", "choice", "num_tokens"),
    [
        *((*key, 64) for key in ((0, 0), (5, 2**32 - 1), (2**33 + 1, 1), (2**64 - 1, 0))),
        *((2**33 + 1, 1, num_tokens) for num_tokens in (13, 1000, 4096)),
    ],
)
def test_noise_has_the_bits_of_the_reference(seed: int, choice: int, num_tokens: int) -> None:
    key = key_of(seed, choice)
    found = DraftOperations().noise(key, POSITIONS, num_tokens)
    assert torch.equal(bits(found), bits(noise.gumbel_noise(key, POSITIONS, num_tokens)))
    keys = torch.stack([key_of(seed ^ 1), key, key_of(seed, choice ^ 1)])
    each = DraftOperations().noise(keys, POSITIONS, num_tokens)
    assert torch.equal(bits(each), bits(noise.gumbel_noise(keys, POSITIONS, num_tokens)))
    assert torch.equal(bits(each[1]), bits(found[1]))
    for other in (key_of(seed ^ 1 << 32, choice), key_of(seed, choice ^ 1)):
        is_same = bits(gumbel_noise(other, POSITIONS[:1], num_tokens)) == bits(found[:1])
        assert is_same.float().mean() < 0.1, "other bits for another key"


def test_a_captured_kernel_reads_key_and_positions() -> None:
    key, positions = key_of(0), POSITIONS[:2].clone()
    left = torch.zeros(2, 100, device=DEVICE)
    graphs = Graphs(DEVICE) if DEVICE.type == "cuda" else RecordedGraphs()
    for seed in (7, 2**64 - 1, 7):
        key.copy_(key_of(seed))
        positions.add_(seed % 5)
        graphs.run("noise", lambda: left.copy_(gumbel_noise(key, positions, 100)))
        assert torch.equal(left, noise.gumbel_noise(key, positions, 100))
    assert graphs.counts.replays == 2


def test_a_zero_has_the_sign_of_the_reference() -> None:
    """256 of 2**32 words give noise of minus zero."""
    key, position = key_of(3), torch.tensor([7408], device=DEVICE)
    token = 796
    expected, found = (
        function(key, position, 1000) for function in (noise.gumbel_noise, gumbel_noise)
    )
    assert bits(expected)[0, token] == -(2**31)
    assert torch.equal(bits(found), bits(expected))


FUSED = re.compile(r"\bfma\.rn|\bex2\.|\blg2\.|\bdiv\.|\.ftz\b|\.approx\b")


class Launched:
    """Takes a launch, to be looked at."""

    options: Any = None

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self

    def __call__(self, *given: Any, **options: Any) -> None:
        self.options = options


@pytest.mark.proof
def test_no_step_of_a_compiled_kernel_is_fused_or_approximate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched = Launched()
    monkeypatch.setattr(noise_kernels, "fill_noise", launched)
    gumbel_noise(key_of(0), POSITIONS, 100)
    constants = {"BLOCKS": launched.options.pop("BLOCKS")}
    given = dict.fromkeys(("key", "positions"), "*i64") | {"out": "*fp32"}
    given |= dict.fromkeys(("key_stride", "num_tokens"), "i32")
    request = Request(noise_kernels.__name__, "fill_noise", given, constants)
    fusing = {**launched.options, "enable_fp_fusion": True}
    asked = [
        dataclasses.replace(request, capability=capability, options=launched.options)
        for capability in CAPABILITIES
    ]
    *unfused, fused = compiled([*asked, dataclasses.replace(request, options=fusing)])
    for kernel in unfused:
        assert FUSED.findall(kernel.ptx) == []
        assert kernel.count("FFMA") == 0
        assert kernel.count("FMUL") > 30
        assert kernel.count("FADD") > 30
        assert kernel.stack_bytes == 0
    assert fused.count("FFMA") > 30, "what is looked for would be found"
