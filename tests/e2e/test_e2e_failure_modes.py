"""The table of failures in docs/deploy.md, row by row, through a real Envoy."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest

from deploy.envoy.local_stack import DECODE, REPOSITORY
from tests.e2e.e2e_client import CAT, CHAT, Upload, as_body, chat
from tests.e2e.e2e_stack import RECORD_KEYS, Variant, ext_proc, manager, named, wait_for
from tests.e2e.e2e_variants import NONE_NIXL

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.e2e.e2e_stack import SimulatedWorkers, Stack

NOWHERE = 9
"""A port of the loopback where nothing listens."""

FOREVER = 60.0


@dataclass(frozen=True)
class Row:
    """What the documentation says of one failure.

    Attributes:
        status: of the client's answer; 0 when it has left.
        details: pattern of Envoy's RESPONSE_CODE_DETAILS.
        outcome: of the record; None when all of it is missing.
    """

    status: int
    details: re.Pattern[str]
    outcome: str | None


def documented() -> dict[str, Row]:
    text = (REPOSITORY / "docs/deploy.md").read_text(encoding="utf-8")
    table = text.partition("<!-- failures: begin -->")[2].partition("<!-- failures: end -->")[0]
    rows = {}
    for line in table.strip().splitlines()[2:]:
        name, status, details, outcome, _ = (cell.strip() for cell in line.strip("|").split("|"))
        pattern = ".*".join(re.escape(part) for part in details.strip("`").split("…"))
        rows[name] = Row(int(status), re.compile(pattern), None if outcome == "null" else outcome)
    return rows


ROWS = documented()


class Failing:
    """One stack with one failure.

    Attributes:
        stack: Envoy and the sidecar.
        workers: the simulator behind them.
    """

    def __init__(self, stack: Stack, workers: SimulatedWorkers) -> None:
        self.stack = stack
        self.workers = workers
        self.before = len(stack.log_lines())

    def post(self, body: object = None, path: str = CHAT) -> int:
        """Send the request; returns the status of its answer."""
        return self.stack.post(body or chat("Look", CAT), path=path).status

    def post_slowly(self, role: Any, seconds: float = FOREVER) -> int:
        """Send it while a role takes its time."""
        self.workers.configure(latency={role: seconds})
        return self.post()

    def during_encode(self, act: Callable[[Upload], None]) -> Upload:
        """Send a request, and do something once its encode has begun."""
        self.workers.configure(latency={"encode": FOREVER})
        upload = Upload(self.stack.base, CHAT)
        upload.send(as_body(chat("Look", CAT)))
        upload.finish()
        wait_for(lambda: self.workers.exchanges("encode"), "encode")
        act(upload)
        return upload

    def kill(self) -> None:
        for sidecar in self.stack.sidecars:
            sidecar.kill()
            sidecar.process.wait(10)

    def drain(self) -> int:
        """Let every sidecar drain, and send a request when the last one is gone."""
        for sidecar in self.stack.sidecars:
            sidecar.terminate()
        for sidecar in self.stack.sidecars:
            assert sidecar.process.wait(30) == 0
        return self.post()

    def line(self) -> dict[str, Any]:
        """The first line of the log since the failure was prepared."""
        lines = wait_for(lambda: self.stack.log_lines()[self.before :], "the log line")
        return dict(lines[0])


def filter_without(key: str) -> Callable[[dict[str, Any]], None]:
    def edit(bootstrap: dict[str, Any]) -> None:
        del ext_proc(bootstrap)[key]

    return edit


def mode(body: str, **more: Any) -> Callable[[dict[str, Any]], None]:
    """The filter with another body mode."""

    def edit(bootstrap: dict[str, Any]) -> None:
        config = ext_proc(bootstrap)
        config["processing_mode"]["request_body_mode"] = body
        config.update(more)

    return edit


def sidecar_cluster(bootstrap: dict[str, Any]) -> dict[str, Any]:
    return named(bootstrap["static_resources"]["clusters"], "epd_sidecar")


def unknown_cluster(bootstrap: dict[str, Any]) -> None:
    ext_proc(bootstrap)["grpc_service"]["envoy_grpc"]["cluster_name"] = "nobody"


def not_attached(bootstrap: dict[str, Any]) -> None:
    del manager(bootstrap, "external")["http_filters"][0]


def impatient(bootstrap: dict[str, Any]) -> None:
    manager(bootstrap, "external")["stream_idle_timeout"] = "1s"


def one_request(bootstrap: dict[str, Any]) -> None:
    sidecar_cluster(bootstrap)["circuit_breakers"] = {"thresholds": [{"max_requests": 1}]}


def unchecked(bootstrap: dict[str, Any]) -> None:
    """A cluster that no health check keeps from being called."""
    del sidecar_cluster(bootstrap)["health_checks"]


def http1(bootstrap: dict[str, Any]) -> None:
    unchecked(bootstrap)
    name = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    options = sidecar_cluster(bootstrap)["typed_extension_protocol_options"][name]
    options["explicit_http_config"] = {"http_protocol_options": {}}


def tls(authority: Path, name: str) -> Callable[[dict[str, Any]], None]:
    """Envoy calls the sidecar over TLS."""

    def edit(bootstrap: dict[str, Any]) -> None:
        unchecked(bootstrap)
        names = [{"san_type": "DNS", "matcher": {"exact": name}}]
        context = {
            "alpn_protocols": ["h2"],
            "validation_context": {
                "trusted_ca": {"filename": str(authority)},
                "match_typed_subject_alt_names": names,
            },
        }
        sidecar_cluster(bootstrap)["transport_socket"] = {
            "name": "envoy.transport_sockets.tls",
            "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
                "sni": name,
                "common_tls_context": context,
            },
        }

    return edit


@dataclass(frozen=True)
class Failure:
    """How one failure is made.

    Attributes:
        act: sends the request that fails; returns its status.
        variant: what is configured differently.
        own: whether the stack cannot be used afterwards.
    """

    act: Callable[[Failing], int] = Failing.post
    variant: Variant = field(default_factory=lambda: NONE_NIXL)
    own: bool = False


def edited(edit: Callable[[dict[str, Any]], None]) -> Variant:
    return replace(NONE_NIXL, edit=edit)


def configured(**sections: dict[str, Any]) -> Variant:
    return replace(NONE_NIXL, sections=sections)


def down(failing: Failing) -> int:
    failing.kill()
    return failing.post()


def dies(failing: Failing) -> int:
    return failing.during_encode(lambda _: failing.kill()).answer().status


def leaves(failing: Failing) -> int:
    failing.during_encode(Upload.leave)
    return 0


def a_second_one(failing: Failing) -> int:
    """The status of a request while another one is being worked on."""
    statuses: list[int] = []

    def act(upload: Upload) -> None:
        statuses.append(failing.post())
        failing.line()
        upload.leave()

    failing.during_encode(act)
    return statuses[0]


def refused_prefill(failing: Failing) -> int:
    failing.workers.configure(faults={"prefill": "status:503"})
    return failing.post()


FAILURES: dict[str, Failure] = {
    "the sidecar is down": Failure(down, own=True),
    "the sidecar dies under a request": Failure(dies, own=True),
    "every endpoint drains": Failure(Failing.drain, own=True),
    "the filter names a cluster that does not exist": Failure(variant=edited(unknown_cluster)),
    "Envoy speaks HTTP/1.1 to the sidecar": Failure(variant=edited(http1)),
    "Envoy's circuit breaker": Failure(a_second_one, edited(one_request)),
    "the sidecar is full": Failure(a_second_one, configured(limits={"max_in_flight_requests": 1})),
    "a step is slow": Failure(
        lambda failing: failing.post_slowly("encode"),
        replace(NONE_NIXL, steps={**NONE_NIXL.steps, "encode": {"timeout": "300ms"}}),
    ),
    "everything before decode is slow": Failure(
        lambda failing: failing.post_slowly("encode"), configured(ext_proc={"request_deadline": "300ms"})
    ),
    "Envoy's timeout is shorter than the sidecar's": Failure(
        lambda failing: failing.post_slowly("encode"), edited(impatient)
    ),
    "Buffered: Envoy's message timeout": Failure(
        lambda failing: failing.post_slowly("encode"), edited(mode("BUFFERED", message_timeout="0.2s"))
    ),
    "Buffered: the body is larger than Envoy's buffer": Failure(
        lambda failing: failing.post(chat("Look", padding="x" * (3 << 20))), edited(mode("BUFFERED"))
    ),
    "the filter has another body mode": Failure(variant=edited(mode("STREAMED"))),
    "`gateway.address` leads back to the filter": Failure(
        variant=configured(gateway={"address": "http://127.0.0.1:10000"})
    ),
    "`gateway.address` leads nowhere": Failure(
        variant=configured(gateway={"address": f"http://127.0.0.1:{NOWHERE}"})
    ),
    "a pool is down, or answers 5xx": Failure(refused_prefill),
    "decode is down, or answers 5xx": Failure(variant=replace(NONE_NIXL, ports={DECODE: NOWHERE})),
    "the record does not reach the log": Failure(variant=edited(filter_without("metadata_options"))),
    "the filter is not attached": Failure(variant=edited(not_attached)),
    "an escaped slash in the path": Failure(lambda failing: failing.post(path="/v1/chat%2Fcompletions")),
    "the client leaves": Failure(leaves),
}

CERTIFIED: dict[str, Callable[[Path], Variant]] = {
    "TLS: Envoy plain, sidecar TLS": lambda directory: replace(
        edited(unchecked), sections={"ext_proc": {"tls": {"cert_path": str(directory)}}}
    ),
    "TLS: Envoy TLS, sidecar plain": lambda directory: edited(tls(directory / "tls.crt", "sidecar.test")),
    "TLS: another name, or another CA": lambda directory: replace(
        edited(tls(directory / "tls.crt", "other.test")),
        sections={"ext_proc": {"tls": {"cert_path": str(directory)}}},
    ),
}
"""Failures that need a certificate, by the directory that has one."""


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with tls.crt and tls.key for the name sidecar.test."""
    directory = tmp_path_factory.mktemp("certificate")
    words = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=test "
        "-addext subjectAltName=DNS:sidecar.test -keyout tls.key -out tls.crt"
    )
    subprocess.run(words.split(), cwd=directory, check=True, capture_output=True)
    return directory


def check(failing: Failing, status: int, row: Row) -> None:
    """What the client and the log say is what the documentation says."""
    line = failing.line()
    assert (status, line["code"]) == (row.status, row.status)
    assert row.details.fullmatch(line["details"]), line["details"]
    assert line["outcome"] == row.outcome
    if row.outcome is None:
        assert {line[key] for key in RECORD_KEYS} == {None}
    else:
        assert all(isinstance(line[key], str) for key in RECORD_KEYS)


def test_every_failure_of_the_documentation_is_made_here() -> None:
    """The table and this file have the same rows."""
    assert set(ROWS) == {*FAILURES, *CERTIFIED}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_looks_as_documented(
    name: str,
    workers: SimulatedWorkers,
    shared_stacks: Callable[[str, Variant], Stack],
    own_stack: Callable[[Variant], Stack],
) -> None:
    """Status, details and outcome are those of the table."""
    failure = FAILURES[name]
    shared = failure.variant is NONE_NIXL and not failure.own
    stack = shared_stacks("none-nixl", NONE_NIXL) if shared else own_stack(failure.variant)
    failing = Failing(stack, workers)
    check(failing, failure.act(failing), ROWS[name])


@pytest.mark.parametrize("name", CERTIFIED)
def test_a_failure_of_tls_looks_as_documented(
    name: str, certificate: Path, workers: SimulatedWorkers, own_stack: Callable[[Variant], Stack]
) -> None:
    """Status, details and outcome are those of the table."""
    failing = Failing(own_stack(CERTIFIED[name](certificate)), workers)
    check(failing, failing.post(), ROWS[name])
