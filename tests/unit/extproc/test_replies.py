from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.errors import BadRequest, Overloaded, SidecarError, StepRejected
from sidecar.extproc import replies
from sidecar.extproc.pb.envoy.config.core.v3.base_pb2 import HeaderValueOption
from sidecar.extproc.pb.envoy.service.ext_proc.v3.external_processor_pb2 import (
    HeaderMutation,
    ProcessingResponse,
)
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
from sidecar.observability.record import AccessRecord

if TYPE_CHECKING:
    from google.protobuf.struct_pb2 import Struct

CHANGE = HeaderChange((("x-a", "\xe4"), ("x-empty", "")), ("gone",), clear_route_cache=True)


def built(reply: Reply, metadata: Struct | None = None) -> ProcessingResponse:
    """The reply as Envoy reads it."""
    return ProcessingResponse.FromString(replies.build(reply, metadata))


def check_mutation(mutation: HeaderMutation) -> None:
    first, second = mutation.set_headers
    assert (first.header.key, first.header.raw_value, first.header.value) == ("x-a", b"\xe4", "")
    overwrite = HeaderValueOption.HeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD
    assert {first.append_action, second.append_action} == {overwrite}
    assert second.keep_empty_value
    assert list(mutation.remove_headers) == ["gone"]


def test_headers_reply() -> None:
    """Values are raw octets that overwrite; removals and the route flag travel along."""
    common = built(HeadersReply(CHANGE)).request_headers.response
    check_mutation(common.header_mutation)
    assert common.clear_route_cache


def test_chunk_reply() -> None:
    """A full-duplex piece is a streamed response, the only form Envoy accepts there."""
    for data in (b"abc", memoryview(b"abc")):
        mutation = built(ChunkReply(data, end_of_stream=True)).request_body.response.body_mutation
        assert mutation.WhichOneof("mutation") == "streamed_response"
        assert (mutation.streamed_response.body, mutation.streamed_response.end_of_stream) == (b"abc", True)


def test_replace_body_reply() -> None:
    """A buffered rewrite is one message with headers, route and body."""
    common = built(ReplaceBodyReply(CHANGE, [b"n", memoryview(b"ew")])).request_body.response
    check_mutation(common.header_mutation)
    assert common.clear_route_cache
    assert common.body_mutation.body == b"new"


def test_trailers_reply() -> None:
    """Control headers are removed from trailers, too."""
    message = built(TrailersReply(("prefer",)))
    assert message.WhichOneof("response") == "request_trailers"
    assert list(message.request_trailers.header_mutation.remove_headers) == ["prefer"]


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (HeadersReply(HeaderChange()), "request_headers"),
        (ChunkReply(b"", end_of_stream=False), "request_body"),
        (KeepBodyReply(), "request_body"),
        (TrailersReply(), "request_trailers"),
        (ResponseReply("response_headers"), "response_headers"),
        (ResponseReply("response_body"), "response_body"),
        (ResponseReply("response_trailers"), "response_trailers"),
    ],
)
def test_a_reply_that_changes_nothing_is_still_one(reply: Reply, kind: str) -> None:
    """Envoy refuses a message without a kind, so the empty ones have theirs on the wire."""
    message = built(reply)
    assert message.WhichOneof("response") == kind
    assert not message.HasField("dynamic_metadata")


def test_metadata() -> None:
    """The record is one namespace of strings, empty ones included."""
    record = AccessRecord(request_id="r", prompt_tokens=3_000_000)
    struct = replies.metadata_struct("epd.sidecar", record.strings())
    message = built(KeepBodyReply(), struct)
    fields = message.dynamic_metadata.fields["epd.sidecar"].struct_value.fields
    assert {name: value.string_value for name, value in fields.items()} == record.strings()
    assert {value.WhichOneof("kind") for value in fields.values()} == {"string_value"}
    assert fields["prompt_tokens"].string_value == "3000000"


@pytest.mark.parametrize(
    ("error", "status", "retry"),
    [
        (BadRequest("no"), 400, None),
        (Overloaded("full"), 503, b"1"),
        (StepRejected("media", 418, "no"), 418, None),
    ],
)
def test_immediate(error: SidecarError, status: int, retry: bytes | None) -> None:
    """An error is JSON with its status, named or not, its code as details, and the request id."""
    struct = replies.metadata_struct("ns", {"a": "b"})
    message = ProcessingResponse.FromString(replies.immediate(error, b"{}", "id-1", struct))
    answer = message.immediate_response
    assert (answer.status.code, answer.body, answer.details) == (status, b"{}", error.code)
    fields = {option.header.key: option.header.raw_value for option in answer.headers.set_headers}
    expected = {"content-type": b"application/json", "x-request-id": b"id-1", "request-id": b"id-1"}
    assert fields == expected | ({} if retry is None else {"retry-after": retry})
    assert message.dynamic_metadata == struct


@given(st.binary(max_size=300) | st.integers(60_000, 70_000).map(bytes), st.booleans(), st.booleans())
def test_chunks_are_what_protobuf_writes(data: bytes, end: bool, described: bool) -> None:
    """A piece of any size is, the message the generated classes would write."""
    metadata = replies.metadata_struct("ns", {"a": "b"}) if described else None
    expected = ProcessingResponse(dynamic_metadata=metadata)
    piece = expected.request_body.response.body_mutation.streamed_response
    piece.body, piece.end_of_stream = data, end
    assert built(ChunkReply(memoryview(data), end), metadata) == expected


@given(st.lists(st.binary(max_size=300), max_size=4), st.booleans())
def test_replaced_bodies_are_what_protobuf_writes(segments: list[bytes], described: bool) -> None:
    """The body joins the headers and the metadata of the same reply."""
    metadata = replies.metadata_struct("ns", {"a": "b"}) if described else None
    serialised = replies.build(ReplaceBodyReply(CHANGE, [*segments]), metadata)
    message = ProcessingResponse.FromString(serialised)
    common = message.request_body.response
    check_mutation(common.header_mutation)
    assert common.clear_route_cache
    assert common.body_mutation.WhichOneof("mutation") == "body"
    assert common.body_mutation.body == b"".join(segments)
    assert message.HasField("dynamic_metadata") == described


FIELDS = (
    ("content-type", "text/event-stream"),
    ("x-list", "a"),
    ("set-cookie", "one=1"),
    ("x-list", "\xe4"),
    ("set-cookie", "two=2"),
    ("x-envoy-upstream-service-time", "3"),
    ("x-forwarded-by", "w"),
    ("host", "w"),
)
"""What a worker answers, with fields that Envoy refuses to take."""


def test_a_served_answer_keeps_every_field() -> None:
    """The first value overwrites what Envoy has, further ones are added in the way Envoy honours."""
    struct = replies.metadata_struct("ns", {"a": "b"})
    message = ProcessingResponse.FromString(replies.served(418, FIELDS, memoryview(b"body"), struct))
    answer = message.immediate_response
    assert (answer.status.code, answer.body, answer.details) == (418, b"body", "via_conditional_decode")
    options = [
        (o.header.key, o.header.raw_value, o.append.value, o.append_action)
        for o in answer.headers.set_headers
    ]
    overwrite = HeaderValueOption.HeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD
    assert options == [
        ("content-type", b"text/event-stream", False, overwrite),
        ("x-list", b"a", False, overwrite),
        ("set-cookie", b"one=1", False, overwrite),
        ("x-list", b"\xe4", True, 0),
        ("set-cookie", b"two=2", True, 0),
    ]
    assert message.dynamic_metadata == struct


def test_a_served_head_has_one_field_per_name() -> None:
    """Lists are joined, because Envoy keeps only the last of several; set-cookie cannot be joined."""
    struct = replies.metadata_struct("ns", {"a": "b"})
    message = ProcessingResponse.FromString(replies.served_head(200, FIELDS, struct))
    fields = message.streamed_immediate_response.headers_response.headers.headers
    assert [(field.key, field.raw_value) for field in fields] == [
        (":status", b"200"),
        ("content-type", b"text/event-stream"),
        ("x-list", b"a, \xe4"),
        ("set-cookie", b"two=2"),
    ]
    assert message.dynamic_metadata == struct


@pytest.mark.parametrize("end", [False, True])
def test_a_served_piece(end: bool) -> None:
    """Data and end of stream; metadata only where there is some."""
    message = ProcessingResponse.FromString(replies.served_piece(memoryview(b"data"), end_of_stream=end))
    piece = message.streamed_immediate_response.body_response
    assert (piece.body, piece.end_of_stream) == (b"data", end)
    assert not message.HasField("dynamic_metadata")
