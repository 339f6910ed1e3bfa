"""Builds the messages Envoy reads, serialised; nothing here decides anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

from google.protobuf.struct_pb2 import Struct

from sidecar.extproc.pb.envoy.config.core.v3.base_pb2 import HeaderValue, HeaderValueOption
from sidecar.extproc.pb.envoy.service.ext_proc.v3.external_processor_pb2 import (
    CommonResponse,
    HeaderMutation,
    ImmediateResponse,
    ProcessingResponse,
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

_OVERWRITE = HeaderValueOption.HeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD


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
        request_id: echoed as `x-request-id`.
        metadata: the access-log record.
    """
    headers: list[tuple[str, str]] = [("content-type", "application/json"), ("x-request-id", request_id)]
    if error.retry_after is not None:
        headers.append(("retry-after", str(error.retry_after)))
    answer = ImmediateResponse(
        headers=HeaderMutation(set_headers=_options(headers)), body=body, details=error.code
    )
    status = HttpStatus()
    # The enum is open: any status of an upstream travels, named or not.
    setattr(status, "code", error.status)  # noqa: B010  # the stub wants a named value
    answer.status.CopyFrom(status)
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
        HeaderValueOption(
            header=HeaderValue(key=name, raw_value=value.encode("latin-1")),
            append_action=_OVERWRITE,
            keep_empty_value=True,
        )
        for name, value in headers
    ]
