from __future__ import annotations

import asyncio
import gzip
import socket
import struct
import tracemalloc
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest

from sidecar.errors import LoopDetected, Overloaded, StepFailed, StepTimeout
from sidecar.jsontext import Raw, segments
from sidecar.upstream.client import Answer, Call, Upstream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from sidecar.http import HeaderPairs
    from sidecar.jsontext import Segments

BODY: Segments = [b'{"a":', memoryview(b"1"), b"}"]


@dataclass
class Request:
    """One request as it arrived.

    Attributes:
        head: request line and header lines, as bytes.
        body: the body.
        connection: number of its connection, from 0.
        index: number of the request on its connection, from 0.
    """

    head: list[bytes]
    body: bytes
    connection: int
    index: int
    writer: asyncio.StreamWriter = field(repr=False)

    def header(self, name: bytes) -> list[bytes]:
        return [
            line.partition(b":")[2].strip()
            for line in self.head[1:]
            if line.partition(b":")[0].lower() == name
        ]


class Server:
    """A server of raw answers: the test writes the bytes, or breaks the connection, itself."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.connections = 0
        self.closed: list[int] = []
        self.respond: Callable[[Request], Awaitable[None]] = ok
        self.port = 0
        self.open: set[asyncio.Task[None]] = set()
        self.some_closed = asyncio.Event()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.open.add(task)
        number = self.connections
        self.connections += 1
        index = 0
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[:-2]
                request = Request(head, b"", number, index, writer)
                length = request.header(b"content-length")
                request.body = await reader.readexactly(int(length[0]) if length else 0)
                self.requests.append(request)
                index += 1
                await self.respond(request)
                if writer.is_closing():
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.closed.append(number)
            self.some_closed.set()
            writer.close()
            self.open.discard(task)


def http(body: bytes = b"{}", status: str = "200 OK", *headers: str, length: int | None = None) -> bytes:
    lines = [f"HTTP/1.1 {status}", *headers, f"content-length: {len(body) if length is None else length}"]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


async def ok(request: Request) -> None:
    request.writer.write(http())
    await request.writer.drain()


def always(answer: bytes, *, close: bool = False) -> Callable[[Request], Awaitable[None]]:
    async def respond(request: Request) -> None:
        request.writer.write(answer)
        with suppress(ConnectionError):
            await request.writer.drain()
        if close:
            request.writer.close()

    return respond


def reset(request: Request) -> None:
    """Break the connection with a reset instead of an orderly end."""
    sock = request.writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    request.writer.transport.abort()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    listener = await asyncio.start_server(server.handle, "127.0.0.1", 0, limit=1 << 20)
    server.port = listener.sockets[0].getsockname()[1]
    yield server
    listener.close()
    for task in list(server.open):
        task.cancel()
    await asyncio.gather(*server.open, return_exceptions=True)


@asynccontextmanager
async def connected(
    port: int,
    *,
    host: str = "127.0.0.1",
    head_timeout: float = 20,
    max_idle: int = 100,
    idle_timeout: float = 60,
    prefix: str = "",
) -> AsyncIterator[Upstream]:
    upstream = Upstream(
        f"http://{host}:{port}{prefix}",
        head_timeout=head_timeout,
        timeout_key="gateway.timeout",
        address_key="gateway.address",
        max_idle=max_idle,
        idle_timeout=idle_timeout,
    )
    await upstream.start()
    try:
        yield upstream
    finally:
        await upstream.stop()


@pytest.fixture
async def upstream(server: Server) -> AsyncIterator[Upstream]:
    async with connected(server.port) as upstream:
        yield upstream


class Charges:
    """Stands for the byte budget of a request."""

    def __init__(self, limit: int = 1 << 40) -> None:
        self.limit = limit
        self.total = 0

    def __call__(self, count: int) -> None:
        if self.total + count > self.limit:
            raise Overloaded("full")
        self.total += count


def call(
    body: Segments = BODY,
    headers: HeaderPairs = (("content-type", "application/json"),),
    reserve: Callable[[int], None] | None = None,
    path: str = "/v1/x",
) -> Call:
    return Call("encode", path, headers, body, reserve or Charges())


# --- requests -------------------------------------------------------------------------------------------


async def test_a_call_is_one_post_with_exactly_its_headers(server: Server, upstream: Upstream) -> None:
    """The headers given, the framing, `accept-encoding: identity`, and nothing the library likes to add."""
    headers = (
        ("content-type", "application/json"),
        ("x-a", "1"),
        ("x-a", "2"),
        ("authorization", "Bearer k"),
    )
    answer = await upstream.post(call(headers=headers))
    (request,) = server.requests
    assert request.head[0] == b"POST /v1/x HTTP/1.1"
    assert request.body == b'{"a":1}'
    assert request.header(b"content-length") == [b"7"]
    assert request.header(b"x-a") == [b"1", b"2"]
    names = sorted(line.partition(b":")[0].lower() for line in request.head[1:])
    assert names == sorted(
        [b"host", b"content-length", b"accept-encoding", *(name.encode() for name, _ in headers)]
    )
    assert request.header(b"accept-encoding") == [b"identity"]
    assert (answer.status, bytes(answer.body)) == (200, b"{}")


async def test_a_base_path_is_kept(server: Server) -> None:
    """The path is appended to the configured address."""
    async with connected(server.port, prefix="/base") as upstream:
        await upstream.post(call())
    assert server.requests[0].head[0] == b"POST /base/v1/x HTTP/1.1"


async def test_header_values_are_sent_byte_for_byte(server: Server, upstream: Upstream) -> None:
    """A value that came as UTF-8 leaves as the same octets."""
    octets = "é→".encode()
    await upstream.post(call(headers=(("x-name", octets.decode("latin-1")),)))
    assert server.requests[0].header(b"x-name") == [octets]


async def test_a_header_value_that_is_not_utf8_is_not_changed(server: Server, upstream: Upstream) -> None:
    """A value that cannot be sent as it came is left out, and the call goes on."""
    await upstream.post(call(headers=(("x-name", "\xe9"), ("x-kept", "1"))))
    assert server.requests[0].header(b"x-name") in ([], [b"\xe9"])
    assert server.requests[0].header(b"x-kept") == [b"1"]


async def test_header_values_of_an_answer_are_octets_too(server: Server, upstream: Upstream) -> None:
    """A forwarded response header goes to later legs as it came: decoded as latin-1, like a client's."""
    octets = "é→".encode() + b"\xff"
    server.respond = always(b"HTTP/1.1 200 OK\r\nX-Name: " + octets + b"\r\ncontent-length: 2\r\n\r\n{}")
    answer = await upstream.post(call())
    assert answer.headers["x-name"].encode("latin-1") == octets


async def test_a_large_body_arrives_whole(server: Server, upstream: Upstream) -> None:
    """Megabytes of slices arrive in order, framed by one content-length."""
    raw = Raw(b'"%b"' % (b"0123456789abcdef" * (1 << 19)))
    body = segments({"one": raw, "two": [raw, 1]})
    await upstream.post(call(body))
    (request,) = server.requests
    assert request.body == b"".join(body)
    assert request.header(b"transfer-encoding") == []


async def test_an_empty_body_is_framed(server: Server, upstream: Upstream) -> None:
    """No bytes are a content-length of zero."""
    await upstream.post(call([]))
    assert server.requests[0].header(b"content-length") == [b"0"]


# --- answers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [200, 201, 400, 401, 403, 404, 412, 422, 429, 499, 500, 502, 503, 504])
async def test_every_status_is_an_answer(server: Server, upstream: Upstream, status: int) -> None:
    """What a status means is the step's business: it is returned with its headers and body."""
    server.respond = always(http(b'{"error":1}', f"{status} X", "X-Revision: r1"))
    answer = await upstream.post(call())
    assert (answer.status, bytes(answer.body), answer.headers["x-revision"]) == (status, b'{"error":1}', "r1")


async def test_a_redirect_is_not_followed(server: Server, upstream: Upstream) -> None:
    """Bodies and tokens go to the configured address only."""
    location = f"location: http://127.0.0.1:{server.port}/elsewhere"
    server.respond = always(http(b"", "307 Temporary Redirect", location))
    assert (await upstream.post(call())).status == 307
    assert len(server.requests) == 1


async def test_508_is_a_loop(server: Server, upstream: Upstream) -> None:
    """The filter's own refusal of a sub-request: the client learns of the loop, with the step as stage."""
    server.respond = always(http(b"{}", "508 Loop Detected"))
    with pytest.raises(LoopDetected) as failed:
        await upstream.post(call())
    assert (failed.value.status, failed.value.stage) == (508, "encode")


CHUNKED = (
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n5;x=y\r\ndefgh\r\n0\r\nt: 1\r\n\r\n"
)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (CHUNKED, b"abcdefgh"),
        (http(b"abc", length=3), b"abc"),
        (http(b""), b""),
        (b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nuntil the end", b"until the end"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + http(b"after"), b"after"),
    ],
)
async def test_every_framing_is_read_and_charged(
    server: Server, upstream: Upstream, answer: bytes, expected: bytes
) -> None:
    """Whatever the framing, the body is complete and every byte of it is charged."""
    server.respond = always(answer, close=b"connection: close" in answer)
    charges = Charges()
    read = await upstream.post(call(reserve=charges))
    assert read.body == expected
    assert charges.total == len(expected)


async def test_compressed_answers_are_not_inflated(server: Server, upstream: Upstream) -> None:
    """An answer compressed in spite of `identity` is handed on as it came: it cannot blow up in memory."""
    packed = gzip.compress(b"x" * 1_000_000)
    server.respond = always(http(packed, "200 OK", "content-encoding: gzip"))
    charges = Charges()
    assert (await upstream.post(call(reserve=charges))).body == packed
    assert charges.total == len(packed)


async def test_cookies_do_not_leak_into_other_requests(server: Server) -> None:
    """A cookie set for one client's request is not sent with another's; a client's own cookie is."""
    server.respond = always(http(b"{}", "200 OK", "set-cookie: session=secret; Path=/"))
    # A cookie jar takes no cookies from hosts that are addresses: the test needs a name.
    async with connected(server.port, host="localhost") as upstream:
        await upstream.post(call())
        await upstream.post(call(headers=(("cookie", "mine=1"),)))
        await upstream.post(call())
    assert [request.header(b"cookie") for request in server.requests] == [[], [b"mine=1"], []]


def test_an_excerpt_is_bounded_and_harmless() -> None:
    """The excerpt of a body for the log has no control characters, no raw bytes, and an end."""
    text = Answer(500, {}, bytearray(b"a\nb\x1b[31m\xff" + "é".encode() + b"x" * 100_000)).excerpt()
    assert text.isascii()
    assert text.isprintable()
    assert len(text) < 8192
    assert text.startswith("a\\nb")


# --- budget ---------------------------------------------------------------------------------------------


async def test_an_announced_body_over_the_budget_is_refused_before_it_is_read(
    server: Server, upstream: Upstream
) -> None:
    """Overloaded as soon as the length is known; no memory is taken and the connection is closed."""
    server.respond = always(http(b"x" * 100, length=50 << 30))
    tracemalloc.start()
    try:
        with pytest.raises(Overloaded):
            await upstream.post(call(reserve=Charges(1 << 20)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20
    await asyncio.wait_for(server.some_closed.wait(), 10)


async def test_an_endless_body_over_the_budget_is_refused_while_it_is_read(
    server: Server, upstream: Upstream
) -> None:
    """A chunked body is charged as it comes; over the budget it ends, and so does the connection."""

    async def endless(request: Request) -> None:
        request.writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        while not request.writer.is_closing():
            request.writer.write(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
            await request.writer.drain()

    server.respond = endless
    charges = Charges(4 << 20)
    with pytest.raises(Overloaded):
        await upstream.post(call(reserve=charges))
    assert charges.total <= 4 << 20
    await asyncio.wait_for(server.some_closed.wait(), 10)


async def test_a_large_answer_is_held_once(server: Server, upstream: Upstream) -> None:
    """Reading a 64 MB answer takes 64 MB and a few read buffers, not two copies of it."""
    size = 64 << 20
    block = b"x" * (1 << 20)

    async def large(request: Request) -> None:
        request.writer.write(http(b"", length=size))
        for _ in range(size // len(block)):
            request.writer.write(block)
            await request.writer.drain()

    server.respond = large
    tracemalloc.start()
    try:
        answer = await upstream.post(call())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(answer.body) == size
    assert answer.body.count(b"x") == size
    assert peak < size + (24 << 20)


# --- connections that fail ------------------------------------------------------------------------------


async def test_nobody_listens() -> None:
    """A refused connection is a 502 of the step; the address is for the log only."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        async with connected(port) as upstream:
            with pytest.raises(StepFailed) as failed:
                await upstream.post(call())
    assert (failed.value.status, failed.value.code) == (502, "epd_encode_failed")
    assert str(port) not in failed.value.message
    assert str(port) in failed.value.detail


BROKEN: dict[str, bytes] = {
    "before-the-head": b"",
    "within-the-head": b"HTTP/1.1 200 OK\r\ncontent-le",
    "after-the-head": http(b"", length=10),
    "within-the-body": http(b"12345", length=10),
    "within-a-chunk": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\na\r\n12345",
    "without-the-last-chunk": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\n12345\r\n",
    "no-http": b"SSH-2.0-OpenSSH_9.9\r\n\r\n",
    "bad-length": b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\nabc",
    "two-lengths": b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabcd",
    "bad-chunk": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\nabc",
}


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("how", ["end", "reset"])
async def test_a_broken_first_use_of_a_connection_is_502(
    server: Server, upstream: Upstream, broken: str, how: str
) -> None:
    """A new connection that breaks at any point fails the call, which is not sent twice."""

    async def respond(request: Request) -> None:
        request.writer.write(BROKEN[broken])
        await request.writer.drain()
        if how == "end":
            request.writer.close()
        else:
            reset(request)

    server.respond = respond
    with pytest.raises(StepFailed) as failed:
        await upstream.post(call())
    assert (failed.value.status, failed.value.code) == (502, "epd_encode_failed")
    assert len(server.requests) == 1


def _end(request: Request) -> None:
    request.writer.close()


BREAKS = pytest.mark.parametrize("breaks", [_end, reset], ids=["end", "reset"])


@BREAKS
async def test_a_stale_connection_is_retried_once(
    server: Server, upstream: Upstream, breaks: Callable[[Request], None]
) -> None:
    """A kept-alive connection that dies before any response byte: the same call again on a new one."""

    async def respond(request: Request) -> None:
        if request.connection == 0 and request.index == 1:
            breaks(request)
        else:
            await ok(request)

    server.respond = respond
    await upstream.post(call([b"first"]))
    answer = await upstream.post(call([b"second"]))
    assert answer.status == 200
    assert [(r.connection, r.body) for r in server.requests] == [
        (0, b"first"),
        (0, b"second"),
        (1, b"second"),
    ]


@BREAKS
async def test_a_stale_connection_is_retried_while_a_large_body_is_being_sent(
    server: Server, upstream: Upstream, breaks: Callable[[Request], None]
) -> None:
    """It makes no difference whether the other side has read the body before it went."""

    async def respond(request: Request) -> None:
        await ok(request)
        if request.connection == 0:
            # The next request on this connection meets a closed socket; nothing of it is read.
            request.writer.transport.pause_reading()  # type: ignore[attr-defined]  # a stream transport reads
            asyncio.get_running_loop().call_later(0.2, breaks, request)

    server.respond = respond
    await upstream.post(call())
    answer = await upstream.post(call([b"x" * (32 << 20)]))
    assert answer.status == 200
    assert [(r.connection, len(r.body)) for r in server.requests] == [(0, 7), (1, 32 << 20)]


@BREAKS
async def test_a_second_break_is_not_retried(
    server: Server, upstream: Upstream, breaks: Callable[[Request], None]
) -> None:
    """One retry, no more: then the call has failed."""

    async def respond(request: Request) -> None:
        if request.body == b"first":
            await ok(request)
        else:
            breaks(request)

    server.respond = respond
    await upstream.post(call([b"first"]))
    with pytest.raises(StepFailed):
        await upstream.post(call([b"second"]))
    assert [r.body for r in server.requests] == [b"first", b"second", b"second"]


@BREAKS
async def test_the_retry_does_not_meet_another_stale_connection(
    server: Server, upstream: Upstream, breaks: Callable[[Request], None]
) -> None:
    """A worker that restarted has left a whole pool of dead connections; the retry takes a new one."""
    both = asyncio.Event()

    async def respond(request: Request) -> None:
        if request.connection < 2 and request.index == 0:
            if len(server.requests) == 2:
                both.set()
            await both.wait()
            await ok(request)
        elif request.connection < 2:
            breaks(request)
        else:
            await ok(request)

    server.respond = respond
    await asyncio.gather(upstream.post(call()), upstream.post(call()))
    assert server.connections == 2
    assert (await upstream.post(call())).status == 200
    assert [r.connection for r in server.requests[2:]] in ([0, 2], [1, 2])


@BREAKS
@pytest.mark.parametrize("broken", [name for name in BROKEN if name != "before-the-head"])
async def test_nothing_is_retried_after_a_response_byte(
    server: Server, upstream: Upstream, broken: str, breaks: Callable[[Request], None]
) -> None:
    """A worker that has begun to answer has done the work: the call is not sent again.

    A reset within the head is not told apart from one before it: the client library keeps what it has read of
    an unfinished head only when the connection ends in order.
    """
    if broken == "within-the-head" and breaks is not _end:
        return

    async def respond(request: Request) -> None:
        if request.index == 0 and request.connection == 0:
            await ok(request)
            return
        request.writer.write(BROKEN[broken])
        await request.writer.drain()
        await asyncio.sleep(0.05)
        breaks(request)

    server.respond = respond
    await upstream.post(call())
    with pytest.raises(StepFailed):
        await upstream.post(call())
    assert len(server.requests) == 2


async def test_the_whole_budget_is_not_charged_twice_by_a_retry(server: Server, upstream: Upstream) -> None:
    """A retried call charges the answer it got, once."""

    async def respond(request: Request) -> None:
        if request.connection == 0 and request.index == 1:
            request.writer.close()
        else:
            await always(http(b"x" * 1000))(request)

    server.respond = respond
    await upstream.post(call())
    charges = Charges()
    await upstream.post(call(reserve=charges))
    assert charges.total == 1000


# --- time and cancellation ------------------------------------------------------------------------------


async def test_no_head_in_time_is_504(server: Server) -> None:
    """The message names the seconds and the key; the connection is closed, the call not repeated."""

    async def silent(_request: Request) -> None:
        await asyncio.Event().wait()

    server.respond = silent
    async with connected(server.port, head_timeout=0.05) as upstream:
        with pytest.raises(StepTimeout) as failed:
            await upstream.post(call())
    assert (failed.value.status, failed.value.code) == (504, "epd_encode_timeout")
    assert "0.05 s (gateway.timeout)" in failed.value.message
    assert len(server.requests) == 1


async def test_the_head_timeout_ends_with_the_head(server: Server) -> None:
    """A body may take longer than the head: the step's own timeout bounds it."""

    async def slow_body(request: Request) -> None:
        request.writer.write(http(b"", length=2))
        await request.writer.drain()
        await asyncio.sleep(1.2)
        request.writer.write(b"{}")

    server.respond = slow_body
    async with connected(server.port, head_timeout=1) as upstream:
        assert (await upstream.post(call())).body == b"{}"


@pytest.mark.parametrize("sent_before", [b"", http(b"12345", length=10)], ids=["head", "body"])
async def test_cancelling_closes_the_connection(
    server: Server, upstream: Upstream, sent_before: bytes
) -> None:
    """A client that left takes the sub-request with it: the worker sees its connection end."""
    answered = asyncio.Event()

    async def respond(request: Request) -> None:
        if len(server.requests) > 1:
            await ok(request)
            return
        request.writer.write(sent_before)
        await request.writer.drain()
        answered.set()

    server.respond = respond
    task = asyncio.ensure_future(upstream.post(call()))
    await answered.wait()
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(server.some_closed.wait(), 10)
    assert (await upstream.post(call())).status == 200
    assert [request.connection for request in server.requests] == [0, 1]


# --- answers read as they arrive -------------------------------------------------------------------------

CHUNKED_HEAD = b"HTTP/1.1 200 OK\r\nX-A: 1\r\nx-a: 2\r\ntransfer-encoding: chunked\r\n\r\n"


class Paced:
    """Answers with a head at once and with one chunk per `go`; a None ends the answer well."""

    def __init__(self) -> None:
        self.pieces: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def __call__(self, request: Request) -> None:
        request.writer.write(CHUNKED_HEAD)
        while (piece := await self.pieces.get()) is not None:
            request.writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        request.writer.write(b"0\r\n\r\n")


async def test_chunks_come_as_they_are_sent(server: Server, upstream: Upstream) -> None:
    """The head before any chunk, each chunk before the next is sent, nobody charged; then the pool has it."""
    server.respond = paced = Paced()
    charges = Charges(0)
    answer = await upstream.open(call(reserve=charges))
    assert (answer.status, answer.headers[:2]) == (200, (("x-a", "1"), ("x-a", "2")))
    chunks = answer.chunks()
    for piece in (b"one", b"two"):
        paced.pieces.put_nowait(piece)
        assert await anext(chunks) == piece
    paced.pieces.put_nowait(None)
    assert [chunk async for chunk in chunks] == []
    answer.close()
    server.respond = ok
    await upstream.post(call())
    assert server.connections == 1


@pytest.mark.parametrize("begun", [False, True])
async def test_an_abandoned_answer_closes_its_connection(
    server: Server, upstream: Upstream, *, begun: bool
) -> None:
    """Whether or not a chunk was read: the worker learns that nobody listens."""
    server.respond = paced = Paced()
    answer = await upstream.open(call())
    if begun:
        paced.pieces.put_nowait(b"one")
        await anext(answer.chunks())
    answer.close()
    answer.close()
    paced.pieces.put_nowait(None)
    await asyncio.wait_for(server.some_closed.wait(), 10)
    server.respond = ok
    await upstream.post(call())
    assert [request.connection for request in server.requests] == [0, 1]


@pytest.mark.parametrize("breaks", [asyncio.StreamWriter.close, None], ids=["closes", "resets"])
async def test_an_answer_that_breaks_off(
    server: Server, upstream: Upstream, breaks: Callable[[asyncio.StreamWriter], None] | None
) -> None:
    """What came is passed on, then the step has failed; the call is not sent again."""
    await upstream.post(call())

    async def respond(request: Request) -> None:
        request.writer.write(CHUNKED_HEAD + b"3\r\none\r\n")
        await request.writer.drain()
        await asyncio.sleep(0.05)
        if breaks is None:
            reset(request)
        else:
            breaks(request.writer)

    server.respond = respond
    answer = await upstream.open(call())
    chunks = answer.chunks()
    assert await anext(chunks) == b"one"
    with pytest.raises(StepFailed) as failed:
        await anext(chunks)
    answer.close()
    assert failed.value.code == "epd_encode_failed"
    assert len(server.requests) == 2


async def test_an_open_answer_is_read_whole(server: Server, upstream: Upstream) -> None:
    """A head that turns out not to be a stream's is followed by one body, charged."""
    server.respond = always(http(b"refused", "412 Precondition Failed"))
    charges = Charges()
    answer = await upstream.open(call(reserve=charges))
    assert answer.status == 412
    assert (await answer.read()).body == b"refused"
    answer.close()
    assert charges.total == 7


@pytest.mark.parametrize(("size", "read"), [(0, 0), (100, 100), (101, 100), (1 << 20, 100)])
async def test_of_a_long_answer_only_the_beginning_is_read(
    server: Server, upstream: Upstream, size: int, read: int
) -> None:
    """Up to the limit, charged to nobody; what is beyond it is neither read nor held."""
    server.respond = always(http(b"x" * size))
    charges = Charges(0)
    answer = await upstream.open(call(reserve=charges))
    assert (await answer.read_up_to(100)).body == b"x" * read
    answer.close()
    assert charges.total == 0


async def test_a_call_that_goes_alone_is_sent_once(server: Server, upstream: Upstream) -> None:
    """It uses no kept connection, leaves none behind, and is not repeated when its connection breaks."""
    await upstream.post(call())

    async def break_off(request: Request) -> None:
        request.writer.close()

    server.respond = break_off
    with pytest.raises(StepFailed):
        await upstream.post(replace(call(), alone=True))
    assert [request.connection for request in server.requests] == [0, 1]
    server.respond = ok
    await upstream.post(replace(call(), alone=True))
    await upstream.post(call())
    assert [request.connection for request in server.requests] == [0, 1, 2, 0]


async def test_open_answers_count_as_in_use(server: Server) -> None:
    """While an answer is open its connection is one of the kept ones; closed, it no longer is."""
    server.respond = paced = Paced()
    async with connected(server.port, max_idle=1) as upstream:
        first = await upstream.open(call())
        second = await upstream.open(call())
        first.close()
        second.close()
        third = await upstream.open(call())
        third.close()
    assert [request.header(b"connection") for request in server.requests] == [[], [b"close"], []]
    for _ in range(3):
        paced.pieces.put_nowait(None)


async def test_a_call_that_fails_is_no_longer_in_use(server: Server) -> None:
    """Failures do not use up the connections that are kept."""
    server.respond = always(b"", close=True)
    async with connected(server.port, max_idle=1) as upstream:
        with pytest.raises(StepFailed):
            await upstream.open(call())
        server.respond = ok
        await upstream.post(call())
    assert server.requests[-1].header(b"connection") == []


async def test_an_open_answer_that_is_a_loop(server: Server, upstream: Upstream) -> None:
    """508 is a loop before any byte of its body is read."""
    server.respond = always(http(b"", "508 Loop Detected", length=10))
    with pytest.raises(LoopDetected):
        await upstream.open(call())
    await asyncio.wait_for(server.some_closed.wait(), 10)


# --- the pool -------------------------------------------------------------------------------------------


async def test_connections_are_kept_alive(server: Server, upstream: Upstream) -> None:
    """One call after the other uses one connection."""
    for _ in range(3):
        await upstream.post(call())
    assert server.connections == 1


async def test_no_more_connections_are_kept_than_configured(server: Server) -> None:
    """A burst may open more; what is over the limit is closed after use, nothing is refused."""
    together = asyncio.Barrier(6)

    async def respond(request: Request) -> None:
        await together.wait()
        closing = request.header(b"connection") == [b"close"]
        request.writer.write(http(b"{}", "200 OK", *(["connection: close"] if closing else [])))
        await request.writer.drain()
        if closing:
            request.writer.close()

    server.respond = respond
    async with connected(server.port, max_idle=2) as upstream:
        answers = await asyncio.gather(*(upstream.post(call()) for _ in range(6)))
        assert [answer.status for answer in answers] == [200] * 6
        for _ in range(100):
            if len(server.closed) == 4:
                break
            await asyncio.sleep(0.02)
        assert len(server.closed) == 4
    assert server.connections == 6


async def test_the_pool_must_be_started() -> None:
    """A client that was never started is a fault of the program, not of the upstream."""
    upstream = Upstream(
        "http://127.0.0.1:1",
        head_timeout=1,
        timeout_key="gateway.timeout",
        address_key="gateway.address",
        max_idle=1,
        idle_timeout=1,
    )
    with pytest.raises(RuntimeError):
        await upstream.post(call())
    await upstream.stop()


async def test_the_environments_proxy_is_not_used(
    server: Server, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bodies, tokens and keys go straight to the configured address."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    answer: Any = await upstream.post(call())
    assert answer.status == 200
    assert len(server.requests) == 1
