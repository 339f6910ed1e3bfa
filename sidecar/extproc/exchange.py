"""One ext_proc call as a state machine: events in, replies out, no transport and no event loop.

A `PassthroughExchange` answers every event at once and changes headers only. A `CoordinatedExchange` collects
the whole request body first and answers with a rewrite. Both follow what Envoy 1.40 accepts: one header reply
before any body reply; the pieces of a full-duplex body in chunks of at most 62 KiB, with the end of the
stream on the last one only, or on none of them if trailers follow.

Replies are made while they are consumed, so a large body is never held twice: iterate them to the end.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from sidecar.errors import BodyTooLarge, UnsupportedBodyMode
from sidecar.extproc.protocol import (
    BodyMode,
    CallEnded,
    Carries,
    ChunkReply,
    Event,
    HeaderChange,
    HeadersReply,
    KeepBodyReply,
    ReplaceBodyReply,
    Reply,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseEvent,
    ResponseReply,
    TrailersReply,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sidecar.control_headers import ControlHeaders
    from sidecar.jsontext import Segment, Segments

CHUNK_SIZE = 62 << 10
"""Bytes per full-duplex body reply: Envoy recommends to stay below 64 KiB a message."""

_ENVOYS_OWN = frozenset({"connection", "content-length", "host", "transfer-encoding"})
"""Headers a rewrite never touches: Envoy frames the message it forwards itself."""


def check_body_mode(mode: BodyMode) -> None:
    """Raise UnsupportedBodyMode unless `mode` can carry a rewritten body."""
    if mode not in (BodyMode.FULL_DUPLEX_STREAMED, BodyMode.BUFFERED):
        raise UnsupportedBodyMode(
            f"the ext_proc filter runs with request_body_mode: {mode.name}; set processing_mode to "
            "request_body_mode: FULL_DUPLEX_STREAMED with request_trailer_mode: SEND, or to BUFFERED"
        )


class ClientLeft(Exception):
    """The call ended before the request was complete: there is nobody to answer."""


class PassthroughExchange:
    """A request that is not ours: every event is answered at once, the body is never held.

    Args:
        mode: how the filter sends bodies.
        change: what the header reply does.
        control_headers: names that are removed from trailers, too.

    Attributes:
        finished: the reply just given is the last one.
        request_bytes: body bytes seen so far.
    """

    def __init__(self, mode: BodyMode, change: HeaderChange, control_headers: ControlHeaders) -> None:
        self._mode = mode
        self._change = change
        self._control_headers = control_headers
        self.finished = False
        self.request_bytes = 0

    def receive(self, event: Event) -> Iterator[Reply]:
        """Answer one event.

        Raises:
            ClientLeft: the call ended inside the request.
        """
        match event:
            case _ if self.finished:
                return
            case RequestHeaders():
                self.finished = event.end_of_stream or self._mode is BodyMode.NONE
                yield HeadersReply(self._change, Carries.RECORD)
            case RequestBody():
                yield from self._pass_body(event)
            case RequestTrailers():
                self.finished = True
                yield TrailersReply(self._control_headers.among(event.names), Carries.TOTALS)
            case ResponseEvent():
                yield ResponseReply(event.part)
            case CallEnded():
                self._end()

    def _pass_body(self, event: RequestBody) -> Iterator[Reply]:
        self.request_bytes += len(event.data)
        if self._mode is BodyMode.FULL_DUPLEX_STREAMED:
            last = Carries.TOTALS if event.end_of_stream else Carries.NOTHING
            for chunk in _chunks([event.data], end_of_stream=event.end_of_stream, last=last):
                self.finished = chunk.end_of_stream
                yield chunk
        else:
            self.finished = event.end_of_stream
            ends = event.end_of_stream or self._mode is BodyMode.BUFFERED
            yield KeepBodyReply(Carries.TOTALS if ends else Carries.NOTHING)

    def _end(self) -> None:
        # A BUFFERED body is complete in one message; whether trailers follow depends on request_trailer_mode.
        if self._mode is not BodyMode.BUFFERED or not self.request_bytes:
            raise ClientLeft
        self.finished = True


class CoordinatedExchange:
    """A request of ours: its body is collected, then answered with a rewrite.

    Args:
        mode: FULL_DUPLEX_STREAMED or BUFFERED.
        max_body: largest body accepted, in bytes (`ext_proc.max_request_body_size`).
        control_headers: names no client may send on.

    Attributes:
        complete: the whole request has arrived.
        finished: the reply just given is the last one.
        request_bytes: body bytes seen so far.

    Raises:
        UnsupportedBodyMode: any other mode.
    """

    def __init__(self, mode: BodyMode, max_body: int, control_headers: ControlHeaders) -> None:
        check_body_mode(mode)
        self._mode = mode
        self._max_body = max_body
        self._control_headers = control_headers
        self._body: io.BytesIO | None = None
        self._has_content_length = False
        self._control_names: tuple[str, ...] = ()
        self._trailers: RequestTrailers | None = None
        self._ended_by_body = False
        self._trailers_may_follow = False
        self._rewritten = False
        self.complete = False
        self.finished = False
        self.request_bytes = 0

    def receive(self, event: Event) -> Iterator[Reply]:
        """Take one event in; what comes after the end of the request is ignored.

        Raises:
            BodyTooLarge: the body exceeds `max_body`.
            ClientLeft: the call ended before the request was complete, or Envoy has answered it itself.
        """
        match event:
            case RequestHeaders():
                self._has_content_length = event.head.get("content-length") is not None
                self._control_names = self._control_headers.among(name for name, _ in event.head.headers)
                if self._mode is BodyMode.BUFFERED:
                    # Envoy holds the body back until this reply; additions and route wait for the rewrite.
                    yield HeadersReply(HeaderChange(remove_headers=self._control_names))
            case RequestTrailers() if self._trailers_may_follow:
                self._trailers_may_follow = False
                self.finished = True
                yield TrailersReply(self._control_headers.among(event.names))
            case ResponseEvent() if not self._rewritten:
                raise ClientLeft
            case ResponseEvent():
                yield ResponseReply(event.part)
            case _ if self.complete:
                return
            case RequestBody():
                self._collect(event)
            case RequestTrailers():
                self._trailers = event
                self.complete = True
            case CallEnded():
                raise ClientLeft

    def _collect(self, event: RequestBody) -> None:
        self.request_bytes += len(event.data)
        if self.request_bytes > self._max_body:
            raise BodyTooLarge(
                f"the request body is larger than {self._max_body} bytes (ext_proc.max_request_body_size)"
            )
        if self._body is None:
            # Its buffer becomes the body without a copy, so pieces and body are never held side by side.
            self._body = io.BytesIO(event.data)
            self._body.seek(0, io.SEEK_END)
        else:
            self._body.write(event.data)
        self.complete = event.end_of_stream or self._mode is BodyMode.BUFFERED
        self._ended_by_body = event.end_of_stream

    def take_body(self) -> bytes:
        """The whole body as one object; the exchange keeps no reference to it."""
        body, self._body = self._body, None
        return b"" if body is None else body.getvalue()

    def rewrite(self, change: HeaderChange, body: Segments) -> Iterator[Reply]:
        """Answer the complete request with new headers and a new body.

        The client's control headers go, unless `change` sets them. Framing headers are left to Envoy, except
        that content-length follows the body in BUFFERED mode.
        """
        self._rewritten = True
        change = self._forwarded(change)
        if self._mode is BodyMode.BUFFERED:
            yield self._replace(change, body)
        else:
            yield HeadersReply(change, Carries.RECORD)
            for chunk in _chunks(body, end_of_stream=self._trailers is None):
                self.finished = chunk.end_of_stream
                yield chunk
            if self._trailers is not None:
                self.finished = True
                yield TrailersReply(self._control_headers.among(self._trailers.names))

    def _forwarded(self, change: HeaderChange) -> HeaderChange:
        set_headers = tuple(
            (name.lower(), value) for name, value in change.set_headers if name.lower() not in _ENVOYS_OWN
        )
        kept = _ENVOYS_OWN.union(name for name, _ in set_headers)
        removed = dict.fromkeys((*self._control_names, *change.remove_headers))
        return HeaderChange(
            set_headers, tuple(name for name in removed if name not in kept), change.clear_route_cache
        )

    def _replace(self, change: HeaderChange, body: Segments) -> ReplaceBodyReply:
        if self._has_content_length:
            # Envoy answers 500 when the header and the new body disagree.
            change = HeaderChange(
                (*change.set_headers, ("content-length", str(sum(map(len, body))))),
                change.remove_headers,
                change.clear_route_cache,
            )
        self._trailers_may_follow = not self._ended_by_body
        self.finished = self._ended_by_body
        return ReplaceBodyReply(change, body, Carries.RECORD)


def _chunks(
    segments: Segments, *, end_of_stream: bool, last: Carries = Carries.NOTHING
) -> Iterator[ChunkReply]:
    """The segments as chunks of at most CHUNK_SIZE; the last one, maybe empty, takes `end_of_stream`."""
    pieces = _pieces(segments)
    held: Segment = next(pieces, b"")
    for piece in pieces:
        yield ChunkReply(held, end_of_stream=False)
        held = piece
    if held or end_of_stream:
        yield ChunkReply(held, end_of_stream=end_of_stream, carries=last)


def _pieces(segments: Segments) -> Iterator[Segment]:
    """Pieces of CHUNK_SIZE and the rest: of large segments views, of small ones a copy they share."""
    gathered = bytearray()
    for segment in segments:
        view = memoryview(segment)
        position = 0
        while position < len(view):
            taken = view[position : position + CHUNK_SIZE - len(gathered)]
            position += len(taken)
            if not gathered and len(taken) == CHUNK_SIZE:
                yield taken
                continue
            gathered += taken
            if len(gathered) == CHUNK_SIZE:
                yield memoryview(gathered)
                gathered = bytearray()
    if gathered:
        yield memoryview(gathered)
