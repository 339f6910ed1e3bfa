"""Server-sent events out of pieces of any size."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.extproc.event_stream import EventStream


def events(text: bytes, *cuts: int, max_event: int = 1000) -> list[bytes]:
    """The events of a stream that arrives cut at these offsets."""
    stream = EventStream(max_event)
    ends = sorted({0, len(text), *(cut for cut in cuts if cut <= len(text))})
    return [data for start, end in pairwise(ends) for data in stream.receive(text[start:end])]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"data: {}\n\n", [b"{}"]),
        (b"data:{}\n\n", [b"{}"]),
        (b"data:  x\n\n", [b" x"]),
        (b"event: a\nid: 1\ndata: 1\nretry: 5\n\ndata: 2\n\n", [b"1", b"2"]),
        (b": comment\n\ndata: 1\n\n", [b"1"]),
        (b"data: 1\ndata: 2\n\n", [b"1\n2"]),
        (b"data: 1\r\ndata: 2\r\n\r\ndata: 3\r\n\r\n", [b"1\n2", b"3"]),
        (b"data: 1\r\rdata: 2\r\r", [b"1", b"2"]),
        (b"\n\n\ndata: 1\n\n\n\n", [b"1"]),
        (b"data: 1\n", []),
        (b"data: 1", []),
        (b"data\n\ndata: 1\n\n", [b"1"]),
        (b"database: 1\n\n", []),
        (b"", []),
    ],
)
def test_events(text: bytes, expected: list[bytes]) -> None:
    """Data lines join, other fields and comments do not count, every line end ends a line."""
    assert events(text) == expected


@given(
    st.lists(
        st.sampled_from([b"data: 1", b"data:", b"x", b":", b"event: e", b"\n", b"\r", b"\r\n", b"\n\n"]),
        max_size=30,
    ),
    st.lists(st.integers(0, 120), max_size=12),
)
def test_the_cuts_do_not_matter(parts: list[bytes], cuts: list[int]) -> None:
    """The same events come out wherever the stream is cut, also between CR and LF, also into empty pieces."""
    text = b"".join(parts)
    assert events(text, *cuts) == events(text) == events(text, *range(len(text)))


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=8))
def test_any_octets(noise: bytes, cuts: list[int]) -> None:
    """Noise is no error, and cutting it changes nothing."""
    assert events(noise, *cuts) == events(noise)


@pytest.mark.parametrize("cuts", [(), range(0, 4000, 7)], ids=["whole", "cut"])
def test_a_large_event_is_passed_over(cuts: range) -> None:
    """What is over the limit is dropped up to its end; the events around it are read."""
    text = b"data: 1\n\ndata: " + b"x" * 2000 + b"\ndata: more\nevent: e\n\ndata: 2\n\n"
    assert events(text, *cuts) == [b"1", b"2"]


def test_an_event_of_many_lines_is_measured_as_a_whole() -> None:
    """Small lines add up, empty ones too."""
    assert events(b"data: 123456789\n" * 200 + b"\ndata: 2\n\n") == [b"2"]
    assert events(b"data:\n" * 2000 + b"\ndata: 2\n\n") == [b"2"]


def test_no_more_is_held_than_allowed() -> None:
    """An endless event, with or without line ends, never takes more than the limit."""
    for piece in (b"x" * 300, b"data: " + b"x" * 300 + b"\n", b"data:\n" * 60):
        stream = EventStream(1000)
        for _ in range(100):
            assert list(stream.receive(piece)) == []
            assert stream.held <= 1000 + len(b"\n")


def test_the_work_is_linear() -> None:
    """Four megabytes of one event in pieces of eight bytes: a copy per piece would take for ever."""
    stream = EventStream(8 << 20)
    pieces = 1 << 19
    for _ in range(pieces):
        assert list(stream.receive(b"data: xx")) == []
    (data,) = stream.receive(b"\n\n")
    assert len(data) == 8 * pieces - len(b"data: ")
