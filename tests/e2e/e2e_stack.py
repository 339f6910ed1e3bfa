"""Envoy, sidecar and simulator wired together for one kind of test."""

from __future__ import annotations

import copy
import json
import time
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from deploy.envoy.local_stack import (
    DECODE,
    ENCODE,
    ENVOY_ADMIN,
    EXTERNAL,
    INTERNAL,
    PREFILL,
    RENDER,
    SIDECAR,
    SIDECAR_ADMIN,
    LocalStack,
    Program,
    free_ports,
    load_bootstrap,
    load_sidecar_config,
)
from sidecar.observability.record import AccessRecord
from sidecar.simulator.config import ROLES
from sidecar.simulator.server import Simulator
from tests.e2e.e2e_client import CHAT, Answer, as_body, new_id, request

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from sidecar.simulator.config import Role
    from sidecar.simulator.recorder import Exchange
    from tests.e2e.e2e_upstream import LoopThread

RECORD_KEYS = tuple(item.name for item in fields(AccessRecord))
WAIT = 30.0
ROLE_PORTS: dict[Role, int] = {"render": RENDER, "encode": ENCODE, "prefill": PREFILL, "decode": DECODE}


def wait_for(condition: Callable[[], Any], what: str, seconds: float = WAIT) -> Any:
    """The first true value of `condition()`; fails the test when the time is up."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds:.0f} s for {what}")
        time.sleep(0.01)
    return value


class SimulatedWorkers:
    """The simulator in a thread of the test process, so that tests turn its knobs directly."""

    def __init__(self, loop: LoopThread) -> None:
        self._loop = loop
        self._simulator = Simulator()
        loop.run(self._simulator.start())
        self.ports = {role: self._simulator.addresses[role][1] for role in ROLES}

    def close(self) -> None:
        self._loop.run(self._simulator.stop())

    def reset(self, **knobs: Any) -> None:
        """Forget all requests and set the knobs: the defaults, but for `knobs`."""
        self._simulator.reset()
        self._simulator.configure(knobs)

    def configure(self, **knobs: Any) -> None:
        """Change some knobs."""
        self._simulator.configure(knobs)

    def exchanges(self, role: Role) -> list[Exchange]:
        return self._simulator.deployment.recorder.of(role)

    @property
    def violations(self) -> list[str]:
        recorded = self._simulator.deployment.recorder.violations
        return [f"{item.role}: {item.message}" for item in recorded]


@dataclass
class Variant:
    """What differs from the checked-in configuration.

    Attributes:
        bootstrap: file of the Envoy bootstrap.
        pipeline: keys of the sidecar's `pipeline` section.
        steps: params per step type.
        sections: other sections of the sidecar's configuration, key by key.
        ports: well-known port -> port of a stand-in.
        edit: change of the loaded bootstrap.
        sidecars: sidecar processes behind Envoy.
    """

    bootstrap: str = "bootstrap.yaml"
    pipeline: dict[str, Any] = field(default_factory=dict)
    steps: dict[str, dict[str, Any]] = field(default_factory=dict)
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    ports: dict[int, int] = field(default_factory=dict)
    edit: Callable[[dict[str, Any]], None] | None = None
    sidecars: int = 1


class Stack:
    """One running Envoy with its sidecars."""

    def __init__(self, variant: Variant, workers: SimulatedWorkers, directory: Path) -> None:
        ports = free_ports((EXTERNAL, INTERNAL, ENVOY_ADMIN, SIDECAR, SIDECAR_ADMIN))
        ports |= {ROLE_PORTS[role]: port for role, port in workers.ports.items()} | variant.ports
        self.workers = workers
        self.local = LocalStack(directory, ports)
        try:
            endpoints = [self._start_sidecar(variant, number) for number in range(variant.sidecars)]
            bootstrap = load_bootstrap(variant.bootstrap, ports, self.local.access_log)
            _add_endpoints(bootstrap, endpoints)
            if variant.edit is not None:
                variant.edit(bootstrap)
            self.envoy = self.local.envoy(bootstrap, sidecars=variant.sidecars)
        except BaseException:
            self.local.stop()
            raise

    def _start_sidecar(self, variant: Variant, number: int) -> int:
        config = load_sidecar_config(self.local.ports)
        own = free_ports((SIDECAR, SIDECAR_ADMIN))
        config["ext_proc"]["listen"] = f"127.0.0.1:{own[SIDECAR]}"
        config["admin"]["listen"] = f"127.0.0.1:{own[SIDECAR_ADMIN]}"
        config["pipeline"] |= variant.pipeline
        for step in config["pipeline"]["steps"]:
            step["params"] = {**(step.get("params") or {}), **variant.steps.get(step["type"], {})}
        for section, values in variant.sections.items():
            replaced = {key: self._readdressed(value) for key, value in values.items()}
            config[section] = {**(config.get(section) or {}), **replaced}
        self.local.sidecar(config, name=f"sidecar-{number}")
        return own[SIDECAR]

    def _readdressed(self, value: Any) -> Any:
        if isinstance(value, str):
            for well_known, port in self.local.ports.items():
                value = value.replace(f"127.0.0.1:{well_known}", f"127.0.0.1:{port}")
        return value

    @property
    def base(self) -> str:
        """URL of the listener clients use."""
        return self.local.url(EXTERNAL)

    @property
    def sidecars(self) -> list[Program]:
        return [program for program in self.local.programs if program.name.startswith("sidecar")]

    def post(self, body: object, *, path: str = CHAT, headers: Mapping[str, str] | None = None) -> Answer:
        return request(self.base, "POST", path, body, headers)

    def coordinate(
        self, body: object, *, path: str = CHAT, headers: Mapping[str, str] | None = None
    ) -> tuple[Answer, dict[str, Any]]:
        """Send one request and read its access-log line."""
        marked = {"x-request-id": new_id(), **(headers or {})}
        answer = request(self.base, "POST", path, as_body(body), marked)
        return answer, self.log_line(marked["x-request-id"])

    def log_line(self, request_id: str, *, passthrough: bool = False) -> dict[str, Any]:
        """The access-log line of one request, by the id its client sent.

        Sub-requests of the shared-listener topology carry the same id; they are the ones that pass through.
        """

        def find() -> dict[str, Any] | None:
            lines = [line for line in self.log_lines() if line["request_id"] == request_id]
            return next((line for line in lines if (line["outcome"] == "passthrough") is passthrough), None)

        return dict(wait_for(find, f"the log line of {request_id}"))

    def find_line(self, key: str, value: object) -> dict[str, Any] | None:
        return next((line for line in self.log_lines() if line.get(key) == value), None)

    def log_lines(self) -> list[dict[str, Any]]:
        log = self.local.access_log
        text = log.read_text(encoding="utf-8") if log.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def close(self) -> None:
        self.local.stop()


def _add_endpoints(bootstrap: dict[str, Any], ports: list[int]) -> None:
    """Point the sidecar cluster at these ports."""
    cluster = named(bootstrap["static_resources"]["clusters"], "epd_sidecar")
    endpoints = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
    (pattern,) = endpoints
    endpoints.clear()
    for port in ports:
        endpoint = copy.deepcopy(pattern)
        endpoint["endpoint"]["address"]["socket_address"]["port_value"] = port
        endpoints.append(endpoint)


def named(items: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(item for item in items if item["name"] == name)


def manager(bootstrap: dict[str, Any], listener: str) -> dict[str, Any]:
    """The connection manager of one listener."""
    chain = named(bootstrap["static_resources"]["listeners"], listener)["filter_chains"][0]
    config: dict[str, Any] = chain["filters"][0]["typed_config"]
    return config


def ext_proc(bootstrap: dict[str, Any], listener: str = "external") -> dict[str, Any]:
    """Configuration of the sidecar's filter."""
    filters = manager(bootstrap, listener)["http_filters"]
    config: dict[str, Any] = named(filters, "envoy.filters.http.ext_proc")["typed_config"]
    return config


def add_parity_filter(bootstrap: dict[str, Any], listener: str = "external") -> dict[str, Any]:
    """Put the filter of docs/prompt-token-parity.md, which copies decode's answers, behind the sidecar's.

    Returns:
        Its configuration.
    """
    filters = manager(bootstrap, listener)["http_filters"]
    place = filters.index(named(filters, "envoy.filters.http.ext_proc")) + 1
    config: dict[str, Any] = {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor",
        "stat_prefix": "prompt_token_parity",
        "grpc_service": {"envoy_grpc": {"cluster_name": "epd_sidecar"}},
        "observability_mode": True,
        "failure_mode_allow": True,
        "processing_mode": {
            "request_header_mode": "SKIP",
            "request_body_mode": "NONE",
            "request_trailer_mode": "SKIP",
            "response_header_mode": "SEND",
            "response_body_mode": "STREAMED",
            "response_trailer_mode": "SEND",
        },
        "metadata_options": {"forwarding_namespaces": {"untyped": ["epd.sidecar"]}},
    }
    name = "envoy.filters.http.ext_proc/prompt-token-parity"
    filters.insert(place, {"name": name, "typed_config": config})
    return config


def add_picker(bootstrap: dict[str, Any], listener: str, port: int) -> None:
    """Put the endpoint-picker stand-in last before the router of a listener."""
    filters = manager(bootstrap, listener)["http_filters"]
    filters.insert(
        len(filters) - 1,
        {
            "name": "envoy.filters.http.ext_proc/picker",
            "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor",
                "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}},
                "processing_mode": {
                    "request_header_mode": "SEND",
                    "request_body_mode": "FULL_DUPLEX_STREAMED",
                    "request_trailer_mode": "SEND",
                    "response_header_mode": "SKIP",
                },
            },
        },
    )
    clusters = bootstrap["static_resources"]["clusters"]
    if any(cluster["name"] == "picker" for cluster in clusters):
        return
    cluster = copy.deepcopy(named(clusters, "epd_sidecar"))
    del cluster["health_checks"]
    cluster["name"] = cluster["load_assignment"]["cluster_name"] = "picker"
    endpoints = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
    del endpoints[1:]
    endpoints[0]["endpoint"]["address"]["socket_address"]["port_value"] = port
    clusters.append(cluster)
