"""Rounds on the device answer as the host's, as they are and as graphs that are replayed."""

from dataclasses import replace
from typing import Any

import pytest

from polybasic.chain.formats.plan import AdaptiveFlush, Flush, Ngram, Plan, Tree, Window
from polybasic.chain.kernels.executor import Executor
from polybasic.deploy.runtime.engine import Engine
from polybasic.deploy.runtime.graphs.device_stages import DeviceBlockStage, DeviceTreeStage
from polybasic.deploy.runtime.graphs.drawing import DeviceNoise
from polybasic.deploy.runtime.models import Models
from polybasic.deploy.runtime.request import Request
from polybasic.deploy.runtime.rounds.sampling import Sampling
from polybasic.deploy.runtime.rounds.stages import HostStage, Stage
from tests.deploy.recorded_graphs import RecordedGraphs
from tests.deploy.small_chains import VOCAB_SIZE, Weights, small_config

PROMPT = [1, 4, 2, 0, 5, 3, 3, 1, 2]
NUM_TOKENS = 24
CONTEXT_TOKENS = 40
GREEDY, RANDOM = Sampling(), Sampling(temperature=1.5, seed=5)
WARPED = replace(RANDOM, top_k=3, top_p=0.9, min_p=0.05)
FLUSH = Flush(length=4)
TREE = Tree(depth=3, top_k=2, rows=6)
EVERY = AdaptiveFlush(break_even=0.3, acceptance=(0.7,) * 8)
PLANS = {
    "target": Plan(members=("target",), tree=TREE),
    "two": Plan(members=("target", "head"), tree=TREE),
    "wide": Plan(members=("target", "head"), tree=Tree(depth=4, top_k=4, rows=40)),
    "probable": Plan(
        members=("target", "head"), tree=TREE.model_copy(update={"least_probability": 0.4})
    ),
    "three": Plan(members=("target", "same", "head"), tree=TREE, flush={"target": FLUSH}),
    "token rule": Plan(
        members=("target", "same", "head"),
        tree=TREE,
        flush={"target": Flush(length=5)},
        rule="token",
    ),
    "own cache": Plan(members=("target", "thin", "head"), tree=TREE, flush={"target": FLUSH}),
    "four": Plan(
        members=("target", "same", "thin", "head"),
        tree=TREE,
        flush={"target": Flush(length=7), "same": Flush(length=3)},
    ),
    "adaptive": Plan(
        members=("target", "same", "head"),
        tree=TREE,
        flush={"target": Flush(length=9, adaptive=EVERY)},
    ),
    "block rule": Plan(
        members=("target", "same", "head"), tree=TREE, flush={"target": FLUSH}, rule="block"
    ),
    "block head": Plan(members=("target", "block"), tree=Tree(depth=4, top_k=2, rows=7)),
    "masked head": Plan(members=("target", "masked"), tree=Tree(depth=4, top_k=2, rows=7)),
    "draft model": Plan(members=("target", "drafter"), tree=TREE),
    "ngram": Plan(members=("target",), tree=Tree(depth=1, top_k=1, rows=5), ngram=Ngram()),
    "ngram over a head": Plan(members=("target", "head"), tree=TREE, ngram=Ngram()),
    "window": Plan(
        members=("target", "same", "head"),
        tree=TREE,
        flush={"target": FLUSH},
        windows={"same": Window(sinks=2, tokens=6), "head": Window(sinks=1, tokens=5)},
    ),
}


def engine(sequences: int | None = None) -> Engine:
    """The same chain at each call, for the kernels that the environment asks for."""
    weights = Weights(seed=7)
    target = weights.decoder(small_config(2, 16))
    same = weights.decoder(small_config(2, 16))
    thin = weights.decoder(small_config(1, 16))
    drafter = weights.decoder(small_config(1, 8))
    heads: dict[str, Executor] = {"head": weights.head(target), "drafter": drafter}
    heads["block"] = Weights(seed=8).block_head(target, num_positions=4)
    heads["masked"] = Weights(seed=8).block_head(target, num_positions=4, mask_token_id=1)
    drafts_for = dict.fromkeys(("drafter", "block", "masked"), ("target",))
    drafts_for |= {"head": ("target", "same", "thin")}
    decoders = {"target": target, "same": same, "thin": thin}
    return Engine(Models(decoders, heads, drafts_for, CONTEXT_TOKENS), sequences=sequences)


def answer(runner: Engine, plan: Plan, sampling: Sampling, **changed: Any) -> list[int]:
    request = replace(Request(PROMPT, NUM_TOKENS, sampling, (), plan), **changed)
    return [token for batch in runner.run(request) for token in batch]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setenv("POLYBASIC_KERNELS", "eager")
    return engine()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setenv("POLYBASIC_KERNELS", "device")
    return engine()


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Replays graphs, each compared with its function."""
    monkeypatch.setenv("POLYBASIC_KERNELS", "device")
    monkeypatch.setattr(
        "polybasic.deploy.runtime.engine.Graphs",
        lambda device, enabled: RecordedGraphs(checked=True),
    )
    return engine()


@pytest.mark.parametrize("name", PLANS)
def test_greedy_answers_are_the_hosts(host: Engine, device: Engine, name: str) -> None:
    stages, _ = device.stages(Request(PROMPT, 1, GREEDY, (), PLANS[name]))
    assert isinstance(stages[-1], DeviceTreeStage)
    assert all(isinstance(stage, DeviceBlockStage) for stage in stages[:-1])
    expected = answer(host, PLANS["target"], GREEDY)
    assert len(set(expected)) > 1
    assert answer(device, PLANS[name], GREEDY) == expected


SAMPLINGS = (RANDOM, WARPED, replace(RANDOM, choice=1), replace(RANDOM, seed=2**64 - 1))
# one plan by all, the others by two of them each
COUPLED = {
    name: SAMPLINGS if name == "two" else (SAMPLINGS[place % 4], SAMPLINGS[(place + 1) % 4])
    for place, name in enumerate(name for name, plan in PLANS.items() if plan.rule == "coupled")
}


@pytest.mark.parametrize("name", COUPLED)
def test_coupled_answers_are_the_hosts(host: Engine, device: Engine, name: str) -> None:
    found = []
    for sampling in COUPLED[name]:
        stages, _ = device.stages(Request(PROMPT, 1, sampling, (), PLANS[name]))
        assert isinstance(stages[-1], DeviceTreeStage)
        expected = answer(host, PLANS["target"], sampling)
        assert answer(device, PLANS[name], sampling) == expected
        found.append(expected)
    assert len(set(map(tuple, found))) == len(found)


@pytest.mark.parametrize("name", ["two", "four"])
def test_noise_of_other_positions_answers_otherwise(
    host: Engine, device: Engine, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = DeviceNoise.at
    monkeypatch.setattr(
        DeviceNoise, "at", lambda noise, model, positions: right(noise, model, positions - 1)
    )
    expected = answer(host, PLANS["target"], RANDOM)
    assert answer(device, PLANS[name], RANDOM) != expected


def test_noise_of_an_earlier_request_answers_otherwise(
    host: Engine, device: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(device, PLANS["two"], replace(RANDOM, seed=6))
    monkeypatch.setattr(DeviceNoise, "set", lambda noise, other: None)
    expected = answer(host, PLANS["target"], RANDOM)
    assert answer(device, PLANS["two"], RANDOM) != expected


@pytest.mark.parametrize("name", ["two", "draft model"])
def test_drafts_follow_the_noise_as_the_hosts(
    host: Engine, device: Engine, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostStage, "start", Stage.start)  # a device's rounds draw the first token

    def accepted(runner: Engine) -> list[int]:
        found = runner.run(Request(PROMPT, NUM_TOKENS, RANDOM, (), PLANS[name]))
        assert sum(map(len, found)) == NUM_TOKENS
        # the last rounds of the host draft no deeper than the answer goes on
        return found.statistics.accepted_lengths["target"][: -TREE.depth]

    expected = accepted(host)
    assert accepted(device) == expected
    monkeypatch.setattr(DeviceNoise, "draft", lambda *_: None)
    assert accepted(device) != expected, "drafts of the most probable"


def test_without_a_seed_every_answer_is_another(device: Engine) -> None:
    answers = [answer(device, PLANS["two"], Sampling(temperature=1.5)) for _ in range(4)]
    assert len(set(map(tuple, answers))) == 4


REPLAYED = ("adaptive", "block rule", "draft model", "ngram", "window")
"""Plans that together replay every kind of graph; the others are proof."""


@pytest.mark.parametrize(
    "name",
    [name if name in REPLAYED else pytest.param(name, marks=pytest.mark.proof) for name in PLANS],
)
def test_replayed_rounds_answer_as_called_ones(device: Engine, captured: Engine, name: str) -> None:
    num_tokens = 8 if name == "four" else 14
    for sampling in (GREEDY, WARPED, replace(WARPED, temperature=0.9, seed=6)):
        expected = answer(device, PLANS[name], sampling, max_new_tokens=num_tokens)
        found = answer(captured, PLANS[name], sampling, max_new_tokens=num_tokens)
        assert found == expected
    assert captured.graphs.counts.replays > captured.graphs.counts.captures > 0


@pytest.mark.parametrize("name", ["three", "own cache"])
def test_stop_tokens_and_limits_cut_as_on_the_host(host: Engine, device: Engine, name: str) -> None:
    whole = answer(host, PLANS["target"], GREEDY)
    for length in (1, 2, 5, 11):
        found = answer(device, PLANS[name], GREEDY, max_new_tokens=length)
        assert found == whole[:length]
    for stop in range(VOCAB_SIZE):
        expected = answer(host, PLANS["target"], GREEDY, stop_tokens=frozenset([stop]))
        found = answer(device, PLANS[name], GREEDY, stop_tokens=frozenset([stop]))
        assert found == expected
        assert (stop in whole) == (found[-1] == stop or len(found) < len(whole))


def test_short_and_long_prompts(host: Engine, device: Engine) -> None:
    """Of one token, where a head cannot draft yet, and of more than a draft reads at a time."""
    for models in (host, device):
        models.context_tokens = models.models.context_tokens = 120
    for prompt in ([3], [3, 1], [token % VOCAB_SIZE for token in range(80)]):
        models = [host, device]
        first, second = (
            answer(runner, PLANS["three"], GREEDY, token_ids=prompt, max_new_tokens=6)
            for runner in models
        )
        assert first == second


@pytest.mark.parametrize("name", ["token rule", "block rule"])
def test_seeds_reproduce(device: Engine, name: str) -> None:
    answers = [answer(device, PLANS[name], replace(RANDOM, seed=seed)) for seed in range(3)]
    again = [answer(device, PLANS[name], replace(RANDOM, seed=seed)) for seed in range(3)]
    assert answers == again
    assert len({tuple(tokens) for tokens in answers}) > 1


def test_penalties_are_drawn_by_the_host(device: Engine, host: Engine) -> None:
    """With the passes of the device, captured where these are."""
    sampling = Sampling(repetition_penalty=1.5, frequency_penalty=0.5)
    stages, _ = device.stages(Request(PROMPT, 1, sampling, (), PLANS["three"]))
    assert not isinstance(stages[-1], DeviceTreeStage)
    assert answer(device, PLANS["three"], sampling) == answer(host, PLANS["target"], sampling)
    assert answer(host, PLANS["target"], sampling) != answer(host, PLANS["target"], GREEDY)


def test_requests_follow_each_other(host: Engine, device: Engine) -> None:
    """Nothing of one request is left in the tensors of the next."""
    expected = answer(host, PLANS["target"], GREEDY)
    for name in ("wide", "three", "ngram", "two", "window", "target"):
        answer(device, PLANS[name], RANDOM)
        assert answer(device, PLANS[name], GREEDY) == expected


def test_statistics_count_rounds(device: Engine) -> None:
    request = Request(PROMPT, NUM_TOKENS, GREEDY, (), PLANS["three"])
    found = device.run(request)
    num_tokens = sum(map(len, found))
    statistics = found.statistics
    assert sum(statistics.accepted_lengths["target"]) == num_tokens == statistics.num_tokens
    assert statistics.forward_passes["target"] == len(statistics.accepted_lengths["target"])
    num_rounds = len(statistics.accepted_lengths["same"])
    assert statistics.forward_passes["same"] == num_rounds
    assert statistics.forward_passes["head"] <= TREE.depth * num_rounds


@pytest.mark.parametrize("sampling", [GREEDY, RANDOM])
@pytest.mark.parametrize("plan", ["block head", "masked head"])
def test_blocks_on_the_device_are_the_hosts(
    host: Engine, device: Engine, sampling: Sampling, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostStage, "start", Stage.start)  # a device's rounds draw the first token
    found = []
    for runner in (host, device):
        running = runner.run(Request(PROMPT, NUM_TOKENS, sampling, (), PLANS[plan]))
        assert sum(map(len, running)) == NUM_TOKENS
        found.append(running.statistics.accepted_lengths["target"])
    # the last rounds of the host draft no deeper than the answer goes on
    num_rounds = min(map(len, found)) - TREE.depth
    assert found[0][:num_rounds] == found[1][:num_rounds]
    assert max(found[0]) > 1


def test_trees_on_the_device_have_one_size(host: Engine, device: Engine) -> None:
    def levels_a_round(runner: Engine, name: str) -> float:
        request = Request(PROMPT, NUM_TOKENS, GREEDY, (), PLANS[name])
        running = runner.run(request)
        assert sum(map(len, running)) == NUM_TOKENS
        passes = running.statistics.forward_passes
        return passes["head"] / passes["target"]

    lines: list[str] = []
    for name in ("two", "probable"):
        device.capture(PLANS[name], GREEDY, (), lines.append)
    assert lines == [
        "draft trees of captured rounds all have as many rows: the plan's least_probability 0.4 is "
        "not used"
    ]
    assert (host.captures_rounds, device.captures_rounds) == (False, True)
    assert levels_a_round(device, "probable") == levels_a_round(device, "two")
    assert levels_a_round(host, "probable") < levels_a_round(host, "two")


def test_a_chain_without_device_passes_keeps_the_hosts_stages(host: Engine) -> None:
    stages, _ = host.stages(Request(PROMPT, 1, GREEDY, (), PLANS["three"]))
    assert not isinstance(stages[0], DeviceBlockStage)
    assert not isinstance(stages[-1], DeviceTreeStage)


def test_other_stop_tokens_run_the_same_graphs(captured: Engine) -> None:
    answer(captured, PLANS["three"], GREEDY, stop_tokens=frozenset([0]))
    whole = answer(captured, PLANS["three"], GREEDY)
    num_captured = captured.graphs.counts.captures
    for stop in sorted(set(whole))[:3]:
        found = answer(captured, PLANS["three"], GREEDY, stop_tokens=frozenset([stop]))
        assert found == whole[: whole.index(stop) + 1]
    assert captured.graphs.counts.captures == num_captured


@pytest.mark.parametrize("name", ["target", "two", "three"])
def test_tokens_are_handed_over_round_by_round(name: str, device: Engine) -> None:
    stream = device.run(Request(PROMPT, NUM_TOKENS, GREEDY, (), PLANS[name]))
    found = next(stream)
    # the rest is not made before it is asked for
    assert 0 < len(found) < NUM_TOKENS
    assert device.num_running == 1
    batches = list(stream)
    assert len(batches) > 1
    assert found + [token for batch in batches for token in batch] == answer(
        device, PLANS[name], GREEDY
    )


@pytest.mark.parametrize("name", ["two", "three", "own cache", "four"])
def test_answers_go_on_where_one_was_given_up_between_two_passes(name: str, device: Engine) -> None:
    num_tokens = 16
    request = Request(PROMPT, num_tokens, GREEDY, (), PLANS[name], reuses=True)
    whole = answer(device, PLANS[name], GREEDY, max_new_tokens=num_tokens)
    device.slots.reuses = True
    for num_passes in range(2, 8):
        answering = device.begin(request, runs_ahead=True)
        for _ in range(num_passes):
            device.step()
        assert not answering.is_over
        gained = [token for piece in answering.take() for token in piece.token_ids]
        answering.close()
        assert gained == whole[: len(gained)]
        left = num_tokens - len(gained)
        stream = device.run(replace(request, token_ids=[*PROMPT, *gained], max_new_tokens=left))
        assert gained + [token for batch in stream for token in batch] == whole
        assert stream.statistics.num_cached_tokens >= len(PROMPT) - 1
