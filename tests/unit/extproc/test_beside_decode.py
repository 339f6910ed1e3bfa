"""A call that runs beside decode: until decode answers its failure is the client's, after that the log's."""

from __future__ import annotations

import asyncio
import json
import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import grpc
import pytest

from sidecar.errors import StepFailed
from sidecar.extproc.companions import Companions
from sidecar.extproc.messages import read_event
from sidecar.extproc.pb.envoy.service.ext_proc.v3.external_processor_pb2 import HttpHeaders, ProcessingRequest
from sidecar.extproc.protocol import BodyMode, ResponseEvent
from sidecar.extproc.waiting import decode_answer
from sidecar.pipeline.request import DecodeRewrite
from tests.unit.extproc.extproc_harness import (
    body,
    header_map,
    headers,
    pieces,
    record,
    remaining,
    reply,
    serving,
    settled,
)

if TYPE_CHECKING:
    from sidecar.extproc.channel import Channel
    from sidecar.extproc.protocol import Event
    from sidecar.pipeline.request import InboundRequest
    from tests.unit.extproc.extproc_harness import Call, Harness

ID = ("x-request-id", "id-1")
PAYLOAD = b'{"model":"m"}'


class Prefill:
    """A pipeline whose rewrite has a call alongside, which ends as the test says."""

    def __init__(self) -> None:
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.started = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def __call__(self, request: InboundRequest) -> DecodeRewrite:
        async def alongside() -> None:
            self.started.set()
            try:
                await asyncio.shield(self.end)
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
            finally:
                request.record.prefill_ms = 5.0

        return DecodeRewrite((("epp-profile", "decode"),), (), [b"decode body"], alongside=alongside)

    def fail(self) -> None:
        self.end.set_exception(StepFailed("prefill_decode", "prefill_decode failed: HTTP 500", detail="why"))

    def succeed(self) -> None:
        self.end.set_result(None)


@pytest.fixture
async def prefill() -> Prefill:
    return Prefill()


def response(status: str = "200") -> ProcessingRequest:
    return ProcessingRequest(response_headers=HttpHeaders(headers=header_map((":status", status))))


async def _answered(message: ProcessingRequest) -> Event:
    return read_event(message.SerializeToString())


async def _unexpected(event: Event) -> None:
    raise AssertionError(event)


async def handed_over(harness: Harness, mode: BodyMode = BodyMode.FULL_DUPLEX_STREAMED) -> Call:
    """A call whose rewrite Envoy has received in full."""
    call = harness.call()
    await call.write(headers(ID, mode=mode))
    if mode is BodyMode.BUFFERED:
        await reply(call)
    await call.write(body(PAYLOAD, end=True))
    first = await reply(call)
    if mode is BodyMode.BUFFERED:
        assert first.request_body.response.body_mutation.body == b"decode body"
    else:
        assert pieces([await reply(call)]) == [(b"decode body", True)]
    return call


@pytest.mark.parametrize("mode", [BodyMode.FULL_DUPLEX_STREAMED, BodyMode.BUFFERED])
async def test_a_failure_before_decode_answers_is_the_answer(prefill: Prefill, mode: BodyMode) -> None:
    """The client gets the error although its request has been forwarded already."""
    async with serving(prefill) as harness:
        call = await handed_over(harness, mode)
        prefill.fail()
        (failed,) = await remaining(call)
        assert failed.immediate_response.status.code == 502
        assert json.loads(failed.immediate_response.body)["error"]["code"] == "epd_prefill_decode_failed"
        assert record(failed)["outcome"] == "upstream_error"
        assert record(failed)["stage"] == "prefill_decode"
        await settled(harness)
    (seen,) = harness.answered
    assert (seen.outcome, seen.error) == ("upstream_error", "epd_prefill_decode_failed")


@pytest.mark.parametrize("mode", [BodyMode.FULL_DUPLEX_STREAMED, BodyMode.BUFFERED])
async def test_a_success_ends_the_call(prefill: Prefill, mode: BodyMode) -> None:
    """Decode goes on without the sidecar: nothing of the request is held, and no call stays open."""
    async with serving(prefill) as harness:
        call = await handed_over(harness, mode)
        prefill.succeed()
        assert await remaining(call) == []
        await settled(harness)
    (seen,) = harness.answered
    assert (seen.outcome, seen.stage, seen.prefill_ms) == ("ok", "decode", 5.0)


async def test_decodes_answer_wins_a_tie(prefill: Prefill) -> None:
    """When both are there at once, the client gets what decode says."""
    async with serving(prefill) as harness:
        call = await handed_over(harness)
        ahead: asyncio.Task[Event] = asyncio.create_task(_answered(response()))
        await ahead
        channel = cast("Channel", SimpleNamespace(read_ahead=lambda: ahead, read=lambda: ahead))
        prefill.fail()
        beside = asyncio.ensure_future(prefill.end)
        assert await decode_answer(channel, beside, _unexpected) == ResponseEvent("response_headers", 200)
        assert isinstance(prefill.end.exception(), StepFailed)
        await call.done_writing()


async def test_a_failure_after_decode_answered_is_logged(
    prefill: Prefill, caplog: pytest.LogCaptureFixture
) -> None:
    """The answer goes on untouched; one warning says what became of prefill, and nothing stays charged."""
    async with serving(prefill) as harness:
        call = await handed_over(harness)
        await call.write(response())
        (last,) = await remaining(call)
        assert last.HasField("response_headers")
        assert not prefill.cancelled.is_set()
        prefill.fail()
        await settled(harness)
    (warning,) = [item for item in caplog.records if item.levelno == logging.WARNING]
    assert warning.message == "prefill failed after decode had answered"
    assert vars(warning)["request_id"] == "id-1"
    assert vars(warning)["detail"] == "why"
    (seen,) = harness.answered
    assert seen.outcome == "ok"


async def test_prefill_outlives_a_call_that_envoy_has_ended(prefill: Prefill) -> None:
    """Envoy ends the call at decode's headers, prefill goes on: its answer is charged, and given back."""
    async with serving(prefill) as harness:
        call = await handed_over(harness)
        await call.write(response())
        await remaining(call)
        assert harness.budget.requests == 1
        prefill.succeed()
        await settled(harness)
    assert not prefill.cancelled.is_set()


@pytest.mark.parametrize("status", ["400", "503"])
async def test_decodes_refusal_ends_prefill(prefill: Prefill, status: str) -> None:
    """Nobody fetches the cache of a request that decode has refused."""
    async with serving(prefill) as harness:
        call = await handed_over(harness)
        await call.write(response(status))
        (last,) = await remaining(call)
        assert last.HasField("response_headers")
        assert prefill.cancelled.is_set()
        await settled(harness)


@pytest.mark.parametrize("leave", ["half-close", "reset"])
async def test_a_client_that_leaves_takes_prefill_with_it(prefill: Prefill, leave: str) -> None:
    """Before decode has answered, the end of the call ends prefill."""
    async with serving(prefill) as harness:
        call = await handed_over(harness)
        await prefill.started.wait()
        if leave == "reset":
            call.cancel()
        else:
            await call.done_writing()
        await asyncio.wait_for(prefill.cancelled.wait(), 5)
        await settled(harness)
    assert not harness.answered or harness.answered[0].outcome == "ok"


async def test_a_filter_that_skips_response_headers_is_told_about(
    prefill: Prefill, caplog: pytest.LogCaptureFixture
) -> None:
    """While no call has outlasted a rewrite, one warning names the setting."""
    async with serving(prefill) as harness:
        for _ in range(3):
            call = await handed_over(harness)
            await call.done_writing()
            await remaining(call)
        assert caplog.text.count("response_header_mode to SEND") == 1


async def test_a_filter_that_sends_response_headers_is_left_alone(
    prefill: Prefill, caplog: pytest.LogCaptureFixture
) -> None:
    """Once a call has brought decode's answer, clients that leave are just that."""
    async with serving(prefill) as harness:
        call = await handed_over(harness)
        await call.write(response())
        await remaining(call)
        call = await handed_over(harness)
        await call.done_writing()
        await remaining(call)
        assert "response_header_mode" not in caplog.text
        prefill.succeed()


async def test_what_an_overtaken_prefill_holds_stays_charged(prefill: Prefill) -> None:
    """The body it sends counts until it ends, and its request counts once."""
    async with serving(prefill) as harness:
        call = await handed_over(harness)
        await call.write(response())
        await remaining(call)
        assert (harness.budget.requests, harness.budget.bytes) == (1, len(PAYLOAD))
        prefill.succeed()
        await settled(harness)


async def test_envoys_own_answer_ends_the_request() -> None:
    """A response while the pipeline still runs is none of decode's: nothing more is asked of anybody."""
    started = asyncio.Event()
    cancelled = asyncio.Event()

    async def run(_: InboundRequest) -> DecodeRewrite:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        raise AssertionError("waits for ever")

    async with serving(run) as harness:
        call = harness.call()
        await call.write(headers(ID))
        await call.write(body(PAYLOAD, end=True))
        await started.wait()
        await call.write(response("504"))
        assert await remaining(call) == []
        assert cancelled.is_set()


async def test_a_drain_in_the_moment_of_adoption_leaves_nothing(prefill: Prefill) -> None:
    """Cancelled before it has run once more, the prefill gives its ticket back all the same."""
    async with serving(prefill) as harness:
        companions = Companions()
        ticket = harness.budget.admit()

        async def work() -> None:
            await prefill.end

        with ticket:
            ticket.reserve(7)
            task = asyncio.create_task(work())
            companions.adopt(task, ticket, "id-1")
        companions.cancel()
        await companions.ended()
        assert (harness.budget.requests, harness.budget.bytes) == (0, 0)


async def test_a_drain_waits_for_prefill(prefill: Prefill) -> None:
    """A prefill that has outlived its call keeps the process alive until it ends."""
    async with serving(prefill) as harness:
        call = await handed_over(harness)
        await call.write(response())
        await remaining(call)
        drain = asyncio.create_task(harness.server.drain())
        done, _ = await asyncio.wait({drain}, timeout=0.3)
        assert not done
        prefill.succeed()
        await asyncio.wait_for(drain, 5)


async def test_a_drain_that_is_over_ends_prefill(prefill: Prefill) -> None:
    """When the time to drain is over, prefill is cancelled, and the process can stop."""
    async with serving(prefill) as harness:
        call = await handed_over(harness)
        await call.write(response())
        await remaining(call)
        harness.server._drain_timeout = 0.05
        await asyncio.wait_for(harness.server.drain(), 5)
        assert prefill.cancelled.is_set()


async def test_a_drain_answers_what_waits_for_decode(prefill: Prefill) -> None:
    """A request whose prefill still runs when the time is over gets 503, and prefill ends."""
    async with serving(prefill) as harness:
        call = await handed_over(harness)
        harness.server._drain_timeout = 0.05
        drain = asyncio.create_task(harness.server.drain())
        answered = await reply(call)
        assert answered.immediate_response.status.code == 503
        await asyncio.wait_for(drain, 5)
        assert prefill.cancelled.is_set()
        assert await call.code() == grpc.StatusCode.OK
