"""Answers by Triton's kernels, which the interpreter runs, are those of PyTorch's operations."""

from functools import partial
from pathlib import Path

import pytest

from polybasic.chain.kernels import selection
from polybasic.chain.kernels.torch.backends import DeviceBackend
from polybasic.deploy import engine as engines
from polybasic.deploy import load_chain
from tests.deploy.graphs.test_device_stages import GREEDY, PLANS, RANDOM, answer, engine
from tests.deploy.recorded_graphs import RecordedGraphs

pytest.importorskip("triton")
NUM_TOKENS = 6


@pytest.fixture(autouse=True)
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYBASIC_KERNELS", "device")


@pytest.fixture
def in_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are replayed, too."""
    from polybasic.chain.kernels.cuda.executor import CudaExecutor

    monkeypatch.setattr(selection, "DeviceBackend", partial(DeviceBackend, kind=CudaExecutor))
    monkeypatch.setattr(engines, "Graphs", lambda device, enabled: RecordedGraphs(enabled))


@pytest.mark.parametrize(
    "name",
    [
        "two",
        pytest.param("draft model", marks=pytest.mark.proof),
        pytest.param("window", marks=pytest.mark.proof),
    ],
)
def test_answers(name: str, request: pytest.FixtureRequest) -> None:
    plain = engine()
    samplings = (GREEDY, RANDOM)
    expected = [answer(plain, PLANS[name], one, max_new_tokens=NUM_TOKENS) for one in samplings]
    request.getfixturevalue("in_triton")
    found = engine()
    assert found.models.target.name == "cuda"
    for sampling, tokens in zip(samplings, expected, strict=True):
        assert answer(found, PLANS[name], sampling, max_new_tokens=NUM_TOKENS) == tokens
    assert found.graphs.counts.replays > 0


@pytest.mark.proof
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the head's random weights overflow
def test_answers_of_a_loaded_chain_in_half_precision(
    tiny_chain: Path, request: pytest.FixtureRequest
) -> None:
    """With products by kernels, those of 4-bit weights included."""
    options = {"temperature": 0.0, "max_new_tokens": NUM_TOKENS}
    expected = load_chain(tiny_chain, dtype="float16").generate("w5 w9 w2", **options)
    request.getfixturevalue("in_triton")
    found = load_chain(tiny_chain, dtype="float16").generate("w5 w9 w2", **options)
    assert found.token_ids == expected.token_ids
