from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from sidecar.config.environment import PREFIX
from tests.unit.envoy_config.envoy_config_support import Command

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """`epd-sidecar envoy-config` on the shipped sidecar.yaml."""
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)
    return Command(monkeypatch, capsys)


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with tls.crt and tls.key."""
    directory = tmp_path_factory.mktemp("certificate")
    words = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=test "
        "-addext subjectAltName=DNS:sidecar.test -keyout tls.key -out tls.crt"
    )
    subprocess.run(words.split(), cwd=directory, check=True, capture_output=True)
    return directory
