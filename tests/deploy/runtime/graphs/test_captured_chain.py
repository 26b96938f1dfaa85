"""A chain whose passes and rounds are captured when it is loaded, with CUDA graphs emulated."""

from pathlib import Path
from typing import Any

import pytest

from polybasic.deploy import Chain, load_chain
from polybasic.deploy.runtime import engine, load
from polybasic.deploy.runtime.rounds.sampling import Sampling
from tests.deploy.recorded_graphs import RecordedGraphs

PROMPT = "w5 w9 w2"
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 12}
DRAWN: dict[str, Any] = {"temperature": 0.9, "seed": 4, "max_new_tokens": 12}


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device path on a CPU, with graphs that behave as CUDA's."""
    monkeypatch.setenv("POLYBASIC_KERNELS", "device")
    monkeypatch.setattr(engine, "Graphs", lambda device, enabled: RecordedGraphs(enabled))


def tokens(chain: Chain, options: dict[str, Any]) -> list[int]:
    return chain.generate(PROMPT, **options).token_ids


@pytest.mark.usefixtures("on_device")
def test_graphs_are_captured_at_load_and_answer_the_same(tiny_chain: Path) -> None:
    said = list[str]()
    captured = load_chain(tiny_chain, dtype="float32", say=said.append)
    assert [line.split()[0] for line in said] == ["capturing", "captured"]
    counts = captured.engine.graphs.counts
    at_load = counts.captures
    assert at_load > 0
    assert counts.replays == 0
    plain = load_chain(tiny_chain, dtype="float32", graphs=False, say=said.append)
    assert tokens(captured, GREEDY) == tokens(plain, GREEDY)
    assert counts.replays > 10
    # Nothing that the plan runs greedily was left to be captured while it answers.
    assert counts.captures == at_load
    assert tokens(captured, DRAWN) == tokens(plain, DRAWN)
    assert not plain.engine.graphs.is_active
    assert (plain.engine.graphs.counts.captures, len(said)) == (0, 2)


@pytest.mark.usefixtures("on_device")
def test_graphs_of_a_default_temperature_serve_other_seeds_and_temperatures(
    tiny_chain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "read_default_sampling", lambda target: Sampling(temperature=1.0))
    captured, plain = (
        load_chain(tiny_chain, dtype="float32", graphs=is_captured) for is_captured in (True, False)
    )
    counts = captured.engine.graphs.counts
    at_load, seen = counts.captures, set()
    for seed in (4, 2**64 - 1):
        for temperature in (0.8, 1.6):
            options = {**DRAWN, "seed": seed, "temperature": temperature}
            found = tokens(captured, options)
            assert found == tokens(plain, options)
            seen.add(tuple(found))
    assert counts.captures == at_load > 0
    assert len(seen) == 4


def test_on_a_cpu_nothing_is_captured(tiny_chain: Path) -> None:
    said = list[str]()
    chain = load_chain(tiny_chain, dtype="float32", say=said.append)
    chain.generate(PROMPT, **GREEDY)
    assert chain.engine.graphs.enabled
    assert not chain.engine.graphs.is_active
    assert (said, chain.engine.graphs.counts.captures) == ([], 0)
