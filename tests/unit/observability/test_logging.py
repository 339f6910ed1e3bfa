"""Log lines: parsable, one per record, impossible to forge."""

from __future__ import annotations

import io
import json
import logging
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.observability.logging import JsonFormatter, TextFormatter, configure_logging

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    """Give the root logger back as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def record(message: str, **extra: Any) -> logging.LogRecord:
    return logging.getLogger("sidecar.test").makeRecord(
        "sidecar.test", logging.INFO, "file.py", 1, message, (), None, extra=extra
    )


def test_json_line_has_the_extra_fields() -> None:
    """A record is one JSON object: the standard keys first, then what `extra` holds, with its JSON types."""
    line = json.loads(
        JsonFormatter().format(record("served", request_id="r-1", status=200, media=None, ok=True))
    )
    assert list(line)[:4] == ["time", "level", "logger", "message"]
    assert line["time"].endswith("Z")
    del line["time"]
    assert line == {
        "level": "info",
        "logger": "sidecar.test",
        "message": "served",
        "request_id": "r-1",
        "status": 200,
        "media": None,
        "ok": True,
    }


def test_extra_cannot_replace_a_standard_key() -> None:
    """A field named like one of the line's own keys gets an underscore."""
    line = json.loads(JsonFormatter().format(record("m", level="forged", time="never", exception="none")))
    assert (line["level"], line["level_"], line["time_"], line["exception_"]) == (
        "info",
        "forged",
        "never",
        "none",
    )
    assert line["time"] != "never"


def test_values_json_cannot_hold_become_text() -> None:
    """Objects, NaN, odd keys and cycles never cost a log line."""
    cycle: list[object] = []
    cycle.append(cycle)
    for value in (object(), float("nan"), {(1, 2): 3}, cycle, b"bytes", {1}):
        line = json.loads(JsonFormatter().format(record("m", value=value)), parse_constant=pytest.fail)
        assert isinstance(line["value"], str)


@settings(deadline=None)
@given(st.text(), st.text())
def test_json_line_is_one_line_of_ascii(message: str, value: str) -> None:
    """Any text survives in a line that has no control character and no byte a terminal could act on."""
    line = JsonFormatter().format(record(message, value=value))
    assert line.isascii()
    assert line.isprintable()
    assert json.loads(line)["message"] == message
    assert json.loads(line)["value"] == value


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=())), st.text(st.characters(exclude_categories=())))
def test_text_line_is_one_line(message: str, value: str) -> None:
    """Text lines carry no line break, control character or surrogate whatever was logged."""
    line = TextFormatter().format(record(message, value=value))
    assert len(line.splitlines()) == 1
    assert not any(ord(character) < 0x20 or 0x7F <= ord(character) < 0xA0 for character in line)
    line.encode("utf-8")


def test_text_line() -> None:
    """Values that hold blanks, quotes or nothing are quoted; what is missing prints as None."""
    line = TextFormatter().format(
        record("request answered", api="chat", error="", detail='a "b"', n=1, gone=None)
    )
    _, _, rest = line.partition(" ")
    assert rest == 'INFO    sidecar.test: request answered api=chat error="" detail="a \\"b\\"" n=1 gone=None'


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_exception_is_one_field(log_format: Any) -> None:
    """A traceback stays on the line of its record."""
    stream = io.StringIO()
    configure_logging("info", log_format, stream)
    try:
        int("line one\nline two")
    except ValueError:
        logging.getLogger("sidecar.test").exception("failed")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 1
    assert "ValueError: invalid literal" in lines[0]
    if log_format == "json":
        assert json.loads(lines[0])["exception"].startswith("Traceback (most recent call last):\n")


@pytest.mark.parametrize(
    ("level", "seen"),
    [
        ("error", ["error"]),
        ("warning", ["error", "warning"]),
        ("info", ["error", "warning", "info"]),
        ("debug", ["error", "warning", "info", "debug"]),
    ],
)
def test_level_decides_what_is_written(level: Any, seen: list[str]) -> None:
    """Each level writes itself and what is more severe."""
    stream = io.StringIO()
    configure_logging(level, "json", stream)
    for name in ("error", "warning", "info", "debug"):
        logging.getLogger("sidecar.test").log(getattr(logging, name.upper()), name)
    assert [json.loads(line)["message"] for line in stream.getvalue().splitlines()] == seen


def test_configuring_twice_writes_once() -> None:
    """A second call replaces the first one's handler and leaves others alone."""
    foreign = logging.NullHandler()
    logging.getLogger().addHandler(foreign)
    first, second = io.StringIO(), io.StringIO()
    configure_logging("info", "json", first)
    configure_logging("info", "json", second)
    logging.getLogger("sidecar.test").info("once")
    assert first.getvalue() == ""
    assert second.getvalue().count("once") == 1
    assert foreign in logging.getLogger().handlers


def test_default_stream_is_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    """Logs go to stderr; stdout stays free for the commands' own output."""
    configure_logging("info", "text")
    logging.getLogger("sidecar.test").info("hello")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "hello" in captured.err
