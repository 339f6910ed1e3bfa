"""Reads the messages Envoy sends into the exchange's events."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from sidecar.errors import UnsupportedBodyMode
from sidecar.extproc.pb.envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest
from sidecar.extproc.protocol import (
    AnswerHead,
    AnswerPiece,
    BodyMode,
    Event,
    Observed,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseEvent,
)
from sidecar.extproc.wire import body_piece, is_observed
from sidecar.http import RequestHead

_STATUS = re.compile("[0-9]{3}")

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
    if piece is not None:
        return RequestBody(*piece)
    try:
        return _read(ProcessingRequest.FromString(message))
    except DecodeError:
        if is_observed(message):
            # What nobody waits for is not answered either: another filter's metadata may not be UTF-8.
            return Observed(None)
        raise


def _read(message: ProcessingRequest) -> Event:
    if message.observability_mode:
        return Observed(_answer_part(message))
    match message.WhichOneof("request"):
        case "request_headers":
            return _headers(message.request_headers, message.protocol_config.request_body_mode)
        case "request_body":
            return RequestBody(message.request_body.body, message.request_body.end_of_stream)
        case "request_trailers":
            return RequestTrailers(tuple(field.key for field in message.request_trailers.trailers.headers))
        case "response_headers" as part:
            return ResponseEvent(part, _status(message.response_headers.headers))
        case "response_body" | "response_trailers" as part:
            return ResponseEvent(part)
        case _:
            raise UnsupportedBodyMode("Envoy sent an ext_proc message of a kind this version does not know")


def _answer_part(message: ProcessingRequest) -> AnswerHead | AnswerPiece | None:
    match message.WhichOneof("request"):
        case "response_headers":
            head = message.response_headers
            _, fields = _split(head.headers)
            return AnswerHead(_status(head.headers), fields, head.end_of_stream, _strings(message))
        case "response_body":
            return AnswerPiece(message.response_body.body, message.response_body.end_of_stream)
        case "response_trailers":
            return AnswerPiece(b"", end_of_stream=True)
        case _:
            return None


def _strings(message: ProcessingRequest) -> dict[str, dict[str, str]]:
    namespaces = message.metadata_context.filter_metadata.items()
    return {
        name: {key: value.string_value for key, value in values.fields.items()} for name, values in namespaces
    }


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


def _status(headers: HeaderMap) -> int:
    pseudo, _ = _split(headers)
    text = pseudo.get(":status", "")
    return int(text) if _STATUS.fullmatch(text) else 0


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
