"""What the rounds of a plan cost, once it is known how many there are of which rows."""

from dataclasses import dataclass

import numpy as np

from polybasic.chain.formats.plan import Plan
from polybasic.chain.kernels.drafts import Counts
from polybasic.deploy.planner.measurements import Measurements

NGRAM = "ngram"
"""Name of the n-gram drafts among members."""


@dataclass(frozen=True)
class Played:
    """What happened in all rounds of a plan, by verifying member, from the target down.

    Attributes:
        num_tokens: of all answers.
        rows: rows of passes, and how many passes had so many.
        gained: tokens.
        proposed: tokens in its blocks, of those that verify blocks.
        num_drafts: how many rounds had a draft of depth 0, 1, ...
    """

    num_tokens: int
    rows: dict[str, tuple[Counts, Counts]]
    gained: dict[str, int]
    proposed: dict[str, int]
    num_drafts: Counts


@dataclass(frozen=True)
class Predicted:
    """Predicted costs of a plan, averaged over all tokens of the traces.

    Attributes:
        seconds_per_token: without the prefill.
        tokens_per_pass: of each verifying member, tokens gained by a pass, rejected ones included.
        passes: of each member that runs a model, for each token of the answer.
        rows_per_pass: of each verifying member; like `tokens_per_pass`, 0 without passes.
        seconds_by_member: of each member, and of `NGRAM`, for each token of the answer.
        overhead_seconds: of block rounds beyond their passes, for each token of the answer.
        block_tokens: of each verifying member but the innermost, mean length of its blocks.
    """

    seconds_per_token: float
    tokens_per_pass: dict[str, float]
    passes: dict[str, float]
    rows_per_pass: dict[str, float]
    seconds_by_member: dict[str, float]
    overhead_seconds: float
    block_tokens: dict[str, float]


def predict(plan: Plan, played: Played, measurements: Measurements) -> Predicted:
    """The costs of a plan's rounds at a measurement's seconds."""
    num_tokens = played.num_tokens
    passes: dict[str, float] = {}
    gained: dict[str, float] = {}
    rows_per_pass: dict[str, float] = {}
    seconds: dict[str, float] = {}
    block_tokens: dict[str, float] = {}
    overhead = 0.0
    for name, (rows, counts) in played.rows.items():
        num_passes = int(counts.sum())
        passes[name] = num_passes / num_tokens
        gained[name] = played.gained[name] / max(num_passes, 1)
        rows_per_pass[name] = float(rows @ counts) / max(num_passes, 1)
        costs = measurements.passes[name]
        by_rows = np.array([costs.at(one) for one in rows.tolist()])
        seconds[name] = float(by_rows @ counts) / num_tokens
        if name in played.proposed:
            overhead += measurements.block_overhead_seconds[name] * num_passes / num_tokens
            block_tokens[name] = played.proposed[name] / max(num_passes, 1)
    drafter, drafts = plan.members[-1], played.num_drafts
    if drafter not in played.rows:
        depths = np.arange(len(drafts))
        of_drafts = measurements.drafts[drafter]
        by_depth = np.array([of_drafts.at(depth, plan.tree.top_k) for depth in depths.tolist()])
        passes[drafter] = int(drafts @ depths) / num_tokens
        seconds[drafter] = float(by_depth @ drafts) / num_tokens
    if plan.ngram is not None:
        seconds[NGRAM] = measurements.ngram_seconds * int(drafts.sum()) / num_tokens
    return Predicted(
        seconds_per_token=sum(seconds.values()) + overhead,
        tokens_per_pass=gained,
        passes=passes,
        rows_per_pass=rows_per_pass,
        seconds_by_member=seconds,
        overhead_seconds=overhead,
        block_tokens=block_tokens,
    )
