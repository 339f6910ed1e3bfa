"""Stand-ins around the simulator: a worker that notes raw bytes, and an endpoint picker."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, TypeVar

import grpc
from aiohttp import web

from sidecar.extproc.pb.envoy.service.ext_proc.v3 import external_processor_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator

T = TypeVar("T")
PICKER_HEADER = "x-picked-endpoint"


class LoopThread:
    """An event loop in its own thread, for servers that live as long as the test session."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T], seconds: float = 30) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(seconds)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()


@dataclass
class Received:
    """One request as the recording worker reads it; `size` grows while it arrives."""

    method: str
    path: str
    headers: dict[str, str]
    size: int = 0
    sha256: str = ""
    body: bytes = b""
    complete: bool = False


class RecordingWorker:
    """A worker that notes every byte and answers 200.

    Answers wait between `hold()` and `release()`. A body with `"stream": true` is answered with server-sent
    events, each held until `release_event()`.
    """

    def __init__(self, loop: LoopThread) -> None:
        self._loop = loop
        self.received: list[Received] = []
        self._gate = asyncio.Semaphore(0)
        self._open = asyncio.Event()
        self._open.set()
        self.address = self._loop.run(self._start())

    @property
    def port(self) -> int:
        return self.address[1]

    async def _start(self) -> tuple[str, int]:
        app = web.Application(client_max_size=1 << 40)
        app.router.add_route("*", "/{tail:.*}", self._serve)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        # The default of 128 drops connections of a crowd, and Envoy gives a dropped one up after 5 s.
        site = web.TCPSite(self._runner, "127.0.0.1", 0, backlog=4096)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        return str(host), int(port)

    def close(self) -> None:
        self._loop.run(self._runner.cleanup())

    def reset(self) -> None:
        self.release()
        self.received.clear()
        self._gate = asyncio.Semaphore(0)

    def hold(self) -> None:
        self._loop.loop.call_soon_threadsafe(self._open.clear)

    def release(self) -> None:
        self._loop.loop.call_soon_threadsafe(self._open.set)

    def release_event(self) -> None:
        self._loop.loop.call_soon_threadsafe(self._gate.release)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        note = Received(request.method, request.path_qs, headers)
        self.received.append(note)
        digest, pieces = hashlib.sha256(), []
        async for piece in request.content.iter_any():
            note.size += len(piece)
            digest.update(piece)
            pieces.append(piece)
        note.sha256, note.body, note.complete = digest.hexdigest(), b"".join(pieces), True
        await self._open.wait()
        if b'"stream": true' in note.body or b'"stream":true' in note.body:
            return await self._events(request)
        return web.json_response({"size": note.size, "sha256": note.sha256})

    async def _events(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for number in range(5):
            await asyncio.wait_for(self._gate.acquire(), 30)
            await response.write(b"data: event %d\n\n" % number)
        await response.write_eof()
        return response


@dataclass
class Picked:
    """What the picker saw of one request before it chose; `trailers` are names, None when there were none."""

    headers: dict[str, str]
    body: bytes
    trailers: tuple[str, ...] | None


@dataclass
class EndpointPicker:
    """An ext_proc server that reads the whole request, names an endpoint and gives the request back."""

    picked: list[Picked] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._server = grpc.server(
            ThreadPoolExecutor(16),
            options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", -1)],
        )
        handler = grpc.stream_stream_rpc_method_handler(
            self._process,
            request_deserializer=pb.ProcessingRequest.FromString,
            response_serializer=pb.ProcessingResponse.SerializeToString,
        )
        service = grpc.method_handlers_generic_handler(
            "envoy.service.ext_proc.v3.ExternalProcessor", {"Process": handler}
        )
        self._server.add_generic_rpc_handlers((service,))
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(0).wait(10)

    def _process(
        self, requests: Iterator[pb.ProcessingRequest], _context: grpc.ServicerContext
    ) -> Iterator[pb.ProcessingResponse]:
        headers: dict[str, str] = {}
        body = bytearray()
        trailers: tuple[str, ...] | None = None
        for message in requests:
            match message.WhichOneof("request"):
                case "request_headers":
                    fields = message.request_headers.headers.headers
                    headers = {item.key: item.raw_value.decode("latin-1") for item in fields}
                    ended = message.request_headers.end_of_stream
                case "request_body":
                    body += message.request_body.body
                    ended = message.request_body.end_of_stream
                case "request_trailers":
                    ended = True
                    trailers = tuple(item.key for item in message.request_trailers.trailers.headers)
            if ended:
                break
        else:
            return
        self.picked.append(Picked(headers, bytes(body), trailers))
        yield from _give_back(bytes(body), trailers=trailers is not None)


def _give_back(body: bytes, *, trailers: bool) -> Iterator[pb.ProcessingResponse]:
    chosen = pb.ProcessingResponse()
    common = chosen.request_headers.response
    option = common.header_mutation.set_headers.add()
    option.header.key, option.header.raw_value = PICKER_HEADER, b"stand-in"
    yield chosen
    size = 62 << 10
    for start in range(0, len(body), size):
        reply = pb.ProcessingResponse()
        piece = reply.request_body.response.body_mutation.streamed_response
        piece.body = body[start : start + size]
        piece.end_of_stream = start + size >= len(body) and not trailers
        yield reply
    if trailers:
        ended = pb.ProcessingResponse()
        ended.request_trailers.SetInParent()
        yield ended
