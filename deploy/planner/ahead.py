"""Rounds that overlap: stages near a user go on while an answer of the target is under way.

As `polybasic.deploy.runtime.remote.stage` does it: as soon as a block is sent the next one is
drafted, and sent unless too many are under way. It is of use if the block before is kept whole and
followed by the token that was drafted there; if not, drafting begins anew with the target's answer,
once the round is over that runs then.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

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


def seconds_ahead(
    blocks: Sequence[PlayedBlock],
    seconds_per_row: float,
    round_seconds: float,
    pass_seconds: Sequence[float],
    link_seconds: Sequence[float],
) -> float:
    """Seconds of all answers.

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
