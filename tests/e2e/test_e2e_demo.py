"""The demo: what it prints, and that it leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil

from deploy.envoy.local_stack import REPOSITORY

if TYPE_CHECKING:
    from pathlib import Path


def start(directory: Path) -> subprocess.Popen[str]:
    """Start the demo with its temporary files, and so all its programs, marked by a directory of the test."""
    return subprocess.Popen(
        [sys.executable, "-m", "deploy.envoy.demo"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(directory)},
        cwd=REPOSITORY,
    )


def left_running(directory: Path) -> list[str]:
    """Command lines of processes that inherited the mark."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("TMPDIR") == str(directory):
                found.append(" ".join(process.cmdline()))
    return found


def test_the_demo_shows_three_forms_and_cleans_up(tmp_path: Path) -> None:
    """The demo answers three requests alike, prints the report, exits 0 and leaves no process and no file."""
    demo = start(tmp_path)
    output, _ = demo.communicate(timeout=100)
    assert demo.returncode == 0, output
    assert output.count("I see 2 images: 640x480 jpeg") == 3
    assert "3 requests: 3 ok" in output
    assert "features x2" in output
    assert "content_parts x2" in output
    assert "The same answer three times" in output
    assert left_running(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_demo_cleans_up(tmp_path: Path) -> None:
    """SIGTERM in the middle ends every program of the demo, too."""
    demo = start(tmp_path)
    assert demo.stdout is not None
    while "I see" not in (line := demo.stdout.readline()):
        assert line, "the demo ended early"
    assert len(left_running(tmp_path)) >= 4
    demo.send_signal(signal.SIGTERM)
    output, _ = demo.communicate(timeout=60)
    assert demo.returncode == 130, output
    assert left_running(tmp_path) == []
    assert list(tmp_path.iterdir()) == []
