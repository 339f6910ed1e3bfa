"""docs/deploy/plain-envoy.md can be followed literally."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.envoy.local_stack import (
    DECODE,
    ENCODE,
    ENVOY_ADMIN,
    EXTERNAL,
    PREFILL,
    RENDER,
    REPOSITORY,
    free_ports,
    is_free,
)

PAGE = REPOSITORY / "docs/deploy/plain-envoy.md"


def commands() -> str:
    """The shell commands of the page, in order."""
    return "".join(re.findall(r"```sh\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL))


def on_other_ports(text: str, ports: dict[int, int]) -> str:
    """The commands with free ports in place of the well-known ones, as text and as options."""
    workers = f"--encode 127.0.0.1:{ports[ENCODE]} --prefill 127.0.0.1:{ports[PREFILL]}"
    options = {
        "simulate": " ".join(
            f"--{role}-port {ports[port]}"
            for role, port in (
                ("render", RENDER),
                ("encode", ENCODE),
                ("prefill", PREFILL),
                ("decode", DECODE),
            )
        ),
        "envoy-config": (
            f"--listen 127.0.0.1:{ports[EXTERNAL]} --admin-listen 127.0.0.1:{ports[ENVOY_ADMIN]} "
            f"{workers} --decode 127.0.0.1:{ports[DECODE]}"
        ),
    }
    for command, more in options.items():
        text = text.replace(f"epd-sidecar {command}", f"epd-sidecar {command} {more}")
    for well_known, port in ports.items():
        text = text.replace(f"127.0.0.1:{well_known}", f"127.0.0.1:{port}")
    return text


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory that looks like the root of the repository as far as the page is concerned."""
    (tmp_path / ".venv").symlink_to(Path(sys.executable).parent.parent)
    (tmp_path / "deploy/envoy").mkdir(parents=True)
    (tmp_path / "tmp").mkdir()
    return tmp_path


def run(script: str, root: Path) -> tuple[int, str]:
    """Exit code and output of a script; whatever it leaves running is stopped."""
    shell = subprocess.Popen(
        ["/bin/bash", "-e", "-c", script],
        cwd=root,
        env={**os.environ, "TMPDIR": str(root / "tmp")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = shell.communicate(timeout=100)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()
    return shell.returncode, output


def head_of_report(text: str) -> list[str]:
    (head,) = re.findall(r"^request   api .*$", text, re.MULTILINE)
    return str(head).split()


def test_the_plain_envoy_page_can_be_followed(root: Path) -> None:
    """Its commands start everything, coordinate a request, print the log and stop what they started."""
    ports = free_ports()
    shipped = (REPOSITORY / "deploy/envoy/sidecar.yaml").read_text(encoding="utf-8")
    (root / "deploy/envoy/sidecar.yaml").write_text(on_other_ports(shipped, ports), encoding="utf-8")
    code, output = run(on_other_ports(commands(), ports), root)
    assert code == 0, output
    assert "32x32 png" in output
    assert "KV from prefill: hit" in output
    assert re.search(r"chat +image:1 +tensors +openai x1 +openai .* 200 ok", output)
    assert '"outcome":"ok"' in output
    assert head_of_report(output) == head_of_report(PAGE.read_text(encoding="utf-8"))
    (logs,) = (root / "tmp").iterdir()
    assert '"message": "stopped"' in (logs / "sidecar.log").read_text(encoding="utf-8")
    assert "violation" not in (logs / "simulate.log").read_text(encoding="utf-8")
    assert all(is_free(port) for port in ports.values())
