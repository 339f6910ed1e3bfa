"""What enters the pipeline and what leaves it: the two ends the ext_proc side sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine
    from contextlib import ExitStack

    from sidecar.api import Api
    from sidecar.http import HeaderPairs, RequestHead
    from sidecar.jsontext import Segment, Segments
    from sidecar.limits import Ticket
    from sidecar.observability.record import AccessRecord
    from sidecar.observability.timing import Stopwatch


@dataclass(frozen=True, slots=True)
class InboundRequest:
    """One complete client request, admitted and within its size limit.

    Attributes:
        head: method, path and headers as the client sent them.
        api: the client API that owns the path.
        body: the whole request body.
        request_id: validated `x-request-id`, or a new one.
        traceparent: W3C trace context for every leg: the client's, or a new one.
        record: access-log record; steps fill it in.
        ticket: byte budget this request draws on.
        stopwatch: runs since the headers arrived.
        can_stream_answer: whether the filter can send the client an answer piece by piece.
        cleanup: closed when the client has its answer or has left, however the request ends.
    """

    head: RequestHead
    api: Api
    body: bytes
    request_id: str
    traceparent: str
    record: AccessRecord
    ticket: Ticket
    stopwatch: Stopwatch
    can_stream_answer: bool
    cleanup: ExitStack


@dataclass(frozen=True, slots=True)
class DecodeRewrite:
    """The request Envoy forwards to decode instead of the client's.

    Attributes:
        set_headers: headers to overwrite or add.
        remove_headers: lower-case names to remove.
        body: the new body, as slices to be sent one after the other.
        alongside: a call that has to be in flight while decode is; raises SidecarError when it fails. None
            where decode needs no such company.
    """

    set_headers: HeaderPairs
    remove_headers: tuple[str, ...]
    body: Segments
    alongside: Callable[[], Coroutine[Any, Any, None]] | None = None


class AnswerStream(Protocol):
    """The body of an answer that is still arriving."""

    def chunks(self) -> AsyncIterator[bytes]:
        """The body as it arrives; raises StepFailed when it breaks off."""


@dataclass(frozen=True, slots=True)
class ServedAnswer:
    """The answer of a decode worker that needed no prefill: the client gets it as it is, decode gets nothing.

    Attributes:
        status: HTTP status.
        headers: end-to-end header fields, without content-length.
        body: the whole body.
    """

    status: int
    headers: HeaderPairs
    body: Segment


@dataclass(frozen=True, slots=True)
class ServedStream:
    """The same, where the client gets the body as it arrives; the request's `cleanup` closes the stream.

    Attributes:
        status: HTTP status.
        headers: end-to-end header fields, without content-length.
        body: where the body comes from.
    """

    status: int
    headers: HeaderPairs
    body: AnswerStream


PipelineResult = DecodeRewrite | ServedAnswer | ServedStream
