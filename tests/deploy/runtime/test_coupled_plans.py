"""A seed means a text: every plan of a chain of four gives the tokens that the target alone draws.

Native kernels give a row the same bits in any company, so answers are equal bit for bit, in
bfloat16 too. PyTorch's products round by the number of rows, and two scores that lie closer than
that may change places: in float32 that is rare, in bfloat16 it is not.
"""

import dataclasses
import random
from itertools import chain as joined
from pathlib import Path
from typing import Any

import pytest
import torch

from polybasic.chain.formats.plan import AdaptiveFlush, Flush, Ngram, Plan, Tree, Window
from polybasic.deploy import Chain, load_chain
from polybasic.deploy.runtime.engine import Engine
from polybasic.deploy.runtime.models import Models
from polybasic.deploy.runtime.request import Request, Statistics
from polybasic.deploy.runtime.rounds import noise
from polybasic.deploy.runtime.rounds.noise import Noise
from polybasic.deploy.runtime.rounds.sampling import Sampling
from tests.deploy.noisy_chain import write_four_and_a_copy
from tests.deploy.small_chains import Weights, small_config

NUM_REQUESTS, NUM_NEW_TOKENS = 90, 12
"""Every plan meets every warper that its turn allows twice; every text is compared exactly."""
pytestmark = pytest.mark.processor
TREE = Tree(depth=3, top_k=2, rows=6)
FLUSH = {"target": Flush(length=6), "intermediate": Flush(length=3)}
ADAPTIVE = AdaptiveFlush(break_even=0.25, acceptance=(0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9))
WINDOWS = {"intermediate": Window(tokens=5, sinks=1), "small": Window(tokens=3)}
ALONE = Plan(members=("target",), tree=TREE)
TWO = ("target", "copy")
THREE = ("target", "intermediate", "copy")
FOUR = ("target", "intermediate", "small", "small_draft")


def flushed(*members: str, tree: Tree = TREE, **others: Any) -> Plan:
    return Plan(members=members, tree=tree, **{"flush": FLUSH, **others})


def lengths(target: int, intermediate: int, adaptive: AdaptiveFlush | None = None) -> Any:
    flush = Flush(length=target, adaptive=adaptive)
    return {"target": flush, "intermediate": flush.model_copy(update={"length": intermediate})}


PLANS = [
    flushed("target", ngram=Ngram(min_match=1)),
    flushed("target", "draft", tree=Tree(depth=4, top_k=3, rows=12)),
    flushed(*TWO),
    flushed(*TWO, tree=Tree(depth=6, top_k=1, rows=7)),
    flushed(*TWO, tree=Tree(depth=2, top_k=8, rows=24), ngram=Ngram(min_match=1)),
    flushed("target", "intermediate", flush=lengths(4, 1)),
    flushed("target", "intermediate", "draft"),
    flushed(*THREE, flush=lengths(1, 1)),
    flushed(*THREE, flush=lengths(12, 1)),
    flushed(*THREE, flush=lengths(12, 1, ADAPTIVE)),
    flushed(*THREE, windows={**WINDOWS, "copy": Window(tokens=4)}),
    flushed(*FOUR),
    flushed(*FOUR, flush=lengths(9, 5, ADAPTIVE), windows=WINDOWS),
    flushed(*FOUR[:3], "copy", tree=Tree(depth=5, top_k=4, rows=20)),
    flushed(*FOUR[:3], flush=lengths(2, 2), ngram=Ngram(min_match=1)),
]
WARPERS: list[dict[str, Any]] = [
    {},
    {"top_k": 20},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.8},
    {"frequency_penalty": 0.6},
    {"logit_bias": {5: 2.0, 9: -3.0}},
    {
        "top_k": 30,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "presence_penalty": -0.4,
        "frequency_penalty": 0.3,
        "logit_bias": {7: 1.0},
    },
]


@pytest.fixture(scope="module")
def folder(_tiny_four_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chain of four, with a noisy copy of the target besides, which drafts."""
    return write_four_and_a_copy(_tiny_four_models, tmp_path_factory.mktemp("coupled"))


@pytest.fixture(params=["bfloat16", "float32"])
def chain(folder: Path, request: pytest.FixtureRequest) -> Chain:
    loaded = load_chain(folder, dtype=request.param, context_tokens=100)
    assert loaded.engine.models.target.name == "cpu"
    return loaded


def asked(num_requests: int = NUM_REQUESTS) -> list[tuple[list[int], Sampling]]:
    """Prompts of all lengths to 19 tokens, temperatures of 0.3 to 1.5, all warpers in turn."""
    numbers = random.Random(0)
    return [
        (
            numbers.choices(range(60), k=1 + seed % 19),
            Sampling(numbers.uniform(0.3, 1.5), seed=seed, **WARPERS[seed % len(WARPERS)]),
        )
        for seed in range(num_requests)
    ]


def answer(
    chain: Chain, prompt: list[int], sampling: Sampling, plan: Plan
) -> tuple[list[int], Statistics]:
    pieces = chain.stream_ids(prompt, NUM_NEW_TOKENS, sampling, plan)
    return list(joined.from_iterable(pieces)), pieces.statistics


def tokens(chain: Chain, prompt: list[int], sampling: Sampling, plan: Plan) -> list[int]:
    return answer(chain, prompt, sampling, plan)[0]


def test_every_plan_gives_the_targets_text(chain: Chain) -> None:
    is_rounded = chain.engine.models.target.dtype == torch.bfloat16
    requests = asked(NUM_REQUESTS if is_rounded else NUM_REQUESTS // 2)
    expected = [tokens(chain, *request, ALONE) for request in requests]
    assert sum(map(len, expected)) > 8 * len(requests)
    assert len(set(map(tuple, expected))) > 0.9 * len(requests)
    # each request by one plan, two of them by all; in another order than before
    runs = [(number, PLANS[number % len(PLANS)]) for number in range(len(requests))]
    runs += [(number, plan) for number in (0, 1) for plan in PLANS]
    random.Random(1).shuffle(runs)
    gained: dict[str, list[int]] = {"target": [], "intermediate": [], "small": []}
    for number, plan in runs:
        found, measured = answer(chain, *requests[number], plan)
        assert found == expected[number], (number, plan)
        for name, accepted in measured.accepted_lengths.items():
            gained[name] += accepted
    # drafts and blocks were kept, and refused
    for accepted in gained.values():
        assert 1 in accepted
        assert max(accepted) > 2


def test_pytorchs_operations_give_the_targets_text(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = asked(len(PLANS))
    native = load_chain(folder, dtype="float32", context_tokens=100)
    expected = [tokens(native, *request, ALONE) for request in requests]
    monkeypatch.setenv("POLYBASIC_KERNELS", "eager")
    chain = load_chain(folder, dtype="float32", context_tokens=100)
    assert chain.engine.models.target.name == "torch"
    for number, plan in enumerate(PLANS):
        assert tokens(chain, *requests[number], plan) == expected[number], plan


def texts_by_plan(chain: Chain, rule: str, sampling: Sampling) -> set[tuple[int, ...]]:
    plans = [plan.model_copy(update={"rule": rule}) for plan in (ALONE, *PLANS)]
    return {tuple(tokens(chain, [3, 1, 4], sampling, plan)) for plan in plans}


def test_what_means_another_text(chain: Chain) -> None:
    """Another seed or choice; and without common noise the plan, too."""
    sampling = Sampling(1.0, seed=3)
    (text,) = texts_by_plan(chain, "coupled", sampling)
    others = [
        dataclasses.replace(sampling, seed=4),
        dataclasses.replace(sampling, choice=1),
        dataclasses.replace(sampling, choice=2),
    ]
    texts = [texts_by_plan(chain, "coupled", other) for other in others]
    assert all(len(found) == 1 for found in texts)
    assert len({text}.union(*texts)) == 4
    assert len(texts_by_plan(chain, "block", sampling)) > 5


# Noise reaches drafts and blocks at the positions that it belongs to


def accepted_of_copies(members: tuple[str, ...]) -> dict[str, list[int]]:
    """Where all members are the target itself, one of them as the drafter."""
    config = small_config(num_layers=1, hidden_size=32)
    decoders = {name: Weights(1).decoder(config) for name in members[:-1]}
    plan = flushed(*members, tree=Tree(depth=4, top_k=1, rows=5), flush=lengths(5, 5))
    models = Models(decoders, {"copy": Weights(1).decoder(config)}, {"copy": (members[-2],)}, 100)
    engine, accepted = Engine(models), dict[str, list[int]]()
    for seed in range(4):
        sampling = Sampling(1.2, seed=seed)
        running = engine.run(Request([3, 1, 4, 1], 31, sampling, (), plan))
        assert sum(map(len, running)) == 31
        for name, gained in running.statistics.accepted_lengths.items():
            accepted.setdefault(name, []).extend(gained)
    return accepted


def test_copies_of_the_target_refuse_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree of one path of four tokens, and blocks of five, are kept whole and continued."""
    monkeypatch.setattr(noise, "SHARPNESS", 1.0)
    assert set(accepted_of_copies(TWO)["target"]) == {5}
    three = accepted_of_copies(THREE)
    assert (set(three["target"]), set(three["intermediate"])) == ({6}, {5})
    draft = Noise.draft
    monkeypatch.setattr(Noise, "draft", lambda self, start, depth: draft(self, start + 1, depth))
    assert set(accepted_of_copies(TWO)["target"]) > {1, 2}
