"""Faults, knobs and records."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from sidecar.simulator import ConfigError, Simulator, SimulatorConfig
from tests.unit.simulator.simulator_caller import CHAT, GENERATE, Caller, chat, encode_body, image_url, until

if TYPE_CHECKING:
    from sidecar.simulator.recorder import Exchange

RENDER = f"{CHAT}/render"


def _last(simulator: Simulator, role: Any) -> Exchange:
    return simulator.deployment.recorder.of(role)[-1]


@pytest.mark.parametrize(
    ("fault", "status", "kind"),
    [
        ("status:400", 400, "BadRequestError"),
        ("status:503", 503, "InternalServerError"),
        ("status:500", 500, "InternalServerError"),
        ("scale-out-403", 403, "PermissionDeniedError"),
        ("model-not-found", 404, "NotFoundError"),
    ],
)
async def test_refusals(simulator: Simulator, caller: Caller, fault: str, status: int, kind: str) -> None:
    """Each refusal has its status and its error type."""
    simulator.config.faults["prefill"] = fault
    answered, answer = await caller.post("prefill", CHAT, chat(max_tokens=1))
    assert (answered, answer["error"]["type"]) == (status, kind)
    assert _last(simulator, "prefill").status == status


async def test_missing_endpoint(simulator: Simulator, caller: Caller) -> None:
    """FastAPI's 404 has no error object."""
    simulator.config.faults["render"] = "not-found"
    assert await caller.post("render", RENDER, chat()) == (404, {"detail": "Not Found"})


async def test_garbage(simulator: Simulator, caller: Caller) -> None:
    """A 200 with JSON that ends too early."""
    simulator.config.faults["encode"] = "garbage"
    async with caller.send("encode", GENERATE, encode_body(image_url(), "k")) as response:
        assert response.status == 200
        with pytest.raises(json.JSONDecodeError):
            json.loads(await response.text())


async def test_connection_dropped_before_the_headers(simulator: Simulator, caller: Caller) -> None:
    """No byte of an answer arrives; a count limits the fault."""
    simulator.config.faults["prefill"] = "drop-before-headers*1"
    body = {"prompt": "x", "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    # aiohttp repeats idempotent methods on its own, not a POST.
    with pytest.raises((aiohttp.ServerDisconnectedError, aiohttp.ClientOSError)):
        await caller.post("prefill", "/v1/completions", body)
    assert _last(simulator, "prefill").status is None
    assert (await caller.post("prefill", "/v1/completions", body))[0] == 200


async def test_connection_dropped_after_the_headers(simulator: Simulator, caller: Caller) -> None:
    """The answer starts and ends in the middle of its body."""
    simulator.config.faults["decode"] = "drop-after-headers"
    with pytest.raises((aiohttp.ClientPayloadError, aiohttp.ClientOSError)):
        await caller.post("decode", CHAT, chat())
    assert _last(simulator, "decode").status is None


async def test_hanging_request_notices_that_the_caller_left(simulator: Simulator, caller: Caller) -> None:
    """A hang ends with its caller, and the record says so."""
    simulator.config.faults["encode"] = "hang"
    call = asyncio.create_task(caller.post("encode", GENERATE, encode_body(image_url(), "k")))
    await until(lambda: bool(simulator.deployment.recorder.of("encode")))
    assert not _last(simulator, "encode").cancelled
    call.cancel()
    await until(lambda: _last(simulator, "encode").cancelled)
    assert _last(simulator, "encode").status is None


async def test_stop_does_not_wait_for_hanging_requests() -> None:
    """Stopping cuts off what still hangs."""
    simulator = Simulator(SimulatorConfig(faults={"decode": "hang"}))
    await simulator.start()
    async with aiohttp.ClientSession() as session:
        call = asyncio.create_task(session.post(simulator.url("decode") + CHAT, json=chat()))
        await until(lambda: bool(simulator.deployment.recorder.of("decode")))
        await simulator.stop()
        with pytest.raises(aiohttp.ClientError):
            await call


@pytest.mark.parametrize(
    "fault", ["wrong-counts", "overlapping-spans", "span-out-of-range", "null-kwargs", "null-items"]
)
async def test_self_contradicting_render_answers(simulator: Simulator, caller: Caller, fault: str) -> None:
    """The named part of the answer is wrong, and only with the fault."""
    simulator.config.faults["render"] = f"{fault}*1"
    assert _contradiction(await caller.render(chat(image_url(), image_url(320, 240)))) == fault
    assert _contradiction(await caller.render(chat(image_url(), image_url(320, 240)))) == ""


def _contradiction(answer: dict[str, Any]) -> str:
    features = answer["features"]
    spans = [(s["offset"], s["offset"] + s["length"]) for s in features["mm_placeholders"]["image"]]
    if len(features["mm_hashes"]["image"]) != len(spans):
        return "wrong-counts"
    if spans[0][1] > spans[1][0]:
        return "overlapping-spans"
    if spans[1][1] > len(answer["token_ids"]):
        return "span-out-of-range"
    if features["kwargs_data"] is None:
        return "null-kwargs"
    return "null-items" if features["kwargs_data"] == {"image": [None, None]} else ""


async def test_latency_delays_one_role(simulator: Simulator, caller: Caller) -> None:
    """A role with a latency still waits when another has answered, and a short one ends."""
    simulator.config.latency["prefill"] = 3600
    call = asyncio.create_task(caller.post("prefill", CHAT, chat(max_tokens=1)))
    await until(lambda: bool(simulator.deployment.recorder.of("prefill")))
    assert (await caller.post("decode", CHAT, chat()))[0] == 200
    assert not call.done()
    call.cancel()
    simulator.config.latency["prefill"] = 0.001
    assert (await caller.post("prefill", CHAT, chat(max_tokens=1)))[0] == 200


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"descriptor": "nixl"}, "unknown knob 'descriptor'"),
        ({"descriptors": "maybe"}, "maybe"),
        ({"tensor_bytes": 63}, "tensor_bytes: 63"),
        ({"tensor_bytes": "large"}, "large"),
        ({"faults": {"render": "explode"}}, "faults.render: 'explode'"),
        ({"faults": {"encode": "wrong-counts"}}, "faults.encode"),
        ({"faults": {"encode": "status:99"}}, "status:99"),
        ({"faults": {"encode": "hang*0"}}, r"hang\*0"),
        ({"faults": {"router": "hang"}}, "router"),
        ({"models": []}, "models"),
        ({"latency": {"encode": "slow"}}, "latency"),
    ],
)
def test_impossible_knobs_are_refused(changes: dict[str, Any], message: str) -> None:
    """The error names the knob and the value, and nothing changes."""
    simulator = Simulator()
    with pytest.raises(ConfigError, match=message):
        simulator.configure(changes)
    assert simulator.config == SimulatorConfig()


async def test_addresses_are_fixed_while_running(simulator: Simulator) -> None:
    """A knob that could not take effect is refused."""
    with pytest.raises(ConfigError, match="ports is fixed"):
        simulator.configure({"ports": {"render": 1}})


async def test_admin_listener_steers_and_watches(simulator: Simulator, caller: Caller) -> None:
    """Knobs can be patched, exchanges and violations read, and everything reset."""
    admin, session = simulator.url("admin"), caller.session
    async with session.post(f"{admin}/simulator/config", json={"descriptors": "none"}) as response:
        assert (response.status, (await response.json())["descriptors"]) == (200, "none")
    async with session.post(f"{admin}/simulator/config", json={"descriptors": 5}) as response:
        assert response.status == 400
    async with session.post(f"{admin}/simulator/config", data=b"{") as response:
        assert response.status == 400
    headers = {"authorization": "Bearer secret-value", "x-request-id": "id-1", "traceparent": "00-a-b-01"}
    headers |= {"x-epd-hop": "1"}
    await caller.post("encode", GENERATE, encode_body(image_url(), "k") | {"mm_payload": "none"}, **headers)
    async with session.get(f"{admin}/simulator/exchanges") as response:
        text = await response.text()
    exchanges = json.loads(text)
    (exchange,) = exchanges["encode"]
    assert (exchange["method"], exchange["path"], exchange["status"]) == ("POST", GENERATE, 200)
    assert exchange["headers"].items() >= {
        "epp-profile": "encode", "x-request-id": "id-1", "traceparent": "00-a-b-01", "x-epd-hop": "1",
        "authorization": "<redacted>",
    }.items()  # fmt: skip
    assert "secret-value" not in text
    assert exchange["body"]["content_parts"][0]["url"].startswith("<sha256 ")
    assert exchange["body"]["token_ids"] == encode_body("", "k")["token_ids"]
    async with session.get(f"{admin}/simulator/violations") as response:
        (violation,) = await response.json()
    assert (violation["role"], violation["request_id"], violation["fatal"]) == ("encode", "id-1", False)
    async with session.post(f"{admin}/simulator/reset") as response:
        assert (await response.json())["descriptors"] == "nixl"
    async with session.get(f"{admin}/simulator/exchanges") as response:
        assert await response.json() == {"render": [], "encode": [], "prefill": [], "decode": []}
    assert caller.violations == []


async def test_health_and_models_on_every_role(simulator: Simulator, caller: Caller) -> None:
    """Both are there, and are not recorded as exchanges."""
    for role in ("render", "encode", "prefill", "decode"):
        async with caller.session.get(f"{simulator.url(role)}/health") as response:
            assert response.status == 200
        async with caller.session.get(f"{simulator.url(role)}/v1/models") as response:
            assert [model["id"] for model in (await response.json())["data"]] == ["simulated-vl"]
    assert not simulator.deployment.recorder.exchanges


async def test_wrong_method_is_a_405(simulator: Simulator, caller: Caller) -> None:
    """Only POST generates."""
    async with caller.session.get(simulator.url("decode") + CHAT) as response:
        assert response.status == 405


async def test_large_bodies_are_accepted(simulator: Simulator, caller: Caller) -> None:
    """A body of 80 MB is read and recorded by its size."""
    body = {"prompt": "x", "padding": "p" * (80 << 20)}
    assert (await caller.post("decode", "/v1/completions", body))[0] == 200
    exchange = _last(simulator, "decode")
    assert exchange.body_bytes > 80 << 20
    assert exchange.body["padding"].endswith(f"length {80 << 20}>")


async def test_busy_port_is_an_error_and_leaves_nothing_bound(simulator: Simulator) -> None:
    """The failing start gives back what it bound."""
    taken = simulator.addresses["decode"][1]
    other = Simulator(SimulatorConfig(ports={"decode": taken}))
    with pytest.raises(OSError, match=str(taken)):
        await other.start()
    assert other.addresses == {}
