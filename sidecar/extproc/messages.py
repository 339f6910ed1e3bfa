"""Reads the messages Envoy sends into the exchange's events."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidecar.errors import UnsupportedBodyMode
from sidecar.extproc.pb.envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest
from sidecar.extproc.protocol import (
    BodyMode,
    Event,
    Observed,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseEvent,
)
from sidecar.extproc.wire import body_piece
from sidecar.http import RequestHead

if TYPE_CHECKING:
    from sidecar.extproc.pb.envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue
    from sidecar.extproc.pb.envoy.service.ext_proc.v3.external_processor_pb2 import HttpHeaders


def read_event(message: bytes) -> Event:
    """The event in one serialised ProcessingRequest.

    A body piece is a view of `message`.

    Raises:
        google.protobuf.message.DecodeError: not a ProcessingRequest.
        UnsupportedBodyMode: the body mode or the kind of message is none this version knows.
    """
    piece = body_piece(message)
    return _read(ProcessingRequest.FromString(message)) if piece is None else RequestBody(*piece)


def _read(message: ProcessingRequest) -> Event:
    if message.observability_mode:
        return Observed()
    match message.WhichOneof("request"):
        case "request_headers":
            return _headers(message.request_headers, message.protocol_config.request_body_mode)
        case "request_body":
            return RequestBody(message.request_body.body, message.request_body.end_of_stream)
        case "request_trailers":
            return RequestTrailers(tuple(field.key for field in message.request_trailers.trailers.headers))
        case "response_headers" | "response_body" | "response_trailers" as part:
            return ResponseEvent(part)
        case _:
            raise UnsupportedBodyMode("Envoy sent an ext_proc message of a kind this version does not know")


def _headers(message: HttpHeaders, mode: int) -> RequestHeaders:
    pseudo, fields = _split(message.headers)
    path, _, query = pseudo.get(":path", "").partition("?")
    head = RequestHead(pseudo.get(":method", ""), path, query, fields)
    try:
        return RequestHeaders(head, message.end_of_stream, BodyMode(mode))
    except ValueError:
        raise UnsupportedBodyMode(
            f"request_body_mode number {mode} of the ext_proc filter is not known to this version; set "
            "processing_mode.request_body_mode to FULL_DUPLEX_STREAMED"
        ) from None


def _split(headers: HeaderMap) -> tuple[dict[str, str], tuple[tuple[str, str], ...]]:
    """Pseudo-headers by name, and the other fields in order."""
    pseudo: dict[str, str] = {}
    fields: list[tuple[str, str]] = []
    for field in headers.headers:
        if field.key.startswith(":"):
            pseudo[field.key] = _value(field)
        else:
            fields.append((field.key, _value(field)))
    return pseudo, tuple(fields)


def _value(field: HeaderValue) -> str:
    # Peers before Envoy 1.27 fill `value` instead.
    return field.raw_value.decode("latin-1") or field.value
