"""Where texts become token ids: bounded before, and in nobody's way.

A text with more characters than so many of the longest token can spell does not fit the context and
is refused unread. Short texts wait for no long one. Of each client one long text is read at a time,
and one that its client has left is not begun.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar
from weakref import WeakValueDictionary

from tokenizers import Tokenizer

from polybasic.deploy.serve.api.errors import bad_request

Result = TypeVar("Result")

_SHORT_CHARACTERS = 1 << 15
"""Of a text that is read in milliseconds."""


class Reading:
    """The threads that read texts.

    Args:
        tokenizer: whose tokens they become.
        context_tokens: of a prompt with its answer.

    Attributes:
        most_characters: of a text that may fit the context.
    """

    def __init__(self, tokenizer: Tokenizer, context_tokens: int) -> None:
        # a token's own spelling has a character for each byte, or for each character
        longest = max(map(len, tokenizer.get_vocab(with_added_tokens=True)))
        self.most_characters, self._context_tokens = context_tokens * longest, context_tokens
        self._short = ThreadPoolExecutor(2, "polybasic-short-texts")
        self._long = ThreadPoolExecutor(1, "polybasic-long-texts")
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def check(self, num_characters: int, param: str, num_tokens: int = 0) -> None:
        """Refuse what cannot fit, before any work.

        Args:
            num_characters: of a prompt, or of all messages of a conversation.
            param: the field of the request.
            num_tokens: that it has at least, whatever its characters are.

        Raises:
            ApiError: it is longer than the context.
        """
        if num_characters > self.most_characters or num_tokens > self._context_tokens:
            size = f"{num_characters:,} characters" if num_characters else f"{num_tokens:,} tokens"
            raise bad_request(
                f"{size} of {param} do not fit the context of {self._context_tokens} tokens; "
                "shorten it",
                param,
                "context_length_exceeded",
            )

    async def read(self, client: str, num_characters: int, work: Callable[[], Result]) -> Result:
        """What `work` makes of texts of so many characters; cancelling it leaves its place."""
        loop = asyncio.get_running_loop()
        if num_characters <= _SHORT_CHARACTERS:
            return await loop.run_in_executor(self._short, work)
        turn = self._turns.setdefault(client, asyncio.Lock())
        async with turn:
            return await loop.run_in_executor(self._long, work)

    def close(self) -> None:
        """Begin nothing any more."""
        for threads in (self._short, self._long):
            threads.shutdown(wait=False, cancel_futures=True)
