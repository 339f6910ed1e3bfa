"""Every gateway with every topology, body mode, kind of target, and with TLS or without."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from sidecar.control_headers import HOP_GUARD
from tests.chart.attach_cases import (
    CLIENTS,
    PROVIDERS,
    REFUSED,
    WORKING,
    Case,
    case,
    fails_closed,
    removed_before_routing,
    rendered,
    rendered_with,
)
from tests.chart.attach_schemas import known_kinds, problems
from tests.chart.chart_rendering import (
    is_kubernetes_own,
    kubernetes_problems,
    lint,
    refusal,
    render,
    six_values,
    strings,
)

if TYPE_CHECKING:
    from tests.chart.chart_rendering import Rendered

working = pytest.mark.parametrize("item", WORKING, ids=str)
every_provider = pytest.mark.parametrize("provider", PROVIDERS)


def all_problems(item: Rendered) -> list[str]:
    return [
        problem
        for document in item.documents
        for problem in (kubernetes_problems if is_kubernetes_own(document) else problems)(document)
    ]


@working
def test_every_object_is_what_its_api_takes(item: Case) -> None:
    """Each kind passes its schema, unknown fields refused, and no object is written twice."""
    objects = rendered(item)
    assert all_problems(objects) == []
    places = [
        (document["kind"], document["metadata"]["namespace"], document["metadata"]["name"])
        for document in objects.documents
    ]
    assert len(places) == len(set(places))


@pytest.mark.parametrize("item", REFUSED, ids=str)
def test_what_the_gateway_cannot_do_is_refused(item: Case) -> None:
    """Each reason is told, all of them at once, and nothing else."""
    said = refusal(item.values)
    assert [reason for reason in item.refused_for if reason not in said] == []
    assert said.count("\n- ") == len(item.refused_for)


def test_the_matrix_is_what_the_documentation_promises() -> None:
    """Three gateways take HTTPRoutes; the others and shared listeners take Gateways only."""
    with_routes = {item.provider for item in WORKING if item.kind == "HTTPRoute"}
    assert with_routes == {"envoy-gateway", "kgateway", "agentgateway"}
    assert {item.provider for item in WORKING if item.body == "Buffered"} == {
        "envoy-gateway",
        "istio",
        "kgateway",
    }
    assert len(WORKING) + len(REFUSED) == 80


@working
def test_a_request_never_passes_without_the_sidecar(item: Case) -> None:
    """The filter fails closed, and it is attached exactly once."""
    assert fails_closed(rendered(item), item.provider) == [True]


@working
def test_clients_cannot_choose_a_phase(item: Case) -> None:
    """Phase and token are dropped before routing; on a shared listener the sidecar's own need to arrive."""
    shared = item.topology == "shared-listener"
    # A load balancer of GKE has one backend for clients, whatever they send.
    expected = [] if shared or item.provider == "gke" else ["epp-profile", "x-epd-phase-token"]
    assert removed_before_routing(rendered(item), item.provider) == expected


@working
def test_nothing_removes_what_the_sidecar_says(item: Case) -> None:
    """No route filters headers (that happens after the sidecar), and the hop guard is never touched."""
    objects = rendered(item)
    for route in objects.all("HTTPRoute"):
        assert [rule for rule in route["spec"]["rules"] if "filters" in rule] == []
    texts = {text.lower() for document in objects.documents for text in strings(document)}
    assert [text for text in texts if HOP_GUARD in text] == []


@working
def test_policies_and_their_targets_share_a_namespace(item: Case) -> None:
    """Each policy that targets a Gateway or a route names one that exists, in its own namespace."""
    objects = rendered(item)
    routes = {(doc["metadata"]["namespace"], doc["metadata"]["name"]) for doc in objects.all("HTTPRoute")}
    services = {(doc["metadata"]["namespace"], doc["metadata"]["name"]) for doc in objects.all("Service")}
    known = {
        "Gateway": {("inference", CLIENTS), ("inference", "inference-internal")},
        "HTTPRoute": routes | {("inference", "chat")},
        "Service": services | {("inference", name) for name in ("encode", "prefill", "decode")},
    }
    # The Service of the internal Gateway, which its controller creates.
    known["Service"].add(("inference", "inference-internal"))
    for document in objects.documents:
        spec = document.get("spec", {})
        targets = [*spec.get("targetRefs", []), *([spec["targetRef"]] if "targetRef" in spec else [])]
        for target in targets:
            place = (document["metadata"]["namespace"], target["name"])
            assert place in known[target["kind"]], document["kind"]


@pytest.mark.parametrize("provider", [name for name in PROVIDERS if name != "gke"])
@pytest.mark.parametrize("topology", ["internal-listener", "shared-listener"])
def test_a_gateway_elsewhere_gets_its_policies_there(provider: str, topology: str) -> None:
    """Policies on Gateways and the routes live with them; the sidecar's own stay with the release."""
    elsewhere = {"attach": {"namespace": "edge"}}
    objects = rendered_with(provider, elsewhere, topology=topology)
    assert all_problems(objects) == []
    for document in objects.documents:
        spec = document.get("spec", {})
        kinds = {target["kind"] for target in spec.get("targetRefs", [])}
        kinds |= {"Gateway"} if "parentRefs" in spec else set()
        if kinds:
            where = "inference" if kinds == {"Service"} else "edge"
            assert document["metadata"]["namespace"] == where, document["metadata"]
    references = [
        document
        for document in objects.all("ReferenceGrant")
        if document["spec"]["from"][0]["kind"] != "HTTPRoute"
    ]
    # Istio's filter names Envoy's cluster, which needs no permission.
    assert len(references) == (0 if provider == "istio" else 1)
    for grant in references:
        assert grant["metadata"]["namespace"] == "inference"
        assert grant["spec"]["from"][0]["namespace"] == "edge"
        assert grant["spec"]["to"] == [{"group": "", "kind": "Service", "name": "epd-epd-sidecar"}]


@every_provider
def test_switched_off_parts_leave_nothing_behind(provider: str) -> None:
    """Without listener policy, access log and phases only the filter is left, and it is valid."""
    off = {
        "attach": {"listenerPolicy": {"enabled": False}, "accessLog": {"enabled": False}},
        "phases": {"enabled": False},
    }
    objects = rendered_with(provider, off)
    assert all_problems(objects) == []
    filters = {
        "envoy-gateway": ["EnvoyExtensionPolicy"],
        "istio": ["DestinationRule", "EnvoyFilter"],
        "kgateway": ["BackendConfigPolicy", "GatewayExtension", "TrafficPolicy"],
        "agentgateway": ["AgentgatewayPolicy"],
        "gke": ["GCPRoutingExtension", "HealthCheckPolicy"],
    }
    foreign = [document["kind"] for document in objects.documents if not is_kubernetes_own(document)]
    assert sorted(foreign) == filters[provider]


def test_without_a_provider_nothing_is_attached() -> None:
    """Provider none leaves the filter to the operator, and still creates the phase routes."""
    objects = render(six_values({"attach": {"provider": "none"}}))
    foreign = [document["kind"] for document in objects.documents if not is_kubernetes_own(document)]
    assert set(foreign) == {"HTTPRoute"}
    assert all_problems(objects) == []


@every_provider
def test_the_linter_is_content(provider: str) -> None:
    """`helm lint` has no errors and no warnings."""
    assert lint(case(provider).values) == []


@every_provider
def test_the_schemas_cover_what_is_rendered(provider: str) -> None:
    """No object goes unchecked because its kind has no schema."""
    kinds = {
        document["kind"] for document in rendered(case(provider)).documents if not is_kubernetes_own(document)
    }
    assert kinds <= set(known_kinds())


@every_provider
def test_the_gateway_speaks_http2_to_the_sidecar(provider: str) -> None:
    """The Service's port says so in the word that this gateway knows, for plaintext and for TLS."""
    words = {}
    for tls in (True,) if provider == "gke" else (False, True):
        service = rendered(Case(provider, tls=tls)).one("Service", "epd-epd-sidecar")
        (port,) = (port for port in service["spec"]["ports"] if port["name"] == "grpc-ext-proc")
        words[tls] = port.get("appProtocol")
    expected = {
        "envoy-gateway": {False: "kubernetes.io/h2c", True: None},
        "istio": {False: "kubernetes.io/h2c", True: None},
        "kgateway": {False: "kubernetes.io/h2c", True: "grpc"},
        "agentgateway": {False: "kubernetes.io/h2c", True: None},
        "gke": {True: "HTTP2"},
    }
    assert words == expected[provider]
