from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.errors import BodyTooLarge, UnsupportedBodyMode
from sidecar.extproc.exchange import CHUNK_SIZE, ClientLeft, CoordinatedExchange, PassthroughExchange
from sidecar.extproc.protocol import (
    BodyMode,
    CallEnded,
    Carries,
    ChunkReply,
    HeaderChange,
    HeadersReply,
    KeepBodyReply,
    ReplaceBodyReply,
    RequestBody,
    RequestTrailers,
    ResponseEvent,
    ResponseReply,
    TrailersReply,
)
from tests.unit.extproc.extproc_harness import CONTROL, DUPLEX, head_event

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sidecar.extproc.protocol import Event, Reply

BUFFERED = BodyMode.BUFFERED
sizes = st.one_of(st.integers(0, 200), st.integers(CHUNK_SIZE - 2, CHUNK_SIZE + 2), st.integers(0, 300_000))
chunkings = st.lists(sizes, max_size=6).map(
    lambda lengths: [bytes([index + 1]) * length for index, length in enumerate(lengths)]
)
modes_without_duplex = st.sampled_from([BodyMode.STREAMED, BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL])


def feed(exchange: PassthroughExchange | CoordinatedExchange, events: Sequence[Event]) -> list[Reply]:
    return [reply for event in events for reply in exchange.receive(event)]


def stream(chunks: Sequence[bytes], *, trailers: bool, separate_end: bool) -> list[Event]:
    """A body the way Envoy sends it: trailers, an empty last piece, or the end on the last piece."""
    events: list[Event] = [RequestBody(chunk, end_of_stream=False) for chunk in chunks]
    if trailers:
        events.append(RequestTrailers(("grpc-status", "x-tenant-secret")))
    elif separate_end or not chunks:
        events.append(RequestBody(b"", end_of_stream=True))
    else:
        events[-1] = RequestBody(chunks[-1], end_of_stream=True)
    return events


def check_duplex_body(replies: Sequence[Reply], expected: bytes, *, trailers: bool) -> None:
    if trailers:
        *replies, last = replies
        assert isinstance(last, TrailersReply)
        assert last.remove_trailers == ("x-tenant-secret",)
    chunks = [reply for reply in replies if isinstance(reply, ChunkReply)]
    assert len(chunks) == len(replies)
    assert b"".join(chunk.data for chunk in chunks) == expected
    assert all(len(chunk.data) <= CHUNK_SIZE for chunk in chunks)
    ends = [chunk.end_of_stream for chunk in chunks]
    assert ends == ([False] * len(ends) if trailers else [False] * (len(ends) - 1) + [True])


def duplex() -> CoordinatedExchange:
    return CoordinatedExchange(DUPLEX, 10_000_000, CONTROL)


def buffered() -> CoordinatedExchange:
    return CoordinatedExchange(BUFFERED, 10_000_000, CONTROL)


@given(chunkings, st.booleans(), st.booleans())
def test_passthrough_duplex_round_trips(chunks: list[bytes], trailers: bool, separate_end: bool) -> None:
    """Any body in any pieces is streamed on byte for byte, one end, headers first."""
    exchange = PassthroughExchange(DUPLEX, HeaderChange(remove_headers=("prefer",)), CONTROL)
    first, *rest = feed(
        exchange, [head_event(), *stream(chunks, trailers=trailers, separate_end=separate_end)]
    )
    assert first == HeadersReply(HeaderChange(remove_headers=("prefer",)), Carries.RECORD)
    check_duplex_body(rest, b"".join(chunks), trailers=trailers)
    assert rest[-1].carries is Carries.TOTALS
    assert all(reply.carries is Carries.NOTHING for reply in rest[:-1])
    assert exchange.finished
    assert exchange.request_bytes == sum(map(len, chunks))


def test_passthrough_duplex_is_not_held_back() -> None:
    """Each piece is forwarded before the next one arrives, but for nothing."""
    exchange = PassthroughExchange(DUPLEX, HeaderChange(), CONTROL)
    feed(exchange, [head_event()])
    assert feed(exchange, [RequestBody(b"abc", end_of_stream=False)]) == [
        ChunkReply(b"abc", end_of_stream=False)
    ]
    assert not exchange.finished


@given(modes_without_duplex, chunkings, st.booleans(), st.booleans())
def test_passthrough_keeps_the_body_in_other_modes(
    mode: BodyMode, chunks: list[bytes], trailers: bool, separate_end: bool
) -> None:
    """Outside full duplex every message gets one reply that leaves the body alone."""
    exchange = PassthroughExchange(mode, HeaderChange(), CONTROL)
    events = stream(chunks, trailers=trailers, separate_end=separate_end)
    first, *rest = feed(exchange, [head_event(mode=mode), *events])
    assert isinstance(first, HeadersReply)
    assert len(rest) == len(events)
    expected = [KeepBodyReply] * (len(events) - trailers) + [TrailersReply] * trailers
    assert [type(reply) for reply in rest] == expected
    assert exchange.finished


@pytest.mark.parametrize("mode", list(BodyMode))
def test_passthrough_without_body_ends_with_the_headers(mode: BodyMode) -> None:
    """A request without body is answered by its header reply, in every mode."""
    exchange = PassthroughExchange(mode, HeaderChange(), CONTROL)
    assert len(feed(exchange, [head_event(method="GET", mode=mode, end=True)])) == 1
    assert exchange.finished


def test_passthrough_with_body_mode_none_ends_with_the_headers() -> None:
    """With request_body_mode NONE no body message follows the headers."""
    exchange = PassthroughExchange(BodyMode.NONE, HeaderChange(), CONTROL)
    feed(exchange, [head_event(mode=BodyMode.NONE)])
    assert exchange.finished


def test_passthrough_ignores_what_follows_the_end() -> None:
    """A second end of stream is not forwarded."""
    exchange = PassthroughExchange(DUPLEX, HeaderChange(), CONTROL)
    feed(exchange, [head_event(), RequestBody(b"a", end_of_stream=True)])
    assert feed(exchange, [RequestBody(b"a", end_of_stream=True), RequestTrailers(()), CallEnded()]) == []


@pytest.mark.parametrize("mode", [DUPLEX, BodyMode.STREAMED])
def test_passthrough_notices_that_the_client_left(mode: BodyMode) -> None:
    """The end of the call inside a body means that the client left."""
    exchange = PassthroughExchange(mode, HeaderChange(), CONTROL)
    feed(exchange, [head_event(mode=mode), RequestBody(b"a", end_of_stream=False)])
    with pytest.raises(ClientLeft):
        feed(exchange, [CallEnded()])


def test_passthrough_buffered_body_may_be_the_end() -> None:
    """A buffered body without end of stream is complete: its trailers are not sent to us by every filter."""
    exchange = PassthroughExchange(BUFFERED, HeaderChange(), CONTROL)
    feed(exchange, [head_event(mode=BUFFERED), RequestBody(b"a", end_of_stream=False)])
    assert feed(exchange, [CallEnded()]) == []
    assert exchange.finished


@pytest.mark.parametrize("part", ["response_headers", "response_body", "response_trailers"])
def test_an_early_response_is_left_alone(part: str) -> None:
    """A filter that sends response phases gets them answered, while a passing request still runs."""
    event = ResponseEvent(part)  # type: ignore[arg-type]  # parametrised over the literal
    passthrough = PassthroughExchange(DUPLEX, HeaderChange(), CONTROL)
    assert feed(passthrough, [head_event(), event])[1:] == [ResponseReply(event.part)]


@pytest.mark.parametrize("end", [[], [RequestBody(b"{}", end_of_stream=True)]])
def test_a_response_before_the_rewrite_is_envoys_own(end: list[Event]) -> None:
    """Nothing has been forwarded yet: Envoy has answered the client itself, who waits no longer."""
    with pytest.raises(ClientLeft):
        feed(duplex(), [head_event(), *end, ResponseEvent("response_headers")])


@given(chunkings, st.booleans(), st.booleans(), chunkings)
def test_coordinated_duplex(
    chunks: list[bytes], trailers: bool, separate_end: bool, segments: list[bytes]
) -> None:
    """Nothing is answered before the whole body is there; then headers, the new body, maybe trailers."""
    exchange = duplex()
    events = stream(chunks, trailers=trailers, separate_end=separate_end)
    assert feed(exchange, [head_event(), *events]) == []
    assert exchange.complete
    assert exchange.take_body() == b"".join(chunks)
    change = HeaderChange((("epp-profile", "decode"),), ("x-gone",), clear_route_cache=True)
    views: list[bytes | memoryview] = [memoryview(segment) for segment in segments]
    first, *rest = list(exchange.rewrite(change, views))
    assert first == HeadersReply(change, Carries.RECORD)
    check_duplex_body(rest, b"".join(segments), trailers=trailers)
    assert exchange.finished


def test_chunks_are_full() -> None:
    """Small segments share a chunk, so a body costs as few messages as possible."""
    exchange = duplex()
    feed(exchange, [head_event(), RequestBody(b"{}", end_of_stream=True)])
    segments: list[bytes | memoryview] = [b"x" * 1000] * 200
    chunks = [r for r in exchange.rewrite(HeaderChange(), segments) if isinstance(r, ChunkReply)]
    assert [len(chunk.data) for chunk in chunks] == [CHUNK_SIZE] * 3 + [200_000 - 3 * CHUNK_SIZE]


@given(st.sampled_from([DUPLEX, BUFFERED]), st.integers(1, 50), st.integers(0, 60))
def test_the_body_is_counted_while_it_arrives(mode: BodyMode, cap: int, size: int) -> None:
    """A body of the cap's size is taken, one byte more is refused before the end arrives."""
    exchange = CoordinatedExchange(mode, cap, CONTROL)
    feed(exchange, [head_event(mode=mode)])
    if size <= cap:
        feed(exchange, [RequestBody(b"x" * size, end_of_stream=False)])
        assert exchange.take_body() == b"x" * size
    else:
        with pytest.raises(BodyTooLarge, match=rf"{cap} bytes \(ext_proc.max_request_body_size\)"):
            feed(exchange, [RequestBody(b"x" * size, end_of_stream=False)])


def test_what_follows_the_end_is_ignored() -> None:
    """Body, a second end of stream and trailers after the end add nothing."""
    exchange = duplex()
    feed(exchange, [head_event(), RequestBody(b"abc", end_of_stream=True)])
    feed(exchange, [RequestBody(b"abc", end_of_stream=True), RequestTrailers(())])
    assert exchange.take_body() == b"abc"
    assert isinstance(list(exchange.rewrite(HeaderChange(), [b"n"]))[-1], ChunkReply)


@given(st.sampled_from([DUPLEX, BUFFERED]), chunkings)
def test_a_partial_body_is_never_complete(mode: BodyMode, chunks: list[bytes]) -> None:
    """The end of the call before the end of the body means that the client left."""
    exchange = CoordinatedExchange(mode, 10_000_000, CONTROL)
    pieces = chunks if mode is DUPLEX else []
    feed(exchange, [head_event(mode=mode), *(RequestBody(piece, end_of_stream=False) for piece in pieces)])
    assert not exchange.complete
    with pytest.raises(ClientLeft):
        feed(exchange, [CallEnded()])


def test_the_taken_body_is_let_go() -> None:
    """The exchange keeps no second reference to megabytes."""
    exchange = duplex()
    feed(exchange, [head_event(), RequestBody(b"abc", end_of_stream=True)])
    assert (exchange.take_body(), exchange.take_body()) == (b"abc", b"")


def test_a_body_in_one_piece_is_not_copied() -> None:
    """What protobuf hands over whole stays the same object."""
    data = b"x" * 1000
    exchange = buffered()
    feed(exchange, [head_event(mode=BUFFERED), RequestBody(data, end_of_stream=True)])
    assert exchange.take_body() is data


@pytest.mark.parametrize("length", [None, "3"])
def test_buffered_rewrite_is_one_reply(length: str | None) -> None:
    """Headers are answered with removals only; one body reply has the rest, and content-length."""
    fields = [("epp-profile", "forged"), ("x-gone", "1")]
    exchange = buffered()
    if length:
        fields.append(("content-length", length))
    (first,) = feed(exchange, [head_event(*fields, mode=BUFFERED)])
    assert first == HeadersReply(HeaderChange(remove_headers=("epp-profile",)))
    assert feed(exchange, [RequestBody(b"abc", end_of_stream=True)]) == []
    change = HeaderChange((("EPP-Profile", "decode"),), ("x-gone",), clear_route_cache=True)
    (reply,) = exchange.rewrite(change, [b"new", memoryview(b"body")])
    sets: tuple[tuple[str, str], ...] = (("epp-profile", "decode"),)
    if length:
        sets = (*sets, ("content-length", "7"))
    assert reply == ReplaceBodyReply(
        HeaderChange(sets, ("x-gone",), clear_route_cache=True), [b"new", b"body"], Carries.RECORD
    )
    assert exchange.finished


def test_buffered_trailers_follow_the_body_reply() -> None:
    """A buffered body with trailers is complete at once; the trailers are answered when they come."""
    exchange = buffered()
    feed(exchange, [head_event(mode=BUFFERED), RequestBody(b"abc", end_of_stream=False)])
    assert exchange.complete
    list(exchange.rewrite(HeaderChange(), [b"n"]))
    assert not exchange.finished
    assert feed(exchange, [RequestTrailers(("x-sum", "epp-profile"))]) == [TrailersReply(("epp-profile",))]
    assert exchange.finished


def test_framing_headers_are_never_touched() -> None:
    """Whatever a rewrite asks, Envoy keeps its own headers in full duplex."""
    exchange = duplex()
    fields = [("prefer", "x"), ("x-gateway-destination-endpoint-subset", "10.0.0.1")]
    feed(exchange, [head_event(*fields), RequestBody(b"{}", end_of_stream=True)])
    change = HeaderChange(
        (("Content-Length", "2"), ("host", "h"), ("prefer", "ours")), ("transfer-encoding", "connection")
    )
    first = next(exchange.rewrite(change, [b"{}"]))
    assert first == HeadersReply(
        HeaderChange((("prefer", "ours"),), ("x-gateway-destination-endpoint-subset",)), Carries.RECORD
    )


@pytest.mark.parametrize("mode", sorted(set(BodyMode) - {DUPLEX, BUFFERED}))
def test_other_modes_cannot_carry_a_rewrite(mode: BodyMode) -> None:
    """The error names the mode and what to set instead."""
    with pytest.raises(UnsupportedBodyMode, match=f"{mode.name}; set processing_mode.*FULL_DUPLEX_STREAMED"):
        CoordinatedExchange(mode, 1, CONTROL)
