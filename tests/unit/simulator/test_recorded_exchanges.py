"""The simulator against exchanges recorded from a real vLLM 0.32."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from sidecar.simulator import Simulator, SimulatorConfig
from tests.unit.simulator.recorded_exchange import (
    NAMES,
    Comparable,
    encoder_outputs,
    read,
    read_events,
    request_bytes,
)
from tests.unit.simulator.simulator_caller import GENERATE, Caller

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

RECORDED_DEPLOYMENT = SimulatorConfig(
    models=["tiny-vl"],
    descriptors="plain",
    kv_connector="shared",
    max_model_len=8192,
    max_images=8,
    max_pixels=200704,
    tool_parser=False,
)


@pytest.fixture
async def simulator() -> AsyncIterator[Simulator]:
    async with Simulator(RECORDED_DEPLOYMENT) as running:
        yield running


async def _send(caller: Caller, exchange: dict[str, Any]) -> tuple[int, str, Any]:
    """Status, media type and answer: a JSON value, or a list of events."""
    request, role = exchange["request"], exchange["role"]
    headers = {"content-type": "application/json"} | request["headers"]
    if role != "render":
        headers["EPP-Profile"] = role
    url = caller.simulator.url(role) + request["path"]
    async with caller.session.post(url, data=request_bytes(exchange), headers=headers) as response:
        streamed = response.content_type == "text/event-stream"
        answer = read_events(await response.text()) if streamed else await response.json()
        return response.status, response.headers["content-type"], answer


@pytest.mark.parametrize("name", NAMES)
async def test_simulator_answers_as_vllm_did(simulator: Simulator, caller: Caller, name: str) -> None:
    """Status, error shape, keys and values agree, but for the accepted differences."""
    exchange = read(name)
    simulator.configure(exchange.get("knobs", {}))
    for earlier in exchange.get("after", []):
        await _send(caller, read(earlier))
    for body in encoder_outputs(exchange):
        assert (await caller.post("encode", GENERATE, body))[0] == 200
    status, content_type, answer = await _send(caller, exchange)
    expected = exchange["response"]
    simulated, recorded = Comparable(exchange), Comparable(exchange)
    assert (status, content_type.partition(";")[0]) == (
        expected["status"],
        expected["content_type"].partition(";")[0],
    ), answer
    if "events" in expected:
        assert simulated.events(answer) == recorded.events(expected["events"])
    else:
        assert simulated.document(answer) == recorded.document(expected["body"])
