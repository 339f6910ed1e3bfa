"""The vocabulary of one ext_proc call: events that come in, replies that go out, no transport types."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sidecar.http import HeaderPairs, RequestHead
    from sidecar.jsontext import Segment, Segments


class BodyMode(IntEnum):
    """The filter's `processing_mode.request_body_mode`, numbered as on the wire."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX_STREAMED = 4
    GRPC = 5


@dataclass(frozen=True, slots=True)
class RequestHeaders:
    """The request's head; first event of every call.

    Attributes:
        head: method, path and headers.
        end_of_stream: nothing follows, no body and no trailers.
        mode: how the filter sends bodies.
    """

    head: RequestHead
    end_of_stream: bool
    mode: BodyMode


@dataclass(frozen=True, slots=True)
class RequestBody:
    """A piece of the request body, or all of it in BUFFERED mode."""

    data: Segment
    end_of_stream: bool


@dataclass(frozen=True, slots=True)
class RequestTrailers:
    """The end of a request that has trailers; `names` are their lower-case names."""

    names: tuple[str, ...]


ResponsePart = Literal["response_headers", "response_body", "response_trailers"]


@dataclass(frozen=True, slots=True)
class ResponseEvent:
    """A part of the upstream's response, sent by a filter that does not skip the response phases.

    Attributes:
        part: which one.
        status: HTTP status, in `response_headers`; 0 in other parts.
    """

    part: ResponsePart
    status: int = 0


@dataclass(frozen=True, slots=True)
class CallEnded:
    """Envoy sends nothing more on this call."""


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """The head of an answer that an observing filter copies.

    Attributes:
        status: HTTP status; 0 when it is none.
        headers: all fields but the pseudo-headers.
        end_of_stream: the answer has no body.
        metadata: the strings of the request's metadata, by namespace and key.
    """

    status: int
    headers: HeaderPairs
    end_of_stream: bool
    metadata: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """A piece of that answer's body; its trailers are an empty one with the end."""

    data: bytes
    end_of_stream: bool


@dataclass(frozen=True, slots=True)
class Observed:
    """A message of a filter in observability mode: nothing may be answered.

    Attributes:
        part: the part of an answer it copies, None for one of a request.
    """

    part: AnswerHead | AnswerPiece | None = None


Event = RequestHeaders | RequestBody | RequestTrailers | ResponseEvent | CallEnded | Observed


class Carries(Enum):
    """Which part of the access-log record travels on a reply."""

    NOTHING = auto()
    RECORD = auto()
    TOTALS = auto()


@dataclass(frozen=True, slots=True)
class HeaderChange:
    """What a reply does to the headers; removals apply before `set_headers`.

    Attributes:
        set_headers: fields to overwrite or add.
        remove_headers: lower-case names to remove.
        clear_route_cache: let Envoy choose the route again afterwards.
    """

    set_headers: HeaderPairs = ()
    remove_headers: tuple[str, ...] = ()
    clear_route_cache: bool = False


@dataclass(frozen=True, slots=True)
class HeadersReply:
    """Answer to the request headers."""

    change: HeaderChange
    carries: Carries = Carries.NOTHING


@dataclass(frozen=True, slots=True)
class ChunkReply:
    """One piece of the body Envoy forwards in FULL_DUPLEX_STREAMED mode."""

    data: Segment
    end_of_stream: bool
    carries: Carries = Carries.NOTHING


@dataclass(frozen=True, slots=True)
class KeepBodyReply:
    """Answer to one body message outside FULL_DUPLEX_STREAMED: forward it as it is."""

    carries: Carries = Carries.NOTHING


@dataclass(frozen=True, slots=True)
class ReplaceBodyReply:
    """Answer to the one body message of BUFFERED mode: forward `body` and change the headers with it."""

    change: HeaderChange
    body: Segments
    carries: Carries = Carries.NOTHING


@dataclass(frozen=True, slots=True)
class TrailersReply:
    """Answer to the request trailers; ends the request."""

    remove_trailers: tuple[str, ...] = ()
    carries: Carries = Carries.NOTHING


@dataclass(frozen=True, slots=True)
class ResponseReply:
    """Answer to a part of the response: forward it as it is."""

    part: ResponsePart
    carries: Carries = Carries.NOTHING


Reply = HeadersReply | ChunkReply | KeepBodyReply | ReplaceBodyReply | TrailersReply | ResponseReply
