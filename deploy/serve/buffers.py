"""What the bodies of requests may take of the memory, and of the event loop's time."""

import asyncio
from collections import Counter
from weakref import WeakValueDictionary

from polybasic.deploy.serve.api.errors import ApiError

SMALL_BYTES = 1 << 16
"""A body that is no larger is not counted."""
BYTES_OF_BODY = 8
"""Of memory at most for each byte of the room: what a body becomes while it is read."""
_PAUSE_SECONDS = 0.1
"""Between two large bodies that are read as JSON, which holds all other requests up."""
_MOST_VALUES = 1 << 16
"""Of a body beside a token of the context each: lists and objects of so many take tenths of a
second to be read."""


class Buffers:
    """The large bodies that are held at a time. A client may have half of the room.

    Args:
        limit: bytes of all of them.
        context_tokens: of a prompt with its answer.
    """

    def __init__(self, limit: int, context_tokens: int) -> None:
        self._limit, self._most_values = limit, context_tokens + _MOST_VALUES
        self._held: Counter[str] = Counter()
        self._turn = asyncio.Lock()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def hold(self, client: str, num_before: int, num_after: int) -> None:
        """Take room for a body of a client that has grown.

        Args:
            num_before: bytes of it that were there.
            num_after: bytes that are there now.

        Raises:
            ApiError: there is no room (503); nothing is taken.
        """
        more = _counted(num_after) - _counted(num_before)
        if self._held.total() + more > self._limit or self._held[client] + more > self._limit // 2:
            raise ApiError(
                503,
                "too many large requests are under way; try again in 2 s",
                code="buffers_full",
                headers={"Retry-After": "2", "Connection": "close"},
            )
        self._held[client] += more

    def free(self, client: str, num: int) -> None:
        """Give the room of a body of so many bytes back."""
        self._held[client] -= _counted(num)
        if not self._held[client]:
            del self._held[client]

    async def wait_to_read(self, client: str, body: bytes | bytearray) -> None:
        """Wait until a body may be read as JSON: a small one at once, large ones one by one.

        Raises:
            ApiError: it has more values than any request that can be taken (413).
        """
        if not _counted(len(body)):
            return
        # commas of texts count, too: each is about a token
        num_values = sum(map(body.count, (b",", b"[", b"{")))
        if num_values > self._most_values:
            raise ApiError(
                413,
                f"the body has some {num_values:,} values; at most {self._most_values:,} are read",
                code="body_too_large",
            )
        own = self._turns.setdefault(client, asyncio.Lock())
        async with own, self._turn:
            await asyncio.sleep(_PAUSE_SECONDS)


def _counted(num: int) -> int:
    return num if num > SMALL_BYTES else 0
