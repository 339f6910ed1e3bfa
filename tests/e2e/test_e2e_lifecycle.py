"""Clients that leave, sidecars that stop, and many requests at once."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import aiohttp
import pytest

from deploy.envoy.local_stack import DECODE, PREFILL
from tests.e2e.e2e_client import CAT, CHAT, Answer, Picture, Upload, as_body, chat, new_id
from tests.e2e.e2e_stack import Variant, wait_for
from tests.e2e.e2e_variants import NONE_NIXL

if TYPE_CHECKING:
    from collections.abc import Callable

    from sidecar.simulator.config import Role
    from tests.e2e.e2e_stack import SimulatedWorkers, Stack
    from tests.e2e.e2e_upstream import RecordingWorker

FOREVER = 60.0


@pytest.fixture
def stack(workers: SimulatedWorkers, shared_stacks: Callable[[str, Variant], Stack]) -> Stack:
    assert workers.violations == []
    return shared_stacks("none-nixl", NONE_NIXL)


def start(stack: Stack, body: object, request_id: str | None = None) -> Upload:
    """Send a whole request without waiting for its answer."""
    upload = Upload(stack.base, CHAT, {"x-request-id": request_id or new_id()})
    upload.send(as_body(body))
    upload.finish()
    return upload


def disconnected(stack: Stack, before: int) -> bool:
    """Whether Envoy has logged a client that left since the log had `before` lines."""
    return any("DC" in line["flags"] for line in stack.log_lines()[before:])


def test_a_client_that_leaves_during_the_upload_costs_nothing(
    stack: Stack, workers: SimulatedWorkers
) -> None:
    """A body that never ends is never processed, not even the part that arrived."""
    before = len(stack.log_lines())
    body = as_body(chat("Look", CAT, padding="x" * 500_000))
    upload = Upload(stack.base, CHAT)
    upload.send(body)  # a complete JSON text, but the request has not ended
    upload.leave()
    wait_for(lambda: disconnected(stack, before), "Envoy to notice")
    answer, _ = stack.coordinate(chat("Hello"))
    assert answer.status == 200
    assert len(workers.exchanges("render")) == 1


@pytest.mark.parametrize("role", ["render", "encode", "prefill"])
def test_a_client_that_leaves_cancels_what_is_in_flight(
    role: Role, stack: Stack, workers: SimulatedWorkers
) -> None:
    """The running sub-requests are cancelled and no later phase is called."""
    workers.configure(latency={role: FOREVER})
    before = len(stack.log_lines())
    pictures = [Picture(200, 200 + 28 * number) for number in range(3)]
    upload = start(stack, chat("Look", *pictures))
    expected = 3 if role == "encode" else 1
    wait_for(lambda: len(workers.exchanges(role)) == expected, f"the {role} sub-requests")
    upload.leave()
    wait_for(lambda: all(item.cancelled for item in workers.exchanges(role)), "the cancellations")
    wait_for(lambda: disconnected(stack, before), "Envoy to log it")
    workers.configure(latency={role: 0.0})
    answer, _ = stack.coordinate(chat("Hello"))  # a whole later request: stragglers would have shown by now
    assert answer.status == 200
    if role == "render":
        assert workers.exchanges("encode") == []
    assert len(workers.exchanges("decode")) == 1
    assert len(workers.exchanges("prefill")) == (2 if role == "prefill" else 1)


def test_a_client_that_leaves_while_decode_works_cancels_decode(
    stack: Stack, workers: SimulatedWorkers
) -> None:
    """After the hand-over Envoy itself cancels the decode request."""
    workers.configure(latency={"decode": FOREVER})
    upload = start(stack, chat("Look", CAT))
    (decode,) = wait_for(lambda: workers.exchanges("decode"), "decode")
    upload.leave()
    wait_for(lambda: decode.cancelled, "the cancelled decode request")


def test_a_killed_sidecar_leaves_a_clean_error(
    own_stack: Callable[[Variant], Stack], workers: SimulatedWorkers
) -> None:
    """SIGKILL in the middle of a request: a 5xx for the client, and not even half a body for decode."""
    stack = own_stack(NONE_NIXL)
    workers.configure(latency={"encode": FOREVER})
    upload = start(stack, chat("Look", CAT))
    (encode,) = wait_for(lambda: workers.exchanges("encode"), "encode")
    stack.sidecars[0].kill()
    answer = upload.answer()
    assert 500 <= answer.status < 600
    wait_for(lambda: encode.cancelled, "the cancelled encode request")
    assert workers.exchanges("decode") == []
    down = stack.post(chat("Look", CAT))
    assert down.status == 503
    assert workers.exchanges("decode") == []


def test_a_draining_sidecar_finishes_what_it_has(
    own_stack: Callable[[Variant], Stack], workers: SimulatedWorkers
) -> None:
    """SIGTERM with a request in flight: the request is answered 200, then the process exits with 0."""
    stack = own_stack(NONE_NIXL)
    workers.configure(latency={"encode": 1.5})
    upload = start(stack, chat("Look", CAT, max_tokens=200))
    wait_for(lambda: workers.exchanges("encode"), "encode")
    (sidecar,) = stack.sidecars
    sidecar.process.send_signal(signal.SIGTERM)
    assert "KV from prefill: hit" in upload.answer().text
    assert sidecar.process.wait(40) == 0


def test_a_rolling_restart_loses_no_request(
    own_stack: Callable[[Variant], Stack], workers: SimulatedWorkers
) -> None:
    """With two sidecars, one of them drained under load, every request is answered 200."""
    stack = own_stack(replace(NONE_NIXL, sidecars=2))
    workers.configure(latency={"prefill": 0.05})
    answers: list[Answer] = []
    stopping = threading.Event()

    def load() -> None:
        while not stopping.is_set():
            answers.append(stack.post(chat("Look", CAT, max_tokens=200)))

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_for(lambda: len(answers) > 20, "load before the restart")
    first = stack.sidecars[0]
    first.process.send_signal(signal.SIGTERM)
    wait_for(lambda: not first.running(), "the first sidecar to end", 60)
    after = len(answers)
    wait_for(lambda: len(answers) > after + 20, "load after the restart")
    stopping.set()
    for thread in threads:
        thread.join(30)
    assert first.process.returncode == 0
    assert [answer.status for answer in answers] == [200] * len(answers)


@dataclass
class Crowd:
    """Many clients at once; `statuses` fills as they are answered."""

    url: str
    bodies: list[bytes]
    statuses: Counter[int] = field(default_factory=Counter)

    def run(self) -> list[bytes]:
        """Send all bodies concurrently; the answers' bodies in the same order."""
        return asyncio.run(self._ask_all())

    async def _ask_all(self) -> list[bytes]:
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=90)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            return await asyncio.gather(*(self._ask(session, body) for body in self.bodies))

    async def _ask(self, session: aiohttp.ClientSession, body: bytes) -> bytes:
        headers = {"content-type": "application/json"}
        async with session.post(self.url, data=body, headers=headers) as response:
            answer = await response.read()
        self.statuses[response.status] += 1
        return answer


def test_two_hundred_image_requests_at_once_are_all_answered(stack: Stack, workers: SimulatedWorkers) -> None:
    """Each of 200 concurrent clients gets its own picture back, computed from its own KV."""
    pictures = [Picture(56 + 4 * (number % 20), 60 + number, (number, 90, 90)) for number in range(200)]
    bodies = [as_body(chat("Look", picture, max_tokens=200)) for picture in pictures]
    crowd = Crowd(f"{stack.base}{CHAT}", bodies)
    answers = crowd.run()
    assert crowd.statuses == {200: 200}
    for picture, answer in zip(pictures, answers, strict=True):
        size, digest = picture.names
        assert f"1 image: {size} jpeg (sha256 {digest})".encode() in answer
        assert b"KV from prefill: hit" in answer
    assert workers.violations == []


def test_eleven_hundred_waiting_requests_pass_the_circuit_breakers(
    own_stack: Callable[[Variant], Stack], recorder: RecordingWorker
) -> None:
    """1100 requests wait for prefill at once, over Envoy's default limit of 1024; all are served."""
    variant = Variant(
        sections={"limits": {"max_in_flight_requests": 2000}},
        ports={PREFILL: recorder.port, DECODE: recorder.port},
    )
    crowd = Crowd(f"{own_stack(variant).base}{CHAT}", [as_body(chat("Hello"))] * 1100)
    recorder.hold()
    clients = threading.Thread(target=crowd.run)
    clients.start()
    try:
        wait_for(lambda: len(recorder.received) + crowd.statuses.total() >= 1100, "1100 at prefill", 60)
        assert not crowd.statuses
    finally:
        recorder.release()
        clients.join(60)
    assert crowd.statuses == {200: 1100}
    assert len(recorder.received) == 2200
