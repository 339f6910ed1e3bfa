from __future__ import annotations

import argparse
import io
import json
from typing import TYPE_CHECKING, Any

import pytest

from sidecar.observability.record import AccessRecord
from sidecar.report import add_arguments, print_report, read_log, run

if TYPE_CHECKING:
    from pathlib import Path


def line(**changes: Any) -> str:
    """One access-log line as the shipped bootstraps write it."""
    record = AccessRecord(
        request_id="4f1c2a9e-77aa-4c1e-8d0e-000000000001",
        api="chat",
        model="m",
        stream=True,
        outcome="ok",
        stage="decode",
        media="image:2",
        mm_payload="none",
        render_form="omitted",
        encode_form="content_parts",
        encode_requests=2,
        prefill_form="mm_metadata",
        media_ms=1.5,
        render_ms=20.25,
        encode_ms=101.0,
        prefill_ms=33.0,
        total_ms=160.0,
        overhead_ms=4.2,
        request_bytes=3 << 20,
        render_bytes=900,
    )
    envoy = {"code": 200, "details": "via_upstream", "flags": "-", "duration_ms": 170}
    return json.dumps({**envoy, **record.strings(), **changes})


def table(*lines: str) -> str:
    out = io.StringIO()
    print_report(read_log(lines), out)
    return out.getvalue()


def column(printed: str, heading: str) -> list[str]:
    """The cells under one heading, found by the dashes that rule the table."""
    header, rule, *rest = printed.splitlines()
    start = header.index(heading)
    ruled = [
        index for index in range(len(rule)) if rule[index] == "-" and (index == 0 or rule[index - 1] == " ")
    ]
    left = max(index for index in ruled if index <= start)
    right = next((index for index in range(left, len(rule)) if rule[index] == " "), None)
    rows = [row for row in rest if " request" not in row and not row.startswith("  ")]
    return [row[left:right].strip() for row in rows]


def notes(printed: str) -> list[str]:
    """The lines below rows."""
    return [row.strip() for row in printed.splitlines() if row.startswith("  ")]


def test_a_row_shows_forms_times_and_sizes() -> None:
    """A coordinated request is one row with its forms, step times in ms, binary sizes and outcome."""
    printed = table(line())
    shown = {
        "request": "4f1c2a9e",
        "media": "image:2",
        "mm_payload": "none",
        "encode form": "content_parts x2",
        "prefill form": "mm_metadata",
        "ms: media": "1.5",
        "render": "20.2",
        "prefill ": "33.0",
        "total": "160.0",
        "own": "4.2",
        "body": "3.0 M",
        "rendered": "900 B",
        "status": "200 ok",
    }
    header = printed.splitlines()[0]
    cells = printed.splitlines()[2]
    for heading, value in shown.items():
        assert heading in header
        assert value in cells
    assert column(printed, "prefill form") == ["mm_metadata"]
    assert column(printed, "own") == ["4.2"]
    assert column(printed, "body") == ["3.0 M"]
    assert printed.splitlines()[-1] == "1 request: 1 ok"


def test_columns_align_over_rows_of_different_width() -> None:
    """Numbers are right-aligned and every column starts at the same place in every row."""
    printed = table(line(total_ms="7.0"), line(total_ms="12345.0", model="x"))
    first, second = printed.splitlines()[2:4]
    assert first.index("7.0") + 3 == second.index("12345.0") + 7
    assert column(printed, "total") == ["7.0", "12345.0"]


def test_a_failed_request_names_error_and_step() -> None:
    """The note of a failed request is its error code and the step that failed."""
    printed = table(line(outcome="upstream_error", error="epd_encode_failed", stage="encode", code=502))
    assert notes(printed) == ["epd_encode_failed in encode"]
    assert column(printed, "status") == ["502 upstream_error"]


def test_a_fallback_names_its_reason() -> None:
    """A request that took the larger form says why."""
    printed = table(line(fallback_reason="image[1]: no descriptor"))
    assert notes(printed) == ["image[1]: no descriptor"]


def test_a_renderer_that_sent_tensors_unasked_is_seen() -> None:
    """The payload column shows what was asked, and what came where that differs."""
    assert column(table(line(render_form="tensors")), "mm_payload") == ["none > tensors"]


def test_a_request_the_sidecar_never_answered_shows_what_envoy_knows() -> None:
    """Null record keys mean the sidecar gave no answer; Envoy's details and flags take their place."""
    empty = dict.fromkeys(AccessRecord().strings())
    printed = table(line(**empty, code=503, details="ext_proc_error_gRPC_error_14", flags="UF"))
    assert column(printed, "status") == ["503 unanswered"]
    assert notes(printed) == ["ext_proc_error_gRPC_error_14 UF"]
    assert "1 request: 1 unanswered" in printed


def test_an_answered_request_without_a_record_points_at_the_filter() -> None:
    """A 200 with null record keys is a filter that drops the metadata, not a sidecar that is down."""
    empty = dict.fromkeys(AccessRecord().strings())
    assert "metadata namespace" in notes(table(line(**empty, code=200, details="via_upstream")))[0]


def test_a_failed_decode_is_seen() -> None:
    """The sidecar's part went well, the worker's did not: the note says so."""
    assert notes(table(line(code=503))) == ["decode answered 503"]


def test_lines_outside_the_table_are_counted_and_said() -> None:
    """Passthrough, foreign JSON and text that is no JSON object are counted, never dropped silently."""
    printed = table(
        line(),
        line(outcome="passthrough", api=""),
        "[2026-01-01] envoy started",
        "[1, 2]",
        '{"code": 200}',
        "",
        "  \n",
    )
    assert printed.splitlines()[-3:] == [
        "1 line passed through untouched",
        "1 line skipped: JSON without the keys of the access-log record",
        "2 lines skipped: not a JSON object",
    ]


def test_a_column_without_values_is_left_out() -> None:
    """A log of text requests has no media column."""
    header = table(line(media="", media_ms="", fallback_reason="")).splitlines()[0]
    assert "media" not in header


def test_client_text_cannot_forge_rows() -> None:
    """Control characters in a logged value print as question marks."""
    printed = table(line(fallback_reason="a\nb\x1b[2J"))
    assert notes(printed) == ["a?b?[2J"]


def test_a_log_without_requests_says_so() -> None:
    """An empty log is said to hold no request."""
    assert table() == "no coordinated request in this log\n"


@pytest.mark.parametrize(("content", "code"), [(line(), 0), ("", 1), ("not json", 1)])
def test_the_command_reads_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, code: int
) -> None:
    """The command prints the table of a file; a log without any request is exit code 1."""
    log = tmp_path / "access.log"
    log.write_text(content + "\n")
    assert run(parse(str(log))) == code
    assert ("image:2" in capsys.readouterr().out) == (code == 0)


def test_the_command_reads_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dash reads standard input, so that a container's log can be piped in."""
    monkeypatch.setattr("sys.stdin", io.StringIO(line() + "\n"))
    assert run(parse("-")) == 0
    assert "mm_metadata" in capsys.readouterr().out


def test_a_missing_log_is_an_error_that_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A log that cannot be opened is exit code 1 and a message with its path and the reason."""
    missing = tmp_path / "none.log"
    assert run(parse(str(missing))) == 1
    assert capsys.readouterr().err == f"cannot read {missing}: No such file or directory\n"


def parse(path: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args([path])
