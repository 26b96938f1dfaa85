"""A long answer leaves nothing behind, and holds no more at its end than at its beginning."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from polybasic.chain.formats.plan import NUM_PROBABILITY_BINS, AdaptiveFlush, Flush
from polybasic.deploy import Chain, load_chain
from polybasic.deploy.runtime.rounds.sampling import GreedyRows, GreedySampler, Sampling
from polybasic.deploy.runtime.rounds.stages import TreeStage


def live_tensors() -> tuple[int, int]:
    """How many there are, and their bytes."""
    gc.collect()
    found = [item for item in gc.get_objects() if issubclass(type(item), Tensor)]
    return len(found), sum(tensor.nbytes for tensor in found)


def pieces_of(chain: Chain, num_tokens: int, temperature: float) -> Iterator[list[int]]:
    flush = Flush(
        length=8,
        adaptive=AdaptiveFlush(break_even=0.01, acceptance=(0.9,) * NUM_PROBABILITY_BINS),
    )
    plan = chain.plan.model_copy(update={"flush": {"target": flush}})
    return chain.stream_ids([5, 9, 2], num_tokens, Sampling(temperature, seed=0), plan)


@pytest.fixture
def chain(tiny_chain: Path) -> Chain:
    """What is here by now is not looked at, until the process ends."""
    loaded = load_chain(tiny_chain)
    loaded.stop_tokens = frozenset()
    gc.collect()
    gc.freeze()
    return loaded


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_long_answer_does_not_grow(chain: Chain, temperature: float) -> None:
    list(pieces_of(chain, 20, temperature))
    before = live_tensors()
    # without the first token, which the prompt's last pass draws
    _, *found = [live_tensors() for _ in pieces_of(chain, 110, temperature)]
    assert len(found) > 5
    assert len({num for num, _ in found[:-1]}) == 1
    # a block's distributions, one row for each of its tokens
    num_bytes = [num for _, num in found]
    assert max(num_bytes) - min(num_bytes) <= (temperature > 0) * 9 * 64 * 4
    assert live_tensors() == before


def test_an_answer_that_grows_is_noticed(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    observe, kept = TreeStage._round, []

    def leaking(self: TreeStage, limit: int) -> Any:
        gain = yield from observe(self, limit)
        kept.append(gain.distributions.probabilities)
        return gain

    list(pieces_of(chain, 20, 0.0))
    before = live_tensors()
    monkeypatch.setattr(TreeStage, "_round", leaking)
    found = [live_tensors() for _ in pieces_of(chain, 110, 0.0)]
    assert found[-1] > found[0]
    assert live_tensors() > before


@pytest.mark.parametrize("is_whole_kept", [False, True])
def test_a_block_holds_no_logits_of_its_rounds(
    chain: Chain, monkeypatch: pytest.MonkeyPatch, is_whole_kept: bool
) -> None:
    run_round, found = TreeStage._round, []

    def counting(self: TreeStage, limit: int) -> Any:
        found.append(live_tensors()[0])
        return (yield from run_round(self, limit))

    if is_whole_kept:
        monkeypatch.setattr(
            GreedySampler,
            "take",
            lambda self, rows, chosen: GreedyRows(
                [rows.tokens[row] for row in chosen], rows.probabilities
            ),
        )
    list(pieces_of(chain, 20, 0.0))
    monkeypatch.setattr(TreeStage, "_round", counting)
    list(pieces_of(chain, 60, 0.0))
    # what the driver still holds of a pass is there from the second round on
    assert (max(found) > found[1]) is is_whole_kept
