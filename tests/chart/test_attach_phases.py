"""Where requests of clients and of the sidecar go: the routes, what they name, and who allows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from tests.chart.attach_cases import CLIENTS, PROVIDERS, TOPOLOGIES, case, rendered, rendered_with
from tests.chart.attach_schemas import problems
from tests.chart.chart_rendering import (
    NAME,
    Rendered,
    is_kubernetes_own,
    kubernetes_problems,
    render,
    schema_refusal,
    six_values,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.chart.chart_rendering import Document

PHASES = ("encode", "prefill", "decode")
CHAT = "/v1/chat/completions"
POOL = {"kind": "InferencePool", "name": "decode-pool"}


@dataclass(frozen=True)
class Matched:
    """What a Gateway does with a request.

    Attributes:
        route: name of the HTTPRoute.
        backend: its backend, without what says nothing.
    """

    route: str
    backend: Mapping[str, Any]


def send(objects: Rendered, gateway: str, path: str, phase: str = "") -> Matched | None:
    """By the Gateway API's rules: exact paths, longer prefixes, more headers, the first rule."""
    best: tuple[tuple[int, int, int], Matched] | None = None
    for route in objects.all("HTTPRoute"):
        if gateway not in [parent["name"] for parent in route["spec"]["parentRefs"]]:
            continue
        for rule in route["spec"]["rules"]:
            for match in rule["matches"]:
                headers = {item["name"].lower(): item["value"] for item in match.get("headers", [])}
                if not covers(match["path"], path) or (headers and headers != {"epp-profile": phase}):
                    continue
                exact = match["path"]["type"] == "Exact"
                rank = (int(exact), len(match["path"]["value"]), len(headers))
                (backend,) = rule["backendRefs"]
                if best is None or rank > best[0]:
                    best = rank, Matched(route["metadata"]["name"], backend)
    return best[1] if best else None


def covers(matcher: Mapping[str, str], path: str) -> bool:
    value = matcher["value"]
    if matcher["type"] == "Exact":
        return path == value
    return path == value or path.startswith(value.rstrip("/") + "/")


def backend_of(objects: Rendered, gateway: str, path: str, phase: str = "") -> str | None:
    found = send(objects, gateway, path, phase)
    return str(found.backend["name"]) if found else None


def any_problems(document: Document) -> list[str]:
    return (kubernetes_problems if is_kubernetes_own(document) else problems)(document)


every_provider = pytest.mark.parametrize("provider", PROVIDERS)


@every_provider
def test_each_phase_has_its_workers_on_the_internal_gateway(provider: str) -> None:
    """Whatever the path, the phase decides; without one it is a request that passes through to decode."""
    objects = rendered(case(provider))
    for path in (CHAT, "/inference/v1/generate", "/v1/models", "/tokenize"):
        for phase in PHASES:
            assert backend_of(objects, "inference-internal", path, phase) == phase
        assert backend_of(objects, "inference-internal", path) == "decode"


@pytest.mark.parametrize("provider", [name for name in PROVIDERS if name != "gke"])
def test_clients_re_enter_through_the_internal_gateway(provider: str) -> None:
    """What clients send goes on to the internal Gateway's Service, where the phase picks the workers."""
    objects = rendered(case(provider))
    for phase in ("", *PHASES):
        found = send(objects, CLIENTS, CHAT, phase)
        assert found == Matched(
            f"{NAME}-clients",
            {"group": "", "kind": "Service", "name": "inference-internal", "port": 80},
        )


def test_gke_has_no_service_to_re_enter_through() -> None:
    """A managed load balancer is no Service of the cluster: its client route leads to decode itself."""
    found = send(rendered(case("gke")), CLIENTS, CHAT)
    assert found == Matched(
        f"{NAME}-clients", {"group": "", "kind": "Service", "name": "decode", "port": 8000}
    )


@every_provider
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_clients_reach_the_paths_of_their_api_only(provider: str, topology: str) -> None:
    """Paths that steer engines, and those that take bodies past the sidecar, have no route for clients."""
    objects = rendered(case(provider, topology))
    for path in (CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/v1/models", "/v1/models/a"):
        assert backend_of(objects, CLIENTS, path)
    for path in (
        f"{CHAT}/batch",
        "/inference/v1/generate",
        "/tokenize",
        "/reset_prefix_cache",
        "/invocations",
    ):
        assert backend_of(objects, CLIENTS, path) is None


@every_provider
def test_a_shared_listener_tells_phases_from_clients(provider: str) -> None:
    """On one Gateway a phase outweighs the client's rule on every path, that of the client's API included."""
    objects = rendered(case(provider, "shared-listener"))
    assert [route["metadata"]["name"] for route in objects.all("HTTPRoute")] == [f"{NAME}-phases"]
    for path in (CHAT, "/inference/v1/generate", "/v1/models"):
        for phase in PHASES:
            assert backend_of(objects, CLIENTS, path, phase) == phase
    assert backend_of(objects, CLIENTS, CHAT) == "decode"


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_other_paths_are_a_matter_of_values(topology: str) -> None:
    """`clientRoute.paths` replaces the list, for the phases of a shared listener too."""
    paths = {"phases": {"clientRoute": {"paths": [{"type": "PathPrefix", "value": "/v1/chat"}]}}}
    objects = rendered_with("istio", paths, topology=topology)
    assert backend_of(objects, CLIENTS, CHAT)
    assert backend_of(objects, CLIENTS, "/v1/models") is None
    if topology == "shared-listener":
        assert backend_of(objects, CLIENTS, CHAT, "prefill") == "prefill"


@every_provider
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_answers_take_as_long_as_they_take(provider: str, topology: str) -> None:
    """No rule has a timeout of its own; on GKE, which has no such field, a policy lifts its default."""
    objects = rendered(case(provider, topology))
    rules = [rule for route in objects.all("HTTPRoute") for rule in route["spec"]["rules"]]
    if provider == "gke":
        assert [rule for rule in rules if "timeouts" in rule] == []
        policies = objects.all("GCPBackendPolicy")
        assert {policy["spec"]["targetRef"]["name"] for policy in policies} == set(PHASES)
        assert {policy["spec"]["default"]["timeoutSec"] for policy in policies} == {3600}
    else:
        assert {tuple(rule["timeouts"].items()) for rule in rules} == {
            (("request", "0s"), ("backendRequest", "0s"))
        }


@pytest.mark.parametrize("group", ["", "inference.networking.k8s.io"])
def test_an_inference_pool_is_named_by_its_group_alone(group: str) -> None:
    """A pool has no port and its own group, whether values say the group or not."""
    objects = rendered_with("istio", {"phases": {"decode": {**POOL, "group": group}}})
    found = send(objects, "inference-internal", CHAT, "decode")
    assert found
    assert found.backend == {
        "group": "inference.networking.k8s.io",
        "kind": "InferencePool",
        "name": "decode-pool",
    }
    assert [rule for rule in objects.all("DestinationRule") if "decode" in rule["spec"]["host"]] == []
    assert [problem for route in objects.all("HTTPRoute") for problem in problems(route)] == []


def test_a_service_of_another_group_is_refused() -> None:
    """What is half a pool is not taken for a Service."""
    mixed = {"phases": {"decode": {"kind": "Service", "group": "inference.networking.k8s.io"}}}
    assert "at '/phases/decode/group'" in schema_refusal(six_values(mixed))


@every_provider
def test_names_that_look_like_other_values_stay_names(provider: str) -> None:
    """Names of digits, and those that are words of YAML, reach the objects as texts."""
    objects = rendered_with(
        provider,
        {
            "attach": {"targetRefs": [{"name": "on", "sectionName": ""}]},
            "phases": {"gateway": {"name": "1e3", "namespace": "123"}, "decode": {"name": "yes"}},
        },
    )
    assert [problem for item in objects.documents for problem in any_problems(item)] == []
    assert backend_of(objects, "1e3", CHAT, "decode") == "yes"
    assert backend_of(objects, "on", CHAT) in ("inference-internal", "yes")


SERVICES: list[tuple[str, str, dict[str, Any], tuple[str, str | None, int]]] = [
    ("explicit", "istio", {"phases": {"service": {"name": "mine", "port": 8080}}}, ("mine", None, 8080)),
    (
        "explicit, elsewhere",
        "envoy-gateway",
        {"phases": {"service": {"name": "mine", "namespace": "envoy-gateway-system"}}},
        ("mine", "envoy-gateway-system", 80),
    ),
    ("address", "istio", {"config": {"gateway": {"address": "http://a"}}}, ("a", None, 80)),
    (
        "address with a port",
        "kgateway",
        {"config": {"gateway": {"address": "http://a.b:8080"}}},
        ("a", "b", 8080),
    ),
    (
        "address with a slash",
        "kgateway",
        {"config": {"gateway": {"address": "http://a.b:80/"}}},
        ("a", "b", 80),
    ),
    ("address of a Service", "istio", {"config": {"gateway": {"address": "http://a.b.svc"}}}, ("a", "b", 80)),
    (
        "address in full",
        "envoy-gateway",
        {"config": {"gateway": {"address": "http://a.b.svc.cluster.local:81"}}},
        ("a", "b", 81),
    ),
    (
        "address in another domain",
        "istio",
        {
            "config": {"gateway": {"address": "http://a.b.svc.example.org"}},
            "attach": {"istio": {"clusterDomain": "example.org"}},
        },
        ("a", "b", 80),
    ),
]
"""What it is read from, provider, values, and (name, namespace if not the route's, port) of the Service."""


@pytest.mark.parametrize(
    ("provider", "overrides", "expected"),
    [
        pytest.param(provider, overrides, expected, id=name)
        for name, provider, overrides, expected in SERVICES
    ],
)
def test_the_service_of_the_internal_gateway(
    provider: str, overrides: dict[str, Any], expected: tuple[str, str | None, int]
) -> None:
    """Values name it; else the sidecar's own address of it does."""
    found = send(rendered_with(provider, overrides), CLIENTS, CHAT)
    assert found
    assert (found.backend["name"], found.backend.get("namespace"), found.backend["port"]) == expected


def granted(objects: Rendered, kind: str, name: str, namespace: str, source: str) -> bool:
    """Whether HTTPRoutes of a namespace may refer to an object of another one."""
    return any(
        grant["metadata"]["namespace"] == namespace
        and {"group": "gateway.networking.k8s.io", "kind": "HTTPRoute", "namespace": source}
        in grant["spec"]["from"]
        and any(target["kind"] == kind and target["name"] == name for target in grant["spec"]["to"])
        for grant in objects.all("ReferenceGrant")
    )


@pytest.mark.parametrize("provider", [name for name in PROVIDERS if name != "gke"])
@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"attach": {"namespace": "edge"}},
        {"phases": {"gateway": {"namespace": "internal"}}},
        {"attach": {"namespace": "edge"}, "phases": {"gateway": {"namespace": "internal"}}},
        {"phases": {"decode": {**POOL, "namespace": "workers"}, "encode": {"namespace": "workers"}}},
        {"phases": {phase: {"name": "worker", "namespace": "workers"} for phase in PHASES}},
        {"config": {"gateway": {"address": "http://internal.envoy-gateway-system.svc:80"}}},
    ],
    ids=["one", "clients", "internal", "both", "workers", "one worker", "the internal Service"],
)
def test_references_across_namespaces_are_granted(provider: str, overrides: dict[str, Any]) -> None:
    """Each backend in another namespace has its ReferenceGrant, and no other grant is made."""
    objects = rendered_with(provider, overrides)
    needed = {
        (backend["kind"], backend["name"], backend["namespace"], route["metadata"]["namespace"])
        for route in objects.all("HTTPRoute")
        for rule in route["spec"]["rules"]
        for backend in rule["backendRefs"]
        if "namespace" in backend
    }
    assert [item for item in needed if not granted(objects, *item)] == []
    for_routes = [
        grant for grant in objects.all("ReferenceGrant") if grant["spec"]["from"][0]["kind"] == "HTTPRoute"
    ]
    assert len(for_routes) == len(needed)
    assert all(problems(grant) == [] for grant in for_routes)
    # A route of its own namespace names no other.
    for route in objects.all("HTTPRoute"):
        for rule in route["spec"]["rules"]:
            for backend in rule["backendRefs"]:
                assert backend.get("namespace") != route["metadata"]["namespace"]


def test_the_routes_of_clients_are_theirs_where_they_are_the_target() -> None:
    """A policy on HTTPRoutes leaves these alone: no second route for clients appears."""
    routes = {
        "attach": {
            "targetRefs": [{"kind": "HTTPRoute", "name": "chat"}],
            "gateways": [{"name": CLIENTS}],
        }
    }
    objects = rendered_with("envoy-gateway", routes)
    assert [route["metadata"]["name"] for route in objects.all("HTTPRoute")] == [f"{NAME}-phases"]
    assert objects.one("EnvoyExtensionPolicy")["spec"]["targetRefs"] == [
        {"group": "gateway.networking.k8s.io", "kind": "HTTPRoute", "name": "chat"}
    ]


@every_provider
def test_host_names_and_sections_reach_the_routes(provider: str) -> None:
    """The client route can be one of several on its Gateway, and the phases on one listener of theirs."""
    overrides = {
        "phases": {
            "gateway": {"sectionName": "plain"},
            "clientRoute": {"hostnames": ["llm.example.com"]},
        }
    }
    objects = rendered_with(provider, overrides)
    clients = objects.one("HTTPRoute", f"{NAME}-clients")["spec"]
    phases = objects.one("HTTPRoute", f"{NAME}-phases")["spec"]
    assert clients["hostnames"] == ["llm.example.com"]
    assert "hostnames" not in phases
    assert phases["parentRefs"] == [
        {
            "group": "gateway.networking.k8s.io",
            "kind": "Gateway",
            "name": "inference-internal",
            "sectionName": "plain",
        }
    ]


@every_provider
def test_routes_can_be_left_to_the_operator(provider: str) -> None:
    """Without `phases.enabled` there are none, and without `clientRoute.enabled` only those of the phases."""
    none = rendered_with(provider, {"phases": {"enabled": False}})
    assert none.all("HTTPRoute") == ()
    phases = rendered_with(provider, {"phases": {"clientRoute": {"enabled": False}}})
    assert [route["metadata"]["name"] for route in phases.all("HTTPRoute")] == [f"{NAME}-phases"]


def test_without_a_filter_clients_have_no_route_to_the_phases() -> None:
    """With provider none the phases get routes; clients get none, because nothing would drop their phase."""
    detached = {"attach": {"provider": "none"}}
    objects = render(six_values(detached))
    assert [route["metadata"]["name"] for route in objects.all("HTTPRoute")] == [f"{NAME}-phases"]
    assert render(six_values(detached, {"phases": {"gateway": {"name": ""}}})).all("HTTPRoute") == ()
