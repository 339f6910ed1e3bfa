from __future__ import annotations

import hashlib
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.vllm.install_vllm import home
from tests.vllm.prepare import unprepared
from tests.vllm.vllm_engines import Engines
from tests.vllm.vllm_lab import Lab

if TYPE_CHECKING:
    from collections.abc import Iterator

_HERE = Path(__file__).resolve().parent

_TEST_SECONDS = 900
"""Longer than the start of four engines on a busy machine."""

_LAB = pytest.StashKey[Lab]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.timeout(_TEST_SECONDS))


@pytest.fixture(scope="session")
def running_lab(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Lab]:
    reason = unprepared(home())
    if reason:
        pytest.exit(f"{reason}; run `make test-vllm`", returncode=3)
    # A terminated run ends like an interrupted one: fixtures stop what they started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    directory = tmp_path_factory.mktemp("vllm")
    lab = Lab(Engines(home(), directory), directory)
    pytestconfig.stash[_LAB] = lab
    try:
        yield lab
    finally:
        lab.close()


@pytest.fixture(scope="module")
def model_lab(running_lab: Lab, request: pytest.FixtureRequest) -> Lab:
    """The lab with the engines on the model that the test module names."""
    running_lab.engines.use(request.module.MODEL_FOLDER)
    return running_lab


@pytest.fixture
def lab(model_lab: Lab, request: pytest.FixtureRequest) -> Iterator[Lab]:
    """The lab with empty stores, for one test, after which every engine must still answer."""
    model_lab.engines.use(request.module.MODEL_FOLDER)
    model_lab.reset()
    yield model_lab
    dead = model_lab.engines.dead()
    assert not dead, "\n".join(dead)


@pytest.fixture
def salt(request: pytest.FixtureRequest) -> str:
    """Seed of pictures and of cache salts, of this test alone: no engine of the session has seen it."""
    return hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:32]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    lab = config.stash.get(_LAB, None)
    if lab is None:
        return
    for what, seconds in lab.engines.start_seconds.items():
        terminalreporter.write_line(f"started {what}: {seconds:.0f} s")
    if lab.differences:
        terminalreporter.write_line(
            f"{len(lab.differences)} answers compared with one engine alone, "
            f"largest logprob difference {max(lab.differences):.1e}"
        )
