"""What the rounds of a plan cost, once it is known how many there are of which rows."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from polybasic.chain.formats.plan import Plan
from polybasic.chain.kernels.drafts import NGRAM, Counts
from polybasic.deploy.planner.measuring.measurements import Measurements
from polybasic.deploy.runtime.remote.link import answer_bytes, verify_bytes
from polybasic.deploy.runtime.remote.stage import MAX_AHEAD


@dataclass(frozen=True)
class PlayedBlock:
    """A block that the target was asked about.

    Attributes:
        rows: of the target's pass: the block, and the token before it.
        is_foreseen: whether all of it was kept and the stage below draws what follows, too.
        is_first: of an answer.
    """

    rows: int
    is_foreseen: bool
    is_first: bool


@dataclass(frozen=True)
class Played:
    """What happened in all rounds of a plan, by verifying member, from the target down.

    Attributes:
        num_tokens: of all answers.
        rows: rows of passes, and how many passes had so many.
        gained: tokens.
        proposed: tokens in its blocks, of those that verify blocks.
        num_drafts: how many rounds had a draft of depth 0, 1, ...
        blocks: that the target was asked about, in order.
    """

    num_tokens: int
    rows: dict[str, tuple[Counts, Counts]]
    gained: dict[str, int]
    proposed: dict[str, int]
    num_drafts: Counts
    blocks: Sequence[PlayedBlock] = ()


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
        link_seconds: of the messages to the target and back, for each token of the answer.
        saved_seconds: by going on while an answer is under way, for each token of the answer; what
            is drafted in vain can make it negative.
        block_tokens: of each verifying member but the innermost, mean length of its blocks.
    """

    seconds_per_token: float
    tokens_per_pass: dict[str, float]
    passes: dict[str, float]
    rows_per_pass: dict[str, float]
    seconds_by_member: dict[str, float]
    overhead_seconds: float
    link_seconds: float
    saved_seconds: float
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
        by_rows = np.array([costs.at(num_rows) for num_rows in rows.tolist()])
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
        num_looks = int(drafts.sum()) + (int(drafts[1:].sum()) if plan.ngram.extends else 0)
        seconds[NGRAM] = measurements.ngram_seconds * num_looks / num_tokens
    link_seconds = saved = 0.0
    in_turns = sum(seconds.values()) + overhead
    if measurements.link is not None:
        rows, counts = played.rows[measurements.target]
        ways = np.array([_way_seconds(num_rows, measurements) for num_rows in rows.tolist()])
        link_seconds = float(ways @ counts) / num_tokens
        in_turns += link_seconds
        if measurements.is_optimistic and played.blocks:
            overlapping = _seconds_ahead(in_turns * num_tokens, played, measurements)
            saved = in_turns - overlapping / num_tokens
    return Predicted(
        seconds_per_token=in_turns - saved,
        tokens_per_pass=gained,
        passes=passes,
        rows_per_pass=rows_per_pass,
        seconds_by_member=seconds,
        overhead_seconds=overhead,
        link_seconds=link_seconds,
        saved_seconds=saved,
        block_tokens=block_tokens,
    )


def _way_seconds(rows: int, measurements: Measurements) -> float:
    """Of a block with the token before it to the target, and of the answer."""
    assert measurements.link is not None, "a target elsewhere"
    num_bytes = verify_bytes(rows) + answer_bytes()
    return measurements.link.seconds(num_bytes) + measurements.message_seconds


def _seconds_ahead(in_turns: float, played: Played, measurements: Measurements) -> float:
    """Seconds of all rounds where they overlap.

    Args:
        in_turns: seconds of the same rounds, one after the other.
    """
    costs = measurements.passes[measurements.target]
    overhead = measurements.block_overhead_seconds[measurements.target]
    works = [costs.at(block.rows) + overhead for block in played.blocks]
    ways = [_way_seconds(block.rows, measurements) for block in played.blocks]
    num_rows = sum(block.rows for block in played.blocks)
    below = in_turns - sum(works) - sum(ways)
    *_, (_, num_rounds) = played.rows.values()
    return seconds_ahead(
        played.blocks, below / num_rows, below / int(num_rounds.sum()), works, ways
    )


def seconds_ahead(
    blocks: Sequence[PlayedBlock],
    seconds_per_row: float,
    round_seconds: float,
    pass_seconds: Sequence[float],
    link_seconds: Sequence[float],
) -> float:
    """Seconds of all answers, where stages near a user go on while one of the target is under way.

    As `polybasic.deploy.runtime.remote.stage` does it: as soon as a block is sent the next one is
    drafted, and sent unless too many are under way. It is of use if the block before is kept whole
    and followed by the token that was drafted there; if not, drafting begins anew with the target's
    answer, once the round is over that runs then.

    Args:
        blocks: in order.
        seconds_per_row: of drafting.
        round_seconds: of the stage below.
        pass_seconds: of the target, for each block.
        link_seconds: of the way to it and back, for each block.
    """
    total = sent = drafting = 0.0
    is_foreseen = False
    answers = deque([0.0], maxlen=MAX_AHEAD + 1)  # when the latest ones came
    for block, work, way in zip(blocks, pass_seconds, link_seconds, strict=True):
        begin = sent
        if block.is_first:
            total += answers[-1]
            begin = 0.0
            answers.extend([0.0] * (MAX_AHEAD + 1))
        elif not is_foreseen:
            is_drafting = answers[-1] < sent + (MAX_AHEAD + 1) * drafting
            begin = answers[-1] + (round_seconds / 2 if is_drafting else 0.0)
        drafting = seconds_per_row * block.rows
        sent = max(begin + drafting, answers[0])
        answers.append(max(sent + way, answers[-1]) + work)
        is_foreseen = block.is_foreseen
    return total + answers[-1]
