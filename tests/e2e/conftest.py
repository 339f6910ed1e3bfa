from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.e2e.e2e_stack import SimulatedWorkers, Stack, Variant
from tests.e2e.e2e_upstream import EndpointPicker, LoopThread, RecordingWorker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(scope="session")
def loop_thread() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.close()


@pytest.fixture(scope="session")
def simulated_workers(loop_thread: LoopThread) -> Iterator[SimulatedWorkers]:
    workers = SimulatedWorkers(loop_thread)
    yield workers
    workers.close()


@pytest.fixture
def workers(simulated_workers: SimulatedWorkers) -> Iterator[SimulatedWorkers]:
    """The simulator with default knobs and empty records."""
    simulated_workers.reset()
    yield simulated_workers
    simulated_workers.reset()


@pytest.fixture(scope="session")
def recording_worker(loop_thread: LoopThread) -> Iterator[RecordingWorker]:
    worker = RecordingWorker(loop_thread)
    yield worker
    worker.close()


@pytest.fixture
def recorder(recording_worker: RecordingWorker) -> RecordingWorker:
    """The recording worker without records."""
    recording_worker.reset()
    return recording_worker


@pytest.fixture(scope="session")
def shared_stacks(
    simulated_workers: SimulatedWorkers, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str, Variant], Stack]]:
    """Stacks by name, started when first asked for and kept for the session."""
    running: dict[str, Stack] = {}

    def get(name: str, variant: Variant) -> Stack:
        if name not in running:
            running[name] = Stack(variant, simulated_workers, tmp_path_factory.mktemp(name))
        return running[name]

    yield get
    for stack in running.values():
        stack.close()


@pytest.fixture
def own_stack(
    workers: SimulatedWorkers, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Variant], Stack]]:
    """Stacks of one test, stopped at its end."""
    running: list[Stack] = []

    def start(variant: Variant) -> Stack:
        running.append(Stack(variant, workers, tmp_path_factory.mktemp("stack")))
        return running[-1]

    yield start
    for stack in running:
        stack.close()


@pytest.fixture(scope="session")
def picker_server() -> Iterator[EndpointPicker]:
    with EndpointPicker() as server:
        yield server


@pytest.fixture
def picker(picker_server: EndpointPicker) -> EndpointPicker:
    """The endpoint-picker stand-in without records."""
    picker_server.picked.clear()
    return picker_server
