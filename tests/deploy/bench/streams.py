"""Streams whose costs are known."""

from collections.abc import Iterator

from polybasic.deploy.runtime.request import Statistics


class FakeStream:
    """Tokens, then what they cost."""

    def __init__(self, tokens: list[int], statistics: Statistics) -> None:
        self._tokens, self.statistics = tokens, statistics

    def __iter__(self) -> Iterator[list[int]]:
        yield self._tokens
