"""Answers of a worker that end the pipeline: whole ones, and streams passed on as they arrive."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from sidecar.errors import SidecarError, StepFailed
from sidecar.extproc.protocol import BodyMode
from sidecar.limits import InFlightBudget
from sidecar.pipeline.request import ServedAnswer, ServedStream
from tests.unit.extproc.extproc_harness import (
    RULES,
    body,
    headers,
    record,
    remaining,
    reply,
    serving,
    settled,
    trailers,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from sidecar.extproc.pb.envoy.service.ext_proc.v3.external_processor_pb2 import (
        ProcessingRequest,
        ProcessingResponse,
    )
    from sidecar.http import HeaderPairs
    from sidecar.pipeline.request import InboundRequest

ID = ("x-request-id", "id-1")
PAYLOAD = b'{"model":"m"}'
FIELDS: HeaderPairs = (("content-type", "text/event-stream"), ("x-worker", "w"))
MESSAGES = "/v1/messages"


class Worker:
    """A pipeline whose worker answers with what the test feeds it; None ends the answer."""

    def __init__(self, status: int = 200) -> None:
        self.feed: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        self.status = status
        self.closed = asyncio.Event()
        self.requests: list[InboundRequest] = []

    async def __call__(self, request: InboundRequest) -> ServedStream:
        self.requests.append(request)
        request.record.stage = "conditional_decode"
        request.cleanup.callback(self.closed.set)
        return ServedStream(self.status, FIELDS, self)

    async def chunks(self) -> AsyncIterator[bytes]:
        while (item := await self.feed.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item


def head_of(answer: ProcessingResponse) -> dict[str, bytes]:
    fields = answer.streamed_immediate_response.headers_response.headers.headers
    assert not any(field.value for field in fields)
    return {field.key: field.raw_value for field in fields}


def piece_of(answer: ProcessingResponse) -> tuple[bytes, bool]:
    assert answer.streamed_immediate_response.WhichOneof("response") == "body_response"
    piece = answer.streamed_immediate_response.body_response
    return piece.body, piece.end_of_stream


@pytest.mark.parametrize("end", [[body(PAYLOAD, end=True)], [body(PAYLOAD), trailers(("x", "1"))]])
async def test_a_stream_is_passed_on_as_it_arrives(end: list[ProcessingRequest]) -> None:
    """The head comes before any event, every event before the next one, the end as an empty piece."""
    worker = Worker()
    async with serving(worker) as harness:
        call = harness.call()
        for message in (headers(ID), *end):
            await call.write(message)
        first = await reply(call)
        assert head_of(first) == {":status": b"200", "content-type": b"text/event-stream", "x-worker": b"w"}
        for event in (b"data: 1\n\n", b"data: 2\n\n"):
            worker.feed.put_nowait(event)
            assert piece_of(await reply(call)) == (event, False)
        worker.feed.put_nowait(None)
        (last,) = await remaining(call)
        assert piece_of(last) == (b"", True)
        await settled(harness)
        (answered,) = harness.answered
    found = record(first)
    assert (found["outcome"], found["stage"], found["error"]) == ("served", "conditional_decode", "")
    assert set(record(last)) == {"total_ms", "overhead_ms"}
    assert answered.strings() == found | record(last)
    assert worker.closed.is_set()
    assert worker.requests[0].can_stream_answer


async def test_a_large_chunk_is_passed_on_in_pieces() -> None:
    """No message is longer than 62 KiB, and nothing is lost."""
    worker = Worker()
    data = bytes(range(256)) * 2000
    worker.feed.put_nowait(data)
    worker.feed.put_nowait(None)
    async with serving(worker) as harness:
        answers = await harness.exchange(headers(ID), body(PAYLOAD, end=True))
    received = [piece_of(answer)[0] for answer in answers[1:]]
    assert b"".join(received) == data
    assert max(map(len, received)) == 62 << 10


async def test_a_stream_holds_no_bytes_of_the_request() -> None:
    """While it is passed on a request counts as one, its body no longer as bytes in flight."""
    worker = Worker()
    async with serving(worker, budget=InFlightBudget(1, 1 << 20)) as harness:
        call = harness.call()
        for message in (headers(ID), body(PAYLOAD, end=True)):
            await call.write(message)
        await reply(call)
        assert (harness.budget.requests, harness.budget.bytes) == (1, 0)
        worker.feed.put_nowait(None)
        await remaining(call)
        await settled(harness)


async def test_the_deadline_ends_with_the_head() -> None:
    """A stream may last longer than request_deadline."""
    worker = Worker()
    async with serving(worker, replace(RULES, request_deadline=0.2)) as harness:
        call = harness.call()
        for message in (headers(ID), body(PAYLOAD, end=True)):
            await call.write(message)
        await reply(call)
        await asyncio.sleep(0.3)
        worker.feed.put_nowait(b"late")
        worker.feed.put_nowait(None)
        assert [piece_of(answer) for answer in await remaining(call)] == [(b"late", False), (b"", True)]


async def test_waiting_for_events_is_not_overhead() -> None:
    """The time of a stream is the worker's."""
    worker = Worker()
    async with serving(worker) as harness:
        call = harness.call()
        for message in (headers(ID), body(PAYLOAD, end=True)):
            await call.write(message)
        await reply(call)
        await asyncio.sleep(0.2)
        worker.feed.put_nowait(None)
        (last,) = await remaining(call)
    totals = record(last)
    assert float(totals["total_ms"]) - float(totals["overhead_ms"]) >= 150


@pytest.mark.parametrize("how", ["cancel", "half-close"])
async def test_a_client_that_leaves_closes_the_stream(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """The worker's answer is closed at once, and the log says that the client left."""
    caplog.set_level(logging.INFO, logger="sidecar")
    worker = Worker()
    async with serving(worker) as harness:
        call = harness.call()
        for message in (headers(ID), body(PAYLOAD, end=True)):
            await call.write(message)
        await reply(call)
        worker.feed.put_nowait(b"one")
        await reply(call)
        if how == "cancel":
            call.cancel()
        else:
            await call.done_writing()
            assert await remaining(call) == []
        async with asyncio.timeout(5):
            await worker.closed.wait()
        await settled(harness)
        assert [answered.outcome for answered in harness.answered] == ["served"]
    (entry,) = [vars(r) for r in caplog.records if r.msg == "client left during the answer"]
    assert (entry["outcome"], entry["request_id"]) == ("served", "id-1")
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


@pytest.mark.parametrize(
    ("path", "opening"), [("/v1/chat/completions", b"\n\ndata: "), (MESSAGES, b"\n\nevent: error\ndata: ")]
)
async def test_a_stream_that_breaks_ends_with_an_error_event(
    path: str, opening: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """The event stands apart from what came before, in the shape of the API; the record ends as an error."""
    caplog.set_level(logging.INFO, logger="sidecar")
    worker = Worker()
    worker.feed.put_nowait(b'data: {"hal')
    worker.feed.put_nowait(StepFailed("conditional_decode", "it broke", detail="d1"))
    async with serving(worker) as harness:
        answers = await harness.exchange(headers(ID, path=path), body(PAYLOAD, end=True))
        (answered,) = harness.answered
        assert (answered.outcome, answered.error) == ("upstream_error", "epd_conditional_decode_failed")
    (half, last) = answers[1:]
    assert piece_of(half) == (b'data: {"hal', False)
    event, end = piece_of(last)
    assert end
    assert event.startswith(opening)
    assert event.endswith(b"\n\n")
    assert "it broke" in json.loads(event.removeprefix(opening))["error"]["message"]
    assert record(last) == answered.strings()
    assert worker.closed.is_set()
    (entry,) = [vars(r) for r in caplog.records if r.msg == "request answered"]
    assert entry["detail"] == "d1"


async def test_our_bug_in_the_stream_ends_it_with_an_error_event(caplog: pytest.LogCaptureFixture) -> None:
    """No call ends without the end of the answer: Envoy would leave the client waiting."""
    worker = Worker()
    worker.feed.put_nowait(RuntimeError("s3cr3t text"))
    async with serving(worker) as harness:
        answers = await harness.exchange(headers(ID), body(PAYLOAD, end=True))
    event, end = piece_of(answers[-1])
    assert end
    assert b"epd_internal" in event
    assert b"s3cr3t" not in event
    assert any(entry.exc_info for entry in caplog.records)


@pytest.mark.parametrize("mode", [BodyMode.FULL_DUPLEX_STREAMED, BodyMode.BUFFERED])
@pytest.mark.parametrize("status", [200, 418, 503])
async def test_a_whole_answer_is_one_message(mode: BodyMode, status: int) -> None:
    """Status, every header and the body of the worker, in either mode, and the call is over."""
    seen: list[bool] = []

    async def served(request: InboundRequest) -> ServedAnswer:
        seen.append(request.can_stream_answer)
        request.record.stage = "conditional_decode"
        fields = (("content-type", "text/plain"), ("set-cookie", "a"), ("set-cookie", "b"))
        return ServedAnswer(status, fields, memoryview(b"whole"))

    async with serving(served) as harness:
        answers = await harness.exchange(headers(ID, mode=mode), body(PAYLOAD, end=True))
        await settled(harness)
        assert [answered.outcome for answered in harness.answered] == ["served"]
    answer = answers[-1].immediate_response
    assert (answer.status.code, answer.body) == (status, b"whole")
    assert [(o.header.key, o.header.raw_value) for o in answer.headers.set_headers] == [
        ("content-type", b"text/plain"),
        ("set-cookie", b"a"),
        ("set-cookie", b"b"),
    ]
    found = record(answers[-1])
    assert (found["outcome"], found["stage"], found["error"]) == ("served", "conditional_decode", "")
    assert seen == [mode is BodyMode.FULL_DUPLEX_STREAMED]


@pytest.mark.parametrize("ends", ["error", "deadline", "client"])
async def test_what_the_request_opened_is_closed(ends: str) -> None:
    """A request that fails, runs out of time or loses its client leaves nothing open."""
    opened, closed = asyncio.Event(), asyncio.Event()

    async def run(request: InboundRequest) -> Any:
        request.cleanup.callback(closed.set)
        opened.set()
        if ends == "error":
            raise SidecarError("no")
        await asyncio.Event().wait()

    deadline = 0.05 if ends == "deadline" else 60
    async with serving(run, replace(RULES, request_deadline=deadline)) as harness:
        call = harness.call()
        for message in (headers(ID), body(PAYLOAD, end=True)):
            await call.write(message)
        await opened.wait()
        if ends == "client":
            call.cancel()
        async with asyncio.timeout(5):
            await closed.wait()
