from __future__ import annotations

import json
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.jsontext import (
    NULL,
    MalformedJson,
    Raw,
    is_null,
    read_array,
    read_document,
    read_object,
    read_string,
    read_value,
    segments,
    size,
    to_raw,
    windows,
)

LARGE = 64 << 10
"""Above the size from which a raw value travels as its own slice."""

whitespace = st.text(" \t\r\n", max_size=2)
numbers = st.from_regex(r"-?(0|[1-9][0-9]{0,25})(\.[0-9]{1,5})?([eE][+-]?[0-9]{1,2})?", fullmatch=True)
strings = st.one_of(
    st.text(max_size=8).map(lambda text: json.dumps(text, ensure_ascii=False)),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8).map(json.dumps),
)


def _array(items: list[str], gap: str) -> str:
    return f"[{gap}{f'{gap},{gap}'.join(items)}{gap}]"


def _object(members: list[tuple[str, str]], gap: str) -> str:
    return f"{{{gap}{f'{gap},'.join(f'{key}{gap}:{value}' for key, value in members)}{gap}}}"


json_texts = st.recursive(
    st.one_of(numbers, strings, st.sampled_from(["null", "true", "false"])),
    lambda inner: st.one_of(
        st.builds(_array, st.lists(inner, max_size=4), whitespace),
        st.builds(_object, st.lists(st.tuples(strings, inner), max_size=4), whitespace),
    ),
    max_leaves=12,
)

trees = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**63 - 1),
        st.text(max_size=6),
        json_texts.map(lambda text: Raw(text.encode())),
        st.sampled_from([Raw(b'"%b"' % (b"x" * LARGE)), Raw(b"[%b1]" % (b"1," * LARGE))]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=10,
)


def _exact(text: bytes) -> Any:
    """The value with every number as the text it was written as."""
    return json.loads(text, parse_int=str, parse_float=str)


@given(st.lists(st.tuples(st.text(max_size=5), json_texts, whitespace), max_size=5))
def test_values_of_a_document_are_kept_byte_for_byte(members: list[tuple[str, str, str]]) -> None:
    """Every value of a document is its text, without the whitespace around it; the last duplicate counts."""
    text = ",".join(f"{gap}{json.dumps(key)}{gap}:{gap}{value}{gap}" for key, value, gap in members)
    read = read_document(b"{%b}" % text.encode())
    assert {key: bytes(value) for key, value in read.items()} == {
        key: value.encode() for key, value, _ in members
    }


@given(json_texts)
def test_a_document_written_again_keeps_the_spelling_of_numbers(text: str) -> None:
    """Reading and writing a document changes neither the digits of a number nor the order of keys."""
    document = f'{{"a": {text}, "b": 1.50E+02}}'.encode()
    again = b"".join(segments(read_document(document)))
    assert _exact(again) == _exact(document)
    assert list(json.loads(again)) == ["a", "b"]


@given(st.lists(json_texts, max_size=6), whitespace)
def test_array_items_are_kept_byte_for_byte(items: list[str], gap: str) -> None:
    """Items of an array are their text, in order."""
    assert [bytes(item) for item in read_array(_array(items, gap).encode())] == [
        item.encode() for item in items
    ]


def test_of_duplicate_keys_the_last_one_counts_however_they_are_escaped() -> None:
    """A key written with escapes is the same key."""
    read = read_document(rb'{"kv": 1, "\u006bv": 2, "k\u0076": 3}')
    assert {key: bytes(value) for key, value in read.items()} == {"kv": b"3"}


@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_a_byte_order_mark_is_refused(kind: type[bytes | bytearray]) -> None:
    """A body that starts with a byte order mark is not accepted as JSON."""
    with pytest.raises(MalformedJson, match="byte order mark"):
        read_document(kind(b'\xef\xbb\xbf{"a":1}'))


@given(st.binary(min_size=1, max_size=6).map(lambda text: bytes(byte | 0x80 for byte in text)))
def test_utf8_is_strict_in_values_nobody_reads(payload: bytes) -> None:
    """A document is accepted exactly when its bytes are UTF-8, also inside untouched values."""
    document = b'{"untouched":["%b"]}' % payload
    try:
        payload.decode()
    except UnicodeDecodeError:
        with pytest.raises(MalformedJson, match="UTF-8"):
            read_document(document)
    else:
        assert bytes(read_document(document)["untouched"]) == b'["%b"]' % payload


@pytest.mark.parametrize("before", range(4))
def test_utf8_is_checked_across_the_windows_of_a_large_body(before: int) -> None:
    """A character that lies across two windows of the check is a character, half of one is none."""
    head = b'{"a":"' + b"x" * ((1 << 20) - 6 - before)
    assert len(read_document(head + "😀".encode() + b'"}')) == 1
    for broken in ("😀".encode()[:3], "😀".encode()[1:], b"\xff"):
        with pytest.raises(MalformedJson, match="UTF-8"):
            read_document(head + broken + b'"}')


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b" ",
        b"{",
        b"[]",
        b"null",
        b'"a"',
        b"1",
        b"{}{}",
        b'{"a":1}x',
        b'{"a":1}\x00',
        b'{"a":1,}',
        b'{"a":[1,]}',
        b"{a:1}",
        b"{'a':1}",
        b'{"a" 1}',
        b'{"a":NaN}',
        b'{"a":-Infinity}',
        b'{"a":01}',
        b'{"a":+1}',
        b'{"a":.5}',
        b'{"a":1.}',
        b'{"a":0x10}',
        b'{"a":tru}',
        b'{"a":"\n"}',
        b'{"a":"\\x"}',
        b'{"a":"\\ud800"}',
        b'{"a":"\\udc00\\ud800"}',
        b'{"a":"open}',
        b'{"a":1}//',
    ],
)
def test_what_is_not_one_json_object_is_refused(text: bytes) -> None:
    """Anything but exactly one JSON object is refused, and the message does not quote the text."""
    with pytest.raises(MalformedJson):
        read_document(text)


@pytest.mark.parametrize("opener", [b"[", b'{"a":'])
def test_depth_is_bounded(opener: bytes) -> None:
    """A document nested a hundred thousand deep is refused, it does not exhaust the stack."""
    closer = b"]" if opener == b"[" else b"}"
    document = b'{"a":%b1%b}' % (opener * 100_000, closer * 100_000)
    with pytest.raises(MalformedJson, match="nested too deeply"):
        read_document(document)
    with pytest.raises(MalformedJson, match="nested too deeply"):
        read_value(document)


def test_the_message_does_not_quote_the_body() -> None:
    """An error about a body says where it is wrong, never what stands there."""
    with pytest.raises(MalformedJson) as caught:
        read_document(b'{"secret-key": secret-value}')
    assert "secret" not in str(caught.value)


def test_integers_beyond_64_bits_stay_integers() -> None:
    """A large JSON integer never passes through a float."""
    number = 2**63 + 1
    assert read_value(Raw(b"%d" % number)) == number
    assert type(read_value(Raw(b"%d" % (number * 2**40)))) is int


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (read_object, b"[]"),
        (read_object, b"null"),
        (read_array, b"{}"),
        (read_string, b"1"),
        (read_string, b"null"),
        (read_value, b"1e999"),
    ],
)
def test_readers_refuse_other_types(read: Any, text: bytes) -> None:
    """A reader of one JSON type refuses the others."""
    with pytest.raises(MalformedJson):
        read(Raw(text))


def test_large_values_are_slices_of_the_received_bytes() -> None:
    """Neither reading a document nor writing its values again copies a large value."""
    body = bytearray(b'{"a": {"b": "%b"}}' % (b"x" * LARGE))
    inner = read_object(read_document(body)["a"])["b"]
    written = segments({"c": [inner]})
    mark = body.index(b"x")
    body[mark : mark + 1] = b"y"
    assert bytes(inner)[:3] == b'"yx'
    assert b"".join(written)[:9] == b'{"c":["yx'


def test_writing_megabytes_takes_no_memory_for_them() -> None:
    """The segments of a body with 32 MB of raw text take kilobytes of their own."""
    raw = read_document(b'{"a":"%b"}' % (b"x" * (32 << 20)))["a"]
    tracemalloc.start()
    try:
        written = segments({"one": raw, "two": [raw, {"three": raw}]})
        list(windows(written, 256 << 10))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size(written) > 96 << 20
    assert peak < 1 << 20


@given(trees)
def test_segments_are_one_plain_encoding(tree: Any) -> None:
    """The slices of a value, one after the other, are what encoding it in one piece gives."""
    written = segments(tree)
    joined = b"".join(written)
    assert joined == msgspec.json.encode(tree)
    assert size(written) == len(joined)
    assert all(len(segment) for segment in written)


@given(st.lists(st.sampled_from([Raw(b'"%b"' % (b"x" * LARGE)), Raw(b"1"), Raw(b'"small"')]), max_size=12))
def test_small_values_share_a_segment(items: list[Raw]) -> None:
    """Only large values cost a segment of their own; everything between two of them is one more."""
    large = sum(len(memoryview(item)) >= LARGE for item in items)
    assert len(segments(items)) <= 2 * large + 1


@given(st.lists(st.binary(max_size=40), max_size=6), st.integers(1, 16))
def test_windows_are_bounded_and_complete(body: list[bytes], limit: int) -> None:
    """Windows of a body are its bytes in order, none longer than asked for, none empty."""
    cut = list(windows(body, limit))
    assert b"".join(cut) == b"".join(body)
    assert all(1 <= len(window) <= limit for window in cut)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, True), (NULL, True), (read_document(b'{"a": null }')["a"], True)]
    + [(Raw(text), False) for text in (b"0", b'""', b"{}", b"[]", b"false", b'"null"')],
)
def test_null_means_absent(value: Raw | None, expected: bool) -> None:
    """An absent member and JSON null are the same; an empty value is something."""
    assert is_null(value) is expected


@given(st.dictionaries(st.text(max_size=4), st.integers(-(2**63), 2**63 - 1), max_size=4))
def test_to_raw_is_the_json_text(value: dict[str, int]) -> None:
    """The text of a value reads back as the value."""
    assert json.loads(bytes(to_raw(value))) == value
