"""Calls of observing filters: read, compared, never answered, never in anybody's way."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import TYPE_CHECKING, Any

import pytest

from sidecar.extproc import observation
from sidecar.extproc.pb.envoy.service.ext_proc.v3.external_processor_pb2 import (
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ProcessingRequest,
)
from sidecar.observability.record import AccessRecord
from sidecar.pipeline.parity import PromptTokenParity
from tests.unit.extproc.extproc_harness import (
    body,
    echo,
    hang,
    header_map,
    headers,
    pieces,
    remaining,
    serving,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.extproc.extproc_harness import Harness

JSON, EVENTS = "application/json", "text/event-stream; charset=utf-8"
RECORD = AccessRecord(
    request_id="r1", api="chat", model="m", outcome="ok", prompt_tokens=41, render_form="text"
).strings()
LOGGER = "sidecar.pipeline.parity"


def head(
    content_type: str = JSON,
    record: dict[str, str] = RECORD,
    *,
    status: int = 200,
    namespace: str = "epd.sidecar",
    end: bool = False,
) -> ProcessingRequest:
    """The head of an answer, with the record of its request, as Envoy copies it."""
    fields = header_map((":status", str(status)), ("content-type", content_type))
    message = ProcessingRequest(response_headers=HttpHeaders(headers=fields), observability_mode=True)
    message.response_headers.end_of_stream = end
    values = message.metadata_context.filter_metadata[namespace].fields
    for key, value in record.items():
        values[key].string_value = value
    return message


def piece(data: bytes, *, end: bool = False) -> ProcessingRequest:
    return ProcessingRequest(response_body=HttpBody(body=data, end_of_stream=end), observability_mode=True)


def trailers() -> ProcessingRequest:
    return ProcessingRequest(response_trailers=HttpTrailers(), observability_mode=True)


def counted(tokens: int) -> bytes:
    return json.dumps({"choices": [], "usage": {"prompt_tokens": tokens}}).encode()


def event(tokens: int | None) -> bytes:
    usage = None if tokens is None else {"prompt_tokens": tokens}
    return b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"


class Mismatches(list[str]):
    """The phases of all mismatches, and the object that counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.parity = PromptTokenParity(lambda _: None, self.append)


@pytest.fixture
def mismatches() -> Mismatches:
    return Mismatches()


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="sidecar")


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """Everything the sidecar logged about calls and answers."""
    own = [entry for entry in caplog.records if not entry.name.endswith("extproc.server")]
    return [(entry.name, entry.levelname) for entry in own]


async def copied(harness: Harness, *messages: ProcessingRequest) -> None:
    """Copy an answer to the sidecar; it ends the call itself, answers nothing and counts nothing."""
    assert await harness.exchange(*messages) == []
    assert harness.answered == []


@pytest.mark.parametrize(
    "messages",
    [
        pytest.param([head(), piece(counted(40)), piece(b"", end=True)], id="whole"),
        pytest.param([head(), piece(counted(40), end=True)], id="whole-in-one"),
        pytest.param(
            [head(EVENTS), piece(event(None)), piece(event(40)), piece(b"", end=True)], id="streamed"
        ),
        pytest.param([head(EVENTS), piece(event(40)), trailers()], id="trailers"),
        pytest.param(
            [head(EVENTS), piece(event(41)), piece(event(40) + b"data: [DONE]\n\n", end=True)], id="last"
        ),
        pytest.param(
            [head(record=RECORD | {"outcome": "served"}), piece(counted(40), end=True)], id="served"
        ),
        pytest.param(
            [headers(observability=True), head(), piece(counted(40), end=True)], id="mirrors-requests"
        ),
    ],
)
async def test_a_mismatch_is_one_line_and_one_count(
    messages: list[ProcessingRequest], mismatches: Mismatches, caplog: pytest.LogCaptureFixture
) -> None:
    """Whole or streamed, the answer is compared when it has ended, and the sidecar ends the call."""
    async with serving(hang, parity=mismatches.parity) as harness:
        await copied(harness, *messages)
    (line,) = [entry for entry in caplog.records if entry.name == LOGGER]
    expected = {
        "request_id": "r1",
        "phase": "decode",
        "api": "chat",
        "model": "m",
        "rendered": 41,
        "reported": 40,
    }
    assert vars(line).items() >= expected.items()
    assert mismatches == ["decode"]
    assert lines(caplog) == [(LOGGER, "WARNING")]


@pytest.mark.parametrize(
    "messages",
    [
        pytest.param([head(), piece(counted(41), end=True)], id="equal"),
        pytest.param([head(EVENTS), piece(event(40)), piece(event(41), end=True)], id="equal-in-the-end"),
        pytest.param([head(EVENTS), piece(event(None), end=True)], id="no-usage"),
        pytest.param([head(EVENTS), piece(b"\xff\x00\r\r\n{]", end=True)], id="garbage"),
        pytest.param([head(), piece(b"\xff\x00{]", end=True)], id="garbage-json"),
        pytest.param([head(end=True)], id="no-body"),
        pytest.param([head(status=500)], id="status"),
        pytest.param([head("text/html")], id="content-type"),
        pytest.param([head(record=RECORD | {"render_form": ""})], id="not-rendered"),
        pytest.param([head(record={})], id="no-record"),
        pytest.param([head(namespace="other")], id="other-namespace"),
    ],
)
async def test_nothing_to_say(
    messages: list[ProcessingRequest], mismatches: Mismatches, caplog: pytest.LogCaptureFixture
) -> None:
    """Equal counts, no count, or an answer that is not compared: of the latter the head alone is read."""
    async with serving(hang, parity=mismatches.parity) as harness:
        await copied(harness, *messages)
    assert (mismatches, lines(caplog)) == ([], [])


async def test_a_call_that_envoy_ends_is_compared_as_far_as_it_came(mismatches: Mismatches) -> None:
    """Without an end of the stream (trailers that the filter skips) the end of the call is the end."""
    async with serving(hang, parity=mismatches.parity) as harness:
        call = harness.call()
        await call.write(head(EVENTS))
        await call.write(piece(event(40)))
        await call.done_writing()
        assert await remaining(call) == []
    assert mismatches == ["decode"]


async def test_a_filter_without_bodies_is_named_once(
    mismatches: Mismatches, caplog: pytest.LogCaptureFixture
) -> None:
    """Heads alone compare nothing: as long as no body has ever come, one warning says which setting it is."""
    async with serving(hang, parity=mismatches.parity) as harness:
        for _ in range(2):
            call = harness.call()
            await call.write(head())
            await call.done_writing()
            assert await remaining(call) == []
    assert caplog.text.count("response_body_mode to STREAMED") == 1


@pytest.mark.parametrize("on", [True, False])
async def test_a_call_that_breaks_off_leaves_nothing(
    *, on: bool, mismatches: Mismatches, caplog: pytest.LogCaptureFixture
) -> None:
    """A reset in the middle is no line, no count, no answered request, and frees what was held."""
    async with serving(hang, parity=mismatches.parity if on else None) as harness:
        watcher = harness.server._processor._observation
        call = harness.call()
        await call.write(head())
        await call.write(piece(b"x" * 1000))
        await until(lambda: bool(watcher._running) and watcher._held == (1000 if on else 0))
        call.cancel()
        await until(lambda: not watcher._running)
        assert watcher._held == 0
        assert harness.answered == []
    assert (mismatches, lines(caplog)) == ([], [])


async def test_observed_calls_count_in_no_limit(mismatches: Mismatches) -> None:
    """A process that takes no request more still reads answers, and they take nothing from its budget."""
    async with serving(hang, parity=mismatches.parity) as harness:
        harness.budget._max_requests = harness.budget._max_bytes = 0
        await copied(harness, head(), piece(counted(40), end=True))
        assert (harness.budget.requests, harness.budget.bytes) == (0, 0)
    assert mismatches == ["decode"]


@pytest.mark.parametrize("on", [True, False])
async def test_octets_that_are_no_message(
    *, on: bool, mismatches: Mismatches, caplog: pytest.LogCaptureFixture
) -> None:
    """The call ends without an answer; the log says so."""
    async with serving(hang, parity=mismatches.parity if on else None) as harness:
        call = harness.raw_call()
        await call.write(head().SerializeToString())
        await call.write(b"\xff\xff\xff")
        assert await remaining(call) == []
        assert harness.answered == []
    assert lines(caplog) == [("sidecar.extproc.observation", "ERROR")]


async def test_a_fault_of_the_comparison_is_not_answered(
    mismatches: Mismatches, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not even a bug of ours reaches Envoy."""

    def broken(*_: object) -> None:
        raise RuntimeError("bug")

    monkeypatch.setattr(mismatches.parity, "compare", broken)
    async with serving(hang, parity=mismatches.parity) as harness:
        await copied(harness, head(), piece(counted(40), end=True))
    assert lines(caplog) == [("sidecar.extproc.observation", "ERROR")]


async def test_all_answers_together_are_bounded(
    mismatches: Mismatches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer that would be too much is given up, the others are compared."""
    monkeypatch.setattr(observation, "_MOST_HELD", 1500)
    async with serving(hang, parity=mismatches.parity) as harness:
        watcher = harness.server._processor._observation
        first = harness.call()
        await first.write(head())
        await first.write(piece(b" " * 1000))
        await until(lambda: watcher._held == 1000)
        await copied(harness, head(), piece(b" " * 1000))
        assert watcher._held == 1000
        await first.write(piece(counted(40), end=True))
        assert await remaining(first) == []
        assert watcher._held == 0
    assert mismatches == ["decode"]


@pytest.mark.parametrize("on", [True, False])
async def test_draining_does_not_wait_for_observed_answers(
    *, on: bool, mismatches: Mismatches, caplog: pytest.LogCaptureFixture
) -> None:
    """They may take as long as decode likes: their calls end at once, unanswered, while requests finish."""
    entered, go = asyncio.Event(), asyncio.Event()

    async def slow(request: Any) -> Any:
        entered.set()
        await go.wait()
        return await echo(request)

    async with serving(slow, parity=mismatches.parity if on else None) as harness:
        harness.server._drain_timeout = 1000.0
        running = asyncio.create_task(harness.exchange(headers(), body(b"{}", end=True)))
        await entered.wait()
        observed = await open_call(harness)
        drain = asyncio.create_task(harness.server.drain())
        assert await remaining(observed) == []
        assert not drain.done()
        go.set()
        assert pieces(await running) == [(b"{}", True)]
        await drain
        assert len(harness.answered) == 1
    assert [name for name, _ in lines(caplog)] == ["sidecar.extproc.call"]


@pytest.mark.parametrize("on", [True, False])
async def test_stopping_at_once_ends_observed_calls_unanswered(
    *, on: bool, mismatches: Mismatches, caplog: pytest.LogCaptureFixture
) -> None:
    """The 503 of a process that stops is for requests; a call that comes late ends with its head."""
    async with serving(hang, parity=mismatches.parity if on else None) as harness:
        observed = await open_call(harness)
        harness.server._processor.shut_down_calls()
        assert await remaining(observed) == []
        await copied(harness, head(EVENTS))
    assert lines(caplog) == []


async def open_call(harness: Harness) -> Any:
    """A call that copies an answer and has not ended."""
    watcher = harness.server._processor._observation
    call = harness.call()
    await call.write(head(EVENTS))
    await call.write(piece(event(40)))
    await until(lambda: len(watcher._running) == 1)
    return call


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  # the watcher raises no events
            await asyncio.sleep(0.005)
