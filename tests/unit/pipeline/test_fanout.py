from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

import pytest

from sidecar.pipeline.fanout import gather_all

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class Calls:
    """Calls that tell when they run, and end when they are told to."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.running: set[int] = set()
        self.most = 0
        self.cancelled: list[int] = []
        self.finish: dict[int, asyncio.Event] = {}

    async def __call__(self, number: int, *, error: Exception | None = None, waits: bool = True) -> int:
        self.begun.append(number)
        self.running.add(number)
        self.most = max(self.most, len(self.running))
        try:
            if waits:
                await self.finish.setdefault(number, asyncio.Event()).wait()
            else:
                await asyncio.sleep(0)
            if error is not None:
                raise error
        except asyncio.CancelledError:
            self.cancelled.append(number)
            raise
        finally:
            self.running.discard(number)
        return number


async def _settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_results_come_in_order_whatever_the_order_of_completion() -> None:
    """The last call may end first; its result stays last."""
    calls = Calls()
    task = asyncio.ensure_future(gather_all((partial(calls, i) for i in range(4)), limit=4))
    await _settle()
    for number in (3, 1, 0, 2):
        calls.finish[number].set()
        await _settle()
    assert await task == [0, 1, 2, 3]


async def test_no_calls_have_no_results() -> None:
    """Nothing to do is done."""
    assert await gather_all((), limit=1) == []


@pytest.mark.parametrize("limit", [1, 3, 20])
async def test_no_more_calls_than_the_limit_run_at_a_time(limit: int) -> None:
    """The limit bounds the calls in flight, and is used up."""
    calls = Calls()
    assert await gather_all((partial(calls, i, waits=False) for i in range(12)), limit=limit) == list(
        range(12)
    )
    assert calls.most == min(limit, 12)


async def test_the_first_failure_cancels_the_others_and_waits_for_them() -> None:
    """A failed call ends those under way, keeps the rest from starting, and leaves nothing behind."""
    calls = Calls()
    failing = partial(calls, 1, error=LookupError("first"))
    task = asyncio.ensure_future(
        gather_all([partial(calls, 0), failing, partial(calls, 2), partial(calls, 3)], limit=3)
    )
    await _settle()
    calls.finish[1].set()
    with pytest.raises(LookupError, match="first"):
        await task
    assert sorted(calls.cancelled) == [0, 2]
    assert sorted(calls.begun) == [0, 1, 2]
    assert calls.running == set()


async def test_no_call_starts_in_the_very_moment_of_a_failure() -> None:
    """A call that ends together with the failed one does not make room for the next."""
    calls = Calls()
    failing = partial(calls, 0, error=LookupError("first"))
    task = asyncio.ensure_future(gather_all([failing, partial(calls, 1), partial(calls, 2)], limit=2))
    await _settle()
    calls.finish[0].set()
    calls.finish[1].set()
    with pytest.raises(LookupError, match="first"):
        await task
    assert calls.begun == [0, 1]


async def test_the_first_failure_is_the_one_raised() -> None:
    """A call that fails while it is cancelled does not hide why it was cancelled."""

    async def fails_when_cancelled() -> int:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise ValueError("second") from None
        return 0

    async def fails() -> int:
        await asyncio.sleep(0)
        raise LookupError("first")

    with pytest.raises(LookupError, match="first"):
        await gather_all([fails_when_cancelled, fails], limit=2)


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("limit", [1, 3])
async def test_a_call_that_is_cancelled_from_inside_is_no_result(position: int, limit: int) -> None:
    """A cancellation that nobody here asked for fails the whole, it does not shorten the results."""

    async def cancelled() -> int:
        await asyncio.sleep(0)
        raise asyncio.CancelledError

    calls = Calls()
    work: list[Callable[[], Awaitable[int]]] = [partial(calls, i, waits=False) for i in range(2)]
    with pytest.raises((asyncio.CancelledError, RuntimeError)):
        await gather_all([*work[:position], cancelled, *work[position:]], limit=limit)


@pytest.mark.parametrize("steps", [0, 1, 10])
async def test_cancelling_the_caller_cancels_every_call(steps: int) -> None:
    """A client that left takes all its calls with it; those that wait for a slot never start."""
    calls = Calls()
    task = asyncio.ensure_future(gather_all((partial(calls, i) for i in range(5)), limit=2))
    await asyncio.sleep(0)
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert calls.running == set()
    assert set(calls.begun) <= {0, 1}
    assert sorted(calls.cancelled) == sorted(calls.begun)
