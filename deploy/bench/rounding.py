"""How much the target's logits change with the rows of the pass that computes them.

A card takes other kernels for other numbers of rows, which add up in another order; in bfloat16 and
float16 a logit then rounds to another value, and a greedy output may part from the target's where
two tokens are close. How close is measured here: some answers of the target are read again in each
of the ways in which plans read them: a token at a time, in blocks and along trees.

Whether a way is sound is judged by the operations that read prompts. They read the same answers in
one pass, which is the reference, then in blocks, and then behind a prompt that was rounded
otherwise. A way that departs from the reference by much more than these do does not round, it is
wrong, and excuses nothing.

#   T = tokens of an answer, V = vocabulary, C = leading candidates of a position
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from polybasic.chain.errors import UserError
from polybasic.deploy.bench.rereading import ONE_ROW, Way, answer_logits, disturbed_logits
from polybasic.deploy.rounds.verifier import Verifier

NUM_ANSWERS = 6
"""Answers that are read again, evenly taken from all."""
NUM_POSITIONS = 48
"""Leading tokens of each that are."""
NUM_LEADING = 8
"""C: tokens of a position between which an output may part."""
USUAL_ROWS = (1, 8)
"""Of blocks in which the operations that read prompts read an answer."""
MOST_OF_USUAL = 2.5
"""How many times as far as these a sound way may depart from the reference.

On random decoders of 1 to 24 layers, in bfloat16, float16 and float32, passes of the device path
departed 0.4 to 1.5 times as far.
"""

Answered = tuple[list[int], list[int]]
"""A prompt and the target's answer to it."""

OtherWay = Callable[[list[int], int], Tensor]
"""Token ids, T -> float32 logits [T, V] behind each of the last T of them, in some other way."""


@dataclass(frozen=True)
class Change:
    """Of the difference of two leading candidates' logits: the largest change that was seen.

    Attributes:
        from_one_row: to `ONE_ROW`; None where a logit was not finite.
        from_reference: to the reference; None likewise.
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
        num_positions: of answers, at which logits were compared.
        usual: the largest change of the operations that read prompts from the reference, and not
            less than the distance of two neighbouring numbers of the dtype at the largest logit.
        ways: of the chain, by name.
        others: ways of systems that compute logits otherwise, by system.
        close_share: of the positions, how many have two best tokens that `tolerance` cannot tell
            apart: an output that parted for another reason passes for a near tie so often.
    """

    dtype: str
    num_positions: int
    usual: float
    ways: dict[str, Change]
    others: dict[str, Change]
    close_share: float

    @property
    def tolerance(self) -> float:
        """Logits that differ by less cannot be told apart by the chain's passes."""
        return _tolerance(self.ways)

    def tolerance_of(self, system: str) -> float:
        """As `tolerance`, for a system: its own way is taken in where it has one."""
        own = {name: change for name, change in self.others.items() if name == system}
        return _tolerance(self.ways | own)

    @property
    def unsound(self) -> list[str]:
        """Names of the chain's ways that do not only round."""
        return [name for name, change in self.ways.items() if not change.is_sound]

    def to_json(self) -> dict[str, Any]:
        """As a report holds it."""
        return {**asdict(self), "tolerance": self.tolerance}


def _tolerance(ways: Mapping[str, Change]) -> float:
    if not ways[str(ONE_ROW)].is_sound:
        return 0.0
    return max(change.from_one_row or 0.0 for change in ways.values() if change.is_sound)


@torch.inference_mode()
def measure_rounding(
    verifier: Verifier,
    answers: Sequence[Answered],
    ways: Sequence[Way],
    others: Mapping[str, OtherWay],
) -> Rounding:
    """Read some of the target's answers in all ways.

    Args:
        verifier: of the target.
        answers: greedy ones, of at least one token each.
        ways: of the plans, with `ONE_ROW`; see `ways_of`.
        others: of systems that compute logits otherwise, by name.

    Raises:
        UserError: the operations that read prompts give a logit that is not finite.
    """
    eager = Verifier(verifier.name, verifier.decoder, verifier.cache)
    eager.window = verifier.window
    found = _Found()
    for prompt, answer in _some_of(answers):
        whole = Way(len(answer))
        reference = answer_logits(eager, prompt, answer, whole)
        usual = [answer_logits(eager, prompt, answer, Way(rows)) for rows in USUAL_ROWS]
        usual.append(disturbed_logits(eager, prompt, answer, whole))
        if not all(logits.isfinite().all() for logits in (reference, *usual)):
            raise UserError(
                "logits are not finite",
                f"{verifier.name} in {_name_of(verifier.decoder.dtype)}",
                "run it in bfloat16 or float32",
            )
        leading = reference.topk(min(NUM_LEADING, reference.shape[1])).indices

        def of_leading(logits: Tensor, leading: Tensor = leading) -> Tensor:
            return logits.to(leading.device).gather(1, leading)

        found.add(
            of_leading(reference),
            [of_leading(logits) for logits in usual],
            {
                str(way): of_leading(answer_logits(verifier, prompt, answer, way))
                for way in dict.fromkeys((ONE_ROW, *ways))
            },
            {
                name: of_leading(logits(prompt + answer[:-1], len(answer)))
                for name, logits in others.items()
            },
        )
    return found.rounding(verifier.decoder.dtype)


class _Found:
    """Logits of leading candidates, answer by answer, and what they say.

    Every tensor is [T, C]; those of one answer follow those of another.
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
        """Take in one answer's."""
        self.reference.append(reference)
        self.usual.append(usual)
        for kept, given in ((self.ways, ways), (self.others, others)):
            for name, logits in given.items():
                kept.setdefault(name, []).append(logits)

    def rounding(self, dtype: torch.dtype) -> Rounding:
        """What all of them say."""
        reference = torch.cat(self.reference)
        one_row = torch.cat(self.ways[str(ONE_ROW)])
        least = torch.finfo(dtype).eps * float(reference.abs().max())
        by_way = [torch.cat(logits) for logits in zip(*self.usual, strict=True)]
        usual = max(least, *(_largest_change(logits, reference) or 0.0 for logits in by_way))

        def changes(ways: dict[str, list[Tensor]]) -> dict[str, Change]:
            found = {}
            for name, parts in ways.items():
                logits = torch.cat(parts)
                departure = _largest_change(logits, reference)
                is_sound = departure is not None and departure <= MOST_OF_USUAL * usual
                found[name] = Change(_largest_change(logits, one_row), departure, is_sound)
            return found

        ways, others = changes(self.ways), changes(self.others)
        best = one_row.topk(2).values
        is_close = best[:, 0] - best[:, 1] < _tolerance(ways)
        return Rounding(
            dtype=_name_of(dtype),
            num_positions=len(reference),
            usual=usual,
            ways=ways,
            others=others,
            close_share=float(is_close.float().mean()),
        )


def _largest_change(one: Tensor, other: Tensor) -> float | None:
    """By how much the difference of two candidates differs at most between two ways [T, C]."""
    shifts = one - other
    change = float((shifts.amax(1) - shifts.amin(1)).max())
    return change if math.isfinite(change) else None


def _some_of(answers: Sequence[Answered]) -> list[Answered]:
    """A few answers from all over, cut to their first tokens."""
    num = min(NUM_ANSWERS, len(answers))
    chosen = [answers[place * len(answers) // num] for place in range(num)]
    return [(prompt, answer[:NUM_POSITIONS]) for prompt, answer in chosen]


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
