"""Running the parallel calls of one step."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

T = TypeVar("T")


async def gather_all(calls: Iterable[Callable[[], Awaitable[T]]], *, limit: int) -> list[T]:
    """Results in order, at most `limit` calls at a time.

    After the first failure no further call starts; those under way are cancelled and waited for, and the
    failure is raised.
    """
    waiting = deque(enumerate(calls))
    results: dict[int, T] = {}

    async def work() -> None:
        while waiting:
            index, call = waiting.popleft()
            try:
                results[index] = await call()
            except BaseException:
                waiting.clear()
                raise

    total = len(waiting)
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(limit, total)):
                group.create_task(work())
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    if len(results) < total:
        # A task group takes a call that cancels itself for one that has ended well.
        raise RuntimeError("a call was cancelled from inside")
    return [results[index] for index in range(total)]
