"""A recording relay in front of one engine, so that a test sees and changes what passes."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiohttp import ClientSession, ClientTimeout, web

if TYPE_CHECKING:
    from collections.abc import Callable

_DROPPED = frozenset({"connection", "content-length", "date", "host", "server", "transfer-encoding"})


@dataclass(frozen=True)
class Passed:
    """One exchange: what reached the relay, and what the engine answered."""

    path: str
    request: bytes
    status: int
    answer: bytes

    @property
    def request_json(self) -> Any:
        return json.loads(self.request)

    @property
    def answer_json(self) -> Any:
        return json.loads(self.answer)


class Relay:
    """Hands every request on to `target` and keeps both bodies, until `reset()`.

    Attributes:
        target: base URL of the engine.
        passed: the exchanges so far.
        before: called before a request goes on.
        change_request: gives the body that goes on instead of the one that came.
        change_answer: as `change_request`, for the engine's answer.
    """

    def __init__(self, target: str) -> None:
        self._engine = target
        self.passed: list[Passed] = []
        self.reset()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.port = asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(30)

    def reset(self) -> None:
        """Forget the exchanges and pass everything unchanged."""
        self.target = self._engine
        self.passed.clear()
        self.before: Callable[[], None] | None = None
        self.change_request: Callable[[bytes], bytes] | None = None
        self.change_answer: Callable[[bytes], bytes] | None = None

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    async def _open(self) -> int:
        self._session = ClientSession(timeout=ClientTimeout(total=180))
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/{tail:.*}", self._pass_on)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return int(self._runner.addresses[0][1])

    async def _close(self) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _pass_on(self, request: web.Request) -> web.Response:
        body = await request.read()
        if self.before is not None:
            self.before()
        if self.change_request is not None:
            body = self.change_request(body)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _DROPPED}
        async with self._session.post(
            f"{self.target}{request.path_qs}", data=body, headers=headers
        ) as answer:
            read = await answer.read()
            self.passed.append(Passed(request.path, body, answer.status, read))
            if self.change_answer is not None:
                read = self.change_answer(read)
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in _DROPPED}
            return web.Response(status=answer.status, headers=kept, body=read)
