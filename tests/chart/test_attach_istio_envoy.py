"""What the EnvoyFilters add to Istio's listeners, in a real Envoy."""

from __future__ import annotations

import copy
import itertools
import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from deploy.envoy.local_stack import envoy_binary, load_bootstrap
from tests.chart.attach_cases import BODY_MODES, PARITY, PREFILL_DECODE, TOPOLOGIES, rendered_with
from tests.chart.chart_rendering import NAME, ROOT, Rendered, merged
from tests.chart.istio_gateway import HTTP, MESH_LOG, add_cluster, as_istio_has_it, patch
from tests.e2e.e2e_client import CAT, DOG, chat, new_id, request
from tests.e2e.e2e_stack import RECORD_KEYS, SimulatedWorkers, Stack, manager, wait_for
from tests.e2e.e2e_upstream import LoopThread
from tests.e2e.e2e_variants import NONE_NIXL

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

CLUSTER = f"outbound|9002||{NAME}.inference.svc.cluster.local"
FILTER = "envoy.filters.http.ext_proc/epd-sidecar"
OBSERVER = "envoy.filters.http.ext_proc/prompt-token-parity"
ISTIO_FILTERS = ["envoy.filters.http.cors", "envoy.filters.http.fault"]
ROUTER = "envoy.filters.http.router"

TRAP = "trap"
"""A phase that only a client asks for."""

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "prefill-decode": PREFILL_DECODE,
    "parity": PARITY,
    "all": merged(PARITY, PREFILL_DECODE),
    "no access log": {"attach": {"accessLog": {"enabled": False}}},
    "no listener policy": {"attach": {"listenerPolicy": {"enabled": False}}},
}


def istio(*overrides: Mapping[str, Any], topology: str = "internal-listener") -> Rendered:
    return rendered_with("istio", *overrides, topology=topology)


def patched(objects: Rendered, bootstrap: dict[str, Any] | None = None) -> dict[str, Any]:
    """The shipped bootstrap with Istio's filters, patched."""
    config = bootstrap or load_bootstrap("bootstrap.yaml", {}, Path("/dev/stdout"))
    add_cluster(config, CLUSTER)
    for listener, name in (("external", NAME), ("internal", f"{NAME}-internal")):
        as_istio_has_it(config, listener)
        for envoy_filter in objects.all("EnvoyFilter"):
            if envoy_filter["metadata"]["name"] == name:
                patch(config, listener, envoy_filter)
    return config


def validate(config: dict[str, Any], directory: Path) -> None:
    file = directory / "envoy.yaml"
    file.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    command = [str(envoy_binary()), "--mode", "validate", "-c", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, cwd=directory)
    assert done.returncode == 0, done.stderr


def filter_names(config: dict[str, Any]) -> list[str]:
    return [item["name"] for item in manager(config, "external")["http_filters"]]


def typed_config(config: dict[str, Any], name: str) -> dict[str, Any]:
    filters = manager(config, "external")["http_filters"]
    found: dict[str, Any] = next(item for item in filters if item["name"] == name)["typed_config"]
    return found


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("topology", "body", "order"),
    list(itertools.product(TOPOLOGIES, BODY_MODES, ("first", "router"))),
)
def test_envoy_accepts_the_patched_listener(
    topology: str, body: str, order: str, variant: str, tmp_path: Path
) -> None:
    """`envoy --mode validate` accepts it, and the filters stand where `attach.order` puts them."""
    objects = istio({"attach": {"bodyMode": body, "order": order}}, VARIANTS[variant], topology=topology)
    config = patched(objects)
    validate(config, tmp_path)
    observer = [OBSERVER] if variant in ("parity", "all") else []
    expected = (
        [FILTER, *ISTIO_FILTERS, *observer, ROUTER]
        if order == "first"
        else [*ISTIO_FILTERS, FILTER, *observer, ROUTER]
    )
    assert filter_names(config) == expected


@pytest.mark.parametrize("deadline", ["59m50s", "1h", "720h"])
def test_envoy_accepts_every_deadline(deadline: str, tmp_path: Path) -> None:
    """A filter that Envoy refuses leaves the listener of a running proxy as it was: without the filter."""
    validate(patched(istio({"config": {"ext_proc": {"request_deadline": deadline}}})), tmp_path)


def test_envoy_accepts_the_largest_buffer(tmp_path: Path) -> None:
    """The largest body that the chart takes with Buffered has room in Envoy's field."""
    largest = {
        "config": {"ext_proc": {"max_request_body_size": 4094}, "limits": {"max_in_flight_bytes": 4094}},
        "resources": {"limits": {"memory": "6Gi"}},
        "attach": {"bodyMode": "Buffered"},
    }
    validate(patched(istio(largest)), tmp_path)


def test_envoy_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    """The validation above is one: a misspelt field of the filter is an error."""
    config = patched(istio())
    typed_config(config, FILTER)["failure_mode_alow"] = False
    with pytest.raises(AssertionError, match="failure_mode_alow"):
        validate(config, tmp_path)


@pytest.mark.parametrize("domain", ["cluster.local", "example.internal"])
def test_the_filter_calls_a_cluster_that_istio_makes(domain: str) -> None:
    """Istio names a cluster after port and host of a Service; Envoy's validation does not check the name."""
    overrides = {
        "attach": {"namespace": "edge", "istio": {"clusterDomain": domain}},
        "config": {
            "ext_proc": {"listen": "0.0.0.0:9123"},
            "gateway": {"address": f"http://inference-internal.inference.svc.{domain}:80"},
            **PARITY["config"],
        },
    }
    objects = istio(overrides)
    service = objects.one("Service", NAME)
    (port,) = (item["port"] for item in service["spec"]["ports"] if item["name"] == "grpc-ext-proc")
    place = service["metadata"]
    host = f"{place['name']}.{place['namespace']}.svc.{domain}"
    assert (port, host) == (9123, f"{NAME}.inference.svc.{domain}")
    attached = objects.one("EnvoyFilter", f"{NAME}.inference")
    called = set(re.findall(r'"cluster_name": "([^"]*)"', json.dumps(attached)))
    assert called == {f"outbound|{port}||{host}"}
    assert objects.one("DestinationRule", NAME)["spec"]["host"] == host


@pytest.mark.parametrize("body", BODY_MODES)
@pytest.mark.parametrize("responses", [False, True])
def test_the_filter_is_the_shipped_one(body: str, responses: bool) -> None:
    """All settings are those of deploy/envoy/bootstrap.yaml, but for the mode and the cluster's name."""
    objects = istio({"attach": {"bodyMode": body}}, PREFILL_DECODE if responses else {})
    shipped = load_bootstrap("bootstrap.yaml", {}, Path("/dev/stdout"))
    expected = copy.deepcopy(manager(shipped, "external")["http_filters"][0]["typed_config"])
    expected["grpc_service"]["envoy_grpc"]["cluster_name"] = CLUSTER
    if body == "Buffered":
        expected["processing_mode"]["request_body_mode"] = "BUFFERED"
    if responses:
        expected["processing_mode"]["response_header_mode"] = "SEND"
    assert typed_config(patched(objects), FILTER) == expected


def test_the_listener_is_the_shipped_one() -> None:
    """What is merged into Istio's connection manager has the values of the shipped listeners."""
    shipped = load_bootstrap("bootstrap.yaml", {}, Path("/dev/stdout"))
    for listener, name in (("external", NAME), ("internal", f"{NAME}-internal")):
        patches = istio().one("EnvoyFilter", name)["spec"]["configPatches"]
        (merge,) = (item["patch"]["value"] for item in patches if item["applyTo"] == "NETWORK_FILTER")
        ours = dict(merge["typed_config"])
        ours.pop("access_log", None)
        # The sidecar's sub-requests bring the client's id; Istio replaces those of clients it does not trust.
        assert ours.pop("preserve_external_request_id") is True
        theirs = manager(shipped, listener)
        assert ours == {key: theirs[key] for key in ours}
        assert {"stream_idle_timeout", "http_protocol_options"} <= set(ours)


def test_the_access_log_is_the_shipped_one_beside_the_mesh_s_own() -> None:
    """The same keys from the same operators; the log that the mesh is configured for stays."""
    before, ours = manager(patched(istio()), "external")["access_log"]
    assert before == MESH_LOG
    shipped = load_bootstrap("bootstrap.yaml", {}, Path("/dev/stdout"))
    (theirs,) = copy.deepcopy(manager(shipped, "external")["access_log"])
    theirs["typed_config"]["log_format"]["json_format"]["ext_proc"] = f"%FILTER_STATE({FILTER}:PLAIN)%"
    assert ours == theirs


def test_the_observer_is_the_documented_one() -> None:
    """The second filter is that of docs/prompt-token-parity.md, but for the cluster's name."""
    text = (ROOT / "docs/prompt-token-parity.md").read_text(encoding="utf-8")
    blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]
    (expected,) = (
        item["typed_config"]
        for block in blocks
        if isinstance(block, list)
        for item in block
        if item.get("name") == OBSERVER
    )
    expected["grpc_service"]["envoy_grpc"]["cluster_name"] = CLUSTER
    assert typed_config(patched(istio(PARITY)), OBSERVER) == expected


def test_the_observer_never_holds_up_an_answer() -> None:
    """It only observes, and the sidecar being away is no reason to lose an answer."""
    observer = typed_config(patched(istio(PARITY)), OBSERVER)
    assert observer["observability_mode"] is True
    assert observer["failure_mode_allow"] is True
    assert observer["processing_mode"]["request_body_mode"] == "NONE"


def test_the_buffered_mode_takes_bodies_up_to_the_sidecar_s_limit() -> None:
    """Envoy's buffer holds the body the sidecar would take, rewritten; in full duplex it is left alone."""
    limit = {"config": {"ext_proc": {"max_request_body_size": 1.5}}}
    for body, expected in (("Buffered", [1572864 + (1 << 20)]), ("FullDuplexStreamed", [])):
        patches = istio({"attach": {"bodyMode": body}}, limit).one("EnvoyFilter", NAME)["spec"][
            "configPatches"
        ]
        limits = [
            item["patch"]["value"]["per_connection_buffer_limit_bytes"]
            for item in patches
            if item["applyTo"] == "LISTENER"
        ]
        assert limits == expected


def log_to(file: Path, bootstrap: dict[str, Any]) -> None:
    """Write the chart's access log to a file."""
    (*_, ours) = manager(bootstrap, "external")["access_log"]
    ours["typed_config"]["path"] = str(file)


@pytest.fixture(scope="module")
def workers() -> Iterator[SimulatedWorkers]:
    loop = LoopThread()
    simulated = SimulatedWorkers(loop)
    yield simulated
    simulated.close()
    loop.close()


@pytest.fixture(scope="module", params=["first", "router"])
def gateway(
    request: pytest.FixtureRequest, workers: SimulatedWorkers, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    """Sidecar, simulator, and an Envoy with Istio's filters and the chart's patches."""
    directory = tmp_path_factory.mktemp("istio")
    objects = istio({"attach": {"order": request.param}}, PARITY)

    def edit(bootstrap: dict[str, Any]) -> None:
        patched(objects, bootstrap)
        log_to(directory / "access.log", bootstrap)
        routes = manager(bootstrap, "external")["route_config"]["virtual_hosts"][0]["routes"]
        match = {"prefix": "/", "headers": [{"name": "epp-profile", "string_match": {"exact": TRAP}}]}
        per_route = {"@type": f"{HTTP}.ext_proc.v3.ExtProcPerRoute", "disabled": True}
        trap = {"name": "trap", "match": match, "direct_response": {"status": 418}}
        routes.insert(0, {**trap, "typed_per_filter_config": {FILTER: per_route}})

    sections = {"observability": {"prompt_token_parity": "warn"}}
    variant = replace(NONE_NIXL, edit=edit, sections=sections)
    stack = Stack(variant, workers, directory)
    yield stack
    stack.close()


def test_a_request_is_coordinated_and_logged(gateway: Stack, workers: SimulatedWorkers) -> None:
    """Through the patched listener a multimodal request runs its phases, and the log has its whole record."""
    workers.reset()
    answer, line = gateway.coordinate(chat("Look", CAT, DOG), headers={"epp-profile": "prefill"})
    assert "KV from prefill: hit" in answer.text
    assert {key: line[key] for key in ("code", "outcome", "stage", "media", "api")} == {
        "code": 200,
        "outcome": "ok",
        "stage": "decode",
        "media": "image:2",
        "api": "chat",
    }
    assert set(RECORD_KEYS) <= set(line)
    assert line["ext_proc"]
    assert [len(workers.exchanges(role)) for role in ("render", "encode", "prefill", "decode")] == [
        1,
        2,
        1,
        1,
    ]
    assert workers.violations == []


def test_a_client_s_phase_is_gone_before_routing(gateway: Stack) -> None:
    """A route that asks for a phase and has no filter is not for clients, whatever phase they send."""
    headers = {"epp-profile": TRAP, "x-request-id": new_id()}
    assert request(gateway.base, "GET", "/v1/models", headers=headers).status == 200
    assert gateway.log_line(headers["x-request-id"], passthrough=True)["route"] == "reentry"


def test_the_observer_counts_decode_s_tokens(gateway: Stack, workers: SimulatedWorkers) -> None:
    """The second filter sees the record of the first, wherever `attach.order` has put that one."""
    workers.reset(prompt_token_skew={"decode": 7})
    config = yaml.safe_load((gateway.local.directory / "sidecar-0.yaml").read_text(encoding="utf-8"))
    admin = f"http://{config['admin']['listen']}"

    def mismatches() -> float:
        text = request(admin, "GET", "/metrics").body.decode()
        (count,) = re.findall(
            r'^epd_sidecar_prompt_token_mismatches_total{phase="decode"} (\S+)', text, re.MULTILINE
        )
        return float(count)

    before = mismatches()
    assert gateway.post(chat("Look", CAT)).status == 200
    wait_for(lambda: mismatches() == before + 1, "the mismatch")


def test_envoy_answers_503_when_the_sidecar_is_away(
    workers: SimulatedWorkers, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A request does not pass without the sidecar, and the log names the filter's failure."""
    directory = tmp_path_factory.mktemp("istio-down")
    objects = istio()

    def edit(bootstrap: dict[str, Any]) -> None:
        patched(objects, bootstrap)
        log_to(directory / "access.log", bootstrap)

    stack = Stack(replace(NONE_NIXL, edit=edit), workers, directory)
    try:
        workers.reset()
        for sidecar in stack.sidecars:
            sidecar.kill()
            sidecar.process.wait(10)
        answer = stack.post(chat("Look", CAT))
        assert answer.status == 503
        line = wait_for(lambda: stack.find_line("code", 503), "the log line")
        assert line["details"].startswith("ext_proc_error")
        assert {line[key] for key in RECORD_KEYS} == {None}
        assert workers.exchanges("decode") == []
    finally:
        stack.close()
