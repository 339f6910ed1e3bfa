from __future__ import annotations

import base64
import binascii
import json
import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.errors import BadRequest
from sidecar.multimodal.data_uri import (
    ALLOWED_TYPES,
    AUDIO_FORMATS,
    build_data_uri,
    check_base64,
    check_data_uri,
    is_data_uri,
)

IMAGES = ALLOWED_TYPES["image"]
PNG = "data:image/png;base64,"


def json_text(value: object) -> msgspec.Raw:
    return msgspec.Raw(json.dumps(value).encode())


def escape_all(text: str) -> msgspec.Raw:
    return msgspec.Raw(b'"' + b"".join(b"\\u%04x" % ord(character) for character in text) + b'"')


def value(raw: msgspec.Raw) -> str:
    text = json.loads(bytes(memoryview(raw)))
    assert isinstance(text, str)
    return text


@given(st.binary(min_size=1))
def test_built_uris_are_valid(data: bytes) -> None:
    """What is built holds exactly the data and passes the check as it is."""
    built = build_data_uri("image/png", data)
    assert value(built) == PNG + base64.b64encode(data).decode()
    checked = check_data_uri(built, IMAGES)
    assert checked.media_type == "image/png"
    assert checked.text is built


@pytest.mark.parametrize("size", [3 * (256 << 10) - 1, 3 * (256 << 10), 3 * (256 << 10) + 1, (5 << 20) + 2])
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_built_across_windows(size: int, kind: type[bytes | bytearray | memoryview]) -> None:
    """Sizes around the encoding window come out as one unbroken base64 text."""
    data = bytes(range(256)) * (size // 256 + 1)
    built = build_data_uri("video/mp4", kind(data[:size]))
    assert value(built) == "data:video/mp4;base64," + base64.b64encode(data[:size]).decode()


@given(
    st.text('AQgw+/=-_ \n\\"é', max_size=12)
    | st.binary(max_size=40).map(lambda data: base64.b64encode(data).decode())
)
def test_payload_check_agrees_with_a_strict_decoder(payload: str) -> None:
    """Exactly the payloads a strict decoder takes pass, plain or escaped."""
    try:
        valid = bool(binascii.a2b_base64(payload.encode("ascii"), strict_mode=True))
    except ValueError:
        valid = False
    for raw in (json_text(PNG + payload), escape_all(PNG + payload)):
        if valid:
            assert value(check_data_uri(raw, IMAGES).text) == PNG + payload
        else:
            with pytest.raises(BadRequest) as caught:
                check_data_uri(raw, IMAGES)
            assert caught.value.stage == "media"


@pytest.mark.parametrize("position", [0, (256 << 10) - 1, 256 << 10, (1 << 20) - 3])
@pytest.mark.parametrize("intruder", ["-", "=", " ", "\\n", "é", "%"])
def test_a_single_wrong_character_is_found(position: int, intruder: str) -> None:
    """One wrong character anywhere in a large payload, also at the edge of a window, is refused."""
    payload = bytearray(b"A" * (1 << 20))
    payload[position : position + len(intruder.encode())] = intruder.encode()
    with pytest.raises(BadRequest):
        check_data_uri(msgspec.Raw(b'"data:image/png;base64,' + payload + b'"'), IMAGES)


@pytest.mark.parametrize(
    "escaped",
    [
        rb'"data:image\/png;base64,\/\/8A"',
        rb'"d\u0061ta:image/png;base64,//8A"',
        rb'"data:image/png\u003bbase64\u002c//8A"',
        rb'"data:image/png;base64,//\u0038A"',
        rb'"DATA:Image/PNG;BASE64,//8A"',
        rb'"data:image/png;charset=utf-8;name=a.png;base64,//8A"',
        rb'"\u0064\u0061\u0074\u0061\u003A\u0069mage/png;base64,//8A"',
    ],
)
def test_other_spellings_become_canonical(escaped: bytes) -> None:
    """Escapes, capitals and parameters are gone from the text that replaces the value."""
    raw = msgspec.Raw(escaped)
    assert is_data_uri(raw)
    checked = check_data_uri(raw, IMAGES)
    assert (checked.media_type, bytes(memoryview(checked.text))) == (
        "image/png",
        b'"data:image/png;base64,//8A"',
    )


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("data:image/png;base64,", "empty"),
        ("data:;base64,QQ==", "no media type"),
        ("data:,QQ==", "no media type"),
        ("data:base64,QQ==", "'base64'"),
        ("data:image/svg+xml;base64,QQ==", "image/gif, image/jpeg, image/png, image/webp"),
        ("data:audio/wav;base64,QQ==", "'audio/wav'"),
        ("data:image/png,QQ==", "not base64"),
        ("data:image/png;base64;x=1,QQ==", "not base64"),
        ("data:image/png;base64", "comma"),
        ("data:image/png" + ";x=y" * 400 + ";base64,QQ==", "comma"),
        ("data:image/png;base64,QQ", "multiple of 4"),
        ("data:image/png;base64,QQ=", "multiple of 4"),
        ("data:image/png;base64,QQ==QQ==", "'='"),
        ("data:image/png;base64,Q===", "'='"),
        ("data:image/png;base64,====", "'='"),
        ("data:image/png;base64,_-_-", "'_'"),
        ("data:image/png;base64,QUJD\nQUJD", "line breaks"),
        ('data:image/png;base64,QUJ"', "characters"),
        ("data:image/png;base64,QUJ\\", "characters"),
        ("data:image/pñg;base64,QUJD", "characters"),
        ("https://example.com/a,b.png", "must start with data:"),
        ("", "comma"),
        (None, "string"),
        (7, "string"),
        ({"url": "x"}, "string"),
    ],
)
def test_refused(uri: object, says: str) -> None:
    """Each fault is a 400 of the media stage that names what is wrong."""
    with pytest.raises(BadRequest) as caught:
        check_data_uri(json_text(uri), IMAGES)
    assert says in caught.value.message
    assert caught.value.stage == "media"


def test_message_is_bounded() -> None:
    """A long or unprintable media type does not flood the message."""
    with pytest.raises(BadRequest) as caught:
        check_data_uri(msgspec.Raw('"data:é{};base64,QQ=="'.format("x" * 900).encode()), IMAGES)
    assert len(caught.value.message) < 250
    assert caught.value.message.isascii()


def test_large_uris_are_checked_in_constant_memory() -> None:
    """A canonical URI of 16 MB is checked without a copy of it."""
    raw = build_data_uri("image/png", bytes(12 << 20))
    tracemalloc.start()
    try:
        check_data_uri(raw, IMAGES)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b'"data:image/png;base64,QQ=="', True),
        (b'"dAtA:"', True),
        (rb'"\u0064\u0041\u0054\u0061\u003a,"', True),
        (rb'"data\u003A"', True),
        (b'"data"', False),
        (b'"https://example.com/data:"', False),
        (rb'"da\\ta:"', False),
        (b'"', False),
        ('"dätä:,"'.encode(), False),
        (b"null", False),
        (b'["data:"]', False),
    ],
)
def test_is_data_uri(text: bytes, expected: bool) -> None:
    """The scheme is recognised in any spelling JSON allows, and only as the scheme of a string."""
    assert is_data_uri(msgspec.Raw(text)) is expected


@given(st.binary(min_size=1))
def test_bare_base64(data: bytes) -> None:
    """Bare base64 passes as it is, and loses its escapes."""
    encoded = base64.b64encode(data).decode()
    raw = json_text(encoded)
    assert check_base64(raw) is raw
    assert bytes(memoryview(check_base64(escape_all(encoded)))) == bytes(memoryview(raw))


@pytest.mark.parametrize("bad", ["", "Q", "data:audio/wav;base64,QQ==", "QQ==\n", "Q\\==", 3, None])
def test_bare_base64_refused(bad: object) -> None:
    """A data URI, line breaks, missing padding and non-strings are not bare base64."""
    with pytest.raises(BadRequest) as caught:
        check_base64(json_text(bad))
    assert caught.value.stage == "media"


def test_audio_formats_are_allowed_types() -> None:
    """Every input_audio format has a media type that audio may have."""
    assert set(AUDIO_FORMATS) == {"wav", "mp3", "flac", "opus", "ogg", "webm"}
    assert set(AUDIO_FORMATS.values()) <= ALLOWED_TYPES["audio"]
