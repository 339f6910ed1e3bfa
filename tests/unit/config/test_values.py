"""The value types: durations, sizes, addresses, names."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.config.values import (
    format_duration,
    format_megabytes,
    parse_duration,
    parse_log_level,
    parse_megabytes,
    quoted,
    split_listen_address,
)

UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


@settings(deadline=None)
@given(st.integers(0, 720 * 3600 * 10**9))
def test_duration_round_trip(nanoseconds: int) -> None:
    """A duration printed and read again is the same number of seconds, to the nanosecond."""
    seconds = nanoseconds / 10**9
    assert parse_duration(format_duration(seconds)) == seconds


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 500), st.sampled_from(list(UNITS))), min_size=1, max_size=5))
def test_duration_is_the_sum_of_its_parts(parts: list[tuple[int, str]]) -> None:
    """Each number counts in its own unit, in any order."""
    text = "".join(f"{number}{unit}" for number, unit in parts)
    expected = sum(number * UNITS[unit] for number, unit in parts)
    if expected > 720 * 3600:
        with pytest.raises(ValueError, match="too long"):
            parse_duration(text)
    else:
        assert parse_duration(text) == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30s", 30.0),
        ("500ms", 0.5),
        ("1m30s", 90.0),
        ("1h", 3600.0),
        ("1.5s", 1.5),
        (".5s", 0.5),
        (0, 0.0),
        ("0", 0.0),
    ],
)
def test_duration_examples(text: object, seconds: float) -> None:
    """Go's notation, and a plain zero."""
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("value", [30, 1.5, "30", "1.5"])
def test_duration_without_unit(value: object) -> None:
    """A number alone does not say seconds or milliseconds: the text asks for a unit."""
    with pytest.raises(ValueError, match="add a unit"):
        parse_duration(value)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "s",
        "1x",
        "-1s",
        "1s ",
        "1 s",
        "1s2",
        "٣s",
        "1d",
        True,
        [],
        None,
        float("nan"),
        10**400,
        float("inf"),
    ],
)
def test_not_a_duration(value: object) -> None:
    """Anything else is refused; only blanks around it are forgiven."""
    if value == "1s ":
        assert parse_duration(value) == 1.0
        return
    with pytest.raises(ValueError, match="is not a duration"):
        parse_duration(value)


@pytest.mark.parametrize(
    ("value", "size"), [(64, 64 << 20), ("64", 64 << 20), (0.5, 1 << 19), ("0.25", 1 << 18), (64.0, 64 << 20)]
)
def test_megabytes(value: object, size: int) -> None:
    """A size is written in MB of 2^20 bytes, whole or not, quoted or not, and prints as it was written."""
    assert parse_megabytes(value) == size
    assert parse_megabytes(format_megabytes(size)) == size


@pytest.mark.parametrize(
    "value", [0, -1, "0", 1e-9, 2**21, "64MB", "64 MB", True, None, float("inf"), 10**400]
)
def test_not_a_size(value: object) -> None:
    """Zero, negative, too large, with a unit, or no number at all."""
    with pytest.raises(ValueError, match=r"without a unit|out of range"):
        parse_megabytes(value)


@pytest.mark.parametrize(
    ("value", "level"),
    [(1, "warning"), (2, "info"), (3, "debug"), (4, "debug"), (5, "debug"), ("2", "info"), ("INFO", "info")],
)
def test_log_levels(value: object, level: str) -> None:
    """Names in any case, and the coordinator's numbers."""
    assert parse_log_level(value) == level


@pytest.mark.parametrize("value", [0, 6, True, "trace", None, [1]])
def test_not_a_log_level(value: object) -> None:
    """Everything else is refused with the list of levels."""
    with pytest.raises(ValueError, match=r"use error, warning, info, debug"):
        parse_log_level(value)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("0.0.0.0:9002", ("0.0.0.0", 9002)),
        ("localhost:0", ("localhost", 0)),
        ("[::]:65535", ("::", 65535)),
        ("[::1]:1", ("::1", 1)),
    ],
)
def test_listen_address(text: str, address: tuple[str, int]) -> None:
    """Host and port come apart; IPv6 loses its brackets."""
    assert split_listen_address(text) == address


@pytest.mark.parametrize(
    "text",
    ["", "9002", ":9002", "h", "h:", "h:x", "h:65536", "h:-1", "::1:80", "[h]:1", "1.2.3:4", "a b:1", "h:٣"],
)
def test_not_a_listen_address(text: str) -> None:
    """No host, no port, a port out of range, IPv6 without brackets."""
    with pytest.raises(ValueError, match=r"is not an address to listen on|is not a port"):
        split_listen_address(text)


@pytest.mark.parametrize(
    "value",
    ["x" * 10_000, ["x" * 10_000], {"k": "x" * 10_000}, 1 << 20000, object(), "\x1b[2J\n"],
    ids=["text", "list", "mapping", "number", "object", "control"],
)
def test_quoted_is_short_and_printable(value: object) -> None:
    """A message shows at most 80 characters of a value, on one line, and no container's content."""
    text = quoted(value)
    assert len(text) <= 82
    assert text.isprintable()
    assert text.isascii()
