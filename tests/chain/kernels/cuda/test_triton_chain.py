"""Answers by Triton's kernels, which the interpreter runs, are those of PyTorch's operations."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("datasets")  # which a machine with a GPU may lack

from polybasic.chain.kernels import selection
from polybasic.chain.kernels.torch.backends import DeviceBackend
from polybasic.deploy import load_chain
from polybasic.deploy.runtime import engine as engines
from polybasic.deploy.runtime.request import Request
from polybasic.train.features.target import load_target
from polybasic.train.head import acceptance
from polybasic.train.head.acceptance import HeldoutBatch, TreeShape, simulate
from polybasic.train.head.start import new_head
from polybasic.train.settings import HeadSettings
from tests.conftest import ChainParts
from tests.deploy.recorded_graphs import RecordedGraphs
from tests.deploy.runtime.graphs.test_device_stages import (
    GREEDY,
    PLANS,
    PROMPT,
    RANDOM,
    answer,
    engine,
)

pytest.importorskip("triton")
NUM_TOKENS = 4


@pytest.fixture(autouse=True)
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYBASIC_KERNELS", "device")


@pytest.fixture
def in_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are replayed, too, and each kernel is launched on its tensors' device."""
    from triton.runtime.interpreter import InterpretedFunction

    from polybasic.chain.kernels.cuda.executor import CudaExecutor

    run, current = InterpretedFunction.run, list[torch.device]()

    @contextmanager
    def device_of(tensor: torch.Tensor) -> Iterator[None]:
        current.append(tensor.device)
        yield
        current.pop()

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        assert current, "a kernel is launched on the current device, whatever that is"
        return run(self, *args, **kwargs)

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(InterpretedFunction, "run", launch)

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
    expected = [
        answer(plain, PLANS[name], sampling, max_new_tokens=NUM_TOKENS) for sampling in samplings
    ]
    request.getfixturevalue("in_triton")
    found = engine()
    assert found.models.target.name == "cuda"
    for sampling, tokens in zip(samplings, expected, strict=True):
        assert answer(found, PLANS[name], sampling, max_new_tokens=NUM_TOKENS) == tokens
    assert found.graphs.counts.replays > 0


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # rows that are padded hold anything
@pytest.mark.parametrize(
    "name",
    ["two", *(pytest.param(name, marks=pytest.mark.proof) for name in ("three", "draft model"))],
)
def test_answers_of_several_sequences(name: str, request: pytest.FixtureRequest) -> None:
    """By captured passes and drafts, which they share."""
    penalized = replace(RANDOM, repetition_penalty=1.3)
    plain, samplings = engine(), (GREEDY, RANDOM, penalized)
    prompts = [PROMPT, PROMPT[:3], PROMPT[::-1]]
    asked = [
        # the first token comes with the prompt; then some rounds have the shapes of others
        Request(prompt, NUM_TOKENS + 3, sampling, (), PLANS[name])
        for prompt, sampling in zip(prompts, samplings, strict=True)
    ]
    expected = [[token for batch in plain.run(question) for token in batch] for question in asked]
    request.getfixturevalue("in_triton")
    found = engine(sequences=3)
    running = [found.begin(question, runs_ahead=True) for question in asked]
    while found.step():
        pass
    assert [
        [token for piece in answering.take() for token in piece.token_ids] for answering in running
    ] == expected
    assert found.graphs.counts.replays > 0


def test_evaluations_of_a_head(
    tiny_chain_parts: ChainParts, monkeypatch: pytest.MonkeyPatch, in_triton: None
) -> None:
    """By captured passes and drafts, whatever the conversation."""
    target = load_target(tiny_chain_parts.target, torch.device("cpu"), dtype=torch.float32)
    settings = HeadSettings(dtype="float32")
    head = new_head(target.head_shape(settings), target.embedding, settings, 0, None, None)
    answers = [list(range(4, 14)), list(range(30, 2, -3))]
    batch = HeldoutBatch(
        ids := torch.tensor(answers),
        target.features(ids),
        torch.tensor([2, 4]),
        torch.tensor([10, 10]),
        ["a", "b"],
    )
    evaluated = partial(simulate, head, target.lm_head, [batch], TreeShape(2, 2, 4))
    graphs = RecordedGraphs()
    monkeypatch.setattr(acceptance, "Graphs", lambda device: graphs)
    found = evaluated()
    assert graphs.counts.replays > found.num_rounds
    monkeypatch.setenv("POLYBASIC_KERNELS", "eager")
    assert evaluated() == found


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


@pytest.mark.proof
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the head's random weights overflow
def test_all_products_of_a_plan_are_known_before_the_first_is_computed(
    tiny_chain: Path, monkeypatch: pytest.MonkeyPatch, in_triton: None
) -> None:
    from polybasic.chain.kernels.cuda.products import fused
    from polybasic.chain.kernels.cuda.products.launch import Product
    from polybasic.chain.kernels.cuda.products.options import Task

    prepared: list[set[Task]] = []
    computed, product_computed = set[Task](), Product.computed

    def record(self: Product, tiling: Any) -> torch.Tensor:
        if tiling is not None:
            computed.add(Task.of(self))
        return product_computed(self, tiling)

    monkeypatch.setattr(Product, "computed", record)
    monkeypatch.setattr(fused, "prepare", lambda found: prepared.append(set(map(Task.of, found))))
    # what is captured runs when it is needed
    monkeypatch.setattr(RecordedGraphs, "prepare", lambda self, steps, say: None)
    chain = load_chain(tiny_chain, dtype="float16")
    assert computed == set()
    chain.generate("w5 w9 w2", temperature=0.0, max_new_tokens=2)
    (known,) = prepared
    assert computed <= known
    assert len(computed) > 8
