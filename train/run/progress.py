"""What is seen of a run while it goes on: a bar on stderr, and a line for each evaluation."""

from collections.abc import Iterator, Sequence
from types import TracebackType

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text


class TrainingBar:
    """A bar with time left, loss, agreement by step of a draft, accepted length, tokens a second.

    Args:
        description: of the run.
        total: its steps.
        done: steps that an earlier process did.
        accepted_length: of the last evaluation; None before the first one.
    """

    def __init__(
        self, description: str, total: int, done: int, accepted_length: float | None
    ) -> None:
        self._progress = _BarAndNumbers(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._accepted_length = accepted_length
        self._task: TaskID = self._progress.add_task(description, total=total, completed=done)

    def advance(self, loss: float, agreement: Sequence[float], tokens_per_second: float) -> None:
        """One step is done; `agreement` is of each unrolled step, in [0, 1]."""
        parts = [f"loss {loss:.3f}", f"agreement {' '.join(f'{each:.2f}' for each in agreement)}"]
        if self._accepted_length is not None:
            parts.append(f"{self._accepted_length:.2f} tokens/round")
        parts.append(f"{tokens_per_second:,.0f} tokens/s")
        self._progress.numbers = "  ".join(parts)
        self._progress.advance(self._task)

    def evaluated(self, accepted_length: float, line: str) -> None:
        """Show a simulated accepted length from here on, and print a line above the bar."""
        self._accepted_length = accepted_length
        self._progress.console.print(line, highlight=False)

    def __enter__(self) -> "TrainingBar":
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()


class _BarAndNumbers(Progress):
    """A bar with a line of numbers below it, which leaves both their room."""

    numbers = ""

    def get_renderables(self) -> Iterator[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        if self.numbers:
            yield Text(self.numbers, no_wrap=True, overflow="ellipsis")
