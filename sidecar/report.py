"""`epd-sidecar report`: Envoy's JSON access log as a table, one row per coordinated request.

Reads the log format of the shipped bootstraps: one JSON object per line, the keys of the access-log record
next to Envoy's own (`code`, `details`, ...).
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Sequence

_TIMES = ("media_ms", "render_ms", "encode_ms", "prefill_ms", "total_ms", "overhead_ms")

_HEADINGS = (
    *("request", "api", "media", "mm_payload", "encode form", "prefill form"),
    *("ms: media", "render", "encode", "prefill", "total", "own"),
    *("body", "rendered", "status"),
)
_RIGHT_ALIGNED = range(6, 14)

_REQUEST_ID_WIDTH = 8
_NOTE_WIDTH = 120


@dataclass
class Report:
    """What a log holds.

    Attributes:
        rows: log lines of coordinated requests and of requests the sidecar never answered.
        passthrough: requests the sidecar let pass untouched.
        unreadable: lines that are not a JSON object.
        foreign: JSON lines without the keys of the access-log record.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    passthrough: int = 0
    unreadable: int = 0
    foreign: int = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "access_log", metavar="ACCESS_LOG", help='Envoy\'s JSON access log; "-" reads standard input'
    )


def run(args: argparse.Namespace) -> int:
    """Print the table; returns 1 when the log cannot be read or holds no request, else 0."""
    try:
        report = _read_path(args.access_log)
    except OSError as error:
        sys.stderr.write(f"cannot read {args.access_log}: {error.strerror}\n")
        return 1
    print_report(report, sys.stdout)
    return 0 if report.rows or report.passthrough else 1


def _read_path(path: str) -> Report:
    if path == "-":
        return read_log(sys.stdin)
    with open(path, encoding="utf-8", errors="replace") as log:  # noqa: PTH123 (any readable path, pipes too)
        return read_log(log)


def read_log(lines: Iterable[str]) -> Report:
    """Sort the lines of an access log; blank lines are skipped, everything else is counted somewhere."""
    report = Report()
    for line in lines:
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError:
            report.unreadable += 1
            continue
        if not isinstance(entry, dict):
            report.unreadable += 1
        elif "outcome" not in entry:
            report.foreign += 1
        elif entry["outcome"] == "passthrough":
            report.passthrough += 1
        else:
            report.rows.append(entry)
    return report


def print_report(report: Report, out: TextIO) -> None:
    """Write the table and what was left out of it."""
    if report.rows:
        _print_table([_cells(entry) for entry in report.rows], [_note(entry) for entry in report.rows], out)
    else:
        out.write("no coordinated request in this log\n")
    outcomes = Counter(_text(entry.get("outcome")) or "unanswered" for entry in report.rows)
    summary = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
    if summary:
        count = len(report.rows)
        out.write(f"{count} {'request' if count == 1 else 'requests'}: {summary}\n")
    for count, what in (
        (report.passthrough, "passed through untouched"),
        (report.foreign, "skipped: JSON without the keys of the access-log record"),
        (report.unreadable, "skipped: not a JSON object"),
    ):
        if count:
            out.write(f"{count} {'line' if count == 1 else 'lines'} {what}\n")


def _cells(entry: dict[str, Any]) -> tuple[str, ...]:
    text = {key: _text(value) for key, value in entry.items()}.get
    return (
        text("request_id", "")[:_REQUEST_ID_WIDTH],
        text("api", ""),
        text("media", ""),
        _payload(text("mm_payload", ""), text("render_form", "")),
        text("encode_form", "") + _times_sign(text("encode_requests", "")),
        text("prefill_form", ""),
        *(text(key, "") for key in _TIMES),
        _size(text("request_bytes", "")),
        _size(text("render_bytes", "")),
        f"{text('code', '')} {text('outcome', '') or 'unanswered'}",
    )


def _payload(asked: str, rendered: str) -> str:
    """What was asked of the renderer, and what it did where that is something else."""
    return f"{asked} > {rendered}" if (asked, rendered) == ("none", "tensors") else asked


def _note(entry: dict[str, Any]) -> str:
    """Why the request failed or took the larger form; Envoy's details where the sidecar never answered."""
    error = _text(entry.get("error"))
    if error:
        return f"{error} in {_text(entry.get('stage'))}"
    code = _text(entry.get("code"))
    if not _text(entry.get("outcome")):
        if code.startswith("2"):
            return "no record: is the filter attached, and its metadata namespace received?"
        return f"{_text(entry.get('details'))} {_text(entry.get('flags'))}".strip()[:_NOTE_WIDTH]
    if code.startswith(("4", "5")):
        return f"decode answered {code}"
    return _text(entry.get("fallback_reason"))


def _text(value: object) -> str:
    """One log value on one line: control characters would let a client draw its own table."""
    if value is None:
        return ""
    return "".join(char if char.isprintable() else "?" for char in str(value))


def _times_sign(count: str) -> str:
    return f" x{count}" if count not in {"", "0"} else ""


def _size(count: str) -> str:
    """Bytes in the largest binary unit that keeps a digit before the point."""
    if not count.isdecimal():
        return count
    size = float(count)
    for unit in ("B", "K", "M"):
        if size < 1024:  # noqa: PLR2004 (binary units)
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} G"


def _print_table(rows: Sequence[tuple[str, ...]], notes: Sequence[str], out: TextIO) -> None:
    """Aligned columns, each row followed by its note; a column that is empty in every row is left out."""
    used = [index for index in range(len(_HEADINGS)) if any(row[index] for row in rows)]
    widths = {index: max(len(row[index]) for row in (_HEADINGS, *rows)) for index in used}
    ruler = tuple("-" * widths.get(index, 0) for index in range(len(_HEADINGS)))
    for row, note in zip((_HEADINGS, ruler, *rows), ("", "", *notes), strict=True):
        line = "  ".join(
            row[index].rjust(widths[index]) if index in _RIGHT_ALIGNED else row[index].ljust(widths[index])
            for index in used
        )
        out.write(line.rstrip() + "\n" + (f"  {note}\n" if note else ""))
