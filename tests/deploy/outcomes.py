"""All that can come of an answer's random events, one outcome after the other."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from polybasic.deploy.runtime.rounds.sampling import Probabilities


@dataclass
class Outcomes:
    """Replays a run once for every sequence of outcomes of its random events."""

    script: list[tuple[int, int]] = field(default_factory=list)
    position: int = 0
    probability: Fraction = Fraction(1)

    def choose(self, probabilities: Sequence[Fraction]) -> int:
        assert sum(probabilities) == 1
        possible = [index for index, p in enumerate(probabilities) if p > 0]
        if self.position == len(self.script):
            self.script.append((0, len(possible)))
        index = possible[self.script[self.position][0]]
        self.position += 1
        self.probability *= probabilities[index]
        return index

    def runs(self) -> Iterator[None]:
        while True:
            self.position, self.probability = 0, Fraction(1)
            yield
            while self.script and self.script[-1][0] + 1 == self.script[-1][1]:
                self.script.pop()
            if not self.script:
                return
            index, count = self.script.pop()
            self.script.append((index + 1, count))


class Enumerated:
    """The two random events of the samplers by block and by token, enumerated.

    Attributes:
        outcomes: of the answer.
    """

    outcomes: Outcomes

    def draw(self, rows: Probabilities, row: int) -> int:
        return self._categorical(rows.values[row : row + 1])[0]

    def _happens(self, probabilities: list[Any]) -> list[bool]:
        return [self.outcomes.choose([1 - Fraction(p), Fraction(p)]) == 1 for p in probabilities]

    def _categorical(self, rows: Any) -> list[int]:
        return [self.outcomes.choose(list(row)) for row in rows]
