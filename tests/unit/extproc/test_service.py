from __future__ import annotations

import asyncio
import gc
import json
import logging
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from sidecar.config import Settings
from sidecar.errors import StepFailed, StepTimeout
from sidecar.extproc.protocol import BodyMode
from sidecar.extproc.rules import ServiceRules
from sidecar.extproc.service import ExternalProcessor
from sidecar.limits import InFlightBudget
from sidecar.pipeline.request import DecodeRewrite
from tests.unit.extproc.extproc_harness import (
    RULES,
    Harness,
    body,
    echo,
    hang,
    headers,
    pieces,
    record,
    remaining,
    reply,
    serving,
    settled,
    trailers,
    with_admission,
)

if TYPE_CHECKING:
    from sidecar.extproc.pb.envoy.service.ext_proc.v3.external_processor_pb2 import (
        ProcessingRequest,
        ProcessingResponse,
    )
    from sidecar.observability.record import AccessRecord
    from sidecar.pipeline.request import InboundRequest

ID = ("x-request-id", "id-1")
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
PAYLOAD = b'{"model":"m"}'


def failure(answers: list[ProcessingResponse], status: int, code: str) -> dict[str, str]:
    """Check that the one answer is an error; its record."""
    answer = answers[-1]
    assert answer.WhichOneof("response") == "immediate_response"
    assert answer.immediate_response.status.code == status
    assert answer.immediate_response.details == code
    error = json.loads(answer.immediate_response.body)["error"]
    assert error["message"]
    found = record(answer)
    assert found["error"] == code
    assert found["request_id"]
    return found


class Pipeline:
    """Keeps what it was asked, and can be held up."""

    def __init__(self) -> None:
        self.requests: list[InboundRequest] = []
        self.entered = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.go = asyncio.Event()

    async def __call__(self, request: InboundRequest) -> DecodeRewrite:
        self.requests.append(request)
        request.record.stage = "encode"
        self.entered.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            # Closing upstream calls takes a moment, which the service has to grant.
            await asyncio.sleep(0.01)
            self.cancelled.set()
            raise
        return await echo(request)


async def test_coordinated_duplex() -> None:
    """Headers with record and route, then the body; the pipeline saw head, body, ids and budget."""
    pipeline = Pipeline()
    pipeline.go.set()
    async with serving(pipeline) as harness:
        answers = await harness.exchange(
            headers(ID, ("traceparent", TRACE), ("prefer", "x")),
            body(PAYLOAD[:5]),
            body(PAYLOAD[5:], end=True),
        )
        await settled(harness)
    first = answers[0].request_headers.response
    assert [(o.header.key, o.header.raw_value) for o in first.header_mutation.set_headers] == [
        ("epp-profile", b"decode")
    ]
    assert list(first.header_mutation.remove_headers) == ["prefer", "x-gone"]
    assert first.clear_route_cache
    assert pieces(answers) == [(PAYLOAD, True)]
    (request,) = pipeline.requests
    assert (request.body, request.request_id, request.traceparent) == (PAYLOAD, "id-1", TRACE)
    assert request.head.path == "/v1/chat/completions"
    assert request.api.name == "chat"
    found = record(answers[0])
    assert found["outcome"] == "ok"
    assert found["stage"] == "decode"
    assert found["api"] == "chat"
    assert found["model"] == "m"
    assert found["error"] == ""
    assert found["request_bytes"] == str(len(PAYLOAD))
    assert float(found["total_ms"]) >= float(found["overhead_ms"]) >= 0
    (answered,) = harness.answered
    assert answered.strings() == found


async def test_coordinated_trailers() -> None:
    """With trailers no body piece ends the stream; the trailers reply does."""
    async with serving(echo) as harness:
        answers = await harness.exchange(headers(), body(PAYLOAD), trailers(("x-sum", "1")))
    assert pieces(answers) == [(PAYLOAD, False)]
    assert answers[-1].WhichOneof("response") == "request_trailers"


@pytest.mark.parametrize("trailing", [False, True])
async def test_coordinated_buffered(trailing: bool) -> None:
    """One header reply before the body, one body reply with everything, one for trailers that follow it."""
    length = ("content-length", str(len(PAYLOAD)))
    async with serving(echo) as harness:
        call = harness.call()
        await call.write(headers(ID, length, ("epp-profile", "forged"), mode=BodyMode.BUFFERED))
        first = await reply(call)
        assert list(first.request_headers.response.header_mutation.remove_headers) == ["epp-profile"]
        assert not first.request_headers.response.clear_route_cache
        await call.write(body(PAYLOAD, end=not trailing))
        second = await reply(call)
        if trailing:
            await call.write(trailers(("x-sum", "1")))
            third = await reply(call)
            assert third.WhichOneof("response") == "request_trailers"
        assert await remaining(call) == []
    common = second.request_body.response
    assert common.body_mutation.body == PAYLOAD
    assert common.clear_route_cache
    fields = {o.header.key: o.header.raw_value for o in common.header_mutation.set_headers}
    assert fields == {"epp-profile": b"decode", "content-length": str(len(PAYLOAD)).encode()}
    assert record(second)["outcome"] == "ok"


async def test_megabytes_round_trip() -> None:
    """A large body comes back whole, in pieces of at most 62 KiB."""
    data = bytes(range(256)) * 20_000
    async with serving(echo, with_admission(max_body=len(data))) as harness:
        answers = await harness.exchange(headers(), body(data[:3_000_000]), body(data[3_000_000:], end=True))
    found = pieces(answers)
    assert b"".join(piece for piece, _ in found) == data
    assert max(len(piece) for piece, _ in found) == 62 << 10


async def test_passthrough() -> None:
    """What is not ours is streamed on; the record travels on the headers, the totals again at the end."""
    async with serving(hang) as harness:
        answers = await harness.exchange(
            headers(("prefer", "x"), path="/v1/files"), body(b"ab"), body(b"c", end=True)
        )
    assert list(answers[0].request_headers.response.header_mutation.remove_headers) == ["prefer"]
    assert pieces(answers) == [(b"ab", False), (b"c", True)]
    assert record(answers[0])["outcome"] == "passthrough"
    assert record(answers[0])["api"] == ""
    assert set(record(answers[-1])) == {"total_ms", "overhead_ms", "request_bytes"}
    assert record(answers[-1])["request_bytes"] == "3"
    assert [r.outcome for r in harness.answered] == ["passthrough"]


async def test_passthrough_has_no_limits() -> None:
    """Cap, budget, upload time and deadline do not apply to what is not ours."""
    rules = replace(with_admission(max_body=1), read_timeout=0.001, request_deadline=0.001)
    async with serving(hang, rules, InFlightBudget(0, 0)) as harness:
        call = harness.call()
        await call.write(headers(path="/v1/files"))
        await reply(call)
        await asyncio.sleep(0.01)
        await call.write(body(b"x" * 100_000, end=True))
        answers = await remaining(call)
    assert sum(len(piece) for piece, _ in pieces(answers)) == 100_000


async def test_own_sub_request() -> None:
    """A valid phase token passes our own path through, even with the hop guard."""
    token = ("x-epd-phase-token", "s3cret")
    async with serving(hang) as harness:
        answers = await harness.exchange(
            headers(token, ("x-epd-hop", "1"), ("epp-profile", "encode"), end=True)
        )
    mutation = answers[0].request_headers.response.header_mutation
    assert list(mutation.remove_headers) == ["x-epd-phase-token"]


@pytest.mark.parametrize(
    ("messages", "status", "code", "api"),
    [
        ([headers(end=True)], 400, "epd_bad_request", "chat"),
        ([headers(), body(b"", end=True)], 400, "epd_bad_request", "chat"),
        ([headers(("content-encoding", "br"))], 415, "epd_unsupported_encoding", "chat"),
        ([headers(("content-length", "9999999"))], 413, "epd_body_too_large", "chat"),
        ([headers(), body(b"x" * 600_000), body(b"x" * 600_000)], 413, "epd_body_too_large", "chat"),
        ([headers(("x-epd-hop", "1"), path="/else")], 508, "epd_loop", ""),
        ([headers(mode=BodyMode.STREAMED)], 500, "epd_unsupported_body_mode", "chat"),
        ([body(b"x")], 500, "epd_unsupported_body_mode", ""),
    ],
    ids=["no body", "empty body", "encoding", "length", "counted", "loop", "mode", "no headers"],
)
async def test_refusals(messages: list[ProcessingRequest], status: int, code: str, api: str) -> None:
    """Every refusal is a JSON answer with the complete record, at stage `request`."""
    async with serving(hang) as harness:
        found = failure(await harness.exchange(*messages), status, code)
        assert (found["stage"], found["api"]) == ("request", api)
        assert float(found["total_ms"]) >= 0
        assert [r.error for r in harness.answered] == [code]
        await settled(harness)


async def test_buffered_body_over_the_cap() -> None:
    """A body over the cap in one message gets our 413, not an error of the transport."""
    async with serving(hang) as harness:
        answers = await harness.exchange(headers(mode=BodyMode.BUFFERED), body(b"x" * 20_000_000, end=True))
    failure(answers, 413, "epd_body_too_large")


async def test_slow_upload() -> None:
    """An upload that does not end is answered 408, naming the key."""
    async with serving(hang, replace(RULES, read_timeout=0.05)) as harness:
        answers = await harness.exchange(headers(), body(b"x"))
        found = failure(answers, 408, "epd_body_timeout")
        await settled(harness)
    assert (found["outcome"], found["request_bytes"]) == ("timeout", "1")
    assert b"ext_proc.read_timeout" in answers[0].immediate_response.body


async def test_slow_upload_past_the_deadline() -> None:
    """The deadline counts from the headers, so a slow upload can use it up."""
    async with serving(hang, replace(RULES, request_deadline=0.05)) as harness:
        failure(await harness.exchange(headers(), body(b"x")), 504, "epd_deadline")


async def test_deadline() -> None:
    """Past the deadline the pipeline is cancelled and the client told at which step it was."""
    pipeline = Pipeline()
    async with serving(pipeline, replace(RULES, request_deadline=0.05)) as harness:
        answers = await harness.exchange(headers(), body(PAYLOAD, end=True))
        assert pipeline.cancelled.is_set()
        await settled(harness)
    found = failure(answers, 504, "epd_deadline")
    assert (found["stage"], found["outcome"]) == ("encode", "timeout")


@pytest.mark.parametrize("how", ["cancel", "half-close"])
async def test_a_client_that_leaves_cancels_the_pipeline(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """The pipeline stops at once, its budget is given back, nobody is answered, the log says so."""
    caplog.set_level(logging.INFO, logger="sidecar")
    pipeline = Pipeline()
    async with serving(pipeline) as harness:
        call = harness.call()
        await call.write(headers(ID))
        await call.write(body(PAYLOAD, end=True))
        await pipeline.entered.wait()
        if how == "cancel":
            call.cancel()
        else:
            await call.done_writing()
            assert await remaining(call) == []
        async with asyncio.timeout(5):
            await pipeline.cancelled.wait()
        await settled(harness)
        assert harness.answered == []
    (entry,) = [vars(r) for r in caplog.records if r.msg == "client left before the answer"]
    assert (entry["outcome"], entry["request_id"], entry["stage"]) == ("client_left", "id-1", "encode")
    assert float(entry["total_ms"]) > 0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/files"])
async def test_a_partial_upload_is_not_processed(path: str) -> None:
    """The end of the call inside the body runs nothing and answers nothing more."""
    pipeline = Pipeline()
    async with serving(pipeline) as harness:
        call = harness.call()
        await call.write(headers(path=path))
        await call.write(body(PAYLOAD))
        await call.done_writing()
        answers = await remaining(call)
        assert not any(answer.HasField("immediate_response") for answer in answers)
        assert harness.answered == []
        await settled(harness)
    assert pipeline.requests == []


class ResettingContext:
    """A call that Envoy resets the moment it has the last reply, as it does in full duplex."""

    def __init__(self, *messages: ProcessingRequest, reset_after: int) -> None:
        self._messages = [message.SerializeToString() for message in messages]
        self._left = reset_after

    async def read(self) -> bytes:
        if not self._messages:
            await asyncio.Event().wait()
        return self._messages.pop(0)

    async def write(self, _message: bytes) -> None:
        self._left -= 1
        if not self._left:
            raise asyncio.CancelledError

    def invocation_metadata(self) -> tuple[()]:
        return ()


@pytest.mark.parametrize(
    ("messages", "reset_after", "outcomes"),
    [
        ([headers(), body(PAYLOAD, end=True)], 1, []),
        ([headers(), body(PAYLOAD, end=True)], 2, ["ok"]),
        ([headers(), body(PAYLOAD), trailers()], 2, []),
        ([headers(), body(PAYLOAD), trailers()], 3, ["ok"]),
        ([headers(path="/else"), body(b"x" * 100_000, end=True)], 2, []),
        ([headers(path="/else"), body(b"x" * 100_000, end=True)], 3, ["passthrough"]),
        ([headers(path="/else", end=True)], 1, ["passthrough"]),
        ([headers(end=True)], 1, ["client_error"]),
    ],
)
async def test_a_reset_after_the_last_reply_is_normal(
    messages: list[ProcessingRequest], reset_after: int, outcomes: list[str]
) -> None:
    """A call cancelled while its last reply is written counts as answered, one cancelled earlier does not."""
    answered: list[AccessRecord] = []
    context: Any = ResettingContext(*messages, reset_after=reset_after)
    processor = ExternalProcessor(RULES, echo, InFlightBudget(1, 1000), answered.append)
    with pytest.raises(asyncio.CancelledError):
        await processor.process(None, context)
    assert [record.outcome for record in answered] == outcomes


async def test_messages_during_the_pipeline_are_ignored() -> None:
    """A second end of stream while the pipeline runs neither stops it nor doubles the body."""
    pipeline = Pipeline()
    async with serving(pipeline) as harness:
        call = harness.call()
        for message in (headers(), body(PAYLOAD, end=True)):
            await call.write(message)
        await pipeline.entered.wait()
        await call.write(body(PAYLOAD, end=True))
        await call.write(trailers())
        await asyncio.sleep(0.02)
        pipeline.go.set()
        answers = await remaining(call)
    assert pieces(answers) == [(PAYLOAD, True)]


@pytest.mark.parametrize("fault", [RuntimeError("s3cr3t text"), asyncio.CancelledError()])
async def test_our_bugs_are_answered(fault: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    """Any exception is a 500 without detail for the client and a log entry with the request id."""

    async def broken(_request: InboundRequest) -> DecodeRewrite:
        raise fault

    async with serving(broken) as harness:
        answers = await harness.exchange(headers(ID), body(PAYLOAD, end=True))
    found = failure(answers, 500, "epd_internal")
    assert found["outcome"] == "internal_error"
    assert b"s3cr3t" not in answers[0].SerializeToString()
    if isinstance(fault, RuntimeError):
        (entry,) = [entry for entry in caplog.records if entry.exc_info]
        assert vars(entry)["request_id"] == "id-1"


async def test_a_bug_after_the_headers_is_answered() -> None:
    """Even half-way through the rewrite the client gets an error, not a hanging request."""

    async def broken(_request: InboundRequest) -> DecodeRewrite:
        segments: list[Any] = [b"x" * 100_000, "not bytes"]
        return DecodeRewrite((), (), segments)

    async with serving(broken) as harness:
        answers = await harness.exchange(headers(), body(PAYLOAD, end=True))
        assert answers[0].WhichOneof("response") == "request_headers"
        failure(answers, 500, "epd_internal")
        assert [r.outcome for r in harness.answered] == ["internal_error"]


async def test_a_message_that_is_none_is_answered() -> None:
    """Octets that are no ProcessingRequest get a 500, not an aborted call."""
    async with serving(hang) as harness:
        call = harness.raw_call()
        await call.write(b"\xff\xff\xff")
        assert b"epd_internal" in await call.read()
        assert await call.code() == grpc.StatusCode.OK


@pytest.mark.parametrize(
    ("error", "status", "stage"),
    [
        (StepFailed("prefill", "prefill failed", detail="d1", upstream_body="u1"), 502, "prefill"),
        (StepTimeout("render", "render took too long"), 504, "render"),
    ],
)
async def test_step_errors(
    error: StepFailed | StepTimeout, status: int, stage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The error names its step; detail and upstream text go to the log only."""
    caplog.set_level(logging.INFO, logger="sidecar")

    async def failing(_request: InboundRequest) -> DecodeRewrite:
        raise error

    async with serving(failing) as harness:
        answers = await harness.exchange(headers(ID), body(PAYLOAD, end=True))
    assert failure(answers, status, error.code)["stage"] == stage
    assert b"u1" not in answers[0].SerializeToString()
    (entry,) = [vars(r) for r in caplog.records if r.msg == "request answered"]
    assert entry.get("detail", "") == error.detail


@pytest.mark.parametrize("how", ["fails", "breaks", "client leaves"])
async def test_a_request_that_ends_badly_leaves_nothing_behind(how: str) -> None:
    """What it held goes with its budget, without waiting for the collector."""

    class Held:
        """Stands for what a step holds."""

    held: list[weakref.ref[Held]] = []
    entered = asyncio.Event()

    async def step(request: InboundRequest) -> None:
        body, holder = request.body, Held()
        held.append(weakref.ref(holder))
        async with asyncio.timeout(30) as scope:
            entered.set()
            if how == "fails":
                raise StepFailed("render", "no")
            if how == "breaks":
                raise RuntimeError("no")
            await asyncio.Event().wait()
        raise AssertionError(f"{body!r} {scope} {holder}")

    async def run(request: InboundRequest) -> DecodeRewrite:
        try:
            await step(request)
        except RuntimeError as error:
            raise KeyError("wrapped") from error
        raise AssertionError("ends in the step")

    gc.collect()
    gc.disable()
    try:
        async with serving(run) as harness:
            call = harness.call()
            await call.write(headers(ID))
            await call.write(body(PAYLOAD, end=True))
            await entered.wait()
            if how == "client leaves":
                call.cancel()
            else:
                await remaining(call)
            await settled(harness)
            async with asyncio.timeout(5):
                while held[0]() is not None:  # noqa: ASYNC110  # a dying object raises no events
                    await asyncio.sleep(0.005)
    finally:
        gc.enable()


async def test_too_many_requests() -> None:
    """Over the request limit: 503 with retry-after; the running one is not disturbed."""
    pipeline = Pipeline()
    async with serving(pipeline, budget=InFlightBudget(1, 1 << 20)) as harness:
        running = asyncio.create_task(harness.exchange(headers(), body(PAYLOAD, end=True)))
        await pipeline.entered.wait()
        answers = await harness.exchange(headers(), body(PAYLOAD, end=True))
        failure(answers, 503, "epd_overloaded")
        fields = {o.header.key: o.header.raw_value for o in answers[0].immediate_response.headers.set_headers}
        assert fields["retry-after"] == b"1"
        pipeline.go.set()
        assert pieces(await running) == [(PAYLOAD, True)]
        await settled(harness)


async def test_too_many_bytes() -> None:
    """Over the byte limit: 503 while the upload still runs, and the bytes are given back."""
    async with serving(hang, budget=InFlightBudget(10, 1000)) as harness:
        failure(await harness.exchange(headers(), body(b"x" * 600), body(b"x" * 600)), 503, "epd_overloaded")
        await settled(harness)


async def test_upload_time_is_not_overhead() -> None:
    """Waiting for the client is counted as waiting."""
    async with serving(echo) as harness:
        call = harness.call()
        await call.write(headers())
        await asyncio.sleep(0.2)
        await call.write(body(PAYLOAD, end=True))
        found = record((await remaining(call))[0])
    assert float(found["total_ms"]) - float(found["overhead_ms"]) >= 150


async def test_traceparent_of_the_call() -> None:
    """A gateway's own trace arrives in the call's metadata."""
    pipeline = Pipeline()
    pipeline.go.set()
    async with serving(pipeline) as harness:
        call = harness.raw_call(("traceparent", TRACE))
        for message in (headers(), body(PAYLOAD, end=True)):
            await call.write(message.SerializeToString())
        assert await remaining(call)
    assert pipeline.requests[0].traceparent == TRACE


async def test_observability_mode() -> None:
    """Mirrored traffic is read to its end and never answered or counted."""
    observed = [headers(observability=True), body(PAYLOAD, end=True)]
    observed[1].observability_mode = True
    async with serving(hang) as harness:
        call = harness.call()
        for message in observed:
            await call.write(message)
        await call.done_writing()
        assert await remaining(call) == []
        assert await call.code() == grpc.StatusCode.OK
        assert harness.answered == []


async def test_a_call_without_messages() -> None:
    """A call that ends before it starts is nothing to account for."""
    async with serving(hang) as harness:
        call = harness.call()
        await call.done_writing()
        assert await remaining(call) == []
        assert harness.answered == []


async def test_one_log_line_per_request(caplog: pytest.LogCaptureFixture) -> None:
    """The decision is one structured line with the whole record, without body or secrets."""
    caplog.set_level(logging.INFO, logger="sidecar")
    async with serving(echo) as harness:
        await harness.exchange(headers(ID, ("authorization", "Bearer k3y")), body(PAYLOAD, end=True))
    (entry,) = [r for r in caplog.records if r.name == "sidecar.extproc.call"]
    assert vars(entry).items() >= harness.answered[0].strings().items()
    assert "k3y" not in str(vars(entry))
    assert PAYLOAD.decode() not in str(vars(entry))


async def test_many_requests_at_once() -> None:
    """Two hundred requests at a time are all answered, each with its own body."""

    async def one(harness: Harness, number: int) -> bool:
        data = b"%d" % number * 5000
        answers = await harness.exchange(headers(), body(data[:100]), body(data[100:], end=True))
        return b"".join(piece for piece, _ in pieces(answers)) == data

    async with serving(echo, budget=InFlightBudget(200, 1 << 30)) as harness:
        results = await asyncio.gather(*(one(harness, number) for number in range(200)))
        assert results == [True] * 200
        await settled(harness)


def test_rules_come_from_the_settings() -> None:
    """Each rule is the value of its key."""
    settings = Settings.model_validate(
        {
            "ext_proc": {"max_request_body_size": 3, "read_timeout": "7s", "request_deadline": "1m30s"},
            "gateway": {"address": "http://gw:80", "phase_token": "0123456789abcdef"},
            "headers": {"strip": ["X-Strip"]},
            "observability": {"metadata_namespace": "other.ns"},
            "errors": {"expose_upstream": True},
            "pipeline": {"forward_response_headers": ["x-fwd"], "steps": [{"type": "decode"}]},
        }
    )
    rules = ServiceRules.from_settings(settings)
    assert (rules.read_timeout, rules.request_deadline) == (7.0, 90.0)
    assert (rules.metadata_namespace, rules.expose_upstream) == ("other.ns", True)
    admission = rules.admission
    assert (admission.max_body, admission.clear_route_cache) == (3 << 20, True)
    assert admission.phase_token == "0123456789abcdef"
    assert all(name in admission.control_headers for name in ("x-strip", "x-fwd", "epp-profile"))
