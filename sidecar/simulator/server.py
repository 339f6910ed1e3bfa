"""The listeners: one per role, and one for whoever watches and steers."""

from __future__ import annotations

import asyncio
import json
import uuid
from copy import deepcopy
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from sidecar.simulator import answers, faults, picker, sglang
from sidecar.simulator.config import LISTENERS, RENDER_FAULTS, ROLES, ConfigError, Role, SimulatorConfig
from sidecar.simulator.decode import decode
from sidecar.simulator.deployment import Address, Call, Deployment
from sidecar.simulator.engine import encode, prefill
from sidecar.simulator.errors import ApiError, NotServed, invalid_body, invalid_field
from sidecar.simulator.headers import check_headers, check_rank
from sidecar.simulator.render import render

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import Self

    from sidecar.simulator.config import Listener, Target
    from sidecar.simulator.generation import Answer
    from sidecar.simulator.prompt import Api
    from sidecar.simulator.recorder import Exchange

MAX_BODY_BYTES = 256 << 20
_SHUTDOWN_SECONDS = 0.2
_WRITE_BYTES = 1 << 20
_APIS: dict[str, Api] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/inference/v1/generate": "generate",
}
_RENDER_SUFFIX = "/render"
_NO_ENCODE = "completions"
_ANTHROPIC = "/v1/messages"
_ENGINES = {"encode": encode, "prefill": prefill, "decode": decode}
_SGLANG = {"prefill": sglang.prefill, "decode": sglang.decode}


class Simulator:
    """A deployment of render, encode, prefill and decode in this process.

    Args:
        config: the knobs to start with; a copy is taken, and checked (ConfigError).

    Attributes:
        deployment: knobs, records and stores.
        addresses: host and port per listener (`render`, `encode`, `prefill`, `decode`, `admin`) once started.
    """

    def __init__(self, config: SimulatorConfig | None = None) -> None:
        self._initial = (config or SimulatorConfig()).patched({})
        self.deployment = Deployment(deepcopy(self._initial))
        self.addresses: dict[Listener, tuple[str, int]] = {}
        self._runners: list[web.AppRunner] = []

    @property
    def config(self) -> SimulatorConfig:
        """The knobs; assigning to an attribute takes effect with the next request."""
        return self.deployment.config

    def url(self, listener: Listener) -> str:
        """Base URL of a listener, once started."""
        host, port = self.addresses[listener]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def configure(self, changes: dict[str, Any]) -> None:
        """Change some knobs, checked; raises ConfigError and then changes none."""
        if self.addresses and (fixed := sorted({"host", "ports"} & changes.keys())):
            raise ConfigError(f"{fixed[0]} is fixed once the simulator runs")
        self.deployment.config = self.config.patched(changes)

    def reset(self) -> None:
        """Back to the initial knobs, with empty stores and records."""
        self.deployment.config = deepcopy(self._initial)
        self.deployment.clear()

    async def start(self) -> None:
        """Bind all listeners; raises OSError when one cannot, and then none stays bound."""
        try:
            for listener in LISTENERS:
                await self._listen(listener)
        except OSError:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Close all listeners; answers in progress are cut off."""
        runners, self._runners = self._runners, []
        await asyncio.gather(*(runner.cleanup() for runner in runners))
        self.addresses = {}

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _listen(self, listener: Listener) -> None:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        if listener == "admin":
            _add_admin(app, self)
        else:
            app.router.add_route("*", "/{path:.*}", _role_handler(self.deployment, listener))
        runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_SECONDS
        )
        await runner.setup()
        self._runners.append(runner)
        host = self.config.host
        await web.TCPSite(runner, host, self.config.ports.get(listener, 0)).start()
        self.addresses[listener] = (host, runner.addresses[0][1])


def _role_handler(
    deployment: Deployment, role: Role
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def handle(request: web.Request) -> web.StreamResponse:
        if request.method == "GET" and request.path in {"/health", "/v1/models"}:
            return _information(deployment, request.path)
        raw = await request.read()
        body = _read_json(raw)
        exchange = deployment.recorder.begin(
            role,
            request.method,
            request.path_qs,
            request.headers,
            body=None if isinstance(body, ApiError) else body,
            body_bytes=len(raw),
        )
        try:
            response = await _answer(deployment, role, request, body, exchange)
        except ApiError as error:
            exchange.status = error.status
            return _json(error.document(anthropic=request.path == _ANTHROPIC), error.status)
        except NotServed:
            exchange.status = 404
            return _json({"detail": "Not Found"}, 404)
        except asyncio.CancelledError:
            exchange.cancelled = True
            raise
        except ConnectionError:
            exchange.cancelled = True
            return web.Response()
        if request.transport is not None and not request.transport.is_closing():
            exchange.status = response.status
        return response

    return handle


async def _answer(
    deployment: Deployment, role: Role, request: web.Request, body: object, exchange: Exchange
) -> web.StreamResponse:
    api = _api_of(role, request.path)
    if request.method != "POST":
        return _json({"detail": "Method Not Allowed"}, 405)
    address = _local_address(request)
    check_headers(deployment, exchange, address)
    reserves = picker.is_reservation(deployment, exchange)
    target: Target = "reserve" if reserves else role
    await asyncio.sleep(deployment.config.latency.get(target, 0))
    fault = deployment.config.take_fault(target)
    model = body.get("model", "") if isinstance(body, dict) else ""
    if (spoilt := await faults.play(request, fault, str(model), deployment.config.models)) is not None:
        return spoilt
    if isinstance(body, ApiError):
        raise body
    if not isinstance(body, dict):
        raise invalid_body("Input should be a valid dictionary or object to extract fields from")
    call = Call(role, body, exchange, address)
    if reserves:
        return web.Response(headers=picker.reserve(deployment, call, fault))
    return await _serve(deployment, request, call, api, fault)


async def _serve(
    deployment: Deployment, request: web.Request, call: Call, api: Api, fault: str
) -> web.StreamResponse:
    request_id = call.exchange.request_id or str(call.body.get("request_id") or uuid.uuid4().hex)
    if call.role == "render":
        spoil = fault if fault in RENDER_FAULTS else ""
        return await _send(request, render(deployment, call, api, request_id, spoil))
    check_rank(call.exchange)
    if deployment.config.kv_connector == "sglang" and call.role in _SGLANG:
        answer = await _SGLANG[call.role](deployment, call, api, request_id)
    else:
        answer = _ENGINES[call.role](deployment, call, api, request_id)
    if not answer.stream:
        return _json(answers.document(answer.generation))
    return await _stream(request, answer, deployment.config.chunk_delay)


def _local_address(request: web.Request) -> Address:
    """The address a request came in at, which tells more than that of a listener on all interfaces."""
    socket_name = request.get_extra_info("sockname")
    if socket_name is None:
        raise ConnectionResetError("the caller left")
    return Address(*socket_name[:2])


def _api_of(role: Role, path: str) -> Api:
    if role == "render":
        api = _APIS.get(path.removesuffix(_RENDER_SUFFIX)) if path.endswith(_RENDER_SUFFIX) else None
        if api == "generate":
            raise NotServed
    else:
        api = _APIS.get(path)
        if role == "encode" and api == _NO_ENCODE:
            raise NotServed
    if api is None:
        raise NotServed
    return api


def _information(deployment: Deployment, path: str) -> web.Response:
    if path == "/health":
        return web.Response()
    config = deployment.config
    models = [
        {"id": name, "object": "model", "owned_by": "vllm", "max_model_len": config.max_model_len}
        for name in config.models
    ]
    return _json({"object": "list", "data": models})


async def _send(request: web.Request, document: bytes) -> web.StreamResponse:
    response = web.StreamResponse()
    response.content_type = "application/json"
    response.content_length = len(document)
    await response.prepare(request)
    view = memoryview(document)
    for start in range(0, len(view), _WRITE_BYTES):
        await response.write(view[start : start + _WRITE_BYTES])
    await response.write_eof()
    return response


async def _stream(request: web.Request, answer: Answer, chunk_delay: float) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    for event in answers.events(answer.generation, include_usage=answer.include_usage):
        await response.write(event)
        await asyncio.sleep(chunk_delay)
    await response.write_eof()
    return response


def _json(document: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(document), status=status, content_type="application/json")


def _read_json(raw: bytes) -> object:
    """The value, or the refusal (ApiError) of a body that is not JSON."""
    if not raw:
        return invalid_body("Field required")
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _not_json(raw)


def _not_json(raw: bytes) -> ApiError:
    """The refusal names the position where the standard library, which vLLM reads bodies with, stops."""
    try:
        json.loads(raw)
    except json.JSONDecodeError as error:
        return invalid_field(str(error.pos), f"JSON decode error: {error.msg}")
    except (ValueError, RecursionError):
        return invalid_body("JSON decode error")
    # The standard library reads what the stricter decoder refuses, such as NaN.
    return invalid_body("JSON decode error")


def _add_admin(app: web.Application, simulator: Simulator) -> None:
    recorder = simulator.deployment.recorder

    async def exchanges(_: web.Request) -> web.Response:
        return _json({role: [asdict(exchange) for exchange in recorder.of(role)] for role in ROLES})

    async def violations(_: web.Request) -> web.Response:
        return _json([asdict(violation) for violation in recorder.violations])

    async def configure(request: web.Request) -> web.Response:
        changes = _read_json(await request.read())
        if not isinstance(changes, dict):
            return _json({"error": "send a JSON object of knobs"}, 400)
        try:
            simulator.configure(changes)
        except ConfigError as error:
            return _json({"error": str(error)}, 400)
        return _json(asdict(simulator.config))

    async def reset(_: web.Request) -> web.Response:
        simulator.reset()
        return _json(asdict(simulator.config))

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    app.router.add_get("/health", health)
    app.router.add_get("/simulator/exchanges", exchanges)
    app.router.add_get("/simulator/violations", violations)
    app.router.add_post("/simulator/config", configure)
    app.router.add_post("/simulator/reset", reset)
