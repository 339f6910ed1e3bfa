from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from sidecar.api.chat import ChatApi
from sidecar.control_headers import ControlHeaders
from sidecar.errors import BadRequest, Overloaded, SidecarError, StepFailed, StepTimeout
from sidecar.http import RequestHead
from sidecar.limits import InFlightBudget
from sidecar.observability.record import AccessRecord
from sidecar.observability.timing import Stopwatch
from sidecar.pipeline.request import DecodeRewrite, InboundRequest, ServedAnswer
from sidecar.pipeline.runner import LegRules, Pipeline, TimedStep
from tests.unit.pipeline.pipeline_support import Deployment, answer, rendered, rendered_text, two_images

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from sidecar.errors import StepName
    from sidecar.pipeline.state import RequestState


class Scripted:
    """A step that does what the test says."""

    def __init__(self, name: StepName, work: Callable[[RequestState], Awaitable[None]] | None = None) -> None:
        self.name: StepName = name
        self._work = work
        self.ran = False

    async def run(self, state: RequestState) -> None:
        self.ran = True
        if self._work is not None:
            await self._work(state)


async def rewrites(state: RequestState) -> None:
    state.rewrite = DecodeRewrite((), (), [])


async def waits(_state: RequestState) -> None:
    await asyncio.Event().wait()


def inbound(record: AccessRecord, body: bytes | None = None) -> InboundRequest:
    return InboundRequest(
        head=RequestHead("POST", "/v1/chat/completions", "", ()),
        api=ChatApi(),
        body=json.dumps(two_images(stream=True)).encode() if body is None else body,
        request_id="r",
        traceparent="t",
        record=record,
        ticket=InFlightBudget(1, 1 << 20).admit(),
        stopwatch=Stopwatch(),
        can_stream_answer=True,
        cleanup=ExitStack(),
    )


def pipeline(*steps: TimedStep) -> Pipeline:
    return Pipeline(steps, LegRules(ControlHeaders(), "", ()))


async def test_steps_run_in_order_over_one_state() -> None:
    """Each step sees what the ones before it left."""
    seen: list[str] = []

    def note(name: StepName) -> Scripted:
        async def work(state: RequestState) -> None:
            seen.append(f"{name} after {state.kv_answer}")
            state.kv_answer = {name: state.inbound.body}  # type: ignore[dict-item]  # any mark will do

        return Scripted(name, work)

    record = AccessRecord()
    await pipeline(
        TimedStep(note("media"), None),
        TimedStep(note("render"), 5),
        TimedStep(Scripted("decode", rewrites), None),
    ).run(inbound(record))
    assert [text.split(" after ")[0] for text in seen] == ["media", "render"]
    assert "media" in seen[1]


async def test_the_record_tells_how_far_the_request_came() -> None:
    """Api, model, stream and media are known before the first step; stage and durations follow the steps."""

    async def fails(_state: RequestState) -> None:
        raise StepFailed("render", "no")

    record = AccessRecord()
    steps = [
        TimedStep(Scripted("media"), None),
        TimedStep(Scripted("render", fails), None),
        TimedStep(Scripted("encode"), None),
    ]
    with pytest.raises(StepFailed):
        await pipeline(*steps).run(inbound(record))
    assert (record.api, record.model, record.stream, record.media) == ("chat", "m", True, "image:2")
    assert record.stage == "render"
    assert record.media_ms is not None
    assert record.render_ms is not None
    assert (record.encode_ms, record.prefill_ms) == (None, None)
    assert not steps[2].step.ran  # type: ignore[attr-defined]  # all are Scripted


async def test_a_malformed_body_fails_before_any_step() -> None:
    """The stage is `request` and the api is known."""
    record = AccessRecord()
    step = Scripted("render")
    with pytest.raises(BadRequest) as failed:
        await pipeline(TimedStep(step, None)).run(inbound(record, b"[]"))
    assert not step.ran
    assert (record.api, record.stage) == ("chat", "request")
    assert failed.value.stage in {None, "request"}


async def test_the_probe_over_its_time_is_504() -> None:
    """A worker that has not answered in time is no refusal: the request ends there."""
    with pytest.raises(StepTimeout) as failed:
        await pipeline(TimedStep(Scripted("conditional_decode", waits), 0.01)).run(inbound(AccessRecord()))
    assert (failed.value.status, failed.value.code) == (504, "epd_conditional_decode_timeout")


@pytest.mark.parametrize("name", ["render", "encode", "prefill"])
async def test_a_step_over_its_time_is_504(name: StepName) -> None:
    """The message names the step and the seconds; the work is cancelled."""
    record = AccessRecord()
    gone = asyncio.Event()

    async def work(state: RequestState) -> None:
        try:
            await waits(state)
        finally:
            gone.set()

    with pytest.raises(StepTimeout) as failed:
        await pipeline(TimedStep(Scripted(name, work), 0.01)).run(inbound(record))
    assert (failed.value.status, failed.value.code) == (504, f"epd_{name}_timeout")
    assert "0.01 s" in failed.value.message
    assert name in failed.value.message
    assert gone.is_set()
    assert record.strings()[f"{name}_ms"]


async def test_a_timeout_inside_a_step_is_not_the_steps_own() -> None:
    """A TimeoutError that is not the step's clock is a fault, not a 504."""

    async def work(_state: RequestState) -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        await pipeline(TimedStep(Scripted("render", work), 5)).run(inbound(AccessRecord()))


async def test_cancelling_the_pipeline_cancels_the_step() -> None:
    """A client that left is a cancellation, never a timeout."""
    task = asyncio.ensure_future(
        pipeline(TimedStep(Scripted("render", waits), 60)).run(inbound(AccessRecord()))
    )
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_pipeline_that_ends_without_a_rewrite_is_a_fault() -> None:
    """Nothing is sent to decode by accident."""
    with pytest.raises(RuntimeError):
        await pipeline(TimedStep(Scripted("render"), None)).run(inbound(AccessRecord()))


async def test_a_served_answer_ends_the_pipeline() -> None:
    """No step runs after it, and the record stays at the step that served."""
    served = ServedAnswer(200, (), b"")

    async def serves(state: RequestState) -> None:
        state.served = served

    record = AccessRecord()
    encode = Scripted("encode")
    steps = [Scripted("render"), Scripted("conditional_decode", serves), encode, Scripted("decode", rewrites)]
    result = await pipeline(*(TimedStep(step, None) for step in steps)).run(inbound(record))
    assert result is served
    assert not encode.ran
    assert record.stage == "conditional_decode"


INVALID: list[Any] = [
    b"{",
    b'{"messages":1}',
    {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    {"messages": [], "stream": 1},
    {"messages": [], "model": []},
]


@pytest.mark.parametrize("body", INVALID)
@pytest.mark.parametrize("openai", [True, False])
async def test_nothing_leaves_for_a_request_that_is_not_valid(body: Any, *, openai: bool) -> None:
    """A refused body has made no call to anybody."""
    deployment = Deployment(openai=openai)
    with pytest.raises(SidecarError) as failed:
        await deployment.run(body)
    assert failed.value.status == 400
    assert deployment.renderer.calls + deployment.gateway.calls == []


async def test_every_leg_of_one_request_has_one_identity() -> None:
    """The same id and trace on render, encode and prefill, the phases in order."""
    deployment = Deployment(render=answer(rendered()))
    await deployment.run(two_images())
    calls = [*deployment.renderer.calls, *deployment.gateway.calls]
    assert [dict(call.headers).get("epp-profile") for call in calls] == [None, "encode", "encode", "prefill"]
    for name in ("x-request-id", "traceparent", "x-epd-hop"):
        assert len({dict(call.headers)[name] for call in calls}) == 1


async def test_a_clients_model_name_cannot_flood_the_access_log() -> None:
    """The record goes into every answer's metadata: a long name is cut there, not on the legs."""
    model = "m" * 4000
    deployment = Deployment()
    decode = await deployment.decode(two_images(model=model))
    assert decode["model"] == model
    assert 0 < len(deployment.record.strings()["model"]) <= 256


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages":[' + b'{"":0},' * 500_000 + b'{"":0}]}',
        b'{"messages":[' + b"{}," * 4_000_001 + b"{}]}",
        b"{" + b'"":0,' * 500_000 + b'"messages":[]}',
    ],
)
async def test_a_body_of_tiny_members_is_refused_before_it_is_read(body: bytes) -> None:
    """A few megabytes of members would become gigabytes of objects, and stall everybody meanwhile."""
    deployment = Deployment()
    with pytest.raises(BadRequest, match="members"):
        await deployment.run(body)
    assert deployment.renderer.calls == []


async def test_what_a_parsed_body_takes_is_charged() -> None:
    """Members are charged before they are read, so that many such bodies do not fit at once."""
    body = b'{"messages":[' + b'{"":0},' * 100_000 + b'{"":0}]}'
    with pytest.raises(Overloaded):
        await Deployment().result(body, InFlightBudget(1, 20 << 20))


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_pil", "image_pil": "http://169.254.169.254/"},
        {"type": "image_embeds", "image_embeds": "x"},
        {"type": "prompt_embeds", "prompt_embeds": "x"},
        {"type": "new_type", "text": "x"},
    ],
)
async def test_a_part_of_unknown_type_is_refused_before_anything_leaves(part: dict[str, Any]) -> None:
    """A renderer may know the type, and fetch what it names without the address guard."""
    deployment = Deployment()
    with pytest.raises(BadRequest) as refused:
        await deployment.run({"messages": [{"role": "user", "content": [part]}]})
    assert part["type"] in refused.value.message
    assert deployment.renderer.calls == []


async def test_more_parts_than_a_conversation_has_are_refused() -> None:
    """Each part costs time on every leg, and everybody waits for it."""
    with pytest.raises(BadRequest, match="16384"):
        await Deployment().run({"messages": [{"role": "user", "content": [""] * 16385}]})
    with pytest.raises(BadRequest, match="16384"):
        await Deployment().run({"messages": [{"role": "user", "content": ""}] * 16385})


async def test_colons_of_a_long_text_are_no_members() -> None:
    """A prompt of log lines is not a body of tiny members."""
    body = {"messages": [{"role": "user", "content": "12:34:56 " * 300_000}]}
    deployment = Deployment(render=rendered_text())
    await deployment.run(body)
    assert deployment.record.prompt_tokens == 3
