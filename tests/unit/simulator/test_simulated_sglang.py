"""Prefill and decode paired as in SGLang."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from sidecar.simulator import ConfigError, Simulator, SimulatorConfig
from sidecar.simulator.bootstrap import Party, Rooms
from sidecar.simulator.deployment import Address, Call
from sidecar.simulator.recorder import Exchange, Recorder
from tests.unit.simulator.simulator_caller import (
    CHAT,
    FOR_PREFILL,
    GENERATE,
    Caller,
    chat,
    encode_body,
    image_url,
    prefill_body,
    until,
)

if TYPE_CHECKING:
    from sidecar.simulator.config import Role

RESERVE = {"Prefer": "reserve-endpoint"}
RANKS = ("routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank")
ROOM = (1 << 63) - 1
Answered = tuple[int, Any]


@pytest.fixture(autouse=True)
def _paired_as_sglang(simulator: Simulator) -> None:
    simulator.configure({"kv_connector": "sglang"})


@dataclass
class Pair:
    """The three requests of one client request, as a correct filter sends them."""

    caller: Caller
    request_id: str = "id-1"
    room: int = ROOM
    prompt: str = "What is this?"
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def endpoint(self) -> str:
        host, port = self.caller.simulator.addresses["prefill"]
        return f"{host}:{port}"

    def body(self, **fields: Any) -> dict[str, Any]:
        bootstrap = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": self.room}
        messages = [{"role": "user", "content": self.prompt}]
        return {"messages": messages} | bootstrap | self.changes | fields

    async def reserve(self) -> str:
        """The endpoint that the picker answers."""
        headers = RESERVE | {"x-request-id": f"{self.request_id}-reserve"}
        async with self.caller.send("prefill", CHAT, chat(max_tokens=1), **headers) as response:
            assert (response.status, await response.read()) == (200, b"")
            return str(response.headers["x-prefill-host-port"])

    async def prefill(self, **fields: Any) -> Answered:
        headers = {"x-request-id": f"{self.request_id}-prefill", "x-prefill-pin": self.endpoint}
        return await self.caller.post("prefill", CHAT, self.body(max_tokens=1) | fields, **headers)

    async def decode(self, **fields: Any) -> Answered:
        headers = {"x-request-id": self.request_id}
        return await self.caller.post("decode", CHAT, self.body() | fields, **headers)

    async def decode_stream(self) -> Answered:
        headers = {"x-request-id": self.request_id}
        async with self.caller.send("decode", CHAT, self.body(stream=True), **headers) as response:
            return response.status, await response.text()

    async def both(self) -> tuple[Answered, Answered]:
        """The answers of prefill and decode that are sent together."""
        await self.reserve()
        prefilled, decoded = await asyncio.gather(self.prefill(), self.decode())
        return prefilled, decoded


@pytest.fixture
def pair(caller: Caller) -> Pair:
    return Pair(caller)


def _waiting(caller: Caller, role: Role) -> int:
    """Requests of a role that have no answer yet and whose caller is still there."""
    exchanges = caller.simulator.deployment.recorder.of(role)
    return sum(exchange.status is None and not exchange.cancelled for exchange in exchanges)


def _open_rooms(caller: Caller) -> int:
    return len(caller.simulator.deployment.rooms)


def _text(answered: Answered) -> str:
    status, answer = answered
    assert status == 200, answer
    return str(answer["choices"][0]["message"]["content"])


# The endpoint picker.


@pytest.mark.parametrize(
    "prefer",
    ["reserve-endpoint", "Reserve-Endpoint", "wait=10, reserve-endpoint;foo=1", " reserve-endpoint "],
)
async def test_reservation_answers_the_prefill_endpoint(caller: Caller, pair: Pair, prefer: str) -> None:
    """The picker answers in place of the engine, with prefill's own address and no body."""
    headers = {"Prefer": prefer, "x-request-id": "id-1-reserve"}
    async with caller.send("prefill", CHAT, chat(max_tokens=1), **headers) as response:
        assert (response.status, await response.read()) == (200, b"")
        assert response.headers["x-prefill-host-port"] == pair.endpoint
    assert caller.violations == []


async def test_ipv6_endpoint_is_in_brackets() -> None:
    """The reservation and the pin write the address with brackets, the body with or without."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    async with (
        Simulator(SimulatorConfig(host="::1", kv_connector="sglang")) as simulator,
        aiohttp.ClientSession() as session,
    ):
        caller = Caller(simulator, session)
        for room, (own, other) in enumerate([("::1", "::1"), ("[::1]", "::1")]):
            pair = Pair(caller, room=room)
            endpoint = await pair.reserve()
            assert endpoint == f"[::1]:{simulator.addresses['prefill'][1]}"
            headers = {"x-request-id": "id-1-prefill", "x-prefill-pin": endpoint}
            body = pair.body(max_tokens=1, bootstrap_host=own)
            prefilled, _ = await asyncio.gather(
                caller.post("prefill", CHAT, body, **headers), pair.decode(bootstrap_host=other)
            )
            assert prefilled[0] == 200
        assert caller.violations == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *[({name: 1}, f"{name} in the body of a reservation") for name in RANKS],
        ({"bootstrap_host": "127.0.0.1"}, "bootstrap_host in the body of a reservation"),
        ({"bootstrap_port": 8998}, "bootstrap_port in the body of a reservation"),
        ({"bootstrap_room": 1}, "bootstrap_room in the body of a reservation"),
    ],
)
async def test_reservation_comes_before_the_pairing(
    caller: Caller, changes: dict[str, Any], message: str
) -> None:
    """The endpoint is not known yet, so the body cannot name it."""
    headers = RESERVE | {"x-request-id": "id-1-reserve"}
    async with caller.send("prefill", CHAT, chat(max_tokens=1) | changes, **headers) as response:
        assert response.status == 200
    assert caller.violations == [message]


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({"x-request-id": "id-1"}, "x-request-id of a reservation, 'id-1', lacks -reserve"),
        ({}, "x-request-id of a reservation, '', lacks -reserve"),
        ({"x-request-id": "a-reserve", "x-prefill-pin": "x"}, "the header x-prefill-pin in a reservation"),
        ({"x-request-id": "a-reserve", "EPP-Profile": "decode"}, "EPP-Profile is 'decode' at prefill"),
    ],
)
async def test_reservation_with_wrong_headers(caller: Caller, headers: dict[str, str], message: str) -> None:
    """It has its own id, is not pinned, and asks for the prefill profile."""
    async with caller.send("prefill", CHAT, chat(max_tokens=1), **RESERVE, **headers) as response:
        assert response.status == 200
    (violation,) = caller.violations
    assert violation.startswith(message)


async def test_reservation_of_a_body_that_is_no_object_is_refused(caller: Caller) -> None:
    """The picker reads the body to choose by it."""
    headers = RESERVE | {"x-request-id": "id-1-reserve"}
    assert (await caller.post("prefill", CHAT, [1], **headers))[0] == 400


async def test_prefill_without_a_pin_is_served(caller: Caller, pair: Pair) -> None:
    """The picker chooses once more, maybe another endpoint: a violation."""
    await pair.reserve()
    headers = {"x-request-id": "id-1-prefill"}
    prefilled, _ = await asyncio.gather(
        caller.post("prefill", CHAT, pair.body(max_tokens=1), **headers), pair.decode()
    )
    assert prefilled[0] == 200
    assert caller.violations == [
        f"x-prefill-pin is None at prefill, where it should be {pair.endpoint!r}",
    ]


async def test_prefill_pinned_elsewhere_is_refused(caller: Caller, pair: Pair) -> None:
    """There is no such endpoint to pick: 503, and the room stays empty."""
    await pair.reserve()
    headers = {"x-request-id": "id-1-prefill", "x-prefill-pin": "10.0.0.1:8000"}
    status, _ = await caller.post("prefill", CHAT, pair.body(max_tokens=1), **headers)
    assert (status, _open_rooms(caller)) == (503, 0)
    assert caller.violations == [
        f"x-prefill-pin is '10.0.0.1:8000' at prefill, where it should be {pair.endpoint!r}"
    ]


# The rendezvous.


@pytest.mark.parametrize("first", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
async def test_neither_answers_before_the_other_arrived(
    caller: Caller, pair: Pair, first: Role, *, stream: bool
) -> None:
    """The first one waits, whichever it is; the second one frees both, and decode has prefill's KV blocks."""
    await pair.reserve()
    calls = {"prefill": pair.prefill, "decode": pair.decode_stream if stream else pair.decode}
    early = asyncio.create_task(calls.pop(first)())
    await until(lambda: _open_rooms(caller) == 1)
    assert _waiting(caller, first) == 1
    (late_call,) = calls.values()
    second_answer, first_answer = await late_call(), await early
    prefilled, decoded = (
        (first_answer, second_answer) if first == "prefill" else (second_answer, first_answer)
    )
    assert prefilled[0] == 200
    assert prefilled[1]["kv_transfer_params"] is None
    assert prefilled[1]["usage"]["completion_tokens"] == 1
    if stream:
        assert decoded[0] == 200
        assert decoded[1].endswith("data: [DONE]\n\n")
        assert '"content":"hit"' in decoded[1]
    else:
        assert _text(decoded).endswith("KV from prefill: hit")
    assert (caller.violations, _open_rooms(caller)) == ([], 0)


async def test_rooms_keep_requests_apart(caller: Caller) -> None:
    """Of many requests at once each decode gets the KV blocks of its own prompt."""
    pairs = [Pair(caller, f"id-{room}", room, f"prompt {room}") for room in range(20)]
    await asyncio.gather(*(pair.reserve() for pair in pairs))
    decodes = [asyncio.create_task(pair.decode()) for pair in reversed(pairs)]
    await until(lambda: _open_rooms(caller) == len(pairs))
    prefilled = await asyncio.gather(*(pair.prefill() for pair in pairs))
    assert {status for status, _ in prefilled} == {200}
    for decoded in await asyncio.gather(*decodes):
        assert _text(decoded).endswith("hit")
    assert (caller.violations, _open_rooms(caller)) == ([], 0)


async def test_media_prefilled_as_tokens_decode_as_chat(simulator: Simulator, caller: Caller) -> None:
    """A prefill in the generate format and a decode in the client's have one prompt when the uuids agree."""
    url = image_url()
    rendered = await caller.render(chat(url))
    (key,) = rendered["features"]["mm_hashes"]["image"]
    pair = Pair(caller)
    endpoint = await pair.reserve()
    bootstrap = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 0}
    body = prefill_body(rendered, form="kwargs_data") | bootstrap
    del body["kv_transfer_params"]
    headers = {"x-request-id": "id-1-prefill", "x-prefill-pin": endpoint}
    answers = await asyncio.gather(
        caller.post("prefill", GENERATE, body, **headers),
        caller.post("decode", CHAT, chat(url, uuids=[key]) | bootstrap, **{"x-request-id": "id-1"}),
    )
    text = _text(answers[1])
    assert "640x480 jpeg" in text
    assert text.endswith("hit")
    assert (caller.violations, len(simulator.deployment.rooms)) == ([], 0)


async def test_kv_of_another_prompt_is_a_violation(caller: Caller, pair: Pair) -> None:
    """Whatever met under the room is decoded from, so the text tells the miss."""
    await pair.reserve()
    other = [{"role": "user", "content": "Something else"}]
    _, decoded = await asyncio.gather(pair.prefill(), pair.decode(messages=other))
    assert _text(decoded).endswith("miss")
    assert caller.violations == ["the KV blocks belong to another prompt than the one to be decoded"]


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_nobody_comes_in_time(simulator: Simulator, caller: Caller, pair: Pair, role: Role) -> None:
    """Each side gives up after its own time limit, with an error and an empty room."""
    simulator.config.bootstrap_timeout = 0.02
    await pair.reserve()
    status, answer = await (pair.prefill() if role == "prefill" else pair.decode())
    assert status == 500
    assert f"under bootstrap_room {ROOM} for 0.02 s" in answer["error"]["message"]
    assert (caller.violations, _open_rooms(caller)) == ([], 0)


async def test_decode_of_a_failed_prefill_waits(simulator: Simulator, caller: Caller, pair: Pair) -> None:
    """A prefill that is refused never enters the room; its decode waits until its caller leaves."""
    await pair.reserve()
    simulator.config.faults["prefill"] = "status:503*1"
    decoding = asyncio.create_task(pair.decode())
    await until(lambda: _open_rooms(caller) == 1)
    assert (await pair.prefill())[0] == 503
    assert (await pair.prefill(n=0))[0] == 400
    assert (_waiting(caller, "decode"), _open_rooms(caller)) == (1, 1)
    decoding.cancel()
    await until(lambda: _open_rooms(caller) == 0)
    assert _waiting(caller, "decode") == 0
    assert caller.violations == []


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_whoever_is_cancelled_leaves_the_room(caller: Caller, pair: Pair, role: Role) -> None:
    """The other one then finds an empty room, and no room is left over in the end."""
    await pair.reserve()
    first, second = (pair.prefill, pair.decode) if role == "prefill" else (pair.decode, pair.prefill)
    for call in (first, second):
        waiting = asyncio.create_task(call())
        await until(lambda: _open_rooms(caller) == 1)
        waiting.cancel()
        await until(lambda: _open_rooms(caller) == 0)
    recorded = caller.simulator.deployment.recorder.exchanges
    assert [exchange.cancelled for exchange in recorded] == [False, True, True]
    assert caller.violations == []


async def test_arrival_while_the_other_is_being_cancelled() -> None:
    """Between the cancellation of a request and its end nobody meets it."""
    rooms = Rooms(Recorder())
    leaving = asyncio.create_task(rooms.meet(1, _party("prefill", "a-prefill"), 60))
    await asyncio.sleep(0)
    arriving = asyncio.create_task(rooms.meet(1, _party("decode", "a"), 60))
    leaving.cancel()
    await asyncio.wait([leaving])
    assert (leaving.cancelled(), arriving.done(), len(rooms)) == (True, False, 1)
    arriving.cancel()
    await asyncio.wait([arriving])
    assert len(rooms) == 0


def _party(role: Role, request_id: str) -> Party:
    server = Address("127.0.0.1", 8998)
    exchange = Exchange(role, "POST", CHAT, {"x-request-id": request_id}, {}, 0)
    return Party(Call(role, {}, exchange, server), server, "prompt")


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_room_serves_one_request_of_each_role(caller: Caller, pair: Pair, role: Role) -> None:
    """A second one is a violation and meets nobody, also after the first is done."""
    again = pair.prefill if role == "prefill" else pair.decode
    prefilled, decoded = await pair.both()
    assert (prefilled[0], decoded[0], caller.violations) == (200, 200, [])
    repeated = asyncio.create_task(again())
    await until(lambda: bool(caller.violations))
    assert caller.violations == [f"a second {role} request under bootstrap_room {ROOM}"]
    assert (_waiting(caller, role), _open_rooms(caller)) == (1, 0)
    repeated.cancel()
    await until(lambda: _waiting(caller, role) == 0)


async def test_second_request_does_not_disturb_the_first(caller: Caller, pair: Pair) -> None:
    """The one that came first keeps its place."""
    await pair.reserve()
    first = asyncio.create_task(pair.prefill())
    await until(lambda: _open_rooms(caller) == 1)
    second = asyncio.create_task(pair.prefill())
    await until(lambda: bool(caller.violations))
    assert _text(await pair.decode()).endswith("hit")
    assert (await first)[0] == 200
    assert not second.done()
    second.cancel()


@pytest.mark.parametrize("changes", [{"bootstrap_host": "10.0.0.1"}, {"bootstrap_port": 8999}])
async def test_decode_that_looks_elsewhere_meets_nobody(
    caller: Caller, pair: Pair, changes: dict[str, Any]
) -> None:
    """Decode connects to the server its body names, so the room alone does not pair them."""
    await pair.reserve()
    calls = [asyncio.create_task(call) for call in (pair.prefill(), pair.decode(**changes))]
    await until(lambda: bool(caller.violations))
    assert (_waiting(caller, "prefill"), _waiting(caller, "decode")) == (1, 1)
    for call in calls:
        call.cancel()
    await until(lambda: _open_rooms(caller) == 0)
    wrong = f"{changes.get('bootstrap_host', '127.0.0.1')}:{changes.get('bootstrap_port', 8998)}"
    assert caller.violations == [
        f"decode looks for the bootstrap server {wrong}, that of its prefill is 127.0.0.1:8998"
    ]


@pytest.mark.parametrize("changes", [{"bootstrap_host": "10.0.0.1"}, {"bootstrap_port": 8999}])
async def test_prefill_is_found_at_its_own_server(
    caller: Caller, pair: Pair, changes: dict[str, Any]
) -> None:
    """Prefill has one bootstrap server whatever its body says; another one there is a violation."""
    await pair.reserve()
    prefilled, decoded = await asyncio.gather(pair.prefill(**changes), pair.decode())
    assert (prefilled[0], decoded[0]) == (200, 200)
    (violation,) = caller.violations
    assert violation.endswith("this prefill has 127.0.0.1:8998")


async def test_bootstrap_port_is_a_knob(simulator: Simulator, caller: Caller, pair: Pair) -> None:
    """The port is that of prefill's bootstrap server, not of its listener."""
    simulator.configure({"bootstrap_port": 9001})
    pair.changes = {"bootstrap_port": 9001}
    prefilled, decoded = await pair.both()
    assert (prefilled[0], decoded[0], caller.violations) == (200, 200, [])


# Bodies and headers.


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bootstrap_host", None), ("bootstrap_host", ""), ("bootstrap_host", ["127.0.0.1"]),
        ("bootstrap_port", None), ("bootstrap_port", "8998"), ("bootstrap_port", 0),
        ("bootstrap_port", 65536), ("bootstrap_port", True), ("bootstrap_room", None),
        ("bootstrap_room", -1), ("bootstrap_room", 1 << 63), ("bootstrap_room", 1.0),
        ("bootstrap_room", "1"), ("bootstrap_room", False), ("bootstrap_room", 1 << 80),
    ],
)  # fmt: skip
async def test_a_body_that_cannot_be_paired_is_refused(
    caller: Caller, pair: Pair, role: Role, name: str, value: object
) -> None:
    """Each bootstrap field has its type and range; without them an engine refuses the request."""
    await pair.reserve()
    changes = {name: value}
    status, answer = await (pair.prefill(**changes) if role == "prefill" else pair.decode(**changes))
    assert (status, _open_rooms(caller)) == (400, 0)
    (violation,) = caller.violations
    assert violation.startswith(f"{name} is {value!r}, where it should be")
    assert violation in answer["error"]["message"]


async def test_an_ordinary_request_is_refused_by_decode(caller: Caller) -> None:
    """All three fields are missing, and each is told."""
    assert (await caller.post("decode", CHAT, chat()))[0] == 400
    assert [message.partition(" ")[0] for message in caller.violations] == [
        "bootstrap_host", "bootstrap_port", "bootstrap_room",
    ]  # fmt: skip


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_transfer_params": FOR_PREFILL}, "kv_transfer_params in the body of {}: SGLang reads none"),
        *[({name: 0}, name + " in the body of {}") for name in RANKS],
    ],
)
async def test_fields_that_do_not_belong(
    caller: Caller, pair: Pair, role: Role, changes: dict[str, Any], message: str
) -> None:
    """Transfer parameters are another engine's, and a client does not choose ranks."""
    await pair.reserve()
    await asyncio.gather(
        pair.prefill(**(changes if role == "prefill" else {})),
        pair.decode(**(changes if role == "decode" else {})),
    )
    assert caller.violations == [message.format(role)]


@pytest.mark.parametrize(
    ("role", "headers", "message"),
    [
        ("decode", {"Prefer": "if-available"}, "the header prefer: if-available reached decode"),
        ("decode", RESERVE, "the header prefer: reserve-endpoint reached decode"),
        ("decode", {"x-prefill-pin": "x"}, "the header x-prefill-pin reached decode"),
        ("prefill", {"Prefer": "if-available"}, "the header prefer: if-available reached prefill"),
    ],
)
async def test_headers_that_do_not_belong(
    caller: Caller, pair: Pair, role: Role, headers: dict[str, str], message: str
) -> None:
    """A preference is answered by the picker or dropped, and only prefill is pinned."""
    await pair.reserve()
    own = {
        "prefill": {"x-request-id": "id-1-prefill", "x-prefill-pin": pair.endpoint},
        "decode": {"x-request-id": "id-1"},
    }
    own[role] |= headers
    answers = await asyncio.gather(
        caller.post("prefill", CHAT, pair.body(max_tokens=1), **own["prefill"]),
        caller.post("decode", CHAT, pair.body(), **own["decode"]),
    )
    assert [status for status, _ in answers] == [200, 200]
    assert caller.violations == [message]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (("a-reserve", "a", "a"), "x-request-id of prefill, 'a', lacks -prefill"),
        (("a-reserve", "b-prefill", "b"), "prefill 'b-prefill' without a reservation 'b-reserve'"),
        (("a-reserve", "a-prefill", "b"), "decode 'b' meets prefill 'a-prefill'"),
        (("a-reserve", "a-prefill", "a-decode"), "decode 'a-decode' meets prefill 'a-prefill'"),
    ],
)
async def test_request_ids_belong_together(
    caller: Caller, pair: Pair, ids: tuple[str, str, str], message: str
) -> None:
    """Reservation and prefill append their own word to the id that decode has."""
    await _serve_with_ids(caller, pair, *ids)
    assert caller.violations[0].startswith(message)


async def test_request_id_of_a_client_may_look_like_one_of_ours(caller: Caller, pair: Pair) -> None:
    """Only the three ids in relation to each other tell what is wrong."""
    await _serve_with_ids(caller, pair, "x-prefill-reserve", "x-prefill-prefill", "x-prefill")
    assert caller.violations == []


async def _serve_with_ids(
    caller: Caller, pair: Pair, reserve_id: str, prefill_id: str, decode_id: str
) -> None:
    body = chat(max_tokens=1)
    async with caller.send("prefill", CHAT, body, **RESERVE, **{"x-request-id": reserve_id}) as response:
        assert response.status == 200
    pinned = {"x-request-id": prefill_id, "x-prefill-pin": pair.endpoint}
    answers = await asyncio.gather(
        caller.post("prefill", CHAT, pair.body(max_tokens=1), **pinned),
        caller.post("decode", CHAT, pair.body(), **{"x-request-id": decode_id}),
    )
    assert [status for status, _ in answers] == [200, 200]


async def test_thinking_budget_above_the_cap_is_accepted(caller: Caller, pair: Pair) -> None:
    """SGLang compares the budget of a Messages body with no limit."""
    endpoint = await pair.reserve()
    body = pair.body(max_tokens=1, thinking={"type": "enabled", "budget_tokens": 1024})
    headers = {"x-request-id": "id-1-prefill", "x-prefill-pin": endpoint}
    answers = await asyncio.gather(
        caller.post("prefill", "/v1/messages", body, **headers),
        caller.post("decode", "/v1/messages", body | {"max_tokens": 9}, **{"x-request-id": "id-1"}),
    )
    assert [status for status, _ in answers] == [200, 200]
    assert caller.violations == []


# Knobs.


@pytest.mark.parametrize(
    ("fault", "answer"),
    [
        ("no-header", (200, None)),
        ("header:", (200, "")),
        ("header:10.0.0.1", (200, "10.0.0.1")),
        ("header:10.0.0.1:8000, [::2]:99999", (200, "10.0.0.1:8000, [::2]:99999")),
        ("status:503", (503, None)),
        ("garbage", (200, None)),
    ],
)
async def test_faulty_reservations(
    simulator: Simulator, caller: Caller, pair: Pair, fault: str, answer: tuple[int, str | None]
) -> None:
    """A reservation has faults of its own, as often as asked for; prefill is not hit by them."""
    simulator.configure({"faults": {"reserve": f"{fault}*1"}})
    headers = RESERVE | {"x-request-id": "id-1-reserve"}
    async with caller.send("prefill", CHAT, chat(max_tokens=1), **headers) as response:
        assert (response.status, response.headers.get("x-prefill-host-port")) == answer
    assert await pair.reserve() == pair.endpoint
    prefilled, _ = await asyncio.gather(pair.prefill(), pair.decode())
    assert (prefilled[0], caller.violations) == (200, [])


async def test_faults_and_latency_of_prefill_spare_the_reservation(
    simulator: Simulator, caller: Caller, pair: Pair
) -> None:
    """Both are the engine's, and the picker answers without it."""
    simulator.configure({"faults": {"prefill": "status:500*1"}, "latency": {"prefill": 3600}})
    assert await pair.reserve() == pair.endpoint
    simulator.config.latency["prefill"] = 0
    assert (await pair.prefill())[0] == 500
    assert simulator.config.faults["prefill"] == ""
    simulator.config.latency["reserve"] = 3600
    reserving = asyncio.create_task(pair.reserve())
    await until(lambda: _waiting(caller, "prefill") == 1)
    prefilled, _ = await asyncio.gather(pair.prefill(), pair.decode())
    assert (prefilled[0], reserving.done()) == (200, False)
    reserving.cancel()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_connector": "mooncake"}, "mooncake"),
        ({"bootstrap_port": 0}, "bootstrap_port: 0"),
        ({"bootstrap_port": 65536}, "bootstrap_port: 65536"),
        ({"bootstrap_port": "8998"}, "bootstrap_port"),
        ({"bootstrap_timeout": 0}, "bootstrap_timeout: 0"),
        ({"bootstrap_timeout": float("inf")}, "bootstrap_timeout: inf"),
        ({"bootstrap_timeout": float("nan")}, "bootstrap_timeout: nan"),
        ({"faults": {"reserve": "wrong-counts"}}, "faults.reserve: 'wrong-counts'"),
        ({"faults": {"prefill": "no-header"}}, "faults.prefill: 'no-header'"),
        ({"faults": {"prefill": "header:x"}}, "faults.prefill: 'header:x'"),
        ({"faults": {"reserve": "header:a\nb"}}, "faults.reserve"),
        ({"faults": {"reserve": "header:x*0"}}, "faults.reserve"),
    ],
)
def test_impossible_knobs_are_refused(changes: dict[str, Any], message: str) -> None:
    """The error names the knob and the value."""
    with pytest.raises(ConfigError, match=message):
        Simulator().configure(changes)


async def test_reset_forgets_rooms_and_reservations(simulator: Simulator, caller: Caller, pair: Pair) -> None:
    """The same room and ids can be used again; who still waits from before meets nobody."""
    await pair.reserve()
    left_over = asyncio.create_task(pair.decode())
    await until(lambda: _open_rooms(caller) == 1)
    simulator.reset()
    simulator.configure({"kv_connector": "sglang"})
    assert _open_rooms(caller) == 0
    assert "id-1" not in simulator.deployment.reservations
    prefilled, decoded = await pair.both()
    assert (prefilled[0], decoded[0], caller.violations) == (200, 200, [])
    assert not left_over.done()
    left_over.cancel()


# The other connectors.


@pytest.mark.parametrize("connector", ["nixl", "shared"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_vllm_reads_nothing_of_all_this(
    simulator: Simulator, caller: Caller, connector: str, role: Role
) -> None:
    """Headers and fields of the pairing are violations, each of its own, and the request is served."""
    simulator.configure({"kv_connector": connector})
    headers = RESERVE | {"x-prefill-pin": "127.0.0.1:1"}
    names = (*RANKS, "bootstrap_host", "bootstrap_port", "bootstrap_room")
    body = chat() | dict.fromkeys(names, 1)
    if role == "prefill":
        body |= {"kv_transfer_params": FOR_PREFILL, "max_tokens": 1}
    assert (await caller.post(role, CHAT, body, **headers))[0] == 200
    assert caller.violations == [
        f"the header x-prefill-pin reached {role}",
        f"the header prefer: reserve-endpoint reached {role}",
        *[f"{name} in the body of {role}" for name in names],
    ]


async def test_probe_for_cached_prompts_is_no_violation_in_vllm(simulator: Simulator, caller: Caller) -> None:
    """Only SGLang's decode may see no preference at all."""
    simulator.configure({"kv_connector": "nixl"})
    assert (await caller.post("decode", CHAT, chat(), Prefer="if-available"))[0] == 412
    assert caller.violations == []


@pytest.mark.parametrize("connector", ["nixl", "shared", "sglang"])
async def test_encode_and_render_are_never_paired(
    simulator: Simulator, caller: Caller, connector: str
) -> None:
    """They see neither pins nor bootstrap fields, and do their work as ever."""
    simulator.configure({"kv_connector": connector})
    body = encode_body(image_url(), "key") | {"bootstrap_room": 1}
    status, answer = await caller.post("encode", GENERATE, body, **{"x-prefill-pin": "x"})
    assert (status, list(answer["ec_transfer_params"])) == (200, ["key"])
    assert caller.violations == [
        "the header x-prefill-pin reached encode",
        "bootstrap_room in the body of encode",
    ]
    async with caller.send("render", f"{CHAT}/render", chat(), **RESERVE) as response:
        assert response.status == 200
    assert caller.violations[2:] == ["the header prefer: reserve-endpoint reached render"]
