"""The admin server over a real socket."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import aiohttp
import pytest

from sidecar.admin import AdminServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


@asynccontextmanager
async def running(
    listen: str = "127.0.0.1:0", ready: Callable[[], bool] = lambda: True
) -> AsyncIterator[tuple[str, int]]:
    server = AdminServer(listen, exposition=lambda: (b"m 1\n", "text/plain; version=0.0.4"), ready=ready)
    bound = await server.start()
    assert bound is not None
    try:
        yield bound
    finally:
        await server.stop()


async def get(address: tuple[str, int], path: str) -> tuple[int, str, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{address[0]}:{address[1]}{path}") as answer,
    ):
        return answer.status, await answer.text(), answer.headers["content-type"]


async def test_metrics_are_served_as_given() -> None:
    """The scrape gets the exposition with its content type."""
    async with running() as address:
        assert await get(address, "/metrics") == (200, "m 1\n", "text/plain; version=0.0.4")


async def test_readiness_follows_the_callable_and_liveness_does_not() -> None:
    """A process that is not ready is still alive: a restart would lose what it drains."""
    ready = True
    async with running(ready=lambda: ready) as address:
        assert (await get(address, "/readyz"))[:2] == (200, "ready\n")
        ready = False
        assert (await get(address, "/readyz"))[:2] == (503, "not ready\n")
        assert (await get(address, "/healthz"))[:2] == (200, "alive\n")


@pytest.mark.parametrize("path", ["/", "/metrics/", "/admin", "/healthz/x"])
async def test_other_paths(path: str) -> None:
    """There is nothing else."""
    async with running() as address:
        assert (await get(address, path))[0] == 404


async def test_empty_address_switches_it_off() -> None:
    """Without an address nothing listens, and stopping is harmless."""
    server = AdminServer("", exposition=lambda: (b"", "text/plain"), ready=lambda: True)
    assert await server.start() is None
    await server.stop()


async def test_stop_frees_the_port_and_can_be_repeated() -> None:
    """After stop the port can be bound again; a second stop does nothing."""
    async with running() as (host, port):
        second = AdminServer(f"{host}:{port}", exposition=lambda: (b"", "text/plain"), ready=lambda: True)
        with pytest.raises(OSError, match="address already in use"):
            await second.start()
    assert await second.start() == (host, port)
    await second.stop()
    await second.stop()
