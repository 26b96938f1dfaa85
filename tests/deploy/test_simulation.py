"""The simulation against hand-worked rounds and against the stages that serve."""

import hashlib
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from polybasic.chain.errors import UserError
from polybasic.chain.manifest import AdaptiveFlush, Flush, Ngram, Plan, Tree
from polybasic.deploy import simulation
from polybasic.deploy.measurements import (
    ABSENT,
    DraftCosts,
    Measurements,
    PassCosts,
    StageOverhead,
    Trace,
)
from polybasic.deploy.sampling import GreedySampler, Probabilities, RandomSampler, Sampling
from polybasic.deploy.simulation import Simulator, simulate
from polybasic.deploy.stages import BlockStage, Stage, TreeStage
from polybasic.deploy.theory import kept_probabilities
from polybasic.deploy.tree import DraftTree

LEAST = Tree(depth=1, top_k=1, rows=2)
LINE = PassCosts((1, 2), (10.0, 11.0))  # 9 + rows


def chain_ranks(accepted: list[int], depth: int) -> np.ndarray:
    """Of a drafter that drafts one chain, right for so many tokens."""
    ranks = np.full((len(accepted), depth, depth), ABSENT)
    for place, num in enumerate(accepted):
        for level in range(min(num, depth)):
            ranks[place, :, level] = level + 1
    return ranks


def make_trace(
    probability: dict[str, list[float]],
    accepted: dict[str, list[int]] | None = None,
    depth: int = 4,
    ngram: dict[int, list[int]] | None = None,
    confidence: dict[str, list[float]] | None = None,
) -> Trace:
    values = {name: np.array(one, dtype=float) for name, one in probability.items()}
    seen = values if confidence is None else {n: np.array(one) for n, one in confidence.items()}
    return Trace(
        "task",
        values,
        seen,
        seen,
        {("draft", name): {1: chain_ranks(one, depth)} for name, one in (accepted or {}).items()},
        None if ngram is None else {key: np.array(one) for key, one in ngram.items()},
    )


def make_measurements(*traces: Trace, **changes: Any) -> Measurements:
    """Passes of 9 + rows seconds for the target, a tenth of it for the model below, and so on."""
    names = tuple(traces[0].probability)
    shares = {names[0]: names[0]} | dict.fromkeys(names[1:], names[0])
    arguments: dict[str, Any] = {
        "hardware": "test",
        "dtype": "float32",
        "temperature": 0.0,
        "verifying": names,
        "drafters": {"draft": names},
        "passes": {
            name: PassCosts(LINE.rows, tuple(one / 10**place for one in LINE.seconds))
            for place, name in enumerate(names)
        },
        "drafts": {"draft": DraftCosts({1: (0.5, 0.25)})},
        "shares_cache": shares,
        "round_overhead_seconds": {name: StageOverhead(0.0, 0.0) for name in names},
        "ngram_seconds": 0.0,
        "traces": list(traces),
    }
    return Measurements(**(arguments | changes))


# Costs and their JSON


def test_pass_costs_between_and_beyond_the_measured_points() -> None:
    costs = PassCosts((2, 4, 8), (1.0, 2.0, 4.0))
    assert [costs.at(rows) for rows in (1, 2, 3, 4, 6, 8, 10)] == [1, 1, 1.5, 2, 3, 4, 5]
    assert PassCosts((1, 2, 4), (1.0, 3.0, 2.0)).at(3) == 2.5
    assert PassCosts((1, 2, 4), (1.0, 3.0, 2.0)).at(8) == 2.0  # never cheaper by more rows
    assert PassCosts((4,), (1.5,)).at(64) == 1.5


def test_draft_costs() -> None:
    costs = DraftCosts({2: (1.0, 0.25)})
    assert [costs.at(depth, 2) for depth in (0, 1, 3)] == [0.0, 1.0, 1.5]


def test_measurements_survive_json() -> None:
    one = make_measurements(
        make_trace({"a": [1, 1], "b": [1, 0]}, {"b": [1, 0]}, ngram={2: [-1, 0]})
    )
    content = json.loads(json.dumps(one.to_json()))
    again = Measurements.from_json(content)
    assert again.to_json() == one.to_json()
    assert again.traces[0].ranks["draft", "b"][1].dtype == np.int64
    plan = Plan(members=("a", "b", "draft"), tree=LEAST, flush={"a": Flush(length=1)})
    assert simulate(plan, again) == simulate(plan, one)


# Hand-worked rounds


def test_target_alone() -> None:
    predicted = simulate(
        Plan(members=("a",), tree=LEAST), make_measurements(make_trace({"a": [1] * 5}))
    )
    assert predicted.seconds_per_token == 10
    assert predicted.passes == {"a": 1}
    assert predicted.tokens_per_pass == {"a": 1}


def test_tree_is_cut_where_the_answer_ends() -> None:
    # At 0 both levels are right: 3 tokens. At 3 two tokens are left, so one level is drafted,
    # which is right: 2 tokens.
    trace = make_trace({"a": [1] * 5}, {"a": [2, 0, 0, 3, 0]})
    plan = Plan(members=("a", "draft"), tree=Tree(depth=2, top_k=1, rows=3))
    overhead = {"a": StageOverhead(100.0, 1e6)}
    predicted = simulate(plan, make_measurements(trace, round_overhead_seconds=overhead))
    assert predicted.seconds_by_member["a"] * 5 == pytest.approx(12 + 11)
    assert predicted.seconds_by_member["draft"] * 5 == pytest.approx(0.75 + 0.5)
    assert predicted.overhead_seconds * 5 == pytest.approx(200)
    assert predicted.seconds_per_token * 5 == pytest.approx(12 + 11 + 1.25 + 200)
    assert predicted.passes == {"a": 2 / 5, "draft": 3 / 5}
    assert predicted.tokens_per_pass == {"a": 2.5}


def test_rows_cut_a_tree_by_rank() -> None:
    ranks = np.full((8, 2, 2), ABSENT)
    ranks[:, :, 0], ranks[:, :, 1] = 2, 5
    trace = make_trace({"a": [1] * 8})
    trace.ranks["draft", "a"] = {2: ranks}
    drafts = {"draft": DraftCosts({2: (0.0, 0.0)})}
    measured = make_measurements(trace, drafts=drafts)

    def passes(rows: int) -> float:
        plan = Plan(members=("a", "draft"), tree=Tree(depth=2, top_k=2, rows=rows))
        return simulate(plan, measured).passes["a"] * 8

    # Rank 2 is in trees of 3 rows, rank 5 in trees of 6: gains of 1, 2 and 3.
    assert [passes(rows) for rows in (2, 3, 5, 6)] == [8, 4, 4, 3]
    # Two candidates of the first level and four of the second are all that there are.
    plan = Plan(members=("a", "draft"), tree=Tree(depth=2, top_k=2, rows=50))
    assert simulate(plan, measured).rows_per_pass["a"] * 3 == 7 + 7 + 3


@pytest.mark.parametrize(("shares", "catch_up"), [(True, 0.0), (False, 1.0)])
def test_blocks_over_single_tokens(shares: bool, catch_up: float) -> None:
    # 0: block of 2 kept whole, 3 tokens. 3: block of 2, refused at once, 1 token. 4: two tokens
    # are left, so the block has 1, which is kept.
    trace = make_trace({"a": [1] * 6, "b": [1, 1, 1, 0, 1, 1]})
    shares_cache = {"a": "a", "b": "a" if shares else "b"}
    plan = Plan(members=("a", "b"), tree=LEAST, flush={"a": Flush(length=2)})
    predicted = simulate(plan, make_measurements(trace, shares_cache=shares_cache))
    assert predicted.seconds_by_member["a"] * 6 == pytest.approx(12 + 12 + 11)
    # Behind the block that was kept whole the lower model reads its last token into its own cache.
    assert predicted.seconds_by_member["b"] * 6 == pytest.approx(5 + catch_up)
    assert predicted.block_tokens["a"] == pytest.approx(5 / 3)
    assert predicted.tokens_per_pass["a"] == 2


def test_four_levels() -> None:
    # c gains 2 a round. Positions 0..11; b parts from a at 5, c from b at 2.
    b, c = [1] * 12, [1] * 12
    b[5], c[5], c[2] = 0, 0, 0
    trace = make_trace({"a": [1] * 12, "b": b, "c": c}, {"c": [1] * 12})
    plan = Plan(
        members=("a", "b", "c", "draft"),
        tree=Tree(depth=1, top_k=1, rows=2),
        flush={"a": Flush(length=6), "b": Flush(length=3)},
    )
    predicted = simulate(plan, make_measurements(trace))
    # a's round at 0 wants 6 tokens of b.
    #   b's round at 0: c makes 0-1, 2-3; b keeps 2 of 4 and adds one: 3 tokens, 5 rows.
    #   b's round at 3: c makes 3-4, 5-6; b keeps 4 (where it leaves a, c agrees): 5, 5 rows.
    # a keeps 5 of 8 and adds one: 6 tokens, 9 rows.
    # a's round at 6: five tokens may follow.
    #   b's round at 6: c makes 6-7, 8-9, kept: 5 tokens, 5 rows.
    # a keeps 5 of 5 and adds one: 12 tokens in all, 6 rows.
    assert predicted.passes["a"] * 12 == pytest.approx(2)
    assert predicted.passes["b"] * 12 == pytest.approx(3)
    assert predicted.passes["c"] * 12 == pytest.approx(6)
    assert predicted.seconds_by_member["a"] * 12 == pytest.approx(18 + 15)
    assert predicted.seconds_by_member["b"] * 12 == pytest.approx(3 * 1.4)
    assert predicted.seconds_by_member["c"] * 12 == pytest.approx(6 * 0.11)
    assert predicted.tokens_per_pass["b"] == pytest.approx(13 / 3)
    assert predicted.block_tokens == {"a": 6.5, "b": 4}


def test_copies_stand_in_for_drafts() -> None:
    trace = make_trace({"a": [1] * 8}, {"a": [1] * 8}, ngram={2: [-1, 0, 3, 0, 0, 0, 9, 0]})
    tree = Tree(depth=2, top_k=1, rows=4)
    plan = Plan(members=("a", "draft"), tree=tree, ngram=Ngram(min_match=2, num_tokens=8))
    predicted = simulate(plan, make_measurements(trace, ngram_seconds=0.125))
    # 0: drafted, 2 tokens of 3 rows; 2: copied, 3 of 3 right: 4 tokens of 4 rows; 6: copied, only
    # one token and the last one are left: 2 rows.
    assert predicted.seconds_by_member["a"] * 8 == pytest.approx(12 + 13 + 11)
    assert predicted.seconds_by_member["draft"] * 8 == pytest.approx(0.75)
    assert predicted.seconds_by_member["ngram"] * 8 == pytest.approx(3 * 0.125)


def test_what_was_not_measured_is_refused() -> None:
    measured = make_measurements(make_trace({"a": [1] * 4}, {"a": [1] * 4}, depth=3))
    for tree in (Tree(depth=4, top_k=1, rows=4), Tree(depth=2, top_k=2, rows=4)):
        with pytest.raises(UserError, match=r"draft tree was not measured.*top_k 1 to depth 3"):
            simulate(Plan(members=("a", "draft"), tree=tree), measured)
    with pytest.raises(UserError, match="n-gram drafts were not measured"):
        simulate(Plan(members=("a",), tree=LEAST, ngram=Ngram()), measured)
    with pytest.raises(UserError, match="nothing to plan from"):
        Simulator(make_measurements(measured.traces[0], traces=[]))


# The stages that serve, on models whose agreement depends on the position alone

VOCAB_SIZE = 8
PROMPT = [1, 2, 3]


@dataclass(frozen=True)
class World:
    """Which choices the models make: by place, not by text, so that refused text costs the same.

    Attributes:
        parts: for each model but the target, places where it leaves the model above.
        accepted: by place, right tokens of a draft.
        sharpness: by place, of the logits.
    """

    parts: list[set[int]]
    accepted: list[int]
    sharpness: list[float]
    temperature: float = 0.0

    def choice(self, level: int, prefix: tuple[int, ...]) -> int:
        token = hashlib.sha256(bytes(prefix)).digest()[0]
        place = len(prefix) - len(PROMPT)
        token += sum(place in parts for parts in self.parts[:level])
        return token % VOCAB_SIZE

    def logits(self, level: int, prefix: tuple[int, ...]) -> torch.Tensor:
        if self.temperature > 0:
            digest = hashlib.sha256(bytes((level, *prefix[-2:]))).digest()
            base = hashlib.sha256(bytes(prefix[-2:])).digest()
            return torch.tensor([(3 * b + d) / 256 for b, d in zip(base, digest, strict=True)][:4])
        values = torch.zeros(VOCAB_SIZE)
        values[self.choice(level, prefix)] = self.sharpness[len(prefix) - len(PROMPT)]
        return values


class TokenCache:
    """Tokens, committed up to `length`."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.length = 0

    def keep(self, rows: Any) -> None:
        self.tokens[self.length :] = [self.tokens[self.length + row] for row in rows]
        self.length = len(self.tokens)

    def truncate(self, length: int) -> None:
        assert length <= self.length
        self.length = length


@dataclass
class FakeVerifier:
    """Counts its passes by their rows."""

    world: World
    level: int
    cache: TokenCache
    passes: Counter[int] = field(default_factory=Counter)
    prefixes: list[tuple[int, ...]] = field(default_factory=list)

    def read(self, tokens: list[int]) -> torch.Tensor:
        return self._read(tokens, list(range(-1, len(tokens) - 1)))

    def read_tree(self, tree: DraftTree) -> torch.Tensor:
        return self._read(tree.tokens, tree.parents)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        prefixes = [self.prefixes[int(state)] for state in states[:, 0]]
        return torch.stack([self.world.logits(self.level, prefix) for prefix in prefixes])

    def _read(self, tokens: list[int], parents: list[int]) -> torch.Tensor:
        self.passes[len(tokens)] += 1
        committed = tuple(self.cache.tokens[: self.cache.length])
        self.cache.tokens[self.cache.length :] = tokens
        first = len(self.prefixes)
        for token, parent in zip(tokens, parents, strict=True):
            before = committed if parent < 0 else self.prefixes[first + parent]
            self.prefixes.append((*before, token))
        return torch.arange(first, len(self.prefixes))[:, None]


@dataclass
class FakeDrafter:
    """A chain of candidates, right for as many tokens as the world says."""

    world: World
    level: int
    depth: int
    num_observed: int = 0
    passes: int = 0

    def observe(self, states: torch.Tensor) -> None:
        self.num_observed += len(states)

    def rewind(self, num_observed: int) -> None:
        assert num_observed <= self.num_observed
        self.num_observed = num_observed

    def draft(self, tokens: list[int], max_depth: int) -> DraftTree:
        assert self.num_observed == len(tokens) - 1
        drafted, depth = list(tokens), min(max_depth, self.depth)
        self.passes += depth
        for level in range(depth):
            if self.world.temperature > 0:
                token = int(self.world.logits(self.level, tuple(drafted)).argmax())
            else:
                token = self.world.choice(self.level, tuple(drafted))
                if level >= self.world.accepted[len(tokens) - len(PROMPT)]:
                    token = (token + 1) % VOCAB_SIZE
            drafted.append(token)
        return DraftTree(drafted[len(tokens) - 1 :], list(range(-1, depth)))


NAMES = ("a", "b", "c")


@dataclass
class Case:
    """A world and a plan over its first models."""

    world: World
    plan: Plan
    owners: dict[str, str]
    num_tokens: int

    @property
    def names(self) -> tuple[str, ...]:
        return self.plan.members[:-1]

    def run(self, sampler: Any) -> tuple[list[int], dict[str, Counter[int]], int]:
        """The answer, each verifier's passes by rows, and the passes of the drafter."""
        caches = {owner: TokenCache() for owner in self.owners.values()}
        verifiers = {
            name: FakeVerifier(self.world, level, caches[self.owners[name]])
            for level, name in enumerate(self.names)
        }
        innermost = self.names[-1]
        drafter = FakeDrafter(self.world, len(self.names) - 1, self.plan.tree.depth)
        stage: Stage = TreeStage(verifiers[innermost], drafter, sampler)  # type: ignore[arg-type]
        for name in reversed(self.names[:-1]):
            stage = BlockStage(verifiers[name], stage, sampler, self.plan.flush[name])  # type: ignore[arg-type]
        stage.prefill(PROMPT)
        for verifier in verifiers.values():
            verifier.passes.clear()
        tokens: list[int] = []
        while len(tokens) < self.num_tokens:
            tokens += stage.propose(1, self.num_tokens - len(tokens)).tokens
        return tokens, {name: one.passes for name, one in verifiers.items()}, drafter.passes

    def measure(self, answers: list[list[int]], sampler: Any) -> Measurements:
        """What a calibration would find along these answers."""
        traces = [self._trace(answer, sampler) for answer in answers]
        return make_measurements(
            *traces, shares_cache=self.owners, temperature=self.world.temperature
        )

    def _trace(self, answer: list[int], sampler: Any) -> Trace:
        prefixes = [(*PROMPT, *answer[:place]) for place in range(len(answer))]
        probability, confidence, own = {}, {}, {}
        for level, name in enumerate(self.names):
            rows = torch.stack([self.world.logits(level, prefix) for prefix in prefixes])
            values = rows.double().softmax(-1)
            confidence[name] = values[range(len(answer)), answer].numpy()
            if self.world.temperature > 0:
                probability[name] = own[name] = confidence[name]
            else:
                probability[name] = (values.argmax(-1) == torch.tensor(answer)).double().numpy()
                own[name] = values.max(-1).values.numpy()
        drafter = FakeDrafter(self.world, len(self.names) - 1, self.plan.tree.depth)
        accepted = []
        for place, prefix in enumerate(prefixes):
            if self.world.temperature == 0:
                accepted.append(self.world.accepted[place])
                continue
            drafter.num_observed = len(prefix) - 1
            drafted = drafter.draft(list(prefix), self.plan.tree.depth).tokens[1:]
            right = [x == y for x, y in zip(drafted, answer[place:], strict=False)]
            accepted.append([*right, False].index(False))
        ranks = {("draft", self.names[-1]): {1: chain_ranks(accepted, self.plan.tree.depth)}}
        return Trace("task", probability, confidence, own, ranks, None)


def random_case(seed: int, is_adaptive: bool = False) -> Case:
    chance = random.Random(seed)
    num_tokens, num_levels = chance.randint(1, 40), chance.randint(2, 3)
    places = range(num_tokens + 1)
    parts = [{place for place in places if chance.random() < 0.2} for _ in range(num_levels - 1)]
    # What a lower model says where an upper one has left the target's text is not measured:
    # it agrees there, as the simulation has it.
    for upper, lower in pairwise(parts):
        lower -= upper
    owners = dict(zip(NAMES, chance.choice(["aaa", "abc", "abb", "aac"]), strict=True))
    depth = chance.randint(1, 4)

    def flush() -> Flush:
        adaptive = AdaptiveFlush(
            break_even=chance.choice([0.3, 0.6]),
            acceptance=tuple(chance.uniform(0.5, 1.0) for _ in range(8)),
        )
        return Flush(length=chance.randint(1, 9), adaptive=adaptive if is_adaptive else None)

    names = NAMES[:num_levels]
    world = World(
        parts,
        [chance.randint(0, depth) for _ in places],
        [chance.uniform(1.0, 6.0) for _ in places],
    )
    plan = Plan(
        members=(*names, "draft"),
        tree=Tree(depth=depth, top_k=1, rows=depth + 1),
        flush={name: flush() for name in names[:-1]},
    )
    return Case(world, plan, {name: owners[name] for name in names}, num_tokens)


def compare(case: Case) -> tuple[dict[str, Counter[int]], dict[str, Counter[int]]]:
    """Passes by rows of the stages, and of the simulation."""
    sampler = GreedySampler(Sampling(), len(PROMPT))
    answer, served, num_drafts = case.run(sampler)
    simulator = Simulator(case.measure([answer], sampler))
    stages: list[Any] = []
    make_stages = simulator._stages
    simulator._stages = lambda *arguments: stages.extend(make_stages(*arguments)) or stages  # type: ignore[method-assign]
    predicted = simulator.run(case.plan)
    played = {
        name: Counter(dict(zip(*(one.tolist() for one in stage.rows_read()), strict=True)))
        for name, stage in zip(case.names, stages, strict=True)
    }
    served["draft"] = Counter({1: num_drafts})
    played["draft"] = Counter({1: round(predicted.passes["draft"] * case.num_tokens)})
    return served, played


@pytest.mark.parametrize("seed", range(60))
def test_every_pass_is_that_of_the_stages(seed: int) -> None:
    served, played = compare(random_case(seed))
    assert played == served


@pytest.mark.parametrize("seed", range(100, 140))
def test_adaptive_flushes_are_those_of_the_stages(seed: int) -> None:
    case = random_case(seed, is_adaptive=True)
    served, played = compare(case)
    assert played == served


def test_adaptive_flushes_do_something() -> None:
    def num_blocks(seed: int, is_adaptive: bool) -> int:
        return sum(compare(random_case(seed, is_adaptive))[0]["a"].values())

    differing = [
        seed for seed in range(100, 110) if num_blocks(seed, True) != num_blocks(seed, False)
    ]
    assert differing


def misses(monkeypatch: pytest.MonkeyPatch, change: Callable[[pytest.MonkeyPatch], None]) -> int:
    change(monkeypatch)
    outcomes = [compare(random_case(seed)) for seed in range(20)]
    return sum(served != played for served, played in outcomes)


def forget_catching_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(self: Any, length: int, was_read: bool) -> None:
        self._read = length

    monkeypatch.setattr(simulation._TreeStage, "resolve", resolve)


def keep_one_token_less(monkeypatch: pytest.MonkeyPatch) -> None:
    find = Simulator._find_extents

    def shortened(self: Any, *arguments: Any) -> list[int]:
        return [max(0, extent - 1) for extent in find(self, *arguments)]

    monkeypatch.setattr(Simulator, "_find_extents", shortened)


def forget_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = Simulator._tree_rounds

    def unlimited(self: Any, name: str, level: int, *arguments: Any) -> Any:
        return rounds(self, name, 0, *arguments)

    monkeypatch.setattr(Simulator, "_tree_rounds", unlimited)


@pytest.mark.parametrize("change", [forget_catching_up, keep_one_token_less, forget_limits])
def test_a_wrong_simulation_is_noticed(
    change: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert misses(monkeypatch, change) > 3


def text_dependent_case(temperature: float, rule: str = "block") -> Case:
    """Models that agree by text, and a drafter that is the argmax of the model above it."""
    flush = Flush(length=5, rule=rule)  # type: ignore[arg-type]
    return Case(
        World([set()], [], [], temperature),
        Plan(
            members=("a", "b", "draft"),
            tree=Tree(depth=3, top_k=1, rows=4),
            flush={"a": flush},
        ),
        {"a": "a", "b": "b"},
        48,
    )


@pytest.mark.parametrize("rule", ["block", "token"])
def test_random_rounds_on_average(rule: str) -> None:
    case = text_dependent_case(1.0, rule)
    served: Counter[str] = Counter()
    answers = []
    for seed in range(60):
        sampler = RandomSampler(Sampling(1.0, seed=seed), torch.device("cpu"), len(PROMPT))
        answer, passes, num_drafts = case.run(sampler)
        answers.append(answer)
        served["draft"] += num_drafts
        for name, rows in passes.items():
            served[name] += sum(rows.values())
    predicted = simulate(case.plan, case.measure(answers, None), num_draws=8)
    num_tokens = 60 * case.num_tokens
    assert predicted.passes["a"] == pytest.approx(served["a"] / num_tokens, rel=0.04)
    # Refused tokens are played as if the answer went on.
    for name in ("b", "draft"):
        assert predicted.passes[name] == pytest.approx(served[name] / num_tokens, rel=0.08)


# Kept tokens at a temperature


def kept_shares(rule: str, num_draws: int = 4000) -> tuple[list[float], list[float]]:
    """Share of draws in which a block from 0 on keeps 1, 2, .. tokens, and what theory says."""
    p, q = [0.5, 0.4, 0.6, 0.3, 0.9, 0.5], [0.9, 0.3, 0.8, 0.25, 0.6, 0.4]
    trace = make_trace({"a": p, "b": q})
    simulator = Simulator(make_measurements(trace, temperature=1.0), num_draws=num_draws)
    extents = np.array([simulator._extents("a", "b", rule, d)[0] for d in range(num_draws)])  # type: ignore[arg-type]
    expected = kept_probabilities(p, q, rule)  # type: ignore[arg-type]
    return [float((extents >= num).mean()) for num in range(1, 7)], expected


@pytest.mark.parametrize("rule", ["block", "token"])
def test_kept_tokens_follow_the_theory(rule: str) -> None:
    shares, expected = kept_shares(rule)
    assert shares == pytest.approx(expected, abs=0.03)


def test_the_rules_differ() -> None:
    shares, _ = kept_shares("block")
    _, others = kept_shares("token")
    assert shares != pytest.approx(others, abs=0.03)


@pytest.mark.parametrize("rule", ["block", "token"])
def test_mean_kept_length_is_that_of_the_sampler(rule: str) -> None:
    """Along texts of the verifier, against real verifications of texts of the proposer."""
    num_runs, length, vocab_size = 3000, 4, 3
    generator = torch.Generator().manual_seed(3)
    tables = torch.randn(2, length + 1, vocab_size, vocab_size, generator=generator).softmax(-1)

    def rows(model: int, tokens: list[int]) -> torch.Tensor:
        """Of each place, given the token before."""
        return torch.stack([tables[model, i, t] for i, t in enumerate([0, *tokens])])

    def text(model: int) -> list[int]:
        tokens = [0]
        for place in range(length):
            row = tables[model, place, tokens[-1]]
            tokens.append(int(torch.multinomial(row, 1, generator=generator)))
        return tokens[1:]

    sampler = RandomSampler(Sampling(1.0, seed=1), torch.device("cpu"), 1)
    served = 0
    for _ in range(num_runs):
        tokens = text(1)
        own, proposed = rows(0, tokens), rows(1, tokens)[:length]
        served += sampler.verify(tokens, Probabilities(proposed), Probabilities(own), rule)[0]

    def mean_extent(model: int) -> float:
        """Along texts of a model."""
        traces = []
        for _ in range(num_runs):
            tokens = text(model)
            at = (list(range(length)), tokens)
            p, q = (rows(one, tokens)[:length][at].tolist() for one in (0, 1))
            traces.append(make_trace({"a": p, "b": q}))
        simulator = Simulator(make_measurements(*traces, temperature=1.0), num_draws=2)
        extents = [simulator._extents("a", "b", rule, draw) for draw in range(2)]  # type: ignore[arg-type]
        return float(np.mean([one[start] for one in extents for start, _ in simulator.spans]))

    assert mean_extent(0) == pytest.approx(served / num_runs, abs=0.08)
    assert mean_extent(1) != pytest.approx(served / num_runs, abs=0.3)


def test_plans_meet_the_same_luck() -> None:
    generator = np.random.default_rng(0)
    p = generator.uniform(0.2, 1.0, (2, 40)).tolist()
    measured = make_measurements(make_trace({"a": p[0], "b": p[1]}), temperature=1.0)
    plan = Plan(members=("a", "b"), tree=LEAST, flush={"a": Flush(length=4)})
    assert simulate(plan, measured) == simulate(plan, measured)
    assert simulate(plan, measured, seed=1) != simulate(plan, measured)


def test_a_plan_takes_milliseconds() -> None:
    generator = np.random.default_rng(0)
    traces = [
        make_trace(
            {"a": [1] * 96, "b": (generator.random(96) < 0.9).tolist()},
            {"b": generator.integers(0, 5, 96).tolist()},
        )
        for _ in range(24)
    ]
    simulator = Simulator(make_measurements(*traces))
    seconds = []
    for length in range(2, 12):
        tree = Tree(depth=4, top_k=1, rows=5)
        plan = Plan(members=("a", "b", "draft"), tree=tree, flush={"a": Flush(length=length)})
        begin = time.perf_counter()
        simulator.run(plan)
        seconds.append(time.perf_counter() - begin)
    assert min(seconds) < 0.01
