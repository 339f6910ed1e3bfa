"""Bodies in protobuf's wire format, moved without being copied into and out of message objects.

A parsed message holds a second copy of its body and hands out a third. The few messages that carry megabytes
are therefore read and written here, field by field; everything else goes through the generated classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidecar.extproc.pb.envoy.service.ext_proc.v3.external_processor_pb2 import (
    BodyMutation,
    BodyResponse,
    CommonResponse,
    HttpBody,
    ProcessingRequest,
    ProcessingResponse,
    StreamedBodyResponse,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sidecar.jsontext import Segment

_LENGTH_DELIMITED = 2
_CONTINUES = 0x80

_IN_BODY_MUTATION = (
    ProcessingResponse.REQUEST_BODY_FIELD_NUMBER,
    BodyResponse.RESPONSE_FIELD_NUMBER,
    CommonResponse.BODY_MUTATION_FIELD_NUMBER,
)
_STREAMED = (*_IN_BODY_MUTATION, BodyMutation.STREAMED_RESPONSE_FIELD_NUMBER)
_REPLACED = (*_IN_BODY_MUTATION, BodyMutation.BODY_FIELD_NUMBER)
_STREAMED_END = bytes((StreamedBodyResponse.END_OF_STREAM_FIELD_NUMBER << 3, 1))


def _tag(number: int) -> bytes:
    return bytes((number << 3 | _LENGTH_DELIMITED,))


_REQUEST_BODY = _tag(ProcessingRequest.REQUEST_BODY_FIELD_NUMBER)
_BODY = _tag(HttpBody.BODY_FIELD_NUMBER)
_BODY_END = bytes((HttpBody.END_OF_STREAM_FIELD_NUMBER << 3, 1))


_OBSERVED = ProcessingRequest.OBSERVABILITY_MODE_FIELD_NUMBER << 3


def body_piece(message: bytes) -> tuple[memoryview, bool] | None:
    """The body and the end of stream of a serialised ProcessingRequest, without copying the body.

    Returns:
        None unless the message is the plain case: a request body, maybe its end, and nothing else. Envoy
        serialises in field order, so that is every body message without attributes or metadata.
    """
    if not message.startswith(_REQUEST_BODY):
        return None
    size, position = _read_varint(message, 1)
    if position + size != len(message) or not message.startswith(_BODY, position):
        return None
    size, position = _read_varint(message, position + 1)
    end = position + size
    if end == len(message):
        return memoryview(message)[position:end], False
    if end + len(_BODY_END) == len(message) and message.endswith(_BODY_END):
        return memoryview(message)[position:end], True
    return None


def is_observed(message: bytes) -> bool:
    """Whether a serialised ProcessingRequest comes from an observing filter, whatever else it holds."""
    position = 0
    while position < len(message):
        tag, position = _read_varint(message, position)
        match tag & 7:
            case 0:
                value, position = _read_varint(message, position)
                if tag == _OBSERVED:
                    return value == 1
            case 1:
                position += 8
            case 2:
                size, position = _read_varint(message, position)
                position += size
            case 5:
                position += 4
            case _:
                return False
    return False


def streamed_body(data: Segment, *, end_of_stream: bool) -> bytes:
    """A ProcessingResponse with one piece of a full-duplex request body."""
    end = _STREAMED_END if end_of_stream else b""
    field = _tag(StreamedBodyResponse.BODY_FIELD_NUMBER) + _varint(len(data))
    return b"".join((_prefix(_STREAMED, len(field) + len(data) + len(end)), field, data, end))


def with_replaced_body(message: ProcessingResponse, body: Sequence[Segment]) -> bytes:
    """`message`, a request body reply, with a new body in it.

    Occurrences of one message field merge (protobuf encoding, "Last One Wins"), so the body follows as a
    second occurrence of `request_body`.
    """
    size = sum(map(len, body))
    return b"".join((message.SerializeToString(), _prefix(_REPLACED, size), *body))


def _prefix(path: Sequence[int], size: int) -> bytes:
    """What stands before `size` octets that are the field at the end of `path`."""
    prefix = b""
    for number in reversed(path):
        prefix = _tag(number) + _varint(size + len(prefix)) + prefix
    return prefix


def _varint(value: int) -> bytes:
    octets = bytearray()
    while value >= _CONTINUES:
        octets.append(value & (_CONTINUES - 1) | _CONTINUES)
        value >>= 7
    octets.append(value)
    return bytes(octets)


def _read_varint(message: bytes, position: int) -> tuple[int, int]:
    """The number at `position` and the position after it; of a truncated one, a number that fits nowhere."""
    value = shift = 0
    while position < len(message):
        octet = message[position]
        position += 1
        value |= (octet & (_CONTINUES - 1)) << shift
        if octet < _CONTINUES:
            return value, position
        shift += 7
    return len(message) + 1, position
