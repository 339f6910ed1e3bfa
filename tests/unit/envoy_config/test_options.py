"""The options: what they default to, what they become, and what is wrong with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from sidecar.control_headers import ControlHeaders
from sidecar.envoy_config.clusters import DESTINATION, SERVICE
from sidecar.extproc.service import SERVICE_NAME
from tests.unit.envoy_config.envoy_config_support import (
    SHARED,
    addresses,
    cluster,
    listener,
    manager,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.envoy_config.envoy_config_support import Command

GATEWAY = "SIDECAR__GATEWAY__ADDRESS"
LISTEN = "SIDECAR__EXT_PROC__LISTEN"
BUFFERED = ("--body-mode", "buffered")


def socket_address(text: str) -> dict[str, object]:
    host, _, port = text.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


@pytest.mark.parametrize(
    ("listen", "endpoint"),
    [
        ("0.0.0.0:9002", "127.0.0.1:9002"),
        ("[::]:9002", "::1:9002"),
        ("10.1.2.3:9002", "10.1.2.3:9002"),
        ("unix:/run/epd.sock", "unix:/run/epd.sock"),
    ],
)
def test_the_sidecar_is_where_it_listens(listen: str, endpoint: str, command: Command) -> None:
    """Without --sidecar the endpoint is ext_proc.listen, a wildcard as seen from the same host."""
    config = command(env={LISTEN: listen}).config
    assert addresses(config, "epd_sidecar") == [endpoint]
    assert cluster(config, "epd_sidecar")["type"] == "STATIC"


def test_several_sidecars_share_a_cluster(command: Command) -> None:
    """Each --sidecar is an endpoint, in order; readiness decides which of them get requests."""
    words = [f"--sidecar={address}" for address in ("127.0.0.1:1", "unix:/b", "127.0.0.1:3")]
    config = command(*words).config
    assert addresses(config, "epd_sidecar") == ["127.0.0.1:1", "unix:/b", "127.0.0.1:3"]
    (check,) = cluster(config, "epd_sidecar")["health_checks"]
    assert check["grpc_health_check"] == {"service_name": SERVICE_NAME}


def test_names_are_resolved(command: Command) -> None:
    """One name makes the cluster STRICT_DNS; IPv4 first, as most workers listen there."""
    config = command("--decode", "decode.svc:8000", "--decode", "10.0.0.1:8000").config
    assert cluster(config, "decode")["type"] == "STRICT_DNS"
    assert cluster(config, "decode")["dns_lookup_family"] == "V4_PREFERRED"
    assert addresses(config, "decode") == ["decode.svc:8000", "10.0.0.1:8000"]
    assert cluster(config, "prefill")["type"] == "STATIC"


def test_listeners_and_workers_can_be_moved(command: Command) -> None:
    """Clients, admin interface, workers and the internal listener are where options and settings say."""
    words = ("--listen=0.0.0.0:8080", "--admin-listen=127.0.0.1:81", "--encode=10.0.0.1:1")
    config = command(*words, "--prefill=10.0.0.2:2", env={GATEWAY: "http://127.0.0.2"}).config
    assert listener(config, "external")["address"] == socket_address("0.0.0.0:8080")
    assert config["admin"]["address"] == socket_address("127.0.0.1:81")
    assert listener(config, "internal")["address"] == socket_address("127.0.0.2:80")
    assert addresses(config, "internal") == ["127.0.0.2:80"]
    assert [addresses(config, phase) for phase in ("encode", "prefill", "decode")] == [
        ["10.0.0.1:1"],
        ["10.0.0.2:2"],
        ["127.0.0.1:8003"],
    ]
    assert manager(config, "external")["stat_prefix"] == "external"


def test_tls_names_whom_to_trust(command: Command, certificate: Path) -> None:
    """The sidecar's certificate must come from the authority and be for the name; ALPN is gRPC's."""
    words = ("--sidecar-ca=/etc/ca.pem", "--part=cluster")
    env = {"SIDECAR__EXT_PROC__TLS__CERT_PATH": str(certificate)}
    for name, kind in (("sidecar.test", "DNS"), ("10.0.0.1", "IP_ADDRESS")):
        (found,) = command(*words, f"--sidecar-name={name}", env=env).config
        context = found["transport_socket"]["typed_config"]
        assert context.get("sni") == (name if kind == "DNS" else None)
        assert context["common_tls_context"] == {
            "alpn_protocols": ["h2"],
            "validation_context": {
                "trusted_ca": {"filename": "/etc/ca.pem"},
                "match_typed_subject_alt_names": [{"san_type": kind, "matcher": {"exact": name}}],
            },
        }


WRONG_OPTIONS = [
    (["--listen", "localhost:80"], '--listen: "localhost:80" is not an address that Envoy can bind'),
    (["--listen", "127.0.0.1"], '--listen: "127.0.0.1" is not an address that Envoy can bind'),
    (["--listen", "127.0.0.1:0"], '--listen: "127.0.0.1:0" is not an address that Envoy can bind'),
    (["--admin-listen", "x"], '--admin-listen: "x" is not an address that Envoy can bind'),
    (["--admin-listen", "127.0.0.1:10000"], "--admin-listen: 127.0.0.1:10000 is also --listen"),
    (["--listen", "127.0.0.1:10001"], "--listen: 127.0.0.1:10001 is also gateway.address"),
    (["--listen", "0.0.0.0:10001"], "--listen: 0.0.0.0:10001 is also gateway.address"),
    (["--admin-listen", "127.0.0.1:10001"], "--admin-listen: 127.0.0.1:10001 is also gateway.address"),
    (["--sidecar", "9002"], '--sidecar: "9002" is not an address; write host:port'),
    (["--sidecar", "0.0.0.0:9002"], '--sidecar: "0.0.0.0:9002" is not an address; write host:port'),
    (["--sidecar", "host:99999"], '--sidecar: "host:99999" is not an address; write host:port'),
    (["--sidecar", "unix:run.sock"], '--sidecar: "unix:run.sock" is not a socket path'),
    (["--sidecar", f"unix:/{'x' * 107}"], "is not a socket path"),
    (["--sidecar", "unix:/a", "--sidecar", "b:1"], "--sidecar: a cluster cannot have socket paths and names"),
    (["--decode", "http://d:1"], '--decode: "http://d:1" is not an address'),
    (["--picker", "p"], '--picker: "p" is not an address'),
    (["--sidecar", "224.0.0.1:9002"], '--sidecar: "224.0.0.1:9002" is not an address'),
    (["--listen", "[ff02::1]:80"], '--listen: "[ff02::1]:80" is not an address that Envoy can bind'),
    (["--listen", "127.0.0.1:9002"], "--listen: 127.0.0.1:9002 is where Envoy looks for --sidecar"),
    (["--admin-listen", "0.0.0.0:8003"], "--admin-listen: 0.0.0.0:8003 is where Envoy looks for --decode"),
    (["--picker", "p:1", "--decode", "d:1"], "--decode: has no effect with --picker"),
    (["--sidecar-ca", "/ca"], "--sidecar-ca: the sidecar serves no TLS"),
    (["--sidecar-name", "n"], "--sidecar-name: the sidecar serves no TLS"),
    (["--sidecar-ca", ""], '--sidecar-ca: "" is not a path'),
    (["--sidecar-ca", "/a\nb"], "--sidecar-ca: "),
    (["--sidecar-name", "a b"], '--sidecar-name: "a b" is not a host name'),
    (["--part", "listeners", "--decode", "a:1"], "--decode: has no place in --part listeners"),
    (["--part", "filter", "--sidecar", "a:1"], "--sidecar: has no place in --part filter"),
    (["--part", "cluster", "--picker", "a:1"], "--picker: has no place in --part cluster"),
    (["--part", "access-log", "--listen", "x"], "--listen: has no place in --part access-log"),
]


@pytest.mark.parametrize(("words", "problem"), WRONG_OPTIONS, ids=[text for _, text in WRONG_OPTIONS])
def test_a_wrong_option_is_named(words: list[str], problem: str, command: Command) -> None:
    """Exit code 2, nothing printed, and a line with the option and what to do."""
    assert any(problem in line for line in command(*words).problems)


WRONG_SETTINGS = [
    ({GATEWAY: "http://gateway:80"}, [], "has a host name; the internal listener listens there"),
    ({GATEWAY: "http://10.0.0.1:80"}, [], "has an address that other hosts reach"),
    ({GATEWAY: "http://0.0.0.0:80"}, [], "has an address that other hosts reach"),
    ({GATEWAY: "https://127.0.0.1:81"}, [], "must be plain http without a path"),
    ({GATEWAY: "http://127.0.0.1:81/v1"}, [], "must be plain http without a path"),
    ({LISTEN: "0.0.0.0:0"}, [], "--sidecar: ext_proc.listen"),
    (
        {"SIDECAR__EXT_PROC__CLEAR_ROUTE_CACHE": "false"},
        ["--topology", "reroute"],
        "ext_proc.clear_route_cache: false leaves every request on the route it came by",
    ),
    (
        {GATEWAY: "http://127.0.0.1:10000"},
        ["--topology", "shared-listener"],
        "gateway.phase_token: required by --topology shared-listener",
    ),
    (
        SHARED | {GATEWAY: "http://gateway"},
        ["--topology", "shared-listener"],
        "leads to port 80, clients and sub-requests share port 10000 (--listen)",
    ),
    (
        SHARED | {GATEWAY: "https://gateway:10000"},
        ["--topology", "shared-listener"],
        "must be plain http without a path",
    ),
    (
        {"SIDECAR__EXT_PROC__REQUEST_DEADLINE": "1h"},
        BUFFERED,
        "ext_proc.request_deadline: 1h is longer than Envoy waits for a reply",
    ),
    (
        {
            "SIDECAR__EXT_PROC__MAX_REQUEST_BODY_SIZE": "4095",
            "SIDECAR__LIMITS__MAX_IN_FLIGHT_BYTES": "4095",
        },
        BUFFERED,
        "ext_proc.max_request_body_size: 4095 MB is more than Envoy buffers",
    ),
]


@pytest.mark.parametrize(
    ("env", "words", "problem"), WRONG_SETTINGS, ids=[text for _, _, text in WRONG_SETTINGS]
)
def test_a_setting_that_cannot_be_served_is_named(
    env: dict[str, str], words: list[str], problem: str, command: Command
) -> None:
    """The line names the key of the sidecar's configuration, the value and what to do."""
    (line,) = command(*words, env=env).problems
    assert problem in line


def test_the_largest_that_envoy_takes_is_taken(command: Command) -> None:
    """One step below both limits of BUFFERED mode there is a configuration."""
    env = {
        "SIDECAR__EXT_PROC__REQUEST_DEADLINE": "59m50s",
        "SIDECAR__EXT_PROC__MAX_REQUEST_BODY_SIZE": "4094",
        "SIDECAR__LIMITS__MAX_IN_FLIGHT_BYTES": "4094",
    }
    config = command(*BUFFERED, env=env).config
    assert listener(config, "external")["per_connection_buffer_limit_bytes"] == 4095 << 20


def test_tls_options_are_required_with_tls(command: Command, certificate: Path) -> None:
    """A sidecar that serves TLS is not called without saying whom to trust; parts without it do not ask."""
    env = {"SIDECAR__EXT_PROC__TLS__CERT_PATH": str(certificate)}
    problems = command(env=env).problems
    assert [line.partition(":")[0] for line in problems] == ["--sidecar-ca", "--sidecar-name"]
    assert command("--part", "filter", env=env).code == 0


def test_the_internal_listener_matters_only_where_it_is_printed(command: Command) -> None:
    """Filter and cluster for a gateway elsewhere: its address may be a name."""
    for part in ("filter", "cluster", "access-log"):
        assert command("--part", part, env={GATEWAY: "https://gateway.example/x"}).code == 0


def test_everything_wrong_is_reported_at_once(command: Command) -> None:
    """Problems of the configuration file and of the options come in one answer."""
    env = {"SIDECAR__EXT_PROC__READ_TIMEOUT": "soon", "SIDECAR__GATEWAY__PHASE_TOKEN": "short"}
    problems = command("--listen", "x", "--picker", "y", env=env).problems
    assert sorted(line.partition(":")[0].partition(" ")[0] for line in problems) == [
        "--listen",
        "--picker",
        "ext_proc.read_timeout",
        "gateway.phase_token",
    ]


def test_names_shared_with_the_sidecar_are_the_same() -> None:
    """The health check asks for the sidecar's service, and the picker's header is a control header."""
    assert SERVICE == SERVICE_NAME
    assert DESTINATION in ControlHeaders()
