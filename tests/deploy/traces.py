"""Hand-made traces and costs for tests of the simulation, and counts of what really runs."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from polybasic.chain.formats.plan import Plan, Tree
from polybasic.chain.kernels.drafts import ABSENT
from polybasic.deploy import Chain
from polybasic.deploy.planner.measuring.measurements import (
    AcceptanceTrace,
    DraftCosts,
    Measurements,
    PassCosts,
)
from polybasic.deploy.runtime.request import Request
from polybasic.deploy.runtime.rounds.sampling import Sampling

GREEDY = Sampling()
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
) -> AcceptanceTrace:
    values = {name: np.array(numbers, dtype=float) for name, numbers in probability.items()}
    seen = (
        values
        if confidence is None
        else {n: np.array(numbers) for n, numbers in confidence.items()}
    )
    return AcceptanceTrace(
        "task",
        values,
        seen,
        seen,
        {
            ("draft", name): {1: chain_ranks(numbers, depth)}
            for name, numbers in (accepted or {}).items()
        },
        None if ngram is None else {key: np.array(numbers) for key, numbers in ngram.items()},
    )


def after_first(measurements: Measurements) -> Measurements:
    """With a token before each trace, which the prompt gives."""

    def extended(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: extended(part) for key, part in value.items()}
        return np.concatenate([value[:1], value]) if isinstance(value, np.ndarray) else value

    traces = [
        replace(
            AcceptanceTrace(*map(extended, vars(trace).values())),
            max_tokens=trace.max_tokens and trace.max_tokens + 1,
        )
        for trace in measurements.traces
    ]
    return replace(measurements, traces=traces)


def num_later(measurements: Measurements) -> int:
    """Tokens of all answers but the first one of each."""
    return sum(len(trace) - 1 for trace in measurements.traces)


def make_measurements(*traces: AcceptanceTrace, **changes: Any) -> Measurements:
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
            name: PassCosts(LINE.rows, tuple(duration / 10**place for duration in LINE.seconds))
            for place, name in enumerate(names)
        },
        "drafts": {"draft": DraftCosts({1: (0.5, 0.25)})},
        "shares_cache": shares,
        "block_overhead_seconds": dict.fromkeys(names, 0.0),
        "ngram_seconds": 0.0,
        "traces": list(traces),
    }
    return Measurements(**(arguments | changes))


def random_prompts(*lengths: int) -> list[tuple[str, list[int]]]:
    """Prompts of one task, of a tiny chain's tokens."""
    drawn = random.Random(0)
    return [("qa", [drawn.randrange(60) for _ in range(length)]) for length in lengths]


def count_passes(
    chain: Chain,
    plan: Plan,
    prompts: Sequence[tuple[str, list[int]]],
    num_tokens: int,
    sampling: Sampling = GREEDY,
) -> dict[str, int]:
    """Passes of each member over all prompts, the prefill left out."""
    total: Counter[str] = Counter()
    for _, prompt in prompts:
        request = Request(prompt, num_tokens, sampling, frozenset(), plan)
        answer = chain.engine.run(request)
        assert sum(map(len, answer)) <= num_tokens
        total.update(answer.statistics.forward_passes)
    return total
