"""Configurations printed by `epd-sidecar envoy-config`, run by a real Envoy."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from deploy.envoy.local_stack import (
    DECODE,
    ENVOY_ADMIN,
    EXTERNAL,
    INTERNAL,
    REPOSITORY,
    SIDECAR,
    SIDECAR_ADMIN,
    LocalStack,
    free_ports,
    load_sidecar_config,
)
from tests.e2e.e2e_client import CAT, CHAT, DOG, Upload, as_body, chat, request
from tests.e2e.e2e_stack import ROLE_PORTS, Stack, wait_for
from tests.e2e.e2e_upstream import EndpointPicker
from tests.e2e.e2e_variants import NIXL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    import grpc

    from sidecar.extproc.pb.envoy.service.ext_proc.v3 import external_processor_pb2 as pb
    from sidecar.simulator.config import Role
    from tests.e2e.e2e_stack import SimulatedWorkers
    from tests.e2e.e2e_upstream import RecordingWorker

MIB = 1 << 20
TOKEN = "a-token-for-the-tests-0123456789"  # guards nothing
TOPOLOGIES = ("internal-listener", "reroute", "shared-listener")
DESTINATION = "x-gateway-destination-endpoint"
LARGE = {"ext_proc": {"max_request_body_size": 1}}


class GeneratedStack(Stack):
    """Sidecars on the shipped configuration, and an Envoy on what the command prints for it.

    Args:
        workers: where the phases go.
        directory: holds everything.
        topology: of Envoy.
        options: more options of the command.
        sections: changed keys of the sidecar's configuration, by section.
        sidecars: processes, each on a port of its own.
        healthy: sidecars that Envoy must see before the first request.
    """

    def __init__(
        self,
        workers: SimulatedWorkers,
        directory: Path,
        topology: str = "internal-listener",
        *,
        options: tuple[str, ...] = (),
        sections: Mapping[str, Mapping[str, Any]] | None = None,
        sidecars: int = 1,
        healthy: int | None = None,
    ) -> None:
        ports = free_ports((EXTERNAL, INTERNAL, ENVOY_ADMIN, SIDECAR, SIDECAR_ADMIN))
        ports |= {ROLE_PORTS[role]: port for role, port in workers.ports.items()}
        self.workers = workers
        self.local = LocalStack(directory, ports)
        try:
            listening = [self._start(number, topology, dict(sections or {})) for number in range(sidecars)]
            self.text = self._print(topology, (*self._options(options, listening), *options))
            config = yaml.safe_load(self.text.replace("/dev/stdout", str(self.local.access_log)))
            self.envoy = self.local.envoy(config, sidecars=sidecars if healthy is None else healthy)
        except BaseException:
            self.local.stop()
            raise

    def _start(self, number: int, topology: str, sections: dict[str, Mapping[str, Any]]) -> str:
        config = load_sidecar_config(self.local.ports)
        own = free_ports((SIDECAR, SIDECAR_ADMIN))
        config["ext_proc"]["listen"] = f"127.0.0.1:{own[SIDECAR]}"
        config["admin"]["listen"] = f"127.0.0.1:{own[SIDECAR_ADMIN]}"
        config["pipeline"] |= NIXL
        if topology == "shared-listener":
            config["gateway"] |= {"address": self.base, "phase_token": TOKEN}
        for section, values in sections.items():
            config[section] |= values
        self.local.sidecar(config, name=f"sidecar-{number}")
        return str(config["ext_proc"]["listen"])

    def _options(self, options: tuple[str, ...], listening: list[str]) -> list[str]:
        words = [
            f"--listen=127.0.0.1:{self.local.ports[EXTERNAL]}",
            f"--admin-listen=127.0.0.1:{self.local.ports[ENVOY_ADMIN]}",
        ]
        if len(listening) > 1:
            words += [f"--sidecar={address}" for address in listening]
        if not any(word.startswith("--picker") for word in options):
            roles: tuple[Role, ...] = ("encode", "prefill", "decode")
            words += [f"--{role}=127.0.0.1:{self.local.ports[ROLE_PORTS[role]]}" for role in roles]
        return words

    def _print(self, topology: str, words: tuple[str, ...]) -> str:
        command = [
            *(sys.executable, "-m", "sidecar", "envoy-config", "--topology", topology),
            *("--config", str(self.local.directory / "sidecar-0.yaml"), *words),
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=60, cwd=REPOSITORY
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def start(
    workers: SimulatedWorkers, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., GeneratedStack]]:
    """Starts stacks for one test; no request of it may break vLLM's contract."""
    running: list[GeneratedStack] = []

    def begin(topology: str = "internal-listener", **more: Any) -> GeneratedStack:
        running.append(GeneratedStack(workers, tmp_path_factory.mktemp("generated"), topology, **more))
        return running[-1]

    yield begin
    for stack in running:
        stack.close()
    assert workers.violations == []


@dataclass
class AddressingPicker(EndpointPicker):
    """A picker that names a worker's address, by the phase of the request.

    Attributes:
        addresses: ip:port per phase; "" is a request without one.
    """

    addresses: dict[str, str] = field(default_factory=dict)

    def _process(
        self, requests: Iterator[pb.ProcessingRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.ProcessingResponse]:
        phases: list[str] = []

        def noted() -> Iterator[pb.ProcessingRequest]:
            for message in requests:
                if message.HasField("request_headers"):
                    fields = message.request_headers.headers.headers
                    phases.extend(item.raw_value.decode() for item in fields if item.key == "epp-profile")
                yield message

        for reply in super()._process(noted(), context):
            if reply.HasField("request_headers"):
                option = reply.request_headers.response.header_mutation.set_headers.add()
                option.header.key = DESTINATION
                option.header.raw_value = self.addresses["".join(phases)].encode()
            yield reply


@pytest.fixture
def addressing(workers: SimulatedWorkers) -> Iterator[AddressingPicker]:
    addresses = {role: f"127.0.0.1:{port}" for role, port in workers.ports.items()}
    with AddressingPicker(addresses=addresses | {"": addresses["decode"]}) as server:
        yield server


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with tls.crt and tls.key for the name sidecar.test."""
    directory = tmp_path_factory.mktemp("certificate")
    words = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=test "
        "-addext subjectAltName=DNS:sidecar.test -keyout tls.key -out tls.crt"
    )
    subprocess.run(words.split(), cwd=directory, check=True, capture_output=True)
    return directory


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_picker_names_the_worker_of_every_request(
    topology: str,
    start: Callable[..., GeneratedStack],
    addressing: AddressingPicker,
    workers: SimulatedWorkers,
    recorder: RecordingWorker,
) -> None:
    """Each phase goes where the picker says; an address a client sends is connected to by nobody."""
    stack = start(topology, options=(f"--picker=127.0.0.1:{addressing.port}",))
    forged = {DESTINATION: f"127.0.0.1:{recorder.port}", f"{DESTINATION}-subset": "127.0.0.1:1"}
    answer, line = stack.coordinate(chat("Look", CAT, DOG, max_tokens=200), headers=forged)
    assert "KV from prefill: hit" in answer.text
    phases = sorted(seen.headers.get("epp-profile", "") for seen in addressing.picked)
    assert phases == ["decode", "encode", "encode", "prefill"]
    assert [len(workers.exchanges(role)) for role in ("encode", "prefill", "decode")] == [2, 1, 1]
    assert line["outcome"] == "ok"
    foreign = request(stack.base, "POST", "/tokenize", {"prompt": "x"}, forged)
    assert foreign.status == 404  # the simulator has no such path
    assert workers.exchanges("decode")[-1].path == "/tokenize"
    assert not any(name in seen.headers for seen in addressing.picked for name in forged)
    assert recorder.received == []


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_without_its_picker_nothing_is_forwarded(
    topology: str,
    start: Callable[..., GeneratedStack],
    workers: SimulatedWorkers,
    recorder: RecordingWorker,
) -> None:
    """The picker is down: 503, and the address of the client's own choice is not used instead."""
    (port,) = free_ports((1,)).values()
    stack = start(topology, options=(f"--picker=127.0.0.1:{port}",))
    forged = {DESTINATION: f"127.0.0.1:{recorder.port}"}
    assert request(stack.base, "POST", "/tokenize", {"prompt": "x"}, forged).status == 503
    assert stack.post(chat("Look"), headers=forged).status in {502, 503}
    assert all(workers.exchanges(role) == [] for role in ("encode", "prefill", "decode"))
    assert recorder.received == []


def test_tls_to_the_sidecar(start: Callable[..., GeneratedStack], certificate: Path) -> None:
    """Envoy calls a sidecar that serves TLS, and its health checks do as well."""
    stack = start(
        options=(f"--sidecar-ca={certificate / 'tls.crt'}", "--sidecar-name=sidecar.test"),
        sections={"ext_proc": {"tls": {"cert_path": str(certificate)}}},
    )
    answer, line = stack.coordinate(chat("Look", CAT, max_tokens=200))
    assert "KV from prefill: hit" in answer.text
    assert line["outcome"] == "ok"


def test_a_sidecar_under_another_name_is_not_called(
    start: Callable[..., GeneratedStack], certificate: Path, workers: SimulatedWorkers
) -> None:
    """A certificate of the right authority for the wrong name: no request leaves, clients get 503."""
    stack = start(
        options=(f"--sidecar-ca={certificate / 'tls.crt'}", "--sidecar-name=other.test"),
        sections={"ext_proc": {"tls": {"cert_path": str(certificate)}}},
        healthy=0,
    )
    assert stack.post(chat("Look", CAT)).status == 503
    wait_for(lambda: stack.find_line("code", 503), "Envoy's line")
    assert all(workers.exchanges(role) == [] for role in ("render", "encode", "prefill", "decode"))


def test_a_unix_socket(start: Callable[..., GeneratedStack], tmp_path: Path) -> None:
    """ext_proc.listen as a socket path needs no option: Envoy connects to the same path."""
    socket = tmp_path / "s"
    stack = start(sections={"ext_proc": {"listen": f"unix:{socket}"}})
    assert f"pipe: {{path: {socket}}}" in stack.text
    answer, line = stack.coordinate(chat("Look", CAT, max_tokens=200))
    assert "KV from prefill: hit" in answer.text
    assert line["outcome"] == "ok"


def test_one_of_two_sidecars_may_stop(start: Callable[..., GeneratedStack]) -> None:
    """Two endpoints, one stopped while requests come: every one of them is answered."""
    stack = start(sidecars=2)
    first, second = stack.sidecars
    body = as_body(chat("Hello"))
    first.terminate()
    statuses = []
    while first.running():
        statuses.append(stack.post(body).status)
    assert first.process.returncode == 0
    statuses += [stack.post(body).status for _ in range(10)]
    assert set(statuses) == {200}
    assert len(statuses) > 10
    assert second.running()


def test_buffered_mode(start: Callable[..., GeneratedStack], workers: SimulatedWorkers) -> None:
    """Envoy waits for slow steps, bodies up to the sidecar's limit are coordinated, longer ones are 413."""
    stack = start(options=("--body-mode=buffered",), sections=LARGE)
    workers.configure(latency={"prefill": 0.5})  # more than the 200 ms Envoy waits by default
    body = chat("Look", CAT, max_tokens=200)
    body["padding"] = "x" * (MIB - len(as_body({**body, "padding": ""})))
    assert len(as_body(body)) == MIB
    answer, line = stack.coordinate(body)
    assert "KV from prefill: hit" in answer.text
    assert (line["outcome"], line["request_bytes"]) == ("ok", str(MIB))
    workers.reset()
    body["padding"] += "x"
    answer, line = stack.coordinate(body)
    assert (answer.status, answer.json["error"]["code"]) == (413, "epd_body_too_large")
    body["padding"] += "x" * 2 * MIB
    # Without a content-length, by which the sidecar could refuse it first.
    upload = Upload(stack.base, CHAT)
    with suppress(ConnectionError):
        upload.send(as_body(body))
        upload.finish()
    wait_for(lambda: stack.find_line("details", "request_payload_too_large"), "Envoy's own 413")
    upload.leave()
    assert all(workers.exchanges(role) == [] for role in ("render", "encode", "prefill", "decode"))


def test_prefill_decode(start: Callable[..., GeneratedStack], workers: SimulatedWorkers) -> None:
    """The step that runs beside decode gets the response headers it waits for, without an option."""
    workers.configure(kv_connector="sglang", bootstrap_timeout=60.0)
    render = {"type": "render", "params": {"address": f"http://127.0.0.1:{workers.ports['render']}"}}
    steps = [render, {"type": "encode"}, {"type": "prefill-decode", "params": {"timeout": "20s"}}]
    stack = start(sections={"pipeline": {"kv_connector": "kv-sglang", "steps": steps}})
    answer, line = stack.coordinate(chat("both", CAT))
    assert (answer.status, line["outcome"], line["stage"]) == (200, "ok", "decode")
    assert stack.local.ports[DECODE] == workers.ports["decode"]
    log = (stack.local.directory / "sidecar-0.log").read_text(encoding="utf-8")
    assert "response_header_mode" not in log


def test_prompt_token_parity(start: Callable[..., GeneratedStack], workers: SimulatedWorkers) -> None:
    """The setting alone makes Envoy show the sidecar decode's answers: it warns of a count that differs."""
    workers.configure(prompt_token_skew={"decode": 1})
    stack = start(sections={"observability": {"prompt_token_parity": "warn"}})
    answer, line = stack.coordinate(chat("Look", CAT))
    assert (answer.status, line["outcome"]) == (200, "ok")
    log = stack.local.directory / "sidecar-0.log"
    wait_for(lambda: '"phase":"decode"' in log.read_text().replace(" ", ""), "the warning")


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_default_configuration_serves(
    topology: str, start: Callable[..., GeneratedStack], workers: SimulatedWorkers
) -> None:
    """With addresses alone every topology coordinates requests and passes the others through."""
    stack = start(topology)
    answer, line = stack.coordinate(chat("Look", CAT, DOG, max_tokens=200), path=CHAT)
    assert "2 images" in answer.text
    assert line["upstream_cluster"] == ("internal" if topology == "internal-listener" else "decode")
    assert request(stack.base, "GET", "/v1/models").status == 200
    assert len(workers.exchanges("encode")) == 2
