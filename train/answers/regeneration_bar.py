"""What is seen while the target answers: a bar on stderr, and lines where nobody sees a bar."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

_LINE_SECONDS = 60


class RegenerationBar:
    """A bar with conversations, failures, answers a second and time left.

    Args:
        total: conversations to answer.
    """

    def __init__(self, total: int) -> None:
        self._progress = Progress(
            TextColumn("the target answers"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task("", total=total, state="")
        self._total, self._num_done, self._num_answers = total, 0, 0
        self._begin = self._told = time.monotonic()

    def advance(self, num_answers: int, num_failed: int) -> None:
        """One conversation has ended.

        Args:
            num_answers: in this one.
            num_failed: conversations so far.
        """
        self._num_done += 1
        self._num_answers += num_answers
        instant = time.monotonic()
        rate = self._num_answers / max(instant - self._begin, 1e-3)
        state = f"failed {num_failed:,}  {rate:.1f} answers/s"
        self._progress.update(self._task, advance=1, state=state)
        console = self._progress.console
        if not console.is_terminal and instant - self._told >= _LINE_SECONDS:
            self._told = instant
            line = f"the target answered {self._num_done:,} of {self._total:,}  {state}"
            console.print(line, highlight=False, soft_wrap=True)

    def __enter__(self) -> "RegenerationBar":
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()
