"""Measurements of constructed machines, to plan for."""

import numpy as np

from polybasic.chain.kernels.drafts import ABSENT
from polybasic.deploy.planner.measuring.measurements import (
    AcceptanceTrace,
    DraftCosts,
    Measurements,
    PassCosts,
)
from polybasic.deploy.planner.settings import PlanGrid

GRID = PlanGrid(
    depths=(1, 2, 3, 4, 5, 6),
    top_ks=(2, 4),
    rows=(4, 8, 16, 32),
    flush_lengths=(2, 4, 6, 8, 12, 16),
    ngram_matches=(2, 3),
)
SMALL_GRID = PlanGrid(
    depths=(2, 4), top_ks=(2,), rows=(4, 8), flush_lengths=(2, 4, 8), ngram_matches=()
)


def make_ranks(chance: np.random.Generator, num: int, hit: float, top_k: int) -> np.ndarray:
    """Of a drafter whose first guess is right with probability `hit`; depth 6."""
    depth = 6
    ranks = np.full((num, depth, depth), ABSENT)
    for place in range(num):
        rank = 0
        for level in range(depth):
            rank += 1 + int(chance.geometric(hit)) - 1 + int(chance.integers(0, 3))
            if chance.random() > 0.5 * (1 + hit) or rank > 4 * top_k:
                break
            ranks[place, level:, level] = rank + np.arange(depth - level) // 2
    return ranks


def make_measurements(
    seed: int,
    cost: dict[str, float],
    agreement: dict[str, float],
    *,
    hit: float = 0.7,
    draft_seconds: float = 0.05,
    temperature: float = 0.0,
    ngram: float | None = None,
    drafters: dict[str, tuple[str, ...]] | None = None,
    num_traces: int = 8,
    predicts: bool = True,
) -> Measurements:
    """A machine on which a pass costs `cost` milliseconds at one row and a tenth for each more.

    Args:
        agreement: of each intermediate with the target.
        predicts: whether the intermediates' probabilities show where they are wrong.
    """
    chance = np.random.default_rng(seed)
    names = tuple(cost)
    drafters = {"draft": names} if drafters is None else drafters
    traces = []
    for _ in range(num_traces):
        num = 48
        probability = {names[0]: np.ones(num)}
        confidence = {names[0]: np.full(num, 0.9)}
        for name in names[1:]:
            agrees = chance.random(num) < agreement[name]
            if temperature == 0:
                probability[name] = agrees.astype(float)
            else:
                probability[name] = np.where(agrees, 0.9, 0.1)
            sure = np.where(agrees, 0.97, 0.4) if predicts else chance.uniform(0.6, 0.99, num)
            confidence[name] = sure
        traces.append(
            AcceptanceTrace(
                "task",
                probability,
                confidence,
                confidence,
                {
                    (drafter, name): {k: make_ranks(chance, num, hit, k) for k in (2, 4)}
                    for drafter, drafts_for in drafters.items()
                    for name in drafts_for
                },
                None
                if ngram is None
                else {m: np.where(chance.random(num) < ngram, 8, -1) for m in (2, 3)},
            )
        )
    rows = (1, 2, 4, 8, 16, 32)
    return Measurements(
        hardware="a machine",
        dtype="float32",
        temperature=temperature,
        verifying=names,
        drafters=drafters,
        passes={
            name: PassCosts(rows, tuple(1e-3 * milliseconds * (0.9 + 0.1 * r) for r in rows))
            for name, milliseconds in cost.items()
        },
        drafts={
            name: DraftCosts(dict.fromkeys((2, 4), (1e-3 * draft_seconds,) * 2))
            for name in drafters
        },
        shares_cache=dict.fromkeys(names, names[0]),
        block_overhead_seconds=dict.fromkeys(names, 1e-5),
        ngram_seconds=1e-6,
        traces=traces,
        rules=("block", "token") if temperature > 0 else ("coupled",),
    )


def random_measurements(seed: int) -> Measurements:
    """Any machine: two intermediates, costs of all kinds, both temperatures."""
    chance = np.random.default_rng(seed)
    cost = dict(zip("abc", np.sort(chance.uniform(0.2, 4.0, 3))[::-1].tolist(), strict=True))
    agreement = {name: float(chance.uniform(0.7, 0.99)) for name in "bc"}
    return make_measurements(
        seed,
        cost,
        agreement,
        hit=float(chance.uniform(0.4, 0.95)),
        draft_seconds=float(chance.uniform(0.01, 0.3)),
        temperature=float(seed % 2),
        num_traces=3,
    )
