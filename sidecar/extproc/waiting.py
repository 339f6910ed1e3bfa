"""Work that ends when nobody waits for it any more."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, TypeVar

from sidecar.errors import InternalError
from sidecar.extproc.exchange import ClientLeft
from sidecar.extproc.frames import release_frames
from sidecar.extproc.protocol import CallEnded, ResponseEvent

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from sidecar.extproc.channel import Channel
    from sidecar.extproc.protocol import Event

T = TypeVar("T")

logger = logging.getLogger(__name__)


class DeadlinePassed(Exception):
    """The work has not ended in time."""


async def while_client_waits(
    channel: Channel, work: Awaitable[T], request_id: str, *, deadline: float | None
) -> T:
    """The result of `work`, which is cancelled and waited for when it is not wanted any more.

    Args:
        channel: the call; its end means that the client has left.
        work: what the client waits for.
        request_id: for the log.
        deadline: point in loop time, None for none.

    Raises:
        ClientLeft: the call ended first, or Envoy answered the client itself.
        DeadlinePassed: the deadline came first.
        InternalError: the work was cancelled from inside.
    """
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            remaining = None if deadline is None else deadline - asyncio.get_running_loop().time()
            ahead = channel.read_ahead()
            await asyncio.wait(
                {task, ahead},
                timeout=None if remaining is None else max(0.0, remaining),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if task.done():
                break
            if not ahead.done():
                raise DeadlinePassed
            # A response here is Envoy's own: it has answered the client, a timeout of its own for example.
            if isinstance(await channel.read(), CallEnded | ResponseEvent):
                raise ClientLeft
        return _result(task)
    finally:
        await stop(task, request_id)


async def decode_answer(
    channel: Channel, beside: asyncio.Future[None], feed: Callable[[Event], Coroutine[Any, Any, None]]
) -> ResponseEvent | None:
    """Wait for the work beside decode, or for decode's answer, whichever comes first; the answer in a tie.

    Args:
        channel: the call.
        beside: the work; goes on when decode's answer is first.
        feed: answers what else Envoy sends meanwhile.

    Returns:
        Decode's answer, not answered yet; None when the work has ended well.

    Raises:
        ClientLeft: the call ended first.
        SidecarError: the work failed.
    """
    while True:
        ahead = channel.read_ahead()
        either: set[asyncio.Future[Any]] = {beside, ahead}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not ahead.done():
            break
        match await channel.read():
            case CallEnded():
                raise ClientLeft
            case ResponseEvent(part="response_headers") as answer:
                return answer
            case event:
                await feed(event)
    _result(beside)
    return None


def _result(task: asyncio.Future[T]) -> T:
    if task.cancelled():
        raise InternalError("internal error of the sidecar: the pipeline was cancelled from inside")
    return task.result()


async def stop(task: asyncio.Future[Any], request_id: str) -> None:
    """Cancel the task if it still runs, and wait until all its calls are closed."""
    interrupted = not task.done()
    if interrupted:
        task.cancel()
        # This wait may be cancelled, too: then nobody else asks how the task ended.
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        await asyncio.wait({task})
    if task.cancelled():
        try:
            task.result()
        except asyncio.CancelledError as cancelled:
            release_frames(cancelled)
        return
    error = task.exception()
    if interrupted and error is not None and not isinstance(error, ClientLeft):
        logger.warning(
            "pipeline failed while it was cancelled", exc_info=error, extra={"request_id": request_id}
        )
