"""What the bodies of requests may take of the memory."""

from collections import Counter

from polybasic.deploy.serve.errors import ApiError

SMALL_BYTES = 1 << 16
"""A body that is no larger is not counted."""
BYTES_OF_BODY = 8
"""That a byte of a body becomes at most while its request is answered."""


class Buffers:
    """The large bodies that are held at a time. A client may have half of the room.

    Args:
        limit: bytes of all of them.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: Counter[str] = Counter()

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


def _counted(num: int) -> int:
    return num if num > SMALL_BYTES else 0
