"""Several things at a time in one event loop."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


async def for_each(
    items: Sequence[Item], num_parallel: int, do: Callable[[Item], Awaitable[None]]
) -> None:
    """Do something with each item, begun in order, with so many at a time.

    Raises:
        Exception: the first of `do`, which ends the others.
    """
    waiting = iter(items)

    async def work() -> None:
        for item in waiting:
            await do(item)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(num_parallel, len(items))):
                group.create_task(work())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
