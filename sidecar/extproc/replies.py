"""Builds the messages Envoy reads, serialised; nothing here decides anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

from google.protobuf.struct_pb2 import Struct
from google.protobuf.wrappers_pb2 import BoolValue

from sidecar.extproc.pb.envoy.config.core.v3.base_pb2 import (
    HeaderMap,
    HeaderValue,
    HeaderValueOption,
)
from sidecar.extproc.pb.envoy.service.ext_proc.v3.external_processor_pb2 import (
    CommonResponse,
    HeaderMutation,
    HttpHeaders,
    ImmediateResponse,
    ProcessingResponse,
    StreamedBodyResponse,
    StreamedImmediateResponse,
)
from sidecar.extproc.pb.envoy.type.v3.http_status_pb2 import HttpStatus
from sidecar.extproc.protocol import (
    ChunkReply,
    HeaderChange,
    HeadersReply,
    KeepBodyReply,
    ReplaceBodyReply,
    Reply,
    ResponseReply,
    TrailersReply,
)
from sidecar.extproc.wire import streamed_body, with_replaced_body

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from sidecar.errors import SidecarError
    from sidecar.http import HeaderPairs
    from sidecar.jsontext import Segment

_OVERWRITE = HeaderValueOption.HeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD
_ENVOYS_OWN = ("x-envoy-", "x-forwarded-")
"""How headers begin that Envoy's mutation rules refuse; a single one costs the whole local answer."""
_SERVED = "via_conditional_decode"
"""RESPONSE_CODE_DETAILS of an answer served whole; a streamed one has no place for details."""


def build(reply: Reply, metadata: Struct | None = None) -> bytes:
    """The serialised message for one reply of the exchange, with dynamic metadata if there is any."""
    message = ProcessingResponse(dynamic_metadata=metadata)
    match reply:
        case HeadersReply():
            message.request_headers.response.CopyFrom(_common(reply.change))
        case ChunkReply():
            chunk = streamed_body(reply.data, end_of_stream=reply.end_of_stream)
            return chunk if metadata is None else chunk + message.SerializeToString()
        case KeepBodyReply():
            message.request_body.SetInParent()
        case ReplaceBodyReply():
            message.request_body.response.CopyFrom(_common(reply.change))
            return with_replaced_body(message, reply.body)
        case TrailersReply():
            message.request_trailers.header_mutation.remove_headers.extend(reply.remove_trailers)
        case ResponseReply():
            getattr(message, reply.part).SetInParent()
    return message.SerializeToString()


def immediate(error: SidecarError, body: bytes, request_id: str, metadata: Struct) -> bytes:
    """The local answer for a failed request.

    Args:
        error: gives status, `details` (its code) and, where it has one, `retry-after` in seconds.
        body: the error as JSON, in the shape of the client's API.
        request_id: echoed as `x-request-id` and `request-id`.
        metadata: the access-log record.
    """
    headers = [
        ("content-type", "application/json"),
        ("x-request-id", request_id),
        ("request-id", request_id),  # where Anthropic's clients look
    ]
    if error.retry_after is not None:
        headers.append(("retry-after", str(error.retry_after)))
    return _local_answer(error.status, _options(headers), body, error.code, metadata)


def served(status: int, headers: HeaderPairs, body: Segment, metadata: Struct) -> bytes:
    """The answer of a worker as a local answer, whole.

    Args:
        status: its status.
        headers: its header fields; one name may have several. Those that are Envoy's to set are left out.
        body: its body.
        metadata: the access-log record.
    """
    return _local_answer(status, _options_of_all(_settable(headers)), bytes(body), _SERVED, metadata)


def served_head(status: int, headers: HeaderPairs, metadata: Struct) -> bytes:
    """The head of a local answer whose body follows in `served_piece` messages; arguments as for `served`."""
    # Of fields with one name Envoy 1.40 keeps the last only.
    fields = {":status": str(status), **_combined(_settable(headers))}
    head = HttpHeaders(headers=HeaderMap(headers=[_field(name, value) for name, value in fields.items()]))
    return ProcessingResponse(
        streamed_immediate_response=StreamedImmediateResponse(headers_response=head),
        dynamic_metadata=metadata,
    ).SerializeToString()


def served_piece(data: Segment, *, end_of_stream: bool, metadata: Struct | None = None) -> bytes:
    """A piece of the body of a streamed local answer."""
    piece = StreamedBodyResponse(body=bytes(data), end_of_stream=end_of_stream)
    return ProcessingResponse(
        streamed_immediate_response=StreamedImmediateResponse(body_response=piece),
        dynamic_metadata=metadata,
    ).SerializeToString()


def _settable(headers: HeaderPairs) -> HeaderPairs:
    return tuple(
        (name, value) for name, value in headers if name != "host" and not name.startswith(_ENVOYS_OWN)
    )


def _local_answer(
    status: int, headers: list[HeaderValueOption], body: bytes, details: str, metadata: Struct
) -> bytes:
    answer = ImmediateResponse(headers=HeaderMutation(set_headers=headers), body=body, details=details)
    code = HttpStatus()
    # The enum is open: any status of an upstream travels, named or not.
    setattr(code, "code", status)  # noqa: B010  # the stub wants a named value
    answer.status.CopyFrom(code)
    return ProcessingResponse(immediate_response=answer, dynamic_metadata=metadata).SerializeToString()


def metadata_struct(namespace: str, values: Mapping[str, str]) -> Struct:
    """Dynamic metadata: `values` as strings under one namespace."""
    struct = Struct()
    fields = struct.fields[namespace].struct_value.fields
    for key, value in values.items():
        fields[key].string_value = value
    return struct


def _common(change: HeaderChange) -> CommonResponse:
    return CommonResponse(
        header_mutation=HeaderMutation(
            set_headers=_options(change.set_headers), remove_headers=change.remove_headers
        ),
        clear_route_cache=change.clear_route_cache,
    )


def _options(headers: HeaderPairs | Iterable[tuple[str, str]]) -> list[HeaderValueOption]:
    return [
        HeaderValueOption(header=_field(name, value), append_action=_OVERWRITE, keep_empty_value=True)
        for name, value in headers
    ]


def _options_of_all(headers: HeaderPairs) -> list[HeaderValueOption]:
    """The first field of a name replaces what Envoy has, further ones are added to it."""
    names: set[str] = set()
    options = []
    for name, value in headers:
        if name in names:
            # Envoy 1.40 adds for this older field only: here the zero append_action overwrites.
            added = BoolValue(value=True)
            options.append(HeaderValueOption(header=_field(name, value), append=added, keep_empty_value=True))
        else:
            options += _options([(name, value)])
            names.add(name)
    return options


def _combined(headers: HeaderPairs) -> dict[str, str]:
    """One value per name, as a list where there were several; of set-cookie, which is no list, the last."""
    combined: dict[str, str] = {}
    for name, value in headers:
        listed = name in combined and name != "set-cookie"
        combined[name] = f"{combined[name]}, {value}" if listed else value
    return combined


def _field(name: str, value: str) -> HeaderValue:
    return HeaderValue(key=name, raw_value=value.encode("latin-1"))
