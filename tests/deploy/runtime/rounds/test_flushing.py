"""Adaptive flushing: hand-worked estimates, and blocks that end where another round would not pay.

That it changes no probability is proved in `test_enumeration.py`.
"""

import dataclasses
import itertools

import pytest
import torch

from polybasic.chain.formats.plan import AdaptiveFlush, Flush, Plan, Tree
from polybasic.deploy.runtime.rounds import stages
from polybasic.deploy.runtime.rounds.flushing import PRIOR_WEIGHT, AdaptiveFlushing, probability_bin
from polybasic.deploy.runtime.rounds.passes import alone
from polybasic.deploy.runtime.rounds.sampling import RandomSampler, Sampling
from tests.deploy.small_chains import Weights, small_chain, small_config
from tests.deploy.tables import Case, build

ACCEPTANCE = (0.0, 0.25, 0.25, 0.5, 0.5, 0.75, 0.75, 1.0)


def flushing(break_even: float) -> AdaptiveFlushing:
    return AdaptiveFlushing(AdaptiveFlush(break_even=break_even, acceptance=ACCEPTANCE))


@pytest.mark.parametrize(
    ("probability", "index"),
    # bin k of 8 begins at the square root of k/8: 0.354, 0.5, 0.612, 0.707, 0.791, 0.866, 0.935
    [
        (0.0, 0),
        (0.35, 0),
        (0.36, 1),
        (0.499, 1),
        (0.5, 2),
        (0.61, 2),
        (0.62, 3),
        (0.71, 4),
        (0.80, 5),
        (0.87, 6),
        (0.93, 6),
        (0.94, 7),
        (1.0, 7),
    ],
)
def test_bins_are_equal_in_the_square(probability: float, index: int) -> None:
    assert probability_bin(probability) == index


def test_survival_is_the_product_over_the_block() -> None:
    # 0.9 -> 0.75, 0.65 -> 0.5, 0.4 -> 0.25
    for probabilities, survival in (([0.9], 0.75), ([0.9, 0.65], 0.375), ([0.9, 0.4], 0.1875)):
        for break_even, wants_more in ((survival, True), (survival + 0.01, False)):
            # in one round or in several: the same block
            assert flushing(break_even).wants_more(probabilities) == wants_more
            by_token = flushing(break_even)
            assert [by_token.wants_more([value]) for value in probabilities][-1] == wants_more
    assert flushing(0.99).wants_more([1.0, 0.95, 1.0])
    assert not flushing(0.01).wants_more([0.1])


def test_what_precedes_a_block_or_belongs_to_an_earlier_one_is_told_apart() -> None:
    flush = flushing(0.5)
    assert not flush.wants_more([0.1])
    earlier = flush.bins
    flush.begin_block(num_before=2)
    assert flush.pays
    assert flush.wants_more([0.1])
    assert flush.wants_more([0.1, 0.9])
    assert not flush.wants_more([0.65])
    assert flush.bins == [probability_bin(0.9), probability_bin(0.65)]
    num_asked = list(flush._num_asked)
    flush.learn(0, earlier)
    assert flush._num_asked[0] == num_asked[0] + 1, "0.1 was rejected"
    assert flush._num_asked[1:] == num_asked[1:]


def test_no_token_costs_nothing() -> None:
    assert flushing(0.99).wants_more([])


def test_block_begins_anew() -> None:
    flush = flushing(0.5)
    assert not flush.wants_more([0.4])
    assert not flush.wants_more([1.0])
    flush.begin_block()
    assert flush.wants_more([1.0])


def test_what_is_learned() -> None:
    # The plan's 0.5 counts for 8 tokens, 4 of them kept.
    assert PRIOR_WEIGHT == 8

    def survival_after(*blocks: tuple[list[float], int]) -> float:
        flush = flushing(0.5)
        for probabilities, num_kept in blocks:
            flush.begin_block()
            flush.wants_more(probabilities)
            flush.learn(num_kept)
        flush.begin_block()
        flush.wants_more([0.65])
        return flush._survival

    assert survival_after() == 4 / 8
    # all of two kept: 6 of 10
    assert survival_after(([0.65, 0.65], 2)) == 6 / 10
    # one kept, one refused: 5 of 10
    assert survival_after(([0.65, 0.65], 1)) == 5 / 10
    # the first refused: nothing is learned of the second; 4 of 9
    assert survival_after(([0.65, 0.65], 0)) == 4 / 9
    # other bins are not affected: 0.9 is kept, 0.65 rejected
    assert survival_after(([0.9, 0.65], 1)) == 4 / 9
    assert survival_after(([0.9, 0.9], 0)) == 4 / 8
    # over several blocks: 4 + 1 + 0 + 2 kept of 8 + 1 + 1 + 2
    assert survival_after(([0.65], 1), ([0.65], 0), ([0.65, 0.65], 2)) == 7 / 12


def test_learning_turns_the_decision() -> None:
    flush = flushing(0.6)
    assert not flush.wants_more([0.65])
    for _ in range(2):
        # 4 of 8, then 5 of 9, then 6 of 10
        flush.begin_block()
        flush.wants_more([0.65])
        flush.learn(1)
    flush.begin_block()
    assert flush.wants_more([0.65])
    for _ in range(2):
        # 6 of 11, then 6 of 12
        flush.learn(0)
    flush.begin_block()
    assert not flush.wants_more([0.65])


# Through the stages


def chain_of(acceptance: tuple[float, ...], break_even: float = 0.5) -> Case:
    """Two tables; the lower one is walked a token a round, because its trees hold one token."""
    adaptive = AdaptiveFlush(break_even=break_even, acceptance=acceptance)
    return Case(
        (Flush(length=5, adaptive=adaptive),),
        num_tokens=12,
        vocab_size=3,
        caches=(0, 1),
        likeness=3,
        sampling=Sampling(1.0, seed=0),
        tree=Tree(depth=1, top_k=1, rows=2),
    )


def block_lengths(case: Case, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[int]]:
    """Lengths of the blocks that were handed up in one answer, and the answer."""
    lengths: list[int] = []
    verify = RandomSampler.verify

    def recorded(self: RandomSampler, tokens: list[int], *others: object) -> tuple[int, int]:
        lengths.append(len(tokens))
        return verify(self, tokens, *others)  # type: ignore[arg-type]

    assert case.sampling is not None
    with monkeypatch.context() as patch:
        patch.setattr(RandomSampler, "verify", recorded)
        sampler = RandomSampler(case.sampling, torch.device("cpu"), len(case.prompt))
        root, _ = build(case, sampler)
        alone(root.prefill(list(case.prompt)))
        answer: list[int] = []
        while len(answer) < case.num_tokens:
            answer += alone(root.propose(1, 100)).tokens
    return lengths, answer


def test_block_ends_at_once_where_tokens_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # a round brings one token, or two where the tree's token was drawn
    lengths, _ = block_lengths(chain_of((0.0,) * 8), monkeypatch)
    assert set(lengths) <= {1, 2}


def test_block_is_full_where_tokens_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    # many blocks: an estimate that were not of one block alone would sink under any break-even
    case = dataclasses.replace(chain_of((1.0,) * 8, break_even=0.1), num_tokens=60)
    lengths, _ = block_lengths(case, monkeypatch)
    assert len(lengths) > 10
    assert set(lengths) <= {5, 6}


def test_block_ends_after_an_unlikely_token(monkeypatch: pytest.MonkeyPatch) -> None:
    # below 0.5 a token is as good as refused, above it is as good as kept
    probabilities: list[list[float]] = []
    ask = RandomSampler.probabilities

    def recorded(self: RandomSampler, *arguments: object) -> list[float]:
        probabilities.append(ask(self, *arguments))  # type: ignore[arg-type]
        return probabilities[-1]

    monkeypatch.setattr(RandomSampler, "probabilities", recorded)
    # one block: what it learns from a block must not count here
    case = chain_of((0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0), break_even=0.9)
    seen: set[bool] = set()
    for seed in range(20):
        probabilities.clear()
        sampling = Sampling(1.0, seed=seed)
        seeded = dataclasses.replace(case, num_tokens=1, sampling=sampling)
        (length,), _ = block_lengths(seeded, monkeypatch)
        assert sum(map(len, probabilities)) == length
        *before, last = probabilities
        assert all(value >= 0.5 for value in itertools.chain(*before))
        assert length >= 5 or min(last) < 0.5
        seen.add(length < 5)
    assert seen == {True, False}


def test_estimates_begin_anew_with_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[AdaptiveFlushing] = []

    class Recorded(AdaptiveFlushing):
        def __init__(self, settings: AdaptiveFlush) -> None:
            super().__init__(settings)
            made.append(self)

    monkeypatch.setattr(stages, "AdaptiveFlushing", Recorded)
    config = small_config(num_layers=1, hidden_size=16)
    decoders = {
        "target": Weights(1).decoder(config),
        "intermediate": Weights(1, noise=0.3).decoder(config),
    }
    plan = Plan(
        members=("target", "intermediate", "draft"),
        tree=Tree(depth=2, top_k=2, rows=4),
        flush={
            "target": Flush(length=4, adaptive=AdaptiveFlush(break_even=0.3, acceptance=ACCEPTANCE))
        },
    )
    head = Weights(2).head(decoders["intermediate"])
    chain = small_chain(decoders, head, plan, Sampling(1.0), [3, 1, 4, 1])
    chain = dataclasses.replace(chain, num_tokens=12, num_counted=12)
    answers = [chain.answer(seed) for seed in (0, 1, 2, 0)]
    assert answers[0] == answers[3] != answers[1]
    # it did learn, and the same again in the end
    assert len(made) == 4
    assert made[0]._num_asked != [PRIOR_WEIGHT] * 8
    assert made[0]._num_asked == made[3]._num_asked != made[1]._num_asked
    assert made[0]._num_kept == made[3]._num_kept


def test_seed_decides_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    case = chain_of(ACCEPTANCE)
    answers = [
        block_lengths(dataclasses.replace(case, sampling=Sampling(1.0, seed=seed)), monkeypatch)
        for seed in (0, 0, 1)
    ]
    assert answers[0] == answers[1] != answers[2]
