"""Makes what the tests need: the vLLM environment, and the tiny models made with it."""

from __future__ import annotations

import hashlib
import os
import subprocess
import time
from pathlib import Path

from tests.vllm.install_vllm import LOW_PRIORITY, InstallError, identity, install, python, ready

_MAKER = Path(__file__).resolve().parent / "tiny_models.py"


def prepare(home: Path) -> dict[str, float]:
    """Install and make what is missing; returns the seconds each part took.

    Raises:
        InstallError: a part failed.
    """
    return {"vLLM": install(home), "models": _make_models(home)}


def unprepared(home: Path) -> str:
    """What is missing, or "" when the tests can run."""
    if not ready(home):
        return f"{home} holds no vLLM environment of this version"
    if not _models_ready(home):
        return f"{home} holds no models of this version"
    return ""


def _models_identity() -> str:
    text = identity() + _MAKER.read_text("utf-8")
    return hashlib.sha256(text.encode()).hexdigest()


def _models_ready(home: Path) -> bool:
    stamp = home / "models" / "stamp"
    return stamp.exists() and stamp.read_text("utf-8").strip() == _models_identity()


def _make_models(home: Path) -> float:
    if _models_ready(home):
        return 0.0
    started = time.monotonic()
    log = home / "models.log"
    with log.open("wb") as output:
        done = subprocess.run(
            [*LOW_PRIORITY, str(python(home)), str(_MAKER), str(home / "models")],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            check=False,
        )
    if done.returncode:
        raise InstallError(f"the models could not be made, see {log}")
    (home / "models" / "stamp").write_text(_models_identity() + "\n", encoding="utf-8")
    return time.monotonic() - started
