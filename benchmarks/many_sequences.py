"""Greedy answers of several sequences at a time, which share the passes of each model."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

from command import ScriptReport
from measuring import Case, Spread

from polybasic.chain.formats.plan import Plan
from polybasic.deploy import Chain
from polybasic.deploy.runtime.request import Request
from polybasic.deploy.runtime.rounds.sampling import Sampling


@dataclass(frozen=True)
class Rate:
    """Of so many sequences at a time, each by the plan of a system.

    Attributes:
        seconds: of an answer to each, prompts included, once graphs are captured.
        num_tokens: of an answer.
    """

    sequences: int
    system: str
    seconds: Spread
    num_tokens: int

    @property
    def tokens_a_second(self) -> float:
        return self.sequences * self.num_tokens / self.seconds.median


def sequence_cases(
    chain: Chain,
    plans: Mapping[str, Plan],
    prompts: Sequence[list[int]],
    nums: Sequence[int],
    num_tokens: int,
    turns: int,
) -> Iterator[Case[Rate]]:
    """All systems with each number of sequences; no token ends an answer."""
    for num, (system, plan) in product(nums, plans.items()):
        requests = [
            Request(prompt, num_tokens, Sampling(), frozenset(), plan) for prompt in prompts[:num]
        ]
        yield f"{system}, {num} sequences", partial(_measured, chain, system, requests, turns)


def _measured(chain: Chain, system: str, requests: list[Request], turns: int) -> list[Rate]:
    # the first time captures graphs
    seconds = [_seconds(chain, requests) for _ in range(1 + turns)][1:]
    num_tokens = requests[0].max_new_tokens
    return [Rate(len(requests), system, Spread.of_turns(seconds), num_tokens)]


def _seconds(chain: Chain, requests: list[Request]) -> float:
    begun = time.perf_counter()
    running = [chain.engine.begin(request, runs_ahead=True) for request in requests]
    while chain.engine.step():
        pass
    for sequence in running:
        # an error is raised here
        assert sequence.statistics.num_tokens == requests[0].max_new_tokens
    return time.perf_counter() - begun


def report_sequences(report: ScriptReport, rates: Sequence[Rate], chain: Chain) -> None:
    """As a table, and how many graphs there are."""
    rows = [
        [
            str(rate.sequences),
            rate.system,
            f"{rate.tokens_a_second:.0f}",
            f"{1e3 * rate.seconds.median / rate.num_tokens:.3f}",
            f"{1e3 * rate.seconds.min / rate.num_tokens:.3f}",
            f"{1e3 * rate.seconds.max / rate.num_tokens:.3f}",
        ]
        for rate in rates
    ]
    columns = ["sequences", "system", "tokens/s", "ms a token of each", "min", "max"]
    report.table("Several sequences at a time", columns, rows)
    counts = chain.engine.graphs.counts
    report.say(f"{counts.captures} graphs in {counts.seconds:.1f} s.")
