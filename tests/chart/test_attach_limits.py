"""Sizes, times and names that a gateway does not take are refused, or written so that it takes them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from tests.chart.attach_cases import CLIENTS, PARITY, PROVIDERS, TOPOLOGIES, Case, case, rendered_with
from tests.chart.attach_schemas import problems
from tests.chart.chart_rendering import CHART, is_kubernetes_own, refusal, render, six_values

if TYPE_CHECKING:
    from tests.chart.chart_rendering import Rendered

BUFFERING = ("envoy-gateway", "istio", "kgateway")
POOLS = [{"phases": {phase: {"kind": "InferencePool"}}} for phase in ("encode", "prefill", "decode")]


def deadline(text: str) -> dict[str, Any]:
    return {"config": {"ext_proc": {"request_deadline": text}}}


def largest_body(megabytes: float) -> dict[str, Any]:
    """Buffered, with limits that have room for one body."""
    return {
        "attach": {"bodyMode": "Buffered"},
        "config": {
            "ext_proc": {"max_request_body_size": megabytes},
            "limits": {"max_in_flight_bytes": megabytes},
        },
        "resources": {"limits": {"memory": "2Ti"}},
    }


def targets(count: int) -> dict[str, Any]:
    return {"attach": {"targetRefs": [{"name": f"gateway-{number}"} for number in range(count)]}}


def namespace(name: str) -> dict[str, Any]:
    return {"config": {"observability": {"metadata_namespace": name}}}


def one_service(*paths: str) -> dict[str, Any]:
    phases = zip(("encode", "prefill"), paths, strict=True)
    return {"phases": {phase: {"name": "vllm", "healthPath": path} for phase, path in phases}}


REFUSALS: list[tuple[str, str, str, dict[str, Any], str]] = [
    *(
        (
            "bufferedBody",
            provider,
            TOPOLOGIES[0],
            largest_body(largest + 1),
            f"MB than {provider} buffers: with attach.bodyMode Buffered use {largest} or less",
        )
        for provider, largest in (("envoy-gateway", 4094), ("istio", 4094), ("kgateway", 2046))
    ),
    (
        "bufferedBody",
        "istio",
        TOPOLOGIES[0],
        largest_body(1048576),
        "config.ext_proc.max_request_body_size 1048576 is more MB than istio buffers",
    ),
    *(
        (
            "bufferedDeadline",
            provider,
            TOPOLOGIES[0],
            {"attach": {"bodyMode": "Buffered"}, **deadline("59m51s")},
            "config.ext_proc.request_deadline 59m51s is longer than Envoy waits for a message",
        )
        for provider in BUFFERING
    ),
    *(
        (
            "sharedPicker",
            provider,
            "shared-listener",
            POOLS[2],
            f"phases.decode.kind InferencePool: {provider} switches endpoint pickers on per route",
        )
        for provider in BUFFERING
    ),
    (
        "targetCount",
        "gke",
        TOPOLOGIES[0],
        targets(11),
        "attach.targetRefs names 11 Gateways, and a GCPRoutingExtension takes 10",
    ),
    (
        "metadataNamespace",
        "envoy-gateway",
        TOPOLOGIES[0],
        namespace("envoy.filters.http.x"),
        "config.observability.metadata_namespace envoy.filters.http.x: Envoy Gateway keeps names",
    ),
    (
        "healthPath",
        "gke",
        TOPOLOGIES[0],
        one_service("/health", "/ready"),
        "phases.prefill.healthPath /ready: the Service vllm is that of another phase, too",
    ),
]
"""Problem, provider, topology, values on top of the plain installation, and the beginning of what is said."""


@pytest.mark.parametrize(
    ("provider", "topology", "overrides", "message"),
    [pytest.param(*rest, id=f"{index} {name} {rest[0]}") for index, (name, *rest) in enumerate(REFUSALS)],
)
def test_it_says_what_cannot_work(
    provider: str, topology: str, overrides: dict[str, Any], message: str
) -> None:
    """One problem gives one message, which names the values and what to do."""
    said = refusal(six_values(case(provider, topology).values, overrides))
    assert message in said
    assert said.count("\n- ") == 1


def test_every_limit_has_its_test() -> None:
    """The table above has every refusal of the template, and the template asks for each."""
    template = (CHART / "templates/attach/_limits.tpl").read_text(encoding="utf-8")
    defined = set(re.findall(r'define "epd-sidecar\.attach\.limit\.(\w+)"', template))
    assert defined == {name for name, *_ in REFUSALS}
    asked = template.partition("range $name := list")[2].partition("-}}")[0]
    assert set(re.findall(r'"(\w+)"', asked)) == defined


@pytest.mark.parametrize(
    ("provider", "topology", "overrides"),
    [
        *((provider, TOPOLOGIES[0], largest_body(4094)) for provider in ("envoy-gateway", "istio")),
        ("kgateway", TOPOLOGIES[0], largest_body(2046)),
        *(
            (provider, TOPOLOGIES[0], {"attach": {"bodyMode": "Buffered"}, **deadline("59m50s")})
            for provider in BUFFERING
        ),
        *((provider, TOPOLOGIES[0], pool) for provider in PROVIDERS for pool in POOLS),
        *((provider, "shared-listener", POOLS[2]) for provider in ("agentgateway", "gke")),
        *((provider, "shared-listener", pool) for provider in PROVIDERS for pool in POOLS[:2]),
        ("gke", TOPOLOGIES[0], targets(10)),
        ("istio", TOPOLOGIES[0], targets(16)),
        ("istio", TOPOLOGIES[0], namespace("envoy.filters.http.x")),
        ("gke", TOPOLOGIES[0], one_service("/ready", "/ready")),
        ("gke", TOPOLOGIES[0], {"phases": {"encode": {"healthPath": "/ready"}}}),
    ],
)
def test_what_works_is_not_refused(provider: str, topology: str, overrides: dict[str, Any]) -> None:
    """The checks stop at their boundaries, and the objects are valid there."""
    objects = rendered_with(provider, overrides, topology=topology)
    assert foreign_problems(objects) == []


def foreign_problems(objects: Rendered) -> list[str]:
    """What the schemas of the gateways' kinds say."""
    return [
        problem for item in objects.documents if not is_kubernetes_own(item) for problem in problems(item)
    ]


@pytest.mark.parametrize("provider", [name for name in PROVIDERS if name != "gke"])
@pytest.mark.parametrize("text", ["1h", "27h46m29s", "27h46m30s", "48h", "720h"])
def test_long_deadlines_are_written_as_the_gateway_reads_them(provider: str, text: str) -> None:
    """No number in a duration of the Gateway API has more than five digits."""
    assert foreign_problems(rendered_with(provider, deadline(text))) == []


@pytest.mark.parametrize(
    ("text", "message", "idle"),
    [
        ("59m49s", "3599s", "3599s"),
        ("59m50s", "3600s", "3600s"),
        ("1h", "3600s", "3610s"),
        ("27h46m29s", "3600s", "99999s"),
        ("27h46m30s", "3600s", "27h46m40s"),
        ("720h", "3600s", "720h0m10s"),
    ],
)
def test_the_message_timeout_ends_at_an_hour(text: str, message: str, idle: str) -> None:
    """The deadline and ten seconds, at most the hour that Envoy takes; the idle timeout stays above it."""
    objects = rendered_with("envoy-gateway", deadline(text))
    assert objects.one("EnvoyExtensionPolicy")["spec"]["extProc"][0]["messageTimeout"] == message
    for policy in objects.all("ClientTrafficPolicy"):
        assert policy["spec"]["timeout"]["http"]["streamIdleTimeout"] == idle
    objects = rendered_with("kgateway", deadline(text))
    assert objects.one("GatewayExtension")["spec"]["extProc"]["messageTimeout"] == message
    for policy in objects.all("ListenerPolicy"):
        assert policy["spec"]["default"]["httpSettings"]["streamIdleTimeout"] == idle


def test_the_observer_lets_answers_pass_when_the_sidecar_is_away() -> None:
    """Else a sidecar that dies would cut off the streams it reads; the filter itself is closed."""
    ours, observer = rendered_with("envoy-gateway", PARITY).one("EnvoyExtensionPolicy")["spec"]["extProc"]
    assert (ours["failOpen"], observer["failOpen"]) == (False, True)


def checks(objects: Rendered) -> dict[str, dict[str, Any]]:
    """The health check's config by the name of its Service."""
    return {
        item["spec"]["targetRef"]["name"]: item["spec"]["default"]["config"]["httpHealthCheck"]
        for item in objects.all("HealthCheckPolicy")
    }


def test_gke_asks_workers_where_vllm_answers() -> None:
    """Each worker Service has one check of its serving port; Google's default path is a 404 of vLLM."""
    overrides = {"phases": {"encode": {"healthPath": "/ready"}, "prefill": {"name": "decode"}}}
    found = checks(rendered_with("gke", overrides))
    assert found.pop("epd-epd-sidecar")["requestPath"] == "/readyz"
    assert found == {
        "encode": {"portSpecification": "USE_SERVING_PORT", "requestPath": "/ready"},
        "decode": {"portSpecification": "USE_SERVING_PORT", "requestPath": "/health"},
    }
    assert set(checks(rendered_with("gke", *POOLS))) == {"epd-epd-sidecar"}
    own = {"phases": {"backendPolicy": {"enabled": False}}}
    assert set(checks(rendered_with("gke", own))) == {"epd-epd-sidecar"}
    assert checks(rendered_with("istio")) == {}


def test_a_health_path_is_a_path() -> None:
    """What a HealthCheckPolicy would refuse is refused here."""
    said = refusal(six_values({"phases": {"decode": {"healthPath": "health"}}}))
    assert 'phases.decode.healthPath: "health" is not a path; begin it with /' in said


@pytest.mark.parametrize("provider", PROVIDERS)
def test_gke_s_load_balancer_may_ask_the_admin_port(provider: str) -> None:
    """Its health check comes from where the calls come from; elsewhere those have no business there."""
    google = [{"ipBlock": {"cidr": "35.191.0.0/16"}}]
    monitoring = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    for scraped in (monitoring, []):
        policy = {"networkPolicy": {"enabled": True, "gateway": google, "monitoring": scraped}}
        rules = rendered_with(provider, policy).one("NetworkPolicy")["spec"]["ingress"]
        admin = [peer for rule in rules if rule["ports"][0]["port"] == "metrics" for peer in rule["from"]]
        assert admin == (google if provider == "gke" else []) + scraped


def test_kgateway_s_listener_settings_are_for_whole_gateways() -> None:
    """Plain-HTTP listeners of one port are one listener of Envoy: a ListenerPolicy names no section."""
    sections = [{"name": CLIENTS, "sectionName": name} for name in ("a", "b")]
    overrides = {"attach": {"targetRefs": sections}, "phases": {"gateway": {"sectionName": "plain"}}}
    objects = rendered_with("kgateway", overrides)
    for policy, gateway in zip(objects.all("ListenerPolicy"), (CLIENTS, "inference-internal"), strict=True):
        assert policy["spec"]["targetRefs"] == [
            {"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": gateway}
        ]
    assert [ref["sectionName"] for ref in objects.one("TrafficPolicy")["spec"]["targetRefs"]] == ["a", "b"]


@pytest.mark.parametrize("provider", BUFFERING)
def test_notes_tell_the_buffer_that_is_not_set(provider: str) -> None:
    """Buffered with listeners of one's own: the notes have the number that the chart would have written."""
    buffered = Case(provider, body="Buffered").values
    own = {"attach": {"listenerPolicy": {"enabled": False}}}
    assert "68157440 bytes are right" in render(six_values(buffered, own)).notes
    assert "bytes are right" not in render(buffered).notes
    assert "bytes are right" not in rendered_with(provider, own).notes


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_notes_say_whose_the_internal_gateway_is(topology: str) -> None:
    """Two releases on one internal Gateway would match the same phases."""
    said = "The internal Gateway inference-internal is this release's alone"
    notes = rendered_with("istio", topology=topology).notes
    assert (said in notes) == (topology == "internal-listener")
