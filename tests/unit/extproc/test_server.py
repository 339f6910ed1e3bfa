from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
import subprocess
from typing import TYPE_CHECKING

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sidecar.extproc.listener import ListenError
from sidecar.extproc.server import Server
from sidecar.extproc.service import SERVICE_NAME, ExternalProcessor
from sidecar.limits import InFlightBudget
from tests.unit.extproc.extproc_harness import (
    RULES,
    body,
    echo,
    hang,
    headers,
    pieces,
    record,
    remaining,
    serving,
    settled,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from sidecar.pipeline.request import DecodeRewrite, InboundRequest
    from tests.unit.extproc.extproc_harness import Harness

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def make_server(
    address: str,
    run: Callable[[InboundRequest], Awaitable[DecodeRewrite]] = echo,
    *,
    cert_path: str = "",
    drain_timeout: float = 5.0,
    notice: float = 0.0,
) -> Server:
    processor = ExternalProcessor(RULES, run, InFlightBudget(10, 1 << 20), lambda _record: None)
    return Server(processor, address, cert_path=cert_path, drain_timeout=drain_timeout, notice=notice)


async def health(channel: grpc.aio.Channel, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return int(answer.status)


async def readiness(channel: grpc.aio.Channel, status: int) -> None:
    """Wait until the ext_proc service has this status."""
    while await health(channel, SERVICE_NAME) != status:  # noqa: ASYNC110  # a check is one call
        await asyncio.sleep(0.005)


def entries(directory: Path) -> list[Path]:
    return list(directory.iterdir())


async def serves(target: str) -> bool:
    async with grpc.aio.insecure_channel(target) as channel:
        return bool(await health(channel, "") == SERVING)


async def test_readiness_and_liveness() -> None:
    """Readiness follows `ready`, liveness does not, and a server that starts is not ready."""
    server = make_server("127.0.0.1:0")
    address = await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        assert await health(channel, "") == SERVING
        assert await health(channel, SERVICE_NAME) == NOT_SERVING
        assert not server.is_ready
        await server.ready(serving=True)
        assert await health(channel, SERVICE_NAME) == SERVING
        assert server.is_ready
        await server.ready(serving=False)
        assert not server.is_ready
        assert [await health(channel, ""), await health(channel, SERVICE_NAME)] == [SERVING, NOT_SERVING]
    await server.stop()


async def test_drain_finishes_what_runs() -> None:
    """While draining, health says so, running requests are answered, then the port is closed."""
    entered, go = asyncio.Event(), asyncio.Event()

    async def slow(request: InboundRequest) -> DecodeRewrite:
        entered.set()
        await go.wait()
        return await echo(request)

    async with serving(slow) as harness:
        running = asyncio.create_task(harness.exchange(headers(), body(b"{}", end=True)))
        await entered.wait()
        drain = asyncio.create_task(harness.server.drain())
        await asyncio.sleep(0.05)
        assert not drain.done()
        go.set()
        assert pieces(await running) == [(b"{}", True)]
        await drain
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*harness.address.split(":"))


async def test_drain_gives_notice() -> None:
    """For the notice time readiness is NOT_SERVING, liveness SERVING, and calls are still accepted."""
    server = make_server("127.0.0.1:0", notice=0.5)
    address = await server.start()
    await server.ready(serving=True)
    async with grpc.aio.insecure_channel(address) as channel:
        drain = asyncio.create_task(server.drain())
        await asyncio.sleep(0)
        assert [await health(channel, ""), await health(channel, SERVICE_NAME)] == [SERVING, NOT_SERVING]
        await drain


async def test_drain_ends_at_its_timeout() -> None:
    """A request that has not ended by then is answered 503, with its record, before the server stops."""
    async with serving(hang) as harness:
        harness.server._drain_timeout = 0.05
        call = harness.call()
        await call.write(headers())
        await call.write(body(b"{}", end=True))
        while not harness.budget.bytes:  # noqa: ASYNC110  # a budget raises no events
            await asyncio.sleep(0.005)
        drain = asyncio.create_task(harness.server.drain())
        (answer,) = await remaining(call)
        assert answer.immediate_response.details == "epd_overloaded"
        assert answer.immediate_response.status.code == 503
        assert record(answer)["outcome"] == "overloaded"
        await drain
        await settled(harness)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains(number: signal.Signals) -> None:
    """SIGTERM and SIGINT end `serve` in order, and leave the handlers as they were."""
    server = make_server("127.0.0.1:0")
    address = await server.start()
    serve = asyncio.create_task(server.serve())
    async with grpc.aio.insecure_channel(address) as channel:
        await readiness(channel, SERVING)
    os.kill(os.getpid(), number)
    await asyncio.wait_for(serve, 10)
    assert not asyncio.get_running_loop().remove_signal_handler(number)


async def test_a_second_signal_stops_at_once() -> None:
    """The second signal does not wait for running requests."""
    server = make_server("127.0.0.1:0", hang, drain_timeout=1000.0, notice=1000.0)
    address = await server.start()
    serve = asyncio.create_task(server.serve())
    async with grpc.aio.insecure_channel(address) as channel:
        await readiness(channel, SERVING)
        os.kill(os.getpid(), signal.SIGTERM)
        await readiness(channel, NOT_SERVING)
        assert not serve.done()
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.wait_for(serve, 10)


async def test_a_burst_of_calls_is_answered() -> None:
    """By default gRPC turns calls away, without an answer of ours, while 1000 others have not begun."""

    async def request(harness: Harness) -> int:
        call = harness.call()
        await call.write(headers())
        await call.write(body(b"{}", end=True))
        return len(await remaining(call))

    async with serving(echo, budget=InFlightBudget(10_000, 1 << 30)) as harness:
        replies = await asyncio.gather(*(request(harness) for _ in range(1500)))
    assert set(replies) == {2}


async def test_a_busy_port_is_an_error() -> None:
    """Two processes never share a port; the message names key and address."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ListenError, match=rf"ext_proc\.listen: .*{address}.*in use"):
            await make_server(address).start()


async def test_two_servers_never_share_a_port() -> None:
    """SO_REUSEPORT is off."""
    first = make_server("127.0.0.1:0")
    address = await first.start()
    with pytest.raises(ListenError):
        await make_server(address).start()
    await first.stop()


async def test_ipv6() -> None:
    """`[v6]:port` listens on IPv6."""
    if not socket.has_ipv6:
        return
    server = make_server("[::1]:0")
    address = await server.start()
    assert address.startswith("[::1]:")
    assert await serves(address)
    await server.stop()


async def test_unix_socket(tmp_path: Path) -> None:
    """A unix socket serves, and is removed at the end."""
    path = tmp_path / "ext.sock"
    server = make_server(f"unix:{path}")
    assert await server.start() == f"unix:{path}"
    assert await serves(f"unix:{path}")
    assert entries(tmp_path) == [path]
    await server.stop()
    assert entries(tmp_path) == []


async def test_a_stale_socket_is_taken_over(tmp_path: Path) -> None:
    """The socket of a process that died does not keep the next one from starting."""
    path = tmp_path / "ext.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    server = make_server(f"unix:{path}")
    await server.start()
    assert await serves(f"unix:{path}")
    await server.stop()


async def test_a_live_socket_is_left_alone(tmp_path: Path) -> None:
    """A path another process serves is an error, and goes on being served."""
    address = f"unix:{tmp_path / 'ext.sock'}"
    first = make_server(address)
    await first.start()
    with pytest.raises(ListenError, match="in use by another process"):
        await make_server(address).start()
    assert await serves(address)
    await first.stop()


async def test_a_socket_that_is_no_longer_ours_stays(tmp_path: Path) -> None:
    """Stopping does not remove a socket that has taken the path over."""
    path = tmp_path / "ext.sock"
    first = make_server(f"unix:{path}")
    await first.start()
    path.unlink()
    second = make_server(f"unix:{path}")
    await second.start()
    await first.stop()
    assert await serves(f"unix:{path}")
    await second.stop()


async def test_a_file_is_not_replaced(tmp_path: Path) -> None:
    """A path that is not a socket is somebody's data."""
    path = tmp_path / "data"
    path.write_text("precious")
    with pytest.raises(ListenError, match="is not a socket"):
        await make_server(f"unix:{path}").start()
    assert path.read_text() == "precious"


async def test_a_long_socket_path_is_an_error(tmp_path: Path) -> None:
    """The kernel's limit is named before it is hit."""
    with pytest.raises(ListenError, match="too long"):
        await make_server(f"unix:{tmp_path / ('x' * 108)}").start()


async def test_tls(tmp_path: Path) -> None:
    """With a certificate directory the listener speaks TLS."""
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 "
        "-subj /CN=localhost -addext subjectAltName=DNS:localhost -keyout tls.key -out tls.crt"
    )
    subprocess.run(command.split(), cwd=tmp_path, check=True, capture_output=True)  # noqa: ASYNC221  # set-up
    server = make_server("127.0.0.1:0", cert_path=str(tmp_path))
    address = await server.start()
    roots = (tmp_path / "tls.crt").read_bytes()
    async with grpc.aio.secure_channel(
        address,
        grpc.ssl_channel_credentials(roots),
        options=[("grpc.ssl_target_name_override", "localhost")],
    ) as channel:
        assert await health(channel, "") == SERVING
    context = ssl.create_default_context(cafile=str(tmp_path / "tls.crt"))
    context.set_alpn_protocols(["h2"])
    host, port = address.split(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=context, server_hostname="localhost")
    assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "h2"
    writer.close()
    await server.stop()


async def test_a_missing_certificate_is_an_error(tmp_path: Path) -> None:
    """The message names the key and the file."""
    with pytest.raises(ListenError, match=r"ext_proc\.tls\.cert_path: cannot read '.*tls\.key'"):
        await make_server("127.0.0.1:0", cert_path=str(tmp_path)).start()
