"""Sub-requests to the gateway and the render service.

One pooled session per upstream, POST only. A body goes out as slices of what was received. An answer is read
into one buffer, every byte of it charged to the request's budget before it is held, or it is handed on as it
arrives.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import aiohttp

from sidecar.errors import LoopDetected, StepFailed, StepTimeout
from sidecar.jsontext import size, windows
from sidecar.observability.redaction import redacted

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping
    from types import SimpleNamespace

    from sidecar.errors import StepName
    from sidecar.http import HeaderPairs
    from sidecar.jsontext import Segments

logger = logging.getLogger(__name__)

_WRITE_WINDOW = 256 << 10
_READ_BUFFER = 1 << 20
_LOOP_STATUS = 508
_EXCERPT_LENGTH = 2048


@dataclass(frozen=True, slots=True)
class Answer:
    """An upstream's answer: status, lower-case headers, the whole body."""

    status: int
    headers: Mapping[str, str]
    body: bytearray

    def excerpt(self) -> str:
        """The beginning of the body as the log may hold it."""
        return redacted(bytes(self.body[:_EXCERPT_LENGTH]).decode("utf-8", "replace"))


@dataclass(frozen=True, slots=True)
class Call:
    """One sub-request.

    Attributes:
        step: whose call it is; names the error codes.
        path: request path, appended to the upstream's address.
        headers: all headers but content-length.
        body: JSON text as slices.
        reserve: charges bytes to the request's budget; raises Overloaded.
        alone: goes over a connection of its own and is never sent again: for a call that must not run twice.
    """

    step: StepName
    path: str
    headers: HeaderPairs
    body: Segments
    reserve: Callable[[int], None]
    alone: bool = False


@dataclass(slots=True)
class _Attempt:
    """What became of one try to send a call."""

    reused_connection: bool = False

    def died_unanswered(self, error: Exception) -> bool:
        """Whether a kept-alive connection broke before the answer began."""
        # aiohttp puts the part of a head that it has read in place of the message.
        head_begun = isinstance(error, aiohttp.ServerDisconnectedError) and not isinstance(error.message, str)
        return self.reused_connection and not head_begun


class OpenAnswer:
    """An answer whose head has arrived: read its body with `read` or `chunks`, and `close` it in any case.

    Attributes:
        status: HTTP status.
        headers: lower-case names and values in order of arrival.
    """

    def __init__(self, call: Call, response: aiohttp.ClientResponse, on_close: Callable[[], None]) -> None:
        self.status = response.status
        self.headers: HeaderPairs = tuple(
            (name.lower(), _octets(value)) for name, value in response.headers.items()
        )
        self._step = call.step
        self._reserve = call.reserve
        self._response = response
        self._on_close = on_close
        self._closed = False

    async def read(self) -> Answer:
        """Read the whole body.

        Raises:
            StepFailed: the connection broke.
            Overloaded: the answer does not fit the byte budget.
        """
        try:
            body = await _read(self._response, self._reserve)
        except (aiohttp.ClientError, OSError) as error:
            raise _broken(self._step, error) from error
        return Answer(self.status, dict(self.headers), body)

    async def read_up_to(self, limit: int) -> Answer:
        """Read the body, charged to nobody, and leave what is beyond `limit` bytes; raises StepFailed."""
        body = bytearray()
        async for chunk in self.chunks():
            body += chunk
            if len(body) > limit:
                break
        return Answer(self.status, dict(self.headers), body[:limit])

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it arrives, charged to nobody; raises StepFailed when the connection breaks."""
        try:
            async for chunk in self._response.content.iter_any():
                yield chunk
        except (aiohttp.ClientError, OSError) as error:
            raise _broken(self._step, error) from error

    def close(self) -> None:
        """Give the connection back to the pool; close it unless the body has been read to its end."""
        if self._closed:
            return
        self._closed = True
        self._on_close()
        if self._response.content.at_eof():
            self._response.release()
        else:
            self._response.close()


class Upstream:
    """A pooled HTTP client for one base address.

    Args:
        address: base URL without a trailing slash.
        head_timeout: seconds until the head of an answer has arrived.
        timeout_key: the configuration key of that timeout, for messages.
        address_key: the configuration key of the address, for messages.
        max_idle: connections kept open while unused.
        idle_timeout: seconds an unused connection stays open.
    """

    def __init__(
        self,
        address: str,
        *,
        head_timeout: float,
        timeout_key: str,
        address_key: str,
        max_idle: int,
        idle_timeout: float,
    ) -> None:
        self._address = address
        self._head_timeout = head_timeout
        self._timeout_key = timeout_key
        self._address_key = address_key
        self._max_idle = max_idle
        self._idle_timeout = idle_timeout
        self._in_flight = 0
        self._pooled: aiohttp.ClientSession | None = None
        self._unpooled: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Open the pool; needs the running event loop."""
        self._pooled = _session(aiohttp.TCPConnector(limit=0, keepalive_timeout=self._idle_timeout))
        self._unpooled = _session(aiohttp.TCPConnector(limit=0, force_close=True))

    async def stop(self) -> None:
        """Close all connections."""
        for session in (self._pooled, self._unpooled):
            if session is not None:
                await session.close()

    async def post(self, call: Call) -> Answer:
        """Send one sub-request and read its whole answer, whatever its status.

        Raises:
            StepTimeout: no answer head in time.
            StepFailed: no connection, or it broke.
            LoopDetected: the sub-request reached this filter again.
            Overloaded: the answer does not fit the byte budget.
        """
        answer = await self.open(call)
        try:
            return await answer.read()
        finally:
            answer.close()

    async def open(self, call: Call) -> OpenAnswer:
        """Send one sub-request and read the head of its answer, whatever its status.

        The other side may close a kept-alive connection just when it is used again. A call that dies so,
        before the head of an answer, is sent once more, on a connection that no pool has kept. A call that
        goes `alone` has such a connection at once.

        Raises:
            StepTimeout: no answer head in time.
            StepFailed: no connection, or it broke.
            LoopDetected: the sub-request reached this filter again.
        """
        attempt = _Attempt()
        try:
            try:
                session = self._unpooled if call.alone else self._pooled
                return await self._attempt(call, session, attempt)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, ConnectionResetError) as error:
                if not attempt.died_unanswered(error):
                    raise
                logger.debug("kept-alive connection was closed, sending again", extra={"step": call.step})
                return await self._attempt(call, self._unpooled, _Attempt())
        except TimeoutError:
            raise StepTimeout(
                call.step, f"{call.step} did not answer within {self._head_timeout:g} s ({self._timeout_key})"
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            raise _broken(call.step, error) from error

    async def _attempt(
        self, call: Call, session: aiohttp.ClientSession | None, attempt: _Attempt
    ) -> OpenAnswer:
        if session is None:
            raise RuntimeError("Upstream.start() has not run")
        headers = _encodable(call.headers)
        headers += [("content-length", str(size(call.body))), ("accept-encoding", "identity")]
        if self._in_flight >= self._max_idle:
            headers.append(("connection", "close"))
        self._in_flight += 1
        try:
            async with asyncio.timeout(self._head_timeout):
                response = await session.post(
                    self._address + call.path,
                    data=_slices(call.body),
                    headers=headers,
                    allow_redirects=False,
                    trace_request_ctx=attempt,
                )
        except BaseException:
            self._one_less()
            raise
        answer = OpenAnswer(call, response, self._one_less)
        if answer.status == _LOOP_STATUS:
            answer.close()
            raise LoopDetected(
                f"the {call.step} call came back to this filter; {self._address_key} must lead to a listener "
                "or route without it",
                stage=call.step,
            )
        return answer

    def _one_less(self) -> None:
        self._in_flight -= 1


def _broken(step: StepName, error: Exception) -> StepFailed:
    return StepFailed(
        step,
        f"{step}: the upstream could not be reached or broke the connection",
        detail=redacted(f"{type(error).__name__}: {error}"),
    )


async def _slices(body: Segments) -> AsyncIterator[memoryview]:
    for window in windows(body, _WRITE_WINDOW):
        yield window


async def _read(response: aiohttp.ClientResponse, reserve: Callable[[int], None]) -> bytearray:
    announced = response.content_length
    if announced is None:
        buffer = bytearray()
        async for chunk in response.content.iter_any():
            reserve(len(chunk))
            buffer += chunk
        return buffer
    reserve(announced)
    buffer = bytearray(announced)
    position = 0
    async for chunk in response.content.iter_any():
        buffer[position : position + len(chunk)] = chunk
        position += len(chunk)
    return buffer


def _session(connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
    tracing = aiohttp.TraceConfig()
    tracing.on_connection_reuseconn.append(_note_reuse)
    return aiohttp.ClientSession(
        connector=connector,
        # A cookie set for one client's request must not be sent with another's.
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),
        auto_decompress=False,
        read_bufsize=_READ_BUFFER,
        trace_configs=[tracing],
        skip_auto_headers=("user-agent", "accept"),
    )


async def _note_reuse(
    _session: aiohttp.ClientSession, context: SimpleNamespace, _params: aiohttp.TraceConnectionReuseconnParams
) -> None:
    attempt: _Attempt = context.trace_request_ctx
    attempt.reused_connection = True


def _encodable(headers: HeaderPairs) -> list[tuple[str, str]]:
    """Header values as aiohttp writes them back to the octets they came as.

    It encodes as UTF-8; a value that is not UTF-8 cannot be sent as it is, and is left out rather than
    changed.
    """
    kept = []
    for name, value in headers:
        try:
            kept.append((name, value.encode("latin-1").decode("utf-8")))
        except UnicodeDecodeError:
            logger.warning("header left out: its value is not UTF-8", extra={"header": name})
    return kept


def _octets(value: str) -> str:
    """A header value aiohttp has decoded, as the latin-1 text of its octets."""
    return value.encode("utf-8", "surrogateescape").decode("latin-1")
