"""The seconds that planning may take: what fits is measured, and what does not is named."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from polybasic.chain.base.progress import ProgressReport

Item = TypeVar("Item")


class Budget:
    """Counts the seconds since it was made.

    Args:
        max_seconds: that all may take. Nothing is interrupted: it takes longer by what was begun.
        clock: seconds since any moment.

    Attributes:
        left_out: what was not measured for want of time, in words.
        is_rough: whether so much was left out that the plan may well be another one.
    """

    def __init__(self, max_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_seconds = max_seconds
        self.left_out: list[str] = []
        self.is_rough = False
        self._clock, self._began = clock, clock()

    @property
    def seconds(self) -> float:
        """Spent so far."""
        return self._clock() - self._began

    def left(self, share: float = 1.0) -> float:
        """Seconds until a share of the budget is spent; at least 0."""
        return max(share * self.max_seconds - self.seconds, 0.0)

    def leave_out(self, what: str, *, is_rough: bool = False) -> None:
        """Note what is not measured."""
        self.left_out.append(what)
        self.is_rough |= is_rough

    def within(
        self, items: Sequence[Item], share: float, what: str, enough: int = 0
    ) -> Iterator[Item]:
        """The first item, and the others as long as they are likely to end within a share.

        Each is expected to take as long as those before did in the mean.

        Args:
            share: of the budget, from 0 to 1, at whose end all that came before is over, too.
            what: the items are, in the plural; progress is reported under this name.
            enough: with fewer items the plan is rough.
        """
        began, num = self.seconds, len(items)
        with ProgressReport(what, num) as progress:
            for done, item in enumerate(items):
                if done and (self.seconds - began) / done > self.left(share):
                    self.leave_out(f"{num - done} of {num} {what}", is_rough=done < enough)
                    progress.end_here()
                    return
                yield item
                progress.step()

    def report(self) -> dict[str, Any]:
        """What was spent and left out, as plain JSON."""
        return {
            "max_seconds": self.max_seconds,
            "seconds": self.seconds,
            "left_out": list(self.left_out),
            "is_rough": self.is_rough,
        }
