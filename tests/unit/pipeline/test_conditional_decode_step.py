from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import pytest

from sidecar.errors import Overloaded, StepFailed
from sidecar.limits import InFlightBudget
from sidecar.pipeline.request import DecodeRewrite, ServedAnswer, ServedStream
from tests.unit.pipeline.pipeline_support import (
    FORWARDED,
    HASHES,
    PHASE_TOKEN,
    REQUEST_ID,
    TRACEPARENT,
    Deployment,
    answer,
    sent,
    two_images,
)

if TYPE_CHECKING:
    from sidecar.upstream.client import Answer, Call

STEPS = ("render", "conditional-decode", "encode", "prefill", "decode")
SSE = {"content-type": "text/event-stream; charset=utf-8"}


def deployment(**more: Any) -> Deployment:
    return Deployment(steps=STEPS, **more)


def probe_of(deployment: Deployment) -> Call:
    (call,) = [call for call in deployment.gateway.calls if call.step == "conditional_decode"]
    return call


async def test_412_goes_on() -> None:
    """Nobody holds the prompt: the phases follow as if nothing had been asked."""
    asked = deployment()
    result = await asked.run(two_images())
    steps = [call.step for call in asked.gateway.calls]
    assert steps == ["conditional_decode", "encode", "encode", "prefill"]
    decode = json.loads(b"".join(result.body))
    assert decode.pop("kv_transfer_params")
    assert sent(probe_of(asked)) == decode
    assert asked.record.stage == "decode"


async def test_the_refusal_gives_its_bytes_back() -> None:
    """The body of a 412 is charged while it is read, and no longer when the next step runs."""
    budget = InFlightBudget(1, 1000)
    later: list[int] = []

    def encode(_call: Call) -> Answer:
        later.append(budget.bytes)
        return answer({"choices": []})

    await deployment(probe=answer(b"x" * 1000, 412), encode=encode).result(two_images(), budget)
    assert later == [0, 0]
    with pytest.raises(Overloaded):
        await deployment(probe=answer(b"x" * 1001, 412)).result(two_images(), budget)


async def test_the_probe_is_the_decode_request() -> None:
    """The client's own path and body, uncapped, with uuids and without transfer parameters."""
    asked = deployment()
    body = two_images(stream=True, max_tokens=77, n=2, kv_transfer_params={"forged": 1})
    await asked.result(body)
    call = probe_of(asked)
    assert call.path == "/v1/chat/completions"
    expected = two_images(stream=True, max_tokens=77, n=2)
    for part, uuid in zip(expected["messages"][0]["content"][1:], HASHES, strict=False):
        part["uuid"] = uuid
    assert sent(call) == expected


async def test_the_headers_of_the_probe() -> None:
    """A decode leg that prefers what is available; what the client prefers is not asked."""
    asked = deployment(
        headers=(("prefer", "respond-async"), ("authorization", "Bearer k")), phase_token=PHASE_TOKEN
    )
    await asked.result(two_images())
    fields = probe_of(asked).headers
    assert [value for name, value in fields if name == "prefer"] == ["if-available"]
    found = dict(fields)
    assert found["epp-profile"] == "decode"
    assert found["authorization"] == "Bearer k"
    assert found["x-epd-phase-token"] == PHASE_TOKEN
    assert (found["x-request-id"], found["traceparent"]) == (REQUEST_ID, TRACEPARENT)
    assert found["x-epd-hop"] == "1"


async def test_a_refusal_carries_nothing_to_later_phases() -> None:
    """412 is discarded with its headers."""
    asked = deployment(probe=answer({}, 412, {FORWARDED: "r1"}))
    result = await asked.run(two_images())
    assert FORWARDED not in dict(result.set_headers)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [201, 302, 400, 401, 404, 409, 413, 429, 500, 503])
async def test_any_other_answer_is_the_clients(status: int, stream: bool) -> None:
    """Success or refusal: it ends the pipeline whole, with its status and body; nobody else is called."""
    asked = deployment(probe=answer(b"its own words", status, {"content-type": "text/plain"}))
    result = await asked.result(two_images(stream=stream))
    assert result == ServedAnswer(status, (("content-type", "text/plain"),), b"its own words")
    assert [call.step for call in asked.gateway.calls] == ["conditional_decode"]
    assert asked.record.stage == "conditional_decode"
    assert (asked.record.encode_ms, asked.record.prefill_ms) == (None, None)


@pytest.mark.parametrize(
    ("stream", "status", "content_type", "streamed"),
    [
        (True, 200, "text/event-stream; charset=utf-8", True),
        (True, 200, "Text/Event-Stream", True),
        (True, 200, "application/json", False),
        (True, 200, "text/event-streams", False),
        (True, 500, "text/event-stream", False),
        (False, 200, "text/event-stream", False),
    ],
)
async def test_what_is_streamed(stream: bool, status: int, content_type: str, streamed: bool) -> None:
    """Events the client asked for, and nothing else: whatever else comes is never half sent."""
    asked = deployment(probe=answer(b"data: 1\n\n", status, {"content-type": content_type}))
    result = await asked.result(two_images(stream=stream))
    assert isinstance(result, ServedStream if streamed else ServedAnswer)


async def test_a_stream_is_still_open() -> None:
    """Its body is read by whoever passes it on; the request's cleanup closes it."""
    asked = deployment(probe=answer(b"data: 1\n\n", 200, SSE))
    result = await asked.result(two_images(stream=True))
    assert isinstance(result, ServedStream)
    assert (result.status, result.headers) == (200, tuple(SSE.items()))
    (opened,) = asked.gateway.opened
    assert not opened.closed
    assert [chunk async for chunk in result.body.chunks()] == [b"data: 1\n\n"]
    asked.cleanup.close()
    assert opened.closed


async def test_headers_of_the_connection_stay_behind() -> None:
    """What belongs to one hop or to the framing is not the client's; repeated fields keep their order."""
    asked = deployment(probe=answer(b"{}"))
    asked.gateway.open_headers = (
        ("connection", "close, X-Hop"),
        ("x-hop", "1"),
        ("content-length", "2"),
        ("transfer-encoding", "chunked"),
        ("keep-alive", "timeout=5"),
        ("trailer", "x"),
        ("x-kept", "1"),
        ("x-kept", "2"),
        ("content-type", "application/json"),
    )
    result = await asked.result(two_images())
    assert isinstance(result, ServedAnswer)
    assert result.headers == (("x-kept", "1"), ("x-kept", "2"), ("content-type", "application/json"))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_filter_that_cannot_stream(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A streaming request makes no probe there and the log says so; any other does."""
    caplog.set_level(logging.INFO, logger="sidecar")
    asked = deployment(can_stream=False, probe=answer({"served": True}))
    result = await asked.result(two_images(stream=stream))
    probes = [call for call in asked.gateway.calls if call.step == "conditional_decode"]
    assert isinstance(result, DecodeRewrite if stream else ServedAnswer)
    assert len(probes) == (0 if stream else 1)
    skipped = [vars(r) for r in caplog.records if "conditional-decode skipped" in r.getMessage()]
    assert [entry["request_id"] for entry in skipped] == ([REQUEST_ID] if stream else [])


async def test_an_answer_that_is_read_is_charged() -> None:
    """Bytes of a whole answer count against the budget like any other."""
    asked = deployment(probe=answer(b"x" * 10_000))
    with pytest.raises(Overloaded):
        await asked.result(two_images(), InFlightBudget(1, 9_999))


async def test_a_gateway_that_cannot_be_reached() -> None:
    """No answer is no refusal: the request fails, and nothing is computed for it."""
    asked = deployment()

    def unreachable(call: Call) -> Answer:
        raise StepFailed(call.step, "no connection")

    asked.gateway.respond = unreachable
    with pytest.raises(StepFailed) as failed:
        await asked.result(two_images())
    assert (failed.value.code, failed.value.stage) == ("epd_conditional_decode_failed", "conditional_decode")


async def test_without_render() -> None:
    """The step needs no tokens."""
    asked = Deployment(steps=("conditional-decode", "decode"), openai=True, probe=answer({"served": 1}))
    assert isinstance(await asked.result(two_images()), ServedAnswer)
    assert asked.renderer.calls == []
