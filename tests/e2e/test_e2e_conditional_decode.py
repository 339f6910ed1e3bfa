"""conditional-decode through a real Envoy: what a worker that holds the prompt answers, the client gets."""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import json
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from deploy.envoy.local_stack import DECODE
from tests.e2e.e2e_client import CAT, CHAT, TIMEOUT, Answer, Upload, as_body, chat, new_id
from tests.e2e.e2e_stack import Variant, ext_proc, wait_for

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from tests.e2e.e2e_stack import SimulatedWorkers, Stack
    from tests.e2e.e2e_upstream import LoopThread

EVENTS = [b'data: {"piece": %d}\n\n' % number for number in range(4)]


class ScriptedWorker:
    """A decode worker that does what the test says; by default it holds no prompt and decodes with 200.

    Attributes:
        respond: answers a probe.
        probes: headers and body of the probes.
        decodes: headers and body of the requests that are none.
        left: clients that closed their connection inside an answer.
    """

    def __init__(self, loop: LoopThread) -> None:
        self._loop = loop
        self.reset()
        self.port = loop.run(self._start())

    def reset(self) -> None:
        self.respond: Callable[[web.Request], Awaitable[web.StreamResponse]] = _nobody
        self.probes: list[tuple[dict[str, str], Any]] = []
        self.decodes: list[tuple[dict[str, str], Any]] = []
        self.left = 0
        self._gate = asyncio.Semaphore(0)

    def release_event(self) -> None:
        self._loop.loop.call_soon_threadsafe(self._gate.release)

    async def gate(self) -> None:
        await asyncio.wait_for(self._gate.acquire(), 30)

    async def _start(self) -> int:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{tail:.*}", self._serve)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return int(self._runner.addresses[0][1])

    def close(self) -> None:
        self._loop.run(self._runner.cleanup())

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        headers = {name.lower(): value for name, value in request.headers.items()}
        if headers.get("prefer") != "if-available":
            self.decodes.append((headers, body))
            return web.json_response({"decoded": True})
        self.probes.append((headers, body))
        try:
            return await self.respond(request)
        except (asyncio.CancelledError, ConnectionError):
            self.left += 1
            raise


async def _nobody(_request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "nobody"}}, status=412)


async def open_stream(request: web.Request) -> web.StreamResponse:
    """A 200 whose events follow."""
    response = web.StreamResponse(
        headers={"content-type": "text/event-stream; charset=utf-8", "x-worker": "w1"}
    )
    await response.prepare(request)
    return response


@pytest.fixture(scope="module")
def scripted_worker(loop_thread: LoopThread) -> Iterator[ScriptedWorker]:
    worker = ScriptedWorker(loop_thread)
    yield worker
    worker.close()


@pytest.fixture
def worker(scripted_worker: ScriptedWorker) -> ScriptedWorker:
    """The scripted worker without records or script."""
    scripted_worker.reset()
    return scripted_worker


def variant(workers: SimulatedWorkers, **more: Any) -> Variant:
    """The checked-in configuration with the step in it."""
    render = {"type": "render", "params": {"address": f"http://127.0.0.1:{workers.ports['render']}"}}
    names = ("conditional-decode", "encode", "prefill", "decode")
    return Variant(pipeline={"steps": [render, *({"type": name} for name in names)]}, **more)


@pytest.fixture
def simulated(workers: SimulatedWorkers, shared_stacks: Callable[[str, Variant], Stack]) -> Stack:
    """Every role is simulated, the KV cache is shared storage."""
    workers.configure(kv_connector="shared")
    return shared_stacks("conditional", variant(workers))


@pytest.fixture
def stack(
    worker: ScriptedWorker, workers: SimulatedWorkers, shared_stacks: Callable[[str, Variant], Stack]
) -> Stack:
    """Decode is the scripted worker."""
    return shared_stacks("conditional-scripted", variant(workers, ports={DECODE: worker.port}))


def buffered(bootstrap: dict[str, Any]) -> None:
    ext_proc(bootstrap)["processing_mode"]["request_body_mode"] = "BUFFERED"
    ext_proc(bootstrap)["message_timeout"] = "30s"


@pytest.fixture
def buffered_stack(
    worker: ScriptedWorker, workers: SimulatedWorkers, shared_stacks: Callable[[str, Variant], Stack]
) -> Stack:
    """The same, in BUFFERED mode."""
    return shared_stacks("conditional-buffered", variant(workers, ports={DECODE: worker.port}, edit=buffered))


class Streaming:
    """A streaming request whose answer is read line by line."""

    def __init__(self, stack: Stack, body: object) -> None:
        self.request_id = new_id()
        host, port = stack.base.removeprefix("http://").split(":")
        self.connection = http.client.HTTPConnection(host, int(port), timeout=TIMEOUT)
        fields = {"content-type": "application/json", "x-request-id": self.request_id}
        self.connection.request("POST", CHAT, as_body(body), fields)

    def head(self) -> Streaming:
        self.response = self.connection.getresponse()
        return self

    def event(self) -> bytes:
        """The next event, as far as its empty line."""
        return self.response.readline() + self.response.readline()

    def rest(self) -> bytes:
        data = self.response.read()
        self.connection.close()
        return data

    def leave(self) -> None:
        self.response.close()
        self.connection.close()


def streaming(**more: Any) -> dict[str, Any]:
    return chat("Hello", stream=True, **more)


def test_the_second_time_the_prompt_is_there(simulated: Stack, workers: SimulatedWorkers) -> None:
    """412 goes on through encode and prefill; the same request again is served without either."""
    first, line = simulated.coordinate(chat("Look", CAT))
    assert "KV from prefill: hit" in first.text
    assert (line["outcome"], line["stage"]) == ("ok", "decode")
    probe, decode = workers.exchanges("decode")
    assert (probe.status, decode.status) == (412, 200)
    assert probe.headers["prefer"] == "if-available"
    assert "prefer" not in decode.headers
    assert decode.body.pop("kv_transfer_params")
    assert probe.body == decode.body
    assert probe.body["messages"][0]["content"][0]["uuid"]

    second, line = simulated.coordinate(chat("Look", CAT))
    assert second.text == first.text
    assert (line["outcome"], line["stage"], line["error"]) == ("served", "conditional_decode", "")
    assert float(line["total_ms"]) >= float(line["overhead_ms"]) >= 0
    assert [len(workers.exchanges(role)) for role in ("render", "encode", "prefill", "decode")] == [
        2,
        1,
        1,
        3,
    ]
    assert workers.violations == []


def test_a_served_stream_is_the_workers(simulated: Stack, workers: SimulatedWorkers) -> None:
    """The events of a hit are those decode itself would have streamed."""
    simulated.coordinate(chat("Look", CAT))
    asked = Streaming(simulated, chat("Look", CAT, stream=True)).head()
    assert asked.response.status == 200
    assert asked.response.headers["content-type"].startswith("text/event-stream")
    events = asked.rest().split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    pieces = [json.loads(event.removeprefix(b"data: ")) for event in events[:-2]]
    text = "".join(piece["choices"][0]["delta"].get("content") or "" for piece in pieces if piece["choices"])
    assert "KV from prefill: hit" in text
    line = simulated.log_line(asked.request_id)
    assert (line["outcome"], line["stage"], line["stream"]) == ("served", "conditional_decode", "true")
    assert workers.violations == []


def test_events_arrive_one_by_one(stack: Stack, worker: ScriptedWorker) -> None:
    """Each event reaches the client before the worker sends the next one."""

    async def respond(request: web.Request) -> web.StreamResponse:
        response = await open_stream(request)
        for event in EVENTS:
            await worker.gate()
            await response.write(event)
        await worker.gate()
        return response

    worker.respond = respond
    asked = Streaming(stack, streaming()).head()
    assert (asked.response.status, asked.response.headers["x-worker"]) == (200, "w1")
    for event in EVENTS:
        worker.release_event()
        assert asked.event() == event
    worker.release_event()
    assert asked.rest() == b""
    line = stack.log_line(asked.request_id)
    assert (line["outcome"], line["stage"], line["error"]) == ("served", "conditional_decode", "")
    assert line["details"] == "ext_proc_local_response"
    assert worker.decodes == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [400, 401, 404, 429, 500, 503])
def test_a_refusal_passes_unchanged(stream: bool, status: int, stack: Stack, worker: ScriptedWorker) -> None:
    """Status, headers and body of the worker reach the client, whatever it asked for."""
    body = b'{"error":{"message":"the worker\'s own words"}}'

    async def respond(_request: web.Request) -> web.StreamResponse:
        response = web.Response(status=status, body=body, content_type="application/json")
        response.headers.add("x-twice", "one")
        response.headers.add("x-twice", "two")
        response.headers["retry-after"] = "7"
        return response

    worker.respond = respond
    answer, line = stack.coordinate(chat("Hello", stream=stream))
    assert (answer.status, answer.body) == (status, body)
    assert answer.headers["content-type"].startswith("application/json")
    assert answer.headers["retry-after"] == "7"
    assert line["outcome"] == "served"
    assert line["details"] == "via_conditional_decode"
    assert worker.decodes == []


def test_repeated_headers_survive(stack: Stack, worker: ScriptedWorker) -> None:
    """A whole answer keeps every value of a header, and loses those of the hop between sidecar and worker."""

    async def respond(_request: web.Request) -> web.StreamResponse:
        response = web.Response(status=418, text="teapot")
        response.headers.add("set-cookie", "a=1")
        response.headers.add("set-cookie", "b=2")
        response.headers["x-forwarded-by"] = "w1"  # the shipped mutation rules refuse it
        response.headers["x-plain"] = "kept"
        return response

    worker.respond = respond
    asked = Streaming(stack, chat("Hello")).head()
    assert (asked.response.status, asked.rest()) == (418, b"teapot")
    headers = asked.response.headers
    assert headers.get_all("set-cookie") == ["a=1", "b=2"]
    assert headers["x-plain"] == "kept"
    assert "x-forwarded-by" not in headers


def test_a_client_that_leaves_ends_the_workers_answer(stack: Stack, worker: ScriptedWorker) -> None:
    """The worker's connection is closed in the middle of the stream; the next request is served."""

    async def respond(request: web.Request) -> web.StreamResponse:
        response = await open_stream(request)
        await response.write(EVENTS[0])
        await worker.gate()
        return response

    worker.respond = respond
    asked = Streaming(stack, streaming()).head()
    assert asked.event() == EVENTS[0]
    asked.leave()
    wait_for(lambda: worker.left, "the worker's connection to be closed")
    line = stack.log_line(asked.request_id)
    assert (line["outcome"], line["flags"]) == ("served", "DC")
    worker.reset()
    answer, _ = stack.coordinate(chat("Hello"))
    assert answer.json == {"decoded": True}


def test_a_client_that_leaves_before_the_answer_ends_the_probe(stack: Stack, worker: ScriptedWorker) -> None:
    """A worker that is still thinking learns that nobody waits, and no later phase is called."""

    async def respond(_request: web.Request) -> web.StreamResponse:
        await worker.gate()
        return await _nobody(_request)

    worker.respond = respond
    asked = Streaming(stack, streaming())
    wait_for(lambda: worker.probes, "the probe")
    asked.connection.close()
    wait_for(lambda: worker.left, "the worker's connection to be closed")
    assert worker.decodes == []


def test_a_worker_that_dies_ends_the_stream_with_an_error(stack: Stack, worker: ScriptedWorker) -> None:
    """The client gets what came, then an error event and a proper end; the log says what happened."""

    async def respond(request: web.Request) -> web.StreamResponse:
        response = await open_stream(request)
        await response.write(EVENTS[0] + b'data: {"hal')
        await worker.gate()
        assert request.transport is not None
        request.transport.abort()
        return response

    worker.respond = respond
    asked = Streaming(stack, streaming()).head()
    assert asked.event() == EVENTS[0]
    worker.release_event()
    half, event, end = asked.rest().split(b"\n\n")
    assert (half, end) == (b'data: {"hal', b"")
    error = json.loads(event.removeprefix(b"data: "))["error"]
    assert error["code"] == "epd_conditional_decode_failed"
    assert asked.request_id in error["message"]
    line = stack.log_line(asked.request_id)
    assert (line["code"], line["outcome"], line["error"]) == (
        200,
        "upstream_error",
        "epd_conditional_decode_failed",
    )


def test_a_large_stream_arrives_whole(stack: Stack, worker: ScriptedWorker) -> None:
    """A megabyte of events arrives byte for byte."""
    events = [b"data: " + b"%07d" % number * 9000 + b"\n\n" for number in range(20)]

    async def respond(request: web.Request) -> web.StreamResponse:
        response = await open_stream(request)
        for event in events:
            await response.write(event)
        return response

    worker.respond = respond
    received = Streaming(stack, streaming()).head().rest()
    assert len(received) > 1 << 20
    assert hashlib.sha256(received).digest() == hashlib.sha256(b"".join(events)).digest()


def test_a_large_answer_arrives_whole(stack: Stack, worker: ScriptedWorker) -> None:
    """Five megabytes that are no stream come as one local answer."""
    body = json.dumps({"text": "0123456789" * 500_000}).encode()

    async def respond(_request: web.Request) -> web.StreamResponse:
        return web.Response(body=body, content_type="application/json")

    worker.respond = respond
    answer, line = stack.coordinate(chat("Hello"))
    assert hashlib.sha256(answer.body).digest() == hashlib.sha256(body).digest()
    assert line["outcome"] == "served"


def test_a_request_with_trailers_is_served(stack: Stack, worker: ScriptedWorker) -> None:
    """Request trailers are part of the request that is over when the answer begins."""

    async def respond(request: web.Request) -> web.StreamResponse:
        response = await open_stream(request)
        await response.write(b"".join(EVENTS))
        return response

    worker.respond = respond
    upload = Upload(stack.base, CHAT)
    upload.send(as_body(streaming()))
    upload.finish([("x-checksum", "1")])
    answer: Answer = upload.answer()
    assert (answer.status, answer.body) == (200, b"".join(EVENTS))
    assert len(worker.probes) == 1


def test_buffered_mode_serves_what_is_not_streamed(buffered_stack: Stack, worker: ScriptedWorker) -> None:
    """A whole answer needs no full-duplex mode; 412 goes on there, too."""

    async def respond(_request: web.Request) -> web.StreamResponse:
        return web.json_response({"served": True})

    answer, line = buffered_stack.coordinate(chat("Hello"))
    assert (answer.json, line["outcome"]) == ({"decoded": True}, "ok")
    worker.respond = respond
    answer, line = buffered_stack.coordinate(chat("Hello"))
    assert (answer.json, line["outcome"]) == ({"served": True}, "served")
    assert (len(worker.probes), len(worker.decodes)) == (2, 1)


def test_buffered_mode_asks_nobody_for_a_stream(buffered_stack: Stack, worker: ScriptedWorker) -> None:
    """A stream could not be passed on: the request takes the long way without a probe."""
    answer, line = buffered_stack.coordinate(streaming())
    assert (answer.status, line["outcome"], line["stage"]) == (200, "ok", "decode")
    assert worker.probes == []
    assert len(worker.decodes) == 1
