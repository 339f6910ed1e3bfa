"""Log lines: one record, one line, as JSON or as text.

The fields of `extra=` become keys of the line. Nothing a request carries can forge a line or a terminal
sequence: control characters are escaped, and an exception is one field.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sidecar.config import LogFormat, LogLevel

_STANDARD_ATTRIBUTES = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
_OWN_KEYS = frozenset({"time", "level", "logger", "message", "exception"})
# C0, DEL, C1, line separators, bidirectional controls, and surrogates, which no stream can encode.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_PLAIN_VALUE = re.compile(r'[^\s"=\\]+')


def configure_logging(level: LogLevel, log_format: LogFormat, stream: TextIO | None = None) -> None:
    """Send every record from `level` up to one stream, in place of an earlier call's (default: stderr).

    Handlers that others put on the root logger stay.
    """
    root = logging.getLogger()
    for handler in root.handlers[:]:
        if isinstance(handler, _LineHandler):
            root.removeHandler(handler)
            handler.close()
    handler = _LineHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    root.addHandler(handler)
    root.setLevel(level.upper())


class _LineHandler(logging.StreamHandler[TextIO]):
    """Our handler, told apart from everybody else's by its class."""


class JsonFormatter(logging.Formatter):
    """One ASCII JSON object per record: time, level, logger, message, the extra fields, exception."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record, without the newline."""
        fields = dict(_fields(record))
        try:
            line = json.dumps(fields, default=str, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            # Odd keys, NaN or a cycle: rare enough to pay with the types of all values.
            line = json.dumps({key: str(value) for key, value in fields.items()})
        return line.replace("\x7f", "\\u007f")


class TextFormatter(logging.Formatter):
    """`<time> <LEVEL> <logger>: <message> key=value …`, values quoted where they need it."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record, without the newline."""
        fields = dict(_fields(record))
        time, level, logger, message = (fields.pop(key) for key in ("time", "level", "logger", "message"))
        words = [f"{time} {level.upper():7} {logger}: {message}"]
        words += [f"{key}={_value(value)}" for key, value in fields.items()]
        return _escaped(" ".join(words))


def _fields(record: logging.LogRecord) -> Iterator[tuple[str, Any]]:
    moment = datetime.fromtimestamp(record.created, UTC)
    yield "time", moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    yield "level", record.levelname.lower()
    yield "logger", record.name
    yield "message", record.getMessage()
    for key, value in record.__dict__.items():
        if key not in _STANDARD_ATTRIBUTES:
            yield (f"{key}_" if key in _OWN_KEYS else key), value
    if record.exc_info and record.exc_info[0]:
        yield "exception", logging.Formatter().formatException(record.exc_info)


def _value(value: object) -> str:
    text = str(value)
    return text if _PLAIN_VALUE.fullmatch(text) else json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    return _UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
