"""How far long work has come, on stderr: on a terminal a bar or a spinner, else lines."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

from rich.console import RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from polybasic.chain.base.console import Console

LINE_SECONDS = 30.0
"""Lines do not come less often, unless a single step takes longer."""

_BAR_WIDTH = 24
"""Which leaves a description its room in 80 columns."""

Item = TypeVar("Item")


class ProgressReport(Progress):
    """Steps done, numbers and time left; shown while a `with` block runs.

    Args:
        description: of the work.
        total: its steps.
        done: steps that an earlier process took.
        clock: seconds since any moment.
    """

    _numbers = ""

    def __init__(
        self,
        description: str,
        total: int,
        done: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        console = Console(stderr=True)
        super().__init__(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(_BAR_WIDTH),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            get_time=clock,
            disable=not console.is_terminal,
        )
        self._bar = self.add_task(description, total=total, completed=done)
        self._description, self._total = description, total
        self._num_done = self._num_done_before = done
        self._began = self._last_step = self._last_line = clock()

    def step(self, numbers: str = "") -> None:
        """One step is done; `numbers` are shown beside it, a loss or a rate."""
        self._num_done += 1
        self._numbers = numbers
        self.advance(self._bar)
        now = self.get_time()
        # the next step may take as long as this one did
        is_due = now + (now - self._last_step) - self._last_line >= LINE_SECONDS
        is_first, is_last = self._num_done_here == 1, self._num_done == self._total
        self._last_step = now
        if self.disable and (is_due or is_first or is_last):
            self._last_line = now
            self.say(self._line(now))

    def end_here(self) -> None:
        """Show that no more steps are taken."""
        self.update(self._bar, total=self._num_done)

    def per_second(self, count: float) -> float:
        """How many a second `count` are since the block began."""
        return count / max(self.get_time() - self._began, 1e-3)

    def say(self, line: str) -> None:
        """Print a line, above the bar where there is one."""
        self.console.print(line, highlight=False, soft_wrap=True)

    def get_renderables(self) -> Iterator[RenderableType]:
        """The bar, and the numbers below it, which leaves both their room."""
        yield self.make_tasks_table(self.tasks)
        if self._numbers:
            yield Text(self._numbers, no_wrap=True, overflow="ellipsis")

    @property
    def _num_done_here(self) -> int:
        return self._num_done - self._num_done_before

    def _line(self, now: float) -> str:
        num_left = self._total - self._num_done
        left = timedelta(seconds=round((now - self._began) / self._num_done_here * num_left))
        parts = [f"{self._description}: {self._num_done:,} of {self._total:,}", self._numbers]
        return "  ".join(part for part in (*parts, f"{left} left") if part)


@contextmanager
def waiting(description: str) -> Iterator[None]:
    """Show a spinner, the text and the seconds so far while work runs whose steps are not known.

    It is removed in the end, and where there is no terminal nothing is shown: what is done is said
    in a line before it.
    """
    console = Console(stderr=True)
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        progress.add_task(description, total=None)
        yield


def tracked(items: Sequence[Item], description: str) -> Iterator[Item]:
    """Iterate, and report on it."""
    with ProgressReport(description, len(items)) as progress:
        for item in items:
            yield item
            progress.step()
