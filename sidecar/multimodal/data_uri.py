"""Data URIs (RFC 2397) as JSON text: checked and built without a second copy of their megabytes.

The workers split a data URI at its first comma and take everything before it literally, so what leaves here
always has the canonical form `data:<media type>;base64,<payload>`.
"""

from __future__ import annotations

import binascii
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from sidecar.errors import BadRequest
from sidecar.jsontext import MalformedJson, read_string

if TYPE_CHECKING:
    from collections.abc import Mapping

ALLOWED_TYPES: Mapping[str, frozenset[str]] = {
    "image": frozenset({"image/jpeg", "image/png", "image/gif", "image/webp"}),
    "audio": frozenset(
        {
            "audio/wav",
            "audio/x-wav",
            "audio/mpeg",
            "audio/mp3",
            "audio/flac",
            "audio/x-flac",
            "audio/ogg",
            "audio/opus",
            "audio/webm",
        }
    ),
    "video": frozenset({"video/mp4", "video/webm", "video/quicktime", "video/mpeg", "video/ogg"}),
}
"""Media types a request may carry, per modality."""

_MISSPELLINGS = {"image/jpg": "image/jpeg"}

AUDIO_FORMATS: Mapping[str, str] = {
    "wav": "audio/wav",
    "mp3": "audio/mpeg",
    "flac": "audio/flac",
    "opus": "audio/opus",
    "ogg": "audio/ogg",
    "webm": "audio/webm",
}
"""Media type of each `input_audio.format`."""

_ALPHABET = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
_CHECK_WINDOW = 256 << 10
_BUILD_WINDOW = 768 << 10
"""Divisible by 3: every window but the last encodes without padding."""
_MAX_HEADER = 1024
"""Bytes in which the comma of a data URI must appear; keeps the search out of the payload."""
_SCHEME = "data:"
_SCHEME_AS_JSON = re.compile(rb'"((?:\\u[0-9a-fA-F]{4}|\\[^u]|[^"\\]){5})')
_LONGEST_SCHEME = 1 + 6 * len(_SCHEME)
"""The opening quote and five characters of six bytes (`\\u0064`) each."""
_SHOWN = 64
"""Characters of a client's value that an error message repeats."""


@dataclass(frozen=True, slots=True)
class CheckedDataUri:
    """A valid data URI.

    Attributes:
        media_type: lower-case, without parameters.
        text: JSON string without escapes, in canonical form; the very object that was checked when it
            already had that form.
    """

    media_type: str
    text: msgspec.Raw


def is_data_uri(raw: msgspec.Raw) -> bool:
    """Whether a JSON value is a string with the scheme `data:`, however it is escaped or capitalised."""
    scheme = _SCHEME_AS_JSON.match(bytes(memoryview(raw)[:_LONGEST_SCHEME]))
    if scheme is None:
        return False
    try:
        return read_string(b'"' + scheme[1] + b'"').lower() == _SCHEME
    except MalformedJson:
        return False


def with_misspellings(types: frozenset[str]) -> frozenset[str]:
    """The media types, and what many clients write for them."""
    return types | {written for written, meant in _MISSPELLINGS.items() if meant in types}


def check_data_uri(raw: msgspec.Raw, allowed: frozenset[str]) -> CheckedDataUri:
    """Check one data URI: a media type in `allowed`, `;base64`, and a payload that is padded standard base64.

    Takes constant extra memory (two windows of 256 KiB) unless the text has escapes or is not canonical.

    Args:
        raw: JSON text of the string, with its quotes; may be tens of MB.
        allowed: lower-case media types.

    Raises:
        BadRequest: stage `media`; the message never quotes the payload.
    """
    try:
        return _check_plain_uri(raw, allowed)
    except _Escaped:
        return _check_plain_uri(_without_escapes(raw), allowed)


def check_base64(raw: msgspec.Raw) -> msgspec.Raw:
    """Check a JSON string that is bare base64 (`input_audio.data`, an Anthropic `source.data`).

    Returns:
        The JSON text without escapes: `raw` itself when it has none.

    Raises:
        BadRequest: stage `media`; not a string, empty, or not padded standard base64.
    """
    try:
        _check_payload(_characters(raw))
    except _Escaped:
        raw = _without_escapes(raw)
        _check_payload(_characters(raw))
    return raw


def build_data_uri(content_type: str, data: bytes | bytearray | memoryview) -> msgspec.Raw:
    """The data URI of `data` as JSON text, encoded in one pass into a buffer of the final size.

    Args:
        content_type: media type without parameters, from `ALLOWED_TYPES`.
        data: the media, in bytes.
    """
    head = f'"{_SCHEME}{content_type};base64,'.encode("ascii")
    text = bytearray(len(head) + (len(data) + 2) // 3 * 4 + 1)
    position = len(head)
    text[:position] = head
    view = memoryview(data)
    for start in range(0, len(view), _BUILD_WINDOW):
        encoded = binascii.b2a_base64(view[start : start + _BUILD_WINDOW], newline=False)
        text[position : position + len(encoded)] = encoded
        position += len(encoded)
    text[-1:] = b'"'
    return msgspec.Raw(text)


class _Escaped(Exception):
    """The JSON text holds escapes, so its bytes are not the string's characters."""


def _characters(raw: msgspec.Raw) -> memoryview:
    """What stands between the quotes."""
    view = memoryview(raw)
    if bytes(view[:1]) != b'"':
        raise _refused("media must be given as a string")
    return view[1:-1]


def _without_escapes(raw: msgspec.Raw) -> msgspec.Raw:
    """The same string as JSON text without escapes; possible because base64 and media types need none."""
    try:
        text = read_string(raw)
    except MalformedJson:
        raise _refused("media is not a valid JSON string") from None
    if not (text.isascii() and text.isprintable()) or '"' in text or "\\" in text:
        raise _refused(
            "media holds characters that are not part of base64; send standard base64 without line breaks"
        )
    return msgspec.Raw(b'"%b"' % text.encode("ascii"))


def _check_plain_uri(raw: msgspec.Raw, allowed: frozenset[str]) -> CheckedDataUri:
    characters = _characters(raw)
    header, comma, _ = bytes(characters[:_MAX_HEADER]).partition(b",")
    if b"\\" in header:
        raise _Escaped
    if not comma:
        raise _refused(
            f"data URI without a comma in its first {_MAX_HEADER} characters; send data:<type>;base64,<data>"
        )
    media_type = _media_type(header, allowed)
    payload = characters[len(header) + 1 :]
    _check_payload(payload)
    canonical = f"{_SCHEME}{media_type};base64".encode()
    if header != canonical:
        raw = msgspec.Raw(b"".join((b'"', canonical, b",", payload, b'"')))
    return CheckedDataUri(media_type, raw)


def _media_type(header: bytes, allowed: frozenset[str]) -> str:
    """The media type of `data:<media type>[;<parameter>]*;base64`."""
    text = header.decode("latin-1").lower()
    if not text.startswith(_SCHEME):
        raise _refused("data URI must start with data:")
    media_type, *parameters = text.removeprefix(_SCHEME).split(";")
    if not media_type:
        raise _refused("data URI has no media type; send data:<type>;base64,<data>")
    if media_type not in allowed:
        raise _refused(
            f"data URI has media type {media_type[:_SHOWN]!a}; allowed here: {', '.join(sorted(allowed))}"
        )
    if not parameters or parameters[-1] != "base64":
        raise _refused(f"data URI is not base64; send data:{media_type};base64,<data>")
    return media_type


def _check_payload(payload: memoryview) -> None:
    """Refuse what is not padded standard base64; raises _Escaped when the bytes are not the characters.

    Deleting the alphabet from a window and looking at the rest takes a fifth of the time of decoding it.
    """
    if not payload:
        raise _refused("media is empty; send its bytes as base64")
    end = bytes(payload[-2:])
    body = payload[: len(payload) - (2 if end == b"==" else end.count(b"=", 1))]
    for start in range(0, len(body), _CHECK_WINDOW):
        foreign = bytes(body[start : start + _CHECK_WINDOW]).translate(None, _ALPHABET)
        if b"\\" in foreign:
            raise _Escaped
        if foreign:
            raise _refused(
                f"media holds {chr(foreign[0])!a}, which standard base64 does not have there; encode it again"
            )
    if len(payload) % 4:
        raise _refused("base64 of media has a length that is no multiple of 4; pad it with =")


def _refused(message: str) -> BadRequest:
    return BadRequest(message, stage="media")
