from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from sidecar.errors import UnsupportedBodyMode
from sidecar.extproc.messages import read_event
from sidecar.extproc.pb.envoy.config.core.v3.base_pb2 import HeaderValue
from sidecar.extproc.pb.envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest
from sidecar.extproc.protocol import (
    AnswerHead,
    AnswerPiece,
    BodyMode,
    Observed,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseEvent,
)
from tests.unit.extproc.extproc_harness import body, headers, trailers


def test_headers() -> None:
    """Pseudo-headers become the head, the query is split off, values are bytes as latin-1, order stays."""
    message = headers(
        ("accept", "a"), ("x", "\xe4"), ("accept", "b"), method="GET", path="/p?q=1?2", mode=BodyMode.BUFFERED
    )
    event = read_event(message.SerializeToString())
    assert isinstance(event, RequestHeaders)
    assert (event.head.method, event.head.path, event.head.query) == ("GET", "/p", "q=1?2")
    assert event.head.headers == (("accept", "a"), ("x", "\xe4"), ("accept", "b"))
    assert event.mode is BodyMode.BUFFERED
    assert not event.end_of_stream


def test_headers_of_an_older_peer() -> None:
    """`value` counts where `raw_value` is empty."""
    message = headers()
    message.request_headers.headers.headers.append(HeaderValue(key="x-old", value="v"))
    event = read_event(message.SerializeToString())
    assert isinstance(event, RequestHeaders)
    assert event.head.get("x-old") == "v"


@given(st.binary(max_size=300), st.booleans(), st.booleans())
def test_body_pieces(data: bytes, end: bool, attributes: bool) -> None:
    """Every body message reads the same, plain or with more in it."""
    message = body(data, end=end)
    if attributes:
        message.attributes["envoy.filters.http.ext_proc"].fields["k"].string_value = "v"
    assert read_event(message.SerializeToString()) == RequestBody(data, end)


@pytest.mark.parametrize("field", ["grpc_message_compressed", "end_of_stream_without_message"])
def test_body_pieces_with_other_fields(field: str) -> None:
    """A field that takes the place of the end of the stream is not taken for it."""
    message = body(b"abc")
    setattr(message.request_body, field, True)
    assert read_event(message.SerializeToString()) == RequestBody(b"abc", end_of_stream=False)


@given(st.binary(max_size=40))
def test_any_octets(noise: bytes) -> None:
    """Whatever arrives is read as protobuf reads it, or refused as protobuf refuses it."""
    message = bytes((4 << 3 | 2,)) + noise
    try:
        expected = ProcessingRequest.FromString(message)
    except DecodeError:
        with pytest.raises(DecodeError):
            read_event(message)
        return
    if expected.WhichOneof("request") == "request_body" and not expected.observability_mode:
        content = expected.request_body
        assert read_event(message) == RequestBody(content.body, content.end_of_stream)


def test_large_body_piece_is_a_view() -> None:
    """Megabytes are not copied while they are read."""
    event = read_event(body(b"x" * 3_000_000, end=True).SerializeToString())
    assert event == RequestBody(b"x" * 3_000_000, end_of_stream=True)
    assert isinstance(event, RequestBody)
    assert isinstance(event.data, memoryview)


def test_trailers() -> None:
    """Trailers are known by name."""
    message = trailers(("x-sum", "1"), ("y", "2"))
    assert read_event(message.SerializeToString()) == RequestTrailers(("x-sum", "y"))


@pytest.mark.parametrize("part", ["response_headers", "response_body", "response_trailers"])
def test_response_parts(part: str) -> None:
    """Response messages are told apart."""
    message = ProcessingRequest()
    getattr(message, part).SetInParent()
    assert read_event(message.SerializeToString()) == ResponseEvent(part)  # type: ignore[arg-type]  # parametrised


@pytest.mark.parametrize("message", [headers(observability=True), body(b"x")], ids=["headers", "body"])
def test_observed_messages(message: ProcessingRequest) -> None:
    """In observability mode no message asks for an answer."""
    message.observability_mode = True
    assert read_event(message.SerializeToString()) == Observed()


def test_an_observed_message_that_cannot_be_read() -> None:
    """Another filter's metadata may be no text: what nobody waits for is passed over, not answered."""
    message = ProcessingRequest(observability_mode=True)
    message.metadata_context.filter_metadata["epd.sidecar"].fields["model"].string_value = "model"
    broken = message.SerializeToString().replace(b"model", b"\xff\xfe\xff\xfe\xff")
    assert read_event(broken) == Observed(None)
    message.observability_mode = False
    with pytest.raises(DecodeError):
        read_event(message.SerializeToString().replace(b"model", b"\xff\xfe\xff\xfe\xff"))


def test_the_head_of_an_observed_answer() -> None:
    """Status, fields in order, and the strings of the forwarded metadata; what is no string is empty."""
    message = ProcessingRequest(observability_mode=True)
    fields = message.response_headers.headers.headers
    fields.extend(
        HeaderValue(key=key, raw_value=value) for key, value in ((":status", b"200"), ("a", b"\xe4"))
    )
    record = message.metadata_context.filter_metadata["epd.sidecar"].fields
    record["outcome"].string_value = "ok"
    record["count"].number_value = 3
    head = AnswerHead(
        200,
        (("a", "\xe4"),),
        end_of_stream=False,
        metadata={"epd.sidecar": {"outcome": "ok", "count": ""}},
    )
    assert read_event(message.SerializeToString()) == Observed(head)


def test_the_body_of_an_observed_answer() -> None:
    """Pieces and their end; trailers are an end, too."""
    message = ProcessingRequest(observability_mode=True)
    message.response_body.body = b"x"
    assert read_event(message.SerializeToString()) == Observed(AnswerPiece(b"x", end_of_stream=False))
    message.response_body.end_of_stream = True
    assert read_event(message.SerializeToString()) == Observed(AnswerPiece(b"x", end_of_stream=True))
    message.response_trailers.SetInParent()
    assert read_event(message.SerializeToString()) == Observed(AnswerPiece(b"", end_of_stream=True))


@pytest.mark.parametrize("message", [ProcessingRequest(), headers(mode=BodyMode.NONE)], ids=["kind", "mode"])
def test_what_a_newer_envoy_may_send(message: ProcessingRequest) -> None:
    """An unknown message or body mode is refused in words, not with a stack trace."""
    if message.HasField("request_headers"):
        message.protocol_config.request_body_mode = 77  # type: ignore[assignment]  # not in the enum
    with pytest.raises(UnsupportedBodyMode, match="this version"):
        read_event(message.SerializeToString())
