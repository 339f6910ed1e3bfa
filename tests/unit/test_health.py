"""`epd-sidecar health`: what it asks, and what it makes of the answer."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from typing import TYPE_CHECKING

import grpc
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_service  # type: ignore[attr-defined]  # missing from the stubs

from sidecar import cli, health
from sidecar.config import ExtProcSettings
from sidecar.extproc.server import Server
from sidecar.extproc.service import ExternalProcessor
from sidecar.limits import InFlightBudget
from tests.unit.extproc.extproc_harness import RULES, echo

if TYPE_CHECKING:
    from pathlib import Path


def make_server(address: str, *, cert_path: str = "") -> Server:
    processor = ExternalProcessor(RULES, echo, InFlightBudget(10, 1 << 20), lambda _record: None)
    return Server(processor, address, cert_path=cert_path, drain_timeout=0.0, notice=0.0)


async def ask(*arguments: str) -> int:
    """Run the command; it blocks, while the server it asks runs on this loop."""
    return await asyncio.to_thread(cli.main, ["health", "--timeout", "10s", *arguments])


def certificate(directory: Path, name: str) -> Path:
    subprocess.run(
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 "
        f"-subj /CN=test -addext subjectAltName=DNS:{name} -keyout tls.key -out tls.crt".split(),
        cwd=directory,
        check=True,
        capture_output=True,
    )
    return directory / "tls.crt"


def config(path: Path, ext_proc: dict[str, object]) -> str:
    settings = {
        "gateway": {"address": "http://gateway"},
        "ext_proc": ext_proc,
        "pipeline": {"steps": [{"type": "decode"}]},
    }
    path.write_text(yaml.safe_dump(settings))
    return str(path)


async def test_readiness_and_liveness(capsys: pytest.CaptureFixture[str]) -> None:
    """Readiness follows the sidecar, liveness does not; each is one line and an exit code."""
    server = make_server("127.0.0.1:0")
    address = await server.start()
    try:
        assert await ask("--address", address) == 1
        assert capsys.readouterr() == ("", f"readiness of {address}: NOT_SERVING\n")
        assert await ask("--address", address, "--live") == 0
        assert capsys.readouterr() == (f"liveness of {address}: SERVING\n", "")
        await server.ready(serving=True)
        assert await ask("--address", address) == 0
        assert capsys.readouterr() == (f"readiness of {address}: SERVING\n", "")
    finally:
        await server.stop()


async def test_the_address_comes_from_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --address the sidecar of the configuration is asked, the environment included."""
    socket_path = tmp_path / "ext_proc.sock"
    server = make_server(f"unix:{socket_path}")
    await server.start()
    await server.ready(serving=True)
    file = config(tmp_path / "sidecar.yaml", {"listen": "127.0.0.1:1"})
    try:
        assert await ask("--config", file) == 1
        monkeypatch.setenv("SIDECAR__EXT_PROC__LISTEN", f"unix:{socket_path}")
        assert await ask("--config", file) == 0
        monkeypatch.setenv("SIDECAR__GATEWAY__ADDRESS", "http://gateway")
        monkeypatch.setenv("SIDECAR__PIPELINE__STEPS__RENDER__PARAMS__ADDRESS", "http://render")
        assert await ask() == 0
    finally:
        await server.stop()


@pytest.mark.parametrize(
    ("listen", "asked"),
    [
        ("0.0.0.0:9002", "127.0.0.1:9002"),
        ("[::]:9002", "[::1]:9002"),
        ("[fd00::1]:9002", "[fd00::1]:9002"),
        ("sidecar:9002", "sidecar:9002"),
        ("unix:/run/ext_proc.sock", "unix:/run/ext_proc.sock"),
    ],
)
def test_an_address_to_listen_on_becomes_one_to_connect_to(listen: str, asked: str) -> None:
    """What stands for all addresses of the host is asked on the loopback."""
    assert health.target(ExtProcSettings(listen=listen), None) == health.Target(asked)


async def test_warnings_are_for_serve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A configuration with warnings still gives one line: they are in the log of the sidecar already."""
    server = make_server("127.0.0.1:0")
    address = await server.start()
    file = config(tmp_path / "sidecar.yaml", {"listen": address, "read_timeout": "1h"})
    try:
        assert await ask("--config", file, "--live") == 0
    finally:
        await server.stop()
    assert capsys.readouterr() == (f"liveness of {address}: SERVING\n", "")
    assert cli.main(["check-config", "--config", file]) == 0
    assert "warning: ext_proc.read_timeout" in capsys.readouterr().err


async def test_an_address_that_is_given_wins() -> None:
    """--address replaces that of the configuration."""
    target = health.target(ExtProcSettings(listen="0.0.0.0:9002"), "other:1")
    assert target == health.Target("other:1")


async def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    """A refused connection is one readable line, at once."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        assert await ask("--address", f"127.0.0.1:{port}") == 1
    message = capsys.readouterr().err
    assert "Connection refused" in message
    assert message.count("\n") == 1


async def test_a_listener_that_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """A process that hangs is reported after the timeout."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        assert await ask("--address", f"127.0.0.1:{port}", "--timeout", "200ms") == 1
    assert "no answer in time" in capsys.readouterr().err


async def test_somebody_elses_health_service(capsys: pytest.CaptureFixture[str]) -> None:
    """A gRPC server without the ext_proc service is not taken for a sidecar."""
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(health_service.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        assert await ask("--address", f"127.0.0.1:{port}") == 1
    finally:
        await server.stop(None)
    assert "not a sidecar" in capsys.readouterr().err


async def test_a_long_reason_stays_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever a server says, the command prints one line of bounded length."""

    class Talkative(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # untyped there
        async def Check(  # noqa: N802 - gRPC's name
            self, _request: object, context: grpc.aio.ServicerContext[object, object]
        ) -> health_pb2.HealthCheckResponse:
            await context.abort(grpc.StatusCode.INTERNAL, "no\n" * 1000)

    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(Talkative(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        assert await ask("--address", f"127.0.0.1:{port}") == 1
    finally:
        await server.stop(None)
    message = capsys.readouterr().err
    assert message.startswith(f"readiness of 127.0.0.1:{port}: INTERNAL: no no no")
    assert message.count("\n") == 1
    assert len(message) < 400


async def test_a_proxy_of_the_environment_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Health is asked of the sidecar itself, wherever http_proxy points."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    server = make_server("127.0.0.1:0")
    address = await server.start()
    try:
        assert await ask("--address", address, "--live") == 0
    finally:
        await server.stop()


async def test_tls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--ca and --name verify as Envoy does; with the configuration at hand its own certificate is enough."""
    ca = certificate(tmp_path, "sidecar.example")
    server = make_server("127.0.0.1:0", cert_path=str(tmp_path))
    address = await server.start()
    await server.ready(serving=True)
    file = config(tmp_path / "sidecar.yaml", {"listen": address, "tls": {"cert_path": str(tmp_path)}})
    try:
        assert await ask("--address", address, "--ca", str(ca), "--name", "sidecar.example") == 0
        assert await ask("--config", file) == 0
        assert await ask("--config", file, "--name", "sidecar.example") == 0
        capsys.readouterr()
        assert await ask("--config", file, "--name", "other.example") == 1
        assert await ask("--address", address, "--ca", str(ca)) == 1  # the name is not 127.0.0.1
        assert await ask("--address", address) == 1  # plaintext
        message = capsys.readouterr().err
        assert message.count("\n") == 3
        assert "127.0.0.1" in message
    finally:
        await server.stop()


async def test_another_servers_certificate(tmp_path: Path) -> None:
    """The certificate of the configuration proves who answers: another server's is refused."""
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    for directory in (theirs, ours):
        directory.mkdir()
        certificate(directory, "sidecar.example")
    server = make_server("127.0.0.1:0", cert_path=str(theirs))
    address = await server.start()
    await server.ready(serving=True)
    ext_proc = ExtProcSettings.model_validate({"listen": address, "tls": {"cert_path": str(ours)}})
    try:
        with pytest.raises(health.Unhealthy, match=r"no TLS connection: .*certificate verify failed"):
            await asyncio.to_thread(health.check, health.target(ext_proc, None), live=False, timeout=10.0)
    finally:
        await server.stop()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--address", "sidecar"], "--address 'sidecar' is not host:port"),
        (["--address", "127.0.0.1:0"], "--address '127.0.0.1:0' is not host:port"),
        (["--address", "unix:relative"], "--address 'unix:relative' is not host:port"),
        (["--address", "127.0.0.1:1", "--name", "x"], "--name is for TLS; add --ca FILE"),
        (["--address", "127.0.0.1:1", "--ca", "/nonexistent"], "cannot read '/nonexistent': No such file"),
        (["--address", "127.0.0.1:1", "--config", "/nonexistent"], "/nonexistent"),
        (
            ["--address", "127.0.0.1:1", "--ca", "/etc/hostname"],
            "'/etc/hostname' has no certificates in PEM form",
        ),
        (["--address", "127.0.0.1:1", "--ca", "/dev/null"], "'/dev/null' has no certificates in PEM form"),
        ([], "give --address, or --config of the sidecar to ask"),
    ],
)
async def test_questions_that_cannot_be_asked(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wrong usage and a wrong configuration are told apart from an unhealthy sidecar: exit code 2."""
    assert await ask(*arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("timeout", ["0s", "3", "soon"])
def test_a_timeout_has_a_unit(timeout: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--timeout is a duration as in the configuration, and not 0."""
    with pytest.raises(SystemExit) as raised:
        cli.main(["health", "--address", "127.0.0.1:1", "--timeout", timeout])
    assert raised.value.code == 2
    assert "--timeout" in capsys.readouterr().err


def test_a_free_port_has_to_be_named() -> None:
    """A sidecar on port 0 cannot be found through its configuration."""
    with pytest.raises(health.CannotAsk, match="name the sidecar's with --address"):
        health.target(ExtProcSettings(listen="127.0.0.1:0"), None)
