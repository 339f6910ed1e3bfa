"""The admin server: metrics and health, apart from the listener Envoy talks to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from sidecar.config.values import split_listen_address

if TYPE_CHECKING:
    from collections.abc import Callable

_SHUTDOWN_SECONDS = 1.0


class AdminServer:
    """`/metrics`, `/healthz` and `/readyz`; any other path is a 404.

    Liveness says only that the process answers: it does not fail under load or while draining, because a
    restart would lose the requests that are being drained.

    Args:
        listen: `host:port` or `[v6]:port`, port 0 for any free one; "" for no server at all.
        exposition: body and content type of a scrape.
        ready: whether new requests are welcome.
    """

    def __init__(
        self, listen: str, *, exposition: Callable[[], tuple[bytes, str]], ready: Callable[[], bool]
    ) -> None:
        self._listen = listen
        self._exposition = exposition
        self._ready = ready
        self._runner: web.AppRunner | None = None

    async def start(self) -> tuple[str, int] | None:
        """Listen, and give the bound host and port (None when there is no server).

        Raises:
            OSError: the address cannot be bound.
        """
        if not self._listen:
            return None
        host, port = split_listen_address(self._listen)
        app = web.Application()
        app.add_routes(
            [
                web.get("/metrics", self._metrics),
                web.get("/healthz", self._healthz),
                web.get("/readyz", self._readyz),
            ]
        )
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_SECONDS)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError:
            await runner.cleanup()
            raise
        self._runner = runner
        bound_host, bound_port = runner.addresses[0][:2]
        return str(bound_host), int(bound_port)

    async def stop(self) -> None:
        """Close the listener and its connections; without a running server nothing happens."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _metrics(self, _request: web.Request) -> web.Response:
        body, content_type = self._exposition()
        return web.Response(body=body, headers={"content-type": content_type})

    async def _healthz(self, _request: web.Request) -> web.Response:
        return web.Response(text="alive\n")

    async def _readyz(self, _request: web.Request) -> web.Response:
        if self._ready():
            return web.Response(text="ready\n")
        return web.Response(status=503, text="not ready\n")
