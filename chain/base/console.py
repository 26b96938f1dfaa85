"""The console of tables and progress bars: its own colours pass, those of the text in it do not."""

import sys
from collections.abc import Iterable

from rich import console
from rich.segment import Segment

from polybasic.chain.base.logs import JsonLines
from polybasic.chain.base.terminal import as_it_is, escaped


class Console(console.Console):
    """rich's, on stdout or stderr, with text escaped before it is laid out, and without markup."""

    def __init__(self, stderr: bool = False, record: bool = False) -> None:
        stream = as_it_is(sys.stderr if stderr else sys.stdout)
        # no variable of the environment makes a terminal of these lines
        never = False if isinstance(stream, JsonLines) else None
        super().__init__(file=stream, markup=False, record=record, force_terminal=never)

    def render(
        self, renderable: console.RenderableType, options: console.ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=escaped(segment.text))
