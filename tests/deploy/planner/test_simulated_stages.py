"""Simulated rounds against the stages that serve, pass by pass and on average."""

import hashlib
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch

from polybasic.chain.formats.plan import AdaptiveFlush, Flush, Plan, Rule, Tree
from polybasic.chain.kernels.drafts import DraftTree
from polybasic.chain.kernels.noise import gumbel_noise, noise_key
from polybasic.deploy.planner.measuring.measurements import AcceptanceTrace, Measurements
from polybasic.deploy.planner.simulated_stages import SimulatedTreeStage
from polybasic.deploy.planner.simulation import Simulator, simulate
from polybasic.deploy.runtime.drafters.interface import NoDrafter
from polybasic.deploy.runtime.rounds.pace import PromptPace
from polybasic.deploy.runtime.rounds.passes import alone
from polybasic.deploy.runtime.rounds.sampling import (
    CoupledSampler,
    GreedySampler,
    Prefixes,
    RandomSampler,
    Sampling,
)
from polybasic.deploy.runtime.rounds.stages import BlockStage, Stage, TreeStage
from tests.deploy.traces import chain_ranks, make_measurements

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


class TableNoise:
    """The noise of a request over the four tokens of a world at a temperature."""

    def __init__(self, seed: int) -> None:
        self.rows = gumbel_noise(noise_key(seed), torch.arange(80), 4)

    def draw(self, *_: object) -> None:
        """Native kernels do not know it."""

    def at(self, positions: list[int]) -> torch.Tensor:
        return self.rows[positions]


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
    pace: PromptPace = field(default_factory=lambda: PromptPace(torch.device("cpu")))

    @property
    def name(self) -> str:
        return NAMES[self.level]

    def see(self, token_ids: list[int]) -> None:
        """All tokens have logits."""

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
    noise: TableNoise | None = None
    clock: None = None
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
                logits = self.world.logits(self.level, tuple(drafted))
                if self.noise is not None:
                    logits = logits + self.noise.at([len(drafted)])[0]
                token = int(logits.argmax())
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
        return tuple(name for name in self.plan.members if name != "draft")

    def run(self, sampler: Any) -> tuple[list[int], dict[str, Counter[int]], int]:
        """The answer, each verifier's passes by rows, and the passes of the drafter."""
        caches = {owner: TokenCache() for owner in self.owners.values()}
        verifiers = {
            name: FakeVerifier(self.world, level, caches[self.owners[name]])
            for level, name in enumerate(self.names)
        }
        innermost = self.names[-1]
        drafter = self._drafter(sampler) if "draft" in self.plan.members else NoDrafter()
        stage: Stage = TreeStage(verifiers[innermost], drafter, sampler)  # type: ignore[arg-type]
        for name in reversed(self.names[:-1]):
            stage = BlockStage(verifiers[name], stage, sampler, self.plan.flush[name])  # type: ignore[arg-type]
        tokens = alone(stage.start(PROMPT)).tokens
        alone(stage.catch_up())
        for verifier in verifiers.values():
            verifier.passes.clear()
        while len(tokens) < self.num_tokens:
            tokens += alone(stage.propose(1, self.num_tokens - len(tokens))).tokens
        return (
            tokens,
            {name: verifier.passes for name, verifier in verifiers.items()},
            drafter.passes if isinstance(drafter, FakeDrafter) else 0,
        )

    def measure(self, answers: list[list[int]], sampler: Any) -> Measurements:
        """What a calibration would find along these answers."""
        traces = [self._trace(answer, sampler) for answer in answers]
        return make_measurements(
            *traces,
            shares_cache=self.owners,
            temperature=self.world.temperature,
            rules=(self.plan.rule,),
        )

    def _drafter(self, sampler: Any) -> FakeDrafter:
        noise = sampler.noise if isinstance(sampler, CoupledSampler) else None
        level, depth = len(self.names) - 1, self.plan.tree.depth
        return FakeDrafter(self.world, level, depth, noise)  # type: ignore[arg-type]

    def _trace(self, answer: list[int], sampler: Any) -> AcceptanceTrace:
        prefixes = [(*PROMPT, *answer[:place]) for place in range(len(answer))]
        probability, confidence, own = {}, {}, {}
        for level, name in enumerate(self.names):
            rows = torch.stack([self.world.logits(level, prefix) for prefix in prefixes])
            values = rows.double().softmax(-1)
            confidence[name] = values[range(len(answer)), answer].numpy()
            if isinstance(sampler, CoupledSampler):
                suffixes = [list(prefix[len(PROMPT) :]) for prefix in prefixes]
                drawn = sampler.distributions(rows, Prefixes(PROMPT, suffixes)).tokens
                probability[name] = (torch.tensor(drawn) == torch.tensor(answer)).double().numpy()
                own[name] = confidence[name]
            elif self.world.temperature > 0:
                probability[name] = own[name] = confidence[name]
            else:
                probability[name] = (values.argmax(-1) == torch.tensor(answer)).double().numpy()
                own[name] = values.max(-1).values.numpy()
        drafter = self._drafter(sampler)
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
        return AcceptanceTrace("task", probability, confidence, own, ranks, None)


def random_case(seed: int, is_adaptive: bool = False) -> Case:
    chance = random.Random(seed)
    num_tokens, num_levels = chance.randint(2, 40), chance.randint(2, 3)
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
    drafters = () if chance.random() < 0.5 else ("draft",)
    world = World(
        parts,
        [chance.randint(0, depth) for _ in places],
        [chance.uniform(1.0, 6.0) for _ in places],
    )
    plan = Plan(
        members=(*names, *drafters),
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
        name: Counter(dict(zip(*(column.tolist() for column in stage.rows_read()), strict=True)))
        for name, stage in zip(case.names, stages, strict=True)
    }
    served["draft"] = Counter({1: num_drafts})
    played["draft"] = Counter({1: round(predicted.passes.get("draft", 0) * (case.num_tokens - 1))})
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

    monkeypatch.setattr(SimulatedTreeStage, "resolve", resolve)


def read_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = SimulatedTreeStage.begin

    def begin_apart(self: Any, *arguments: int) -> None:
        self.reads_with_tree = False
        begin(self, *arguments)

    monkeypatch.setattr(SimulatedTreeStage, "begin", begin_apart)


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


@pytest.mark.parametrize(
    "change", [forget_catching_up, read_by_itself, keep_one_token_less, forget_limits]
)
def test_a_wrong_simulation_is_noticed(
    change: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert misses(monkeypatch, change) > 3


def text_dependent_case(temperature: float, rule: Rule, num_levels: int = 2) -> Case:
    """Models that agree by text, and a drafter of the tokens that the model above it would draw, or
    of its most probable ones."""
    names = NAMES[:num_levels]
    return Case(
        World([set()] * (num_levels - 1), [], [], temperature),
        Plan(
            members=(*names, "draft"),
            tree=Tree(depth=3, top_k=1, rows=4),
            flush=dict.fromkeys(names[:-1], Flush(length=5)),
            rule=rule,
        ),
        {name: name for name in names},
        48,
    )


@pytest.mark.parametrize("rule", ["block", "token"])
def test_random_rounds_on_average(rule: Rule) -> None:
    case = text_dependent_case(1.0, rule)
    served: Counter[str] = Counter()
    answers = []
    for seed in range(60):
        sampler = RandomSampler(Sampling(1.0, seed=seed), torch.device("cpu"), len(PROMPT), rule)
        answer, passes, num_drafts = case.run(sampler)
        answers.append(answer)
        served["draft"] += num_drafts
        for name, rows in passes.items():
            served[name] += sum(rows.values())
    predicted = simulate(case.plan, case.measure(answers, None), num_draws=8)
    num_tokens = 60 * (case.num_tokens - 1)
    assert predicted.passes["a"] == pytest.approx(served["a"] / num_tokens, rel=0.04)
    # Refused tokens are played as if the answer went on.
    for name in ("b", "draft"):
        assert predicted.passes[name] == pytest.approx(served[name] / num_tokens, rel=0.08)


def coupled_sampler(seed: int) -> CoupledSampler:
    return CoupledSampler(Sampling(1.0, seed=seed), len(PROMPT), TableNoise(seed))  # type: ignore[arg-type]


def coupled_passes(case: Case, seed: int, measured_seed: int) -> tuple[Counter[str], Counter[str]]:
    """Passes of the stages with the noise of a seed, and of the simulation with that of another."""
    answer, by_rows, num_drafts = case.run(coupled_sampler(seed))
    served = Counter({name: sum(rows.values()) for name, rows in by_rows.items()})
    served["draft"] = num_drafts
    predicted = simulate(case.plan, case.measure([answer], coupled_sampler(measured_seed)))
    played = {name: round((case.num_tokens - 1) * num) for name, num in predicted.passes.items()}
    return served, Counter(played)


@pytest.mark.parametrize("num_levels", [1, 2, 3])
def test_rounds_with_common_noise_are_those_of_the_stages(num_levels: int) -> None:
    case = text_dependent_case(1.0, "coupled", num_levels)
    served, played, num_wrong = Counter[str](), Counter[str](), 0
    for seed in range(20):
        in_stages, simulated = coupled_passes(case, seed, seed)
        assert simulated["a"] == in_stages["a"]
        served += in_stages
        played += simulated
        num_wrong += coupled_passes(case, seed, seed + 100)[1]["a"] != in_stages["a"]
    assert num_wrong > 10, "noise that is not the answer's must not do"
    for name in played:
        if num_levels == 1:
            assert played[name] == served[name]
        else:
            # below the target, refused tokens are played as if the answer went on
            assert played[name] == pytest.approx(served[name], rel=0.08)
