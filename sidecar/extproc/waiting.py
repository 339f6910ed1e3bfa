"""Work that ends when nobody waits for it any more."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, TypeVar

from sidecar.errors import InternalError
from sidecar.extproc.exchange import ClientLeft
from sidecar.extproc.frames import release_frames
from sidecar.extproc.protocol import CallEnded

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from sidecar.extproc.channel import Channel

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
        ClientLeft: the call ended first.
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
            if isinstance(await channel.read(), CallEnded):
                raise ClientLeft
        if task.cancelled():
            raise InternalError("internal error of the sidecar: the pipeline was cancelled from inside")
        return task.result()
    finally:
        await _stop(task, request_id)


async def _stop(task: asyncio.Future[Any], request_id: str) -> None:
    """Cancel the task if it still runs, and wait until all its calls are closed."""
    interrupted = not task.done()
    if interrupted:
        task.cancel()
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
