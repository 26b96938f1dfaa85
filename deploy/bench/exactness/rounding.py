"""How much the target's logits change with the rows of the pass that computes them.

A GPU uses different kernels for different numbers of rows, which sum in different orders. In
bfloat16 and float16 a logit then rounds to a different value, and a greedy output may diverge from
the target's where two tokens are close. How close is measured here: some answers of the target are
read again in each pattern that plans use: one token at a time, in blocks and along trees.

Whether a pattern is sound is judged by the operations that read prompts. They read the same answers
in one pass, which is the reference, then in blocks, and then after a prompt that was rounded
differently. A pattern that deviates from the reference by much more than these do is not rounding
but wrong, and excuses nothing.

#   T = tokens of an answer, V = vocabulary, C = leading candidates of a position
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.progress import tracked
from polybasic.chain.kernels.product_times import name_of
from polybasic.deploy.bench.exactness.rereading import (
    ONE_ROW,
    ReadPattern,
    answer_logits,
    perturbed_logits,
)
from polybasic.deploy.runtime.rounds.verifier import Verifier

NUM_ANSWERS = 6
"""Answers that are read again, spread evenly over all."""
NUM_POSITIONS = 48
"""Leading tokens of each answer that are read again."""
NUM_LEADING = 8
"""C: tokens of a position between which outputs may diverge."""
USUAL_ROWS = (1, 8)
"""Rows of the blocks in which the operations for prompts read an answer."""
MAX_SOUND_RATIO = 2.5
"""How many times further than these a sound pattern may deviate from the reference.

On random decoders of 1 to 24 layers, in bfloat16, float16 and float32, passes of the device path
deviated 0.4 to 1.5 times as far.
"""

Answered = tuple[list[int], list[int]]
"""A prompt and the target's answer to it."""

ComputeLogits = Callable[[list[int], int], Tensor]
"""Token ids, T -> float32 logits [T, V] after each of the last T tokens, by another system."""


@dataclass(frozen=True)
class LogitChange:
    """The largest change seen in the difference of two leading candidates' logits.

    Attributes:
        from_one_row: relative to `ONE_ROW`; None if a logit was not finite.
        from_reference: relative to the reference; None likewise.
        is_sound: whether the latter can be rounding.
    """

    from_one_row: float | None
    from_reference: float | None
    is_sound: bool


@dataclass(frozen=True)
class Rounding:
    """What was measured on one chain and machine, in one dtype.

    Attributes:
        dtype: of the target's passes.
        num_positions: at which logits were compared.
        usual: the largest change from the reference in the operations for prompts, at least the
            spacing of the dtype at the largest logit.
        ways: changes by read pattern of the chain.
        others: changes by system that computes logits by other means.
        close_share: share of positions whose two best tokens `tolerance` cannot tell apart: so
            often would an output that diverged for another reason pass for a near tie.
        least: change that must be expected of patterns that were not read, such as those of an
            answer's last rounds, where all that were read are sound: a spacing of the dtype at the
            largest logit, and none of batch-invariant passes.
    """

    dtype: str
    num_positions: int
    usual: float
    ways: dict[str, LogitChange]
    others: dict[str, LogitChange]
    close_share: float
    least: float = 0.0

    @property
    def tolerance(self) -> float:
        """Logits that differ by less cannot be told apart by the chain's passes."""
        return _tolerance(self.ways, self.least)

    def tolerance_of(self, system: str) -> float:
        """As `tolerance`, for one system: includes its own change, if it computes logits itself."""
        own = self.others.get(system)
        if own is None or not own.is_sound or not self.ways[str(ONE_ROW)].is_sound:
            return self.tolerance
        return max(self.tolerance, own.from_one_row or 0.0)

    @property
    def tolerance_elsewhere(self) -> float:
        """For a system that tells no logits: at least as far as PyTorch's operations deviate."""
        return max(self.tolerance, self.usual)

    @property
    def unsound(self) -> list[str]:
        """Names of the chain's read patterns whose changes are more than rounding."""
        return [name for name, change in self.ways.items() if not change.is_sound]

    def to_json(self) -> dict[str, Any]:
        """As the report holds it."""
        return {**asdict(self), "tolerance": self.tolerance}


def _tolerance(ways: Mapping[str, LogitChange], least: float) -> float:
    if not ways[str(ONE_ROW)].is_sound:
        return 0.0
    sound = [change.from_one_row or 0.0 for change in ways.values() if change.is_sound]
    return max(sound) if len(sound) < len(ways) else max(least, *sound)


@torch.inference_mode()
def measure_rounding(
    verifier: Verifier,
    answers: Sequence[Answered],
    patterns: Sequence[ReadPattern],
    others: Mapping[str, ComputeLogits],
) -> Rounding:
    """Read some of the target's answers in all patterns.

    Args:
        verifier: of the target.
        answers: greedy ones, of at least one token each.
        patterns: of the plans, with `ONE_ROW`; see `read_patterns_of`.
        others: of systems that compute logits by other means, by name.

    Raises:
        UserError: the operations for prompts compute a logit that is not finite.
    """
    eager = Verifier(verifier.name, verifier.decoder, verifier.cache, window=verifier.window)
    collected = _LeadingLogits()
    for prompt, answer in tracked(_sample_answers(answers), "rounding"):
        whole = ReadPattern(len(answer))
        reference = answer_logits(eager, prompt, answer, whole)
        usual = [answer_logits(eager, prompt, answer, ReadPattern(rows)) for rows in USUAL_ROWS]
        usual.append(perturbed_logits(eager, prompt, answer, whole))
        if not all(logits.isfinite().all() for logits in (reference, *usual)):
            raise UserError(
                "logits are not finite",
                f"{verifier.name} in {name_of(verifier.decoder.dtype)}",
                "run it in bfloat16 or float32",
            )
        leading = reference.topk(min(NUM_LEADING, reference.shape[1])).indices

        def of_leading(logits: Tensor, leading: Tensor = leading) -> Tensor:
            return logits.to(leading.device).gather(1, leading)

        collected.add(
            of_leading(reference),
            [of_leading(logits) for logits in usual],
            {
                str(pattern): of_leading(answer_logits(verifier, prompt, answer, pattern))
                for pattern in dict.fromkeys((ONE_ROW, *patterns))
            },
            {
                name: of_leading(logits(prompt + answer[:-1], len(answer)))
                for name, logits in others.items()
            },
        )
    return collected.rounding(verifier.decoder.dtype, verifier.decoder.is_batch_invariant)


class _LeadingLogits:
    """Logits of the leading candidates, collected answer by answer.

    Every tensor is [T, C]; one tensor for each answer.
    """

    def __init__(self) -> None:
        self.reference: list[Tensor] = []
        self.usual: list[list[Tensor]] = []
        self.ways: dict[str, list[Tensor]] = {}
        self.others: dict[str, list[Tensor]] = {}

    def add(
        self,
        reference: Tensor,
        usual: list[Tensor],
        ways: dict[str, Tensor],
        others: dict[str, Tensor],
    ) -> None:
        """Add the logits of one answer."""
        self.reference.append(reference)
        self.usual.append(usual)
        for kept, given in ((self.ways, ways), (self.others, others)):
            for name, logits in given.items():
                kept.setdefault(name, []).append(logits)

    def rounding(self, dtype: torch.dtype, is_batch_invariant: bool) -> Rounding:
        """The changes over all answers."""
        reference = torch.cat(self.reference)
        one_row = torch.cat(self.ways[str(ONE_ROW)])
        spacing = torch.finfo(dtype).eps * float(reference.abs().max())
        by_pattern = [torch.cat(logits) for logits in zip(*self.usual, strict=True)]
        usual = max(spacing, *(_largest_change(logits, reference) or 0.0 for logits in by_pattern))

        def changes(ways: dict[str, list[Tensor]]) -> dict[str, LogitChange]:
            by_way = {}
            for name, parts in ways.items():
                logits = torch.cat(parts)
                deviation = _largest_change(logits, reference)
                is_sound = deviation is not None and deviation <= MAX_SOUND_RATIO * usual
                by_way[name] = LogitChange(_largest_change(logits, one_row), deviation, is_sound)
            return by_way

        ways, others = changes(self.ways), changes(self.others)
        least = 0.0 if is_batch_invariant else spacing
        best = one_row.topk(2).values
        is_close = best[:, 0] - best[:, 1] < _tolerance(ways, least)
        return Rounding(
            dtype=name_of(dtype),
            num_positions=len(reference),
            usual=usual,
            ways=ways,
            others=others,
            close_share=float(is_close.float().mean()),
            least=least,
        )


def _largest_change(logits: Tensor, reference: Tensor) -> float | None:
    """Most by which the difference of two candidates differs between two sets of logits [T, C]."""
    shifts = logits - reference
    change = float((shifts.amax(1) - shifts.amin(1)).max())
    return change if math.isfinite(change) else None


def _sample_answers(answers: Sequence[Answered]) -> list[Answered]:
    """A few answers spread over all, cut to their first tokens."""
    num = min(NUM_ANSWERS, len(answers))
    chosen = [answers[place * len(answers) // num] for place in range(num)]
    return [(prompt, answer[:NUM_POSITIONS]) for prompt, answer in chosen]
