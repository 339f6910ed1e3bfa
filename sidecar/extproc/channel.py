"""The transport of one call: events out of its stream, messages into it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc

from sidecar.extproc.exchange import ClientLeft
from sidecar.extproc.messages import read_event
from sidecar.extproc.protocol import CallEnded, Event

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[bytes, bytes]


class Channel:
    """Reads and writes of one call.

    Args:
        context: the grpc.aio context of a stream-stream method whose messages are serialised ones.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._ahead: asyncio.Task[Event] | None = None

    async def read(self) -> Event:
        """The next event; CallEnded at the end of the stream and ever after."""
        if self._ahead is None:
            return await self._receive()
        ahead, self._ahead = self._ahead, None
        return await ahead

    async def write(self, message: bytes) -> None:
        """Send one message; raises ClientLeft when the call is gone."""
        try:
            await self._context.write(message)
        except (grpc.aio.UsageError, grpc.aio.InternalError) as error:
            raise ClientLeft from error

    def read_ahead(self) -> asyncio.Task[Event]:
        """Start reading in the background what the next `read` returns."""
        if self._ahead is None:
            self._ahead = asyncio.create_task(self._receive())
        return self._ahead

    def metadata(self, name: str) -> str | None:
        """The call's own metadata value of that name, None if there is none or it is binary."""
        for key, value in self._context.invocation_metadata() or ():
            if key == name and isinstance(value, str):
                return value
        return None

    async def close(self) -> None:
        """Stop reading."""
        if self._ahead is not None:
            self._ahead.cancel()
            await asyncio.wait({self._ahead})

    async def _receive(self) -> Event:
        message = await self._context.read()
        ended = message is grpc.aio.EOF  # type: ignore[attr-defined]  # missing from the stubs
        return CallEnded() if ended else read_event(message)
