"""Runs the tests against real vLLM: prepares what is missing, then starts pytest.

Usage: python -m tests.vllm.run [--only-prepare | PYTEST_ARGUMENT...], from the root of the repository

Exit code 77, which pytest never has, and a reason when the machine cannot run them; they are never skipped.
"""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import psutil

from tests.vllm.install_vllm import InstallError, home
from tests.vllm.prepare import prepare

HERE = Path(__file__).resolve().parent

CANNOT_RUN = 77
_MEMORY = 7 << 30
"""Bytes that four engines of a tiny model take."""


def main(arguments: list[str]) -> None:
    """Prepare, then become pytest."""
    try:
        _check_machine()
        seconds = prepare(home())
    except (InstallError, OSError) as error:
        sys.stderr.write(f"tests against real vLLM cannot run: {error}\n")
        sys.exit(CANNOT_RUN)
    made = ", ".join(f"{part} {taken:.0f} s" for part, taken in seconds.items() if taken)
    sys.stderr.write(f"vLLM in {home()}: {made or 'as it was'}\n")
    if arguments == ["--only-prepare"]:
        return
    root = HERE.parent.parent
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider"]
    command += ["--override-ini", f"testpaths={HERE.relative_to(root)}"]
    os.chdir(root)
    # No process in between: an interrupt reaches pytest, which then stops the engines.
    os.execv(sys.executable, [*command, *arguments])  # noqa: S606 (no shell wanted)


def _check_machine() -> None:
    if platform.system() != "Linux":
        raise InstallError(f"the CPU build of vLLM is for Linux, this is {platform.system()}")
    available = psutil.virtual_memory().available
    if available < _MEMORY:
        raise InstallError(
            f"four engines need {_MEMORY >> 30} GiB of memory, {available / (1 << 30):.1f} are available"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
