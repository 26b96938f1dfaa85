"""The joint law of the first three tokens of chains of small real models, exactly and by counting.

Float32 models with random weights, all warpers, two chains: three members (the target, another
model that shares its cache, a head) and four (between them a narrower model with a cache of its
own; adaptive flushing). The exact law comes from the target's decoder alone, prefix by prefix,
without caches, stages or batches.

By the rules `block` and `token` the law of an answer comes out through every outcome of every
draw, and may depart from the target's by the rounding of float32 alone. That draws follow their
probabilities is counted: Pearson's chi-square at significance 1e-4 over the 35 answers that are
possible; cells that expect fewer than 10 answers would be pooled into one. A chain that is right
fails with one set of seeds in 10,000, and the seeds are fixed. A law at a total variation distance
of 0.075 from the target's is rejected by 4,000 answers with a probability of at least 0.99:
`test_power` takes the direction with the least noncentrality, in which half of the mass grows and
half shrinks by one factor. The counted total variation itself must stay below its mean plus four
standard deviations, as simulated for the exact law.

An answer costs about 0.25 ms, with common noise 0.7 ms, because `tests/deploy/small_chains.py`
computes every pass once. Each has a seed and a sampler of its own, as each request to the engine
has.
"""

import dataclasses
import functools
from collections import Counter, defaultdict
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from polybasic.chain.formats.plan import AdaptiveFlush, Flush, Plan, Rule, Tree, Window
from polybasic.chain.kernels.drafts import Candidates, DraftTree
from polybasic.chain.kernels.executor import Executor
from polybasic.chain.kernels.noise import gumbel_noise, noise_key
from polybasic.chain.kernels.rows import consecutive_rows
from polybasic.deploy.runtime.rounds import verification
from polybasic.deploy.runtime.rounds.cache import KeyValueCache
from polybasic.deploy.runtime.rounds.constraint import Constraint
from polybasic.deploy.runtime.rounds.noise import Noise
from polybasic.deploy.runtime.rounds.sampling import Prefixes, RandomSampler, Sampling
from polybasic.deploy.runtime.rounds.warping import warp
from tests.deploy.outcomes import Enumerated, Outcomes
from tests.deploy.small_chains import (
    CPU,
    VOCAB_SIZE,
    RememberedChain,
    RememberingSampler,
    SmallChain,
    Weights,
    small_chain,
    small_config,
)

pytestmark = pytest.mark.usefixtures("answers_begin_with_a_round")

NUM_ANSWERS = 200_000
FEWER_ANSWERS = 4_000
COUPLED_ANSWERS = 1_000
"""Each is the target's own, as `test_coupled` shows exactly."""
SIGNIFICANCE = 1e-4
LEAST_EXPECTED = 10
ROUNDING = 1e-6
"""Total variation between exact laws of float32 probabilities."""
DETECTED_DISTANCES = {NUM_ANSWERS: 0.0105, FEWER_ANSWERS: 0.075, COUPLED_ANSWERS: 0.15}
"""Total variation distance that is detected with probability 0.99, by the number of answers."""

PROMPT = [3, 1, 4, 1]
SAMPLING = Sampling(
    0.8,
    top_k=5,
    top_p=0.95,
    min_p=0.01,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    logit_bias={2: 0.5},
)
ENUMERATED = dataclasses.replace(SAMPLING, top_k=3)
"""With fewer outcomes of each draw."""
TREE = Tree(depth=2, top_k=2, rows=4)
ADAPTIVE = AdaptiveFlush(break_even=0.25, acceptance=(0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9))


CHAINS: tuple[tuple[int, Rule], ...] = ((3, "block"), (4, "token"), (4, "coupled"))
"""Members and rule."""


@functools.cache
def chain_of(num_members: int, rule: Rule = "block") -> SmallChain:
    config = small_config(num_layers=2, hidden_size=32)
    decoders = {
        "target": Weights(1).decoder(config),
        "intermediate": Weights(1, noise=0.4).decoder(config),
    }
    flush = {"target": Flush(length=2)}
    if num_members == 4:
        decoders["small"] = Weights(3).decoder(small_config(num_layers=1, hidden_size=16))
        flush = {
            "target": Flush(length=3, adaptive=ADAPTIVE),
            "intermediate": Flush(length=2),
        }
    members = (*decoders, "draft")
    head = Weights(9).head(decoders[members[-2]])
    plan = Plan(members=members, tree=TREE, flush=flush, rule=rule)
    # the first can hold a block of three, two tokens and the one after them fill the other
    num_tokens = 7 - num_members
    return small_chain(decoders, head, plan, SAMPLING, PROMPT, num_tokens)


Restrict = Callable[[Tensor, Prefixes], Tensor]
"""Masks rows of logits, as `Constraint.restrict` does."""


@functools.cache
def exact_law(restrict: Restrict | None = None, top_k: int = SAMPLING.top_k) -> Any:
    """Probabilities [V * V * V] of the first three tokens."""
    decoder, sampling = chain_of(3).engine.models.target, dataclasses.replace(SAMPLING, top_k=top_k)
    law = np.ones(1)
    for length in range(3):
        every = np.ndindex((6,) * length)
        rows = [next_row(decoder, [*PROMPT, *tokens], restrict, sampling) for tokens in every]
        law = (law[:, None] * np.array(rows, dtype=np.float64)).reshape(-1)
    return law / law.sum()


@torch.inference_mode()
def next_row(
    decoder: Executor, tokens: list[int], restrict: Restrict | None, sampling: Sampling
) -> list[float]:
    """The warped distribution after `tokens`, read in one pass into an empty cache."""
    config = decoder.config
    cache = KeyValueCache(config, config.num_layers, len(tokens), torch.float32, CPU)
    rows = [consecutive_rows(0, len(tokens))]
    states = decoder.forward(torch.tensor(tokens), [cache.layers], rows)
    logits, prefixes = decoder.logits(states[-1:]), Prefixes(tokens, [[]])
    logits = logits if restrict is None else restrict(logits, prefixes)
    return warp(logits, sampling, prefixes, len(PROMPT))[0].tolist()


@torch.inference_mode()
def count(
    remembered: RememberedChain,
    num_answers: int,
    constraint: Callable[[], Constraint] | None = None,
) -> Any:
    """Answers [V * V * V] to the seeds from 0 on, by their first three tokens.

    Args:
        constraint: makes that of each answer.
    """
    answers: Counter[tuple[int, ...]] = Counter()
    for seed in range(num_answers):
        sampler: Any = remembered.sampler(seed)
        sampler.constraint = None if constraint is None else constraint()
        answers[remembered.answer(sampler)] += 1
    counts = np.zeros((VOCAB_SIZE,) * 3, dtype=np.int64)
    for tokens, number in answers.items():
        counts[tokens] = number
    return counts.reshape(-1)


class EnumeratedSampler(Enumerated, RememberingSampler):
    """Of the rules by block and by token, through every outcome of its float32 probabilities."""

    def _categorical(self, rows: Tensor) -> list[int]:
        exact = [[Fraction(value) for value in row] for row in rows.tolist()]
        return super()._categorical([[value / sum(row) for value in row] for row in exact])


@torch.inference_mode()
def departure(chain: SmallChain) -> float:
    """Total variation between the law of a chain's first three tokens and the target's, exactly.

    Args:
        chain: by the rules block and token, with any sampling: that is `ENUMERATED`.
    """
    remembered = RememberedChain(dataclasses.replace(chain, sampling=ENUMERATED))
    sampler = EnumeratedSampler(remembered.chain, remembered.memory, seed=0)
    sampler.outcomes = Outcomes()
    law: dict[tuple[int, ...], Fraction] = defaultdict(Fraction)
    for _ in sampler.outcomes.runs():
        tokens = remembered.answer(sampler)
        law[tokens] += sampler.outcomes.probability
    assert sum(law.values()) == 1
    found = np.zeros((VOCAB_SIZE,) * 3)
    for tokens, probability in law.items():
        found[tokens] = float(probability)
    return float(distance(found.reshape(-1), exact_law(top_k=ENUMERATED.top_k)))


def pooled(counts: Any, expected: Any) -> tuple[Any, Any]:
    """[..., cells]: those that expect too few answers as one, which comes last."""
    few = expected < LEAST_EXPECTED
    together = counts[..., few].sum(-1, keepdims=True)
    return (
        np.concatenate([counts[..., ~few], together], -1),
        np.append(expected[~few], expected[few].sum()),
    )


def p_values(counts: Any, law: Any) -> Any:
    """Of Pearson's chi-square, for each row of counts [..., cells]; 0 for what is impossible."""
    is_impossible = (counts[..., law == 0] > 0).any(-1)
    counts, expected = pooled(counts, law * counts.sum(-1).flat[0])
    if expected[-1] == 0:
        counts, expected = counts[..., :-1], expected[:-1]
    chi_square = ((counts - expected) ** 2 / expected).sum(-1)
    half_freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    tail = torch.special.gammaincc(half_freedom, torch.tensor(chi_square / 2))
    return np.where(is_impossible, 0.0, tail.numpy())


def distance(counts: Any, law: Any) -> Any:
    """Total variation between counted shares [..., cells] and a law."""
    return np.abs(counts / counts.sum(-1, keepdims=True) - law).sum(-1) / 2


# The test itself


def test_tail_of_the_chi_square() -> None:
    # 5 % and 0.1 % points of the tables: 3.841 and 10.828 with 1 degree of freedom
    law = np.array([0.5, 0.5])
    for chi_square, tail in ((3.841, 0.05), (10.828, 0.001)):
        shift = (chi_square * 10_000) ** 0.5 / 2
        found = p_values(np.array([5000 + shift, 5000 - shift]), law)
        assert found == pytest.approx(tail, rel=1e-3)
    assert p_values(np.array([50, 49, 1]), np.array([0.5, 0.5, 0.0])) == 0


@pytest.mark.parametrize(("num_answers", "detected"), DETECTED_DISTANCES.items())
def test_power(num_answers: int, detected: float) -> None:
    law, numbers = exact_law(), np.random.default_rng(0)
    assert (p_values(numbers.multinomial(num_answers, law, size=2000), law) < 0.01).mean() < 0.02
    half = np.zeros(len(law), dtype=bool)
    for cell in np.argsort(-law):
        half[cell] = law[half].sum() + law[cell] <= 0.5
    mass = law[half].sum()
    assert abs(mass - 0.5) < 0.01
    other = law * np.where(half, 1 + detected / mass, 1 - detected / (1 - mass))
    assert np.abs(other - law).sum() / 2 == pytest.approx(detected)
    rejected = p_values(numbers.multinomial(num_answers, other, size=2000), law) < SIGNIFICANCE
    assert rejected.mean() >= 0.99


# The chains


@pytest.mark.parametrize(("num_members", "rule"), CHAINS)
def test_memory_changes_no_token(num_members: int, rule: Rule) -> None:
    chain = chain_of(num_members, rule)
    remembered = RememberedChain(chain)
    for seed in range(30):
        with torch.inference_mode():
            found = remembered.answer(remembered.sampler(seed))
        assert found == chain.answer(seed)


@pytest.mark.parametrize(("num_members", "rule"), CHAINS[:2])
def test_law_of_the_answers_is_the_targets(num_members: int, rule: Rule) -> None:
    assert departure(chain_of(num_members, rule)) < ROUNDING


def test_draws_are_independent_within_a_request_and_of_the_next_one() -> None:
    rows, events = torch.tensor([[0.5, 0.3, 0.2]]), [0.3, 0.6]

    def drawn(seed: int) -> tuple[int, ...]:
        sampler: Any = RandomSampler(Sampling(1.0, seed=seed), CPU, 0)
        draws = sampler._categorical(rows), sampler._happens(events), sampler._categorical(rows)
        return tuple(int(each) for several in draws for each in several)

    counts = np.zeros((3, 2, 2, 3, 3, 2, 2, 3), dtype=np.int64)
    for seed in range(0, 40_000, 2):
        counts[drawn(seed) + drawn(seed + 1)] += 1
    tokens = np.array([0.5, 0.3, 0.2])
    request_law = np.einsum("a,b,c,d->abcd", tokens, [0.7, 0.3], [0.4, 0.6], tokens)
    law = np.multiply.outer(request_law, request_law).reshape(-1)
    assert p_values(counts.reshape(-1), law) >= SIGNIFICANCE


@pytest.mark.parametrize(
    ("num_members", "rule", "num_answers"),
    [*((*chain, FEWER_ANSWERS) for chain in CHAINS[:2]), (*CHAINS[2], COUPLED_ANSWERS)],
)
def test_law_of_drawn_answers_is_the_targets(
    num_members: int, rule: Rule, num_answers: int
) -> None:
    law = exact_law()
    counts = count(RememberedChain(chain_of(num_members, rule)), num_answers)
    assert counts.sum() == num_answers
    assert p_values(counts, law) >= SIGNIFICANCE
    usual = distance(np.random.default_rng(0).multinomial(num_answers, law, size=2000), law)
    assert distance(counts, law) <= usual.mean() + 4 * usual.std()


@pytest.mark.proof
@pytest.mark.parametrize("rule", ["block", "coupled"])
def test_law_with_trees_that_end_early_is_the_targets(
    monkeypatch: pytest.MonkeyPatch, rule: Rule
) -> None:
    usual = chain_of(3, rule)
    tree = Tree(depth=3, top_k=2, rows=8, least_probability=0.15)
    plan = usual.plan.model_copy(update={"tree": tree})
    models, rows = usual.engine.models, Counter[int]()
    head, keep_best = models.drafters["draft"], Candidates.keep_best

    def counted(candidates: Candidates, *arguments: Any) -> DraftTree:
        kept = keep_best(candidates, *arguments)
        rows[len(kept)] += 1
        return kept

    monkeypatch.setattr(Candidates, "keep_best", counted)
    chain = small_chain(models.decoders, head, plan, SAMPLING, PROMPT, usual.num_tokens)
    found = count(RememberedChain(chain), FEWER_ANSWERS)
    assert p_values(found, exact_law()) >= SIGNIFICANCE
    assert len(rows) > 2, "trees of many sizes"


@pytest.mark.proof
@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        ("medusa", "token"),
        ("hydra", "block"),
        ("block", "token"),
        ("block", "coupled"),
        ("dflash", "token"),
    ],
)
def test_law_with_heads_for_several_positions_is_the_targets(kind: str, rule: Rule) -> None:
    usual = chain_of(4 if rule == "coupled" else 3, rule)
    models = usual.engine.models
    verifier = models.decoders[usual.plan.members[-2]]
    if kind == "block":
        head = Weights(9).block_head(verifier)
    elif kind == "dflash":
        head = Weights(9).dflash_head(verifier)
    else:
        head = Weights(9).heads_by_place(verifier, kind)
    chain = small_chain(models.decoders, head, usual.plan, SAMPLING, PROMPT, usual.num_tokens)
    remembered = RememberedChain(chain)
    assert p_values(count(remembered, FEWER_ANSWERS), exact_law()) >= SIGNIFICANCE
    with torch.inference_mode():
        answers = [chain.answer(seed) for seed in range(20)]
        assert answers == [remembered.answer(remembered.sampler(seed)) for seed in range(20)]


@pytest.mark.proof
@pytest.mark.parametrize(("kind", "rule"), [("early exit", "block"), ("steering", "token")])
def test_law_of_a_drafter_that_shares_the_cache_or_is_steered_is_the_targets(
    kind: str, rule: Rule
) -> None:
    usual = chain_of.__wrapped__(3, rule)
    decoders, weights = usual.engine.models.decoders, Weights(9)
    verifier = decoders["intermediate"]
    if kind == "steering":
        drafter = weights.steered(weights.decoder(small_config(1, 16)), verifier)
    else:
        drafter = weights.early_exit(verifier, 1)
    chain = small_chain(decoders, drafter, usual.plan, SAMPLING, PROMPT, usual.num_tokens)
    assert len({id(verifier.cache) for verifier in chain.engine.verifiers.values()}) == 1
    remembered = RememberedChain(chain)
    assert p_values(count(remembered, FEWER_ANSWERS), exact_law()) >= SIGNIFICANCE
    with torch.inference_mode():
        answers = [chain.answer(seed) for seed in range(20)]
        assert answers == [remembered.answer(remembered.sampler(seed)) for seed in range(20)]


def test_law_of_common_noise_is_the_targets() -> None:
    """With the noise of three positions each the target's rows are drawn from independently.

    This is the law of a chain with the rule `coupled`, since its answers are those of the target.
    """
    law, shape = exact_law(), (VOCAB_SIZE,) * 3
    joint = torch.tensor(law.reshape(shape))
    logs = [joint.sum((1, 2)).log(), joint.sum(2).log(), joint.log()]
    counts = np.zeros(shape, dtype=np.int64)
    for seed in range(20):
        positions = torch.arange(3 * NUM_ANSWERS // 20)
        noise = gumbel_noise(noise_key(seed), positions, VOCAB_SIZE).view(-1, 3, VOCAB_SIZE)
        drawn: tuple[Tensor, ...] = ()
        for place, rows in enumerate(logs):
            drawn = (*drawn, (rows[drawn] + noise[:, place]).argmax(-1))
        np.add.at(counts, tuple(tokens.numpy() for tokens in drawn), 1)
    assert counts.sum() == NUM_ANSWERS
    assert p_values(counts.reshape(-1), law) >= SIGNIFICANCE


def test_law_stays_the_targets_where_others_see_a_part_of_the_context() -> None:
    chain = chain_of.__wrapped__(3)  # its models are nobody else's
    windows = dict.fromkeys(chain.plan.members[1:], Window(tokens=2, sinks=1))
    plan = chain.plan.model_copy(update={"windows": windows})
    chain = dataclasses.replace(chain, plan=plan)
    assert p_values(count(RememberedChain(chain), FEWER_ANSWERS), exact_law()) >= SIGNIFICANCE
    windows["target"] = windows["intermediate"]
    plan = chain.plan.model_copy(update={"windows": windows})
    chain = dataclasses.replace(chain, plan=plan)
    assert p_values(count(RememberedChain(chain), 1000), exact_law()) < SIGNIFICANCE


# What is wrong is rejected


def test_missing_renormalisation_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of p - q is drawn from by inversion, as if it summed to 1."""

    def unnormalised(self: RememberingSampler, rows: Tensor) -> list[int]:
        uniform = torch.rand(len(rows), 1, generator=self.generator)
        drawn = torch.searchsorted(rows.cumsum(-1), uniform, right=True)
        return drawn.clamp(max=VOCAB_SIZE - 1).squeeze(1).tolist()

    monkeypatch.setattr(RememberingSampler, "_categorical", unnormalised)
    monkeypatch.setattr(verification, "residual", lambda p, q, weight: (weight * p - q).clip(0))
    counts = count(RememberedChain(chain_of(3)), FEWER_ANSWERS)
    assert p_values(counts, exact_law()) < SIGNIFICANCE


def test_a_fault_that_no_counting_shows_is_seen_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    residual = verification.residual
    monkeypatch.setattr(
        verification, "residual", lambda p, q, weight: residual(0.999 * p, q, weight)
    )
    assert 10 * ROUNDING < departure(chain_of(4, "token")) < 0.001


def test_one_noise_for_all_positions_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    at = Noise.at
    monkeypatch.setattr(Noise, "at", lambda self, positions: at(self, [0] * len(positions)))
    monkeypatch.setattr(Noise, "draw", lambda *_: None)
    counts = count(RememberedChain(chain_of(4, "coupled")), 1000)
    assert p_values(counts, exact_law()) < SIGNIFICANCE


def test_cache_is_shared_by_neighbours_only() -> None:
    # With a model of another shape between them, one would overwrite the other's rows unseen.
    config, other = small_config(2, 32), small_config(1, 16)
    decoders = {
        "target": Weights(1).decoder(config),
        "second": Weights(2).decoder(config),
        "third": Weights(3).decoder(other),
        "fourth": Weights(4).decoder(config),
    }
    plan = Plan(members=("target", "draft"), tree=TREE)
    chain = small_chain(decoders, Weights(9).head(decoders["target"]), plan, SAMPLING, PROMPT)
    caches = {name: id(verifier.cache) for name, verifier in chain.engine.verifiers.items()}
    assert caches["target"] == caches["second"]
    assert len({caches["target"], caches["third"], caches["fourth"]}) == 3
