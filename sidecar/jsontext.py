"""JSON as text: read only the members that matter, move the rest without parsing or copying it.

A client body or a render answer holds megabytes of base64 that nobody here looks into. Decoding to
`msgspec.Raw` leaves every untouched value as a slice of the received bytes, so unknown fields survive byte
for byte, and `segments` writes a new document as a list of slices instead of one more copy.
"""

from __future__ import annotations

import codecs
import re
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

T = TypeVar("T")

Raw = msgspec.Raw
NULL = Raw(b"null")
RawObject = dict[str, Raw]
Segment = bytes | memoryview
Segments = list[Segment]

_SPLIT_SIZE = 16 << 10
"""A raw value from this size on travels as its own slice; below, a copy is cheaper than one more write."""
_UTF8_WINDOW = 1 << 20
_LONGEST_NAME = 4096
_MEMBER = re.compile(rb'"[ \t\r\n]*:')
_MAX_MEMBERS = 500_000
_MAX_ITEMS = 4_000_000
_MEMBER_COST = 256
_ITEM_COST = 64
_ORDINARY_COST = 64 << 10

_object_decoder: msgspec.json.Decoder[RawObject] = msgspec.json.Decoder(RawObject)
_array_decoder: msgspec.json.Decoder[list[Raw]] = msgspec.json.Decoder(list[Raw])
_string_decoder: msgspec.json.Decoder[str] = msgspec.json.Decoder(str)
_any_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder()


class MalformedJson(ValueError):
    """The text is not the JSON it should be; the message says why, without quoting it."""


def read_document(text: bytes | bytearray) -> RawObject:
    """The members of a top-level JSON object; of duplicate keys the last one counts.

    Raises:
        MalformedJson: not strict UTF-8, a byte order mark, not JSON, nested too deeply, or not an object.
    """
    if text[:3] == codecs.BOM_UTF8:
        raise MalformedJson("it starts with a byte order mark; send plain UTF-8")
    check_utf8(text)
    return read_object(text)


def read_object(text: bytes | bytearray | Raw) -> RawObject:
    """The members of one JSON object, values untouched; raises MalformedJson."""
    return _decode(_object_decoder, text)


def read_array(text: bytes | bytearray | Raw) -> list[Raw]:
    """The items of one JSON array, untouched; raises MalformedJson."""
    return _decode(_array_decoder, text)


def read_string(text: bytes | bytearray | Raw) -> str:
    """The value of one JSON string; raises MalformedJson."""
    return _decode(_string_decoder, text)


def read_name(text: Raw) -> str:
    """The value of a JSON string that is a name, a type or the like: of at most 4096 bytes.

    Raises:
        MalformedJson: longer, or no string.
    """
    if len(memoryview(text)) > _LONGEST_NAME:
        raise MalformedJson(f"a name of more than {_LONGEST_NAME} bytes")
    return read_string(text)


def read_value(text: bytes | bytearray | Raw) -> Any:
    """The whole value as Python objects, for small members only; raises MalformedJson."""
    return _decode(_any_decoder, text)


def _decode(decoder: msgspec.json.Decoder[T], text: bytes | bytearray | Raw) -> T:
    try:
        return decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedJson(str(error)) from None
    except RecursionError:
        raise MalformedJson("nested too deeply") from None


def check_utf8(text: bytes | bytearray) -> None:
    """Raise MalformedJson unless the text is UTF-8: the decoder skips raw values unseen."""
    if text.isascii():
        return
    decoder = codecs.getincrementaldecoder("utf-8")()
    view = memoryview(text)
    try:
        for start in range(0, len(view), _UTF8_WINDOW):
            decoder.decode(bytes(view[start : start + _UTF8_WINDOW]))
    except UnicodeDecodeError as error:
        raise MalformedJson(f"it is not UTF-8 ({error.reason})") from None


def parsed_size(text: bytes | bytearray) -> int:
    """An upper bound for what the members and items of a document cost in memory once read, in bytes.

    Every member has a colon and every item but the first a comma; in strings they cost no memory, but there
    each of them costs prompt tokens. An ordinary request is not worth counting: 0.

    Raises:
        MalformedJson: more members or items than any prompt has; reading them would stall everybody else.
    """
    members, items = text.count(b":"), text.count(b",")
    if members > _MAX_MEMBERS:
        # Colons of text are no members; only where there are so many is a closer look worth its time.
        members = sum(1 for _ in islice(_MEMBER.finditer(text), _MAX_MEMBERS + 1))
    if members > _MAX_MEMBERS or items > _MAX_ITEMS:
        raise MalformedJson(f"more than {_MAX_MEMBERS} members or {_MAX_ITEMS} items")
    return max(0, members * _MEMBER_COST + items * _ITEM_COST - _ORDINARY_COST)


def opener(value: Raw) -> bytes:
    """The first character of a value: tells strings, objects and arrays apart without reading them."""
    return bytes(memoryview(value)[:1])


def is_null(value: Raw | None) -> bool:
    """Whether a member is absent or JSON null."""
    return value is None or value == NULL


def to_raw(value: Any) -> Raw:
    """The JSON text of a value."""
    return Raw(msgspec.json.encode(value))


def segments(value: Any) -> Segments:
    """The JSON text of a value, as slices to be sent one after the other.

    Objects and arrays may hold `Raw` values at any depth; large ones become slices of the text they came
    from.
    Integer arrays belong in here as `to_raw(...)`: items of a list are visited one by one.
    """
    writer = _SegmentWriter()
    writer.write(value)
    return writer.finish()


def size(body: Iterable[Segment]) -> int:
    """Length of a body in bytes."""
    return sum(len(segment) for segment in body)


def windows(body: Iterable[Segment], limit: int) -> Iterator[memoryview]:
    """The slices of a body again, none longer than `limit` bytes."""
    for segment in body:
        view = memoryview(segment)
        for start in range(0, len(view), limit):
            yield view[start : start + limit]


class _SegmentWriter:
    def __init__(self) -> None:
        self._done: Segments = []
        self._small = bytearray()

    def write(self, value: Any) -> None:
        small = self._small
        if isinstance(value, Raw):
            view = memoryview(value)
            if len(view) < _SPLIT_SIZE:
                small += view
            else:
                self._flush()
                self._done.append(view)
        elif isinstance(value, dict):
            opener = b"{"
            for key, item in value.items():
                small += opener + msgspec.json.encode(key) + b":"
                self.write(item)
                opener = b","
            small += b"}" if value else b"{}"
        elif isinstance(value, list):
            opener = b"["
            for item in value:
                small += opener
                self.write(item)
                opener = b","
            small += b"]" if value else b"[]"
        else:
            small += msgspec.json.encode(value)

    def finish(self) -> Segments:
        self._flush()
        return self._done

    def _flush(self) -> None:
        if self._small:
            self._done.append(bytes(self._small))
            self._small.clear()
