"""Installations that no gateway of the provider could serve are refused, each with what to do about it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.chart.attach_cases import PARITY, PREFILL_DECODE, case
from tests.chart.chart_rendering import CHART, lint, refusal, render, six_values

ROUTES: dict[str, Any] = {
    "attach": {
        "targetRefs": [{"kind": "HTTPRoute", "name": "chat"}],
        "gateways": [{"name": "inference-gateway"}],
    }
}
BY_ADDRESS = {"config": {"gateway": {"address": "http://10.0.0.5"}}}
CONDITIONAL = {
    "config": {
        "pipeline": {
            "steps": [
                {"type": name}
                for name in (
                    "replace-media-urls",
                    "render",
                    "conditional-decode",
                    "encode",
                    "prefill",
                    "decode",
                )
            ]
        }
    }
}

REFUSALS: list[tuple[str, str, dict[str, Any], str]] = [
    (
        "targetName",
        "envoy-gateway",
        {"attach": {"targetRefs": [{"name": ""}]}},
        "attach.targetRefs[0].name is missing: name the Gateway that attach.provider envoy-gateway attaches",
    ),
    (
        "targetName",
        "kgateway",
        {"attach": {"targetRefs": [{"name": "inference-gateway"}, {"kind": "Gateway", "name": ""}]}},
        "attach.targetRefs[1].name is missing: name the Gateway",
    ),
    (
        "targetKinds",
        "envoy-gateway",
        {
            "attach": {
                "targetRefs": [{"name": "inference-gateway"}, {"kind": "HTTPRoute", "name": "chat"}],
            }
        },
        "attach.targetRefs mixes Gateways and HTTPRoutes: name either the Gateway or its routes",
    ),
    (
        "targetNotGateway",
        "istio",
        ROUTES,
        "attach.provider istio attaches to whole Gateways only: name the Gateway in attach.targetRefs",
    ),
    (
        "targetNotGateway",
        "gke",
        ROUTES,
        "attach.provider gke attaches to whole Gateways only: name the Gateway in attach.targetRefs",
    ),
    (
        "targetSection",
        "istio",
        {"attach": {"targetRefs": [{"name": "inference-gateway", "sectionName": "https"}]}},
        "attach.targetRefs[].sectionName https: attach.provider istio attaches to whole Gateways only",
    ),
    (
        "targetListeners",
        "kgateway",
        {"attach": {"targetRefs": [{"kind": "HTTPRoute", "name": "chat"}]}},
        "attach.gateways is empty: header removal and access log are settings of a Gateway's listeners",
    ),
    (
        "targetShared",
        "envoy-gateway",
        {
            **ROUTES,
            "attach": {**ROUTES["attach"], "topology": "shared-listener"},
            "phaseToken": {"existingSecret": "phase"},
            "phases": {"gateway": {"name": ""}},
        },
        "attach.topology shared-listener needs the filter on every route",
    ),
    (
        "phasesGateway",
        "agentgateway",
        {"phases": {"gateway": {"name": ""}}},
        "phases.gateway.name is missing: name the internal Gateway",
    ),
    (
        "phasesGatewayExposed",
        "istio",
        {"phases": {"gateway": {"name": "inference-gateway"}}},
        "phases.gateway.name inference-gateway is the Gateway that clients reach",
    ),
    (
        "phasesGatewayExposed",
        "kgateway",
        {**ROUTES, "phases": {"gateway": {"name": "inference-gateway"}}},
        "phases.gateway.name inference-gateway is the Gateway that clients reach",
    ),
    (
        "phasesGatewayShared",
        "envoy-gateway",
        {"attach": {"topology": "shared-listener"}, "phaseToken": {"existingSecret": "phase"}},
        "phases.gateway.name inference-internal: with attach.topology shared-listener the phases are on the",
    ),
    (
        "targetName",
        "istio",
        {"attach": {"targetRefs": []}},
        "attach.targetRefs is empty: name the Gateway that attach.provider istio attaches the filter to",
    ),
    *(
        (
            "phasesService",
            provider,
            {"config": {"gateway": {"address": "https://inference-internal.inference.svc:443"}}},
            "is https, and the client route calls the internal Gateway's Service in plaintext: use its http",
        )
        for provider in ("envoy-gateway", "istio", "kgateway", "agentgateway")
    ),
    *(
        (
            "addressLeadsBack",
            provider,
            {"config": {"gateway": {"address": f"http://{host}:80"}}},
            f"config.gateway.address http://{host}:80 is the Service of the Gateway inference-gateway, which",
        )
        for provider, host in (
            ("istio", "inference-gateway-istio"),
            ("istio", "inference-gateway-istio.inference"),
            ("kgateway", "inference-gateway.inference.svc"),
            ("agentgateway", "inference-gateway.inference.svc.cluster.local"),
            ("envoy-gateway", "inference-gateway.inference.svc"),
            ("envoy-gateway", "envoy-inference-inference-gateway-0a1b2c3d.envoy-gateway-system.svc"),
        )
    ),
    (
        "addressLeadsBack",
        "kgateway",
        {"phases": {"service": {"name": "inference-gateway"}}},
        "phases.service.name inference-gateway is the Service of the Gateway inference-gateway, which has",
    ),
    (
        "addressLeadsBack",
        "istio",
        {
            "attach": {"targetRefs": [{"name": "a"}, {"name": "b"}], "namespace": "edge"},
            "config": {"gateway": {"address": "http://b-istio.edge.svc/"}},
        },
        "config.gateway.address http://b-istio.edge.svc/ is the Service of the Gateway b, which has the",
    ),
    *(
        (
            "clientPaths",
            provider,
            {"phases": {"clientRoute": {"paths": []}}},
            "phases.clientRoute.paths is empty: list the paths that clients reach",
        )
        for provider in ("istio", "gke")
    ),
    *(
        (
            "phasesService",
            provider,
            {"config": {"gateway": {"address": address}}},
            f"phases.service.name is missing: config.gateway.address {address} is not an http Service",
        )
        for provider in ("envoy-gateway", "istio", "kgateway", "agentgateway")
        for address in (
            "http://10.0.0.5",
            "http://internal.example.com",
            "http://Internal.inference.svc:80",
            "http://internal.inference.svc.other.domain",
        )
    ),
    (
        "buffered",
        "agentgateway",
        {"attach": {"bodyMode": "Buffered"}},
        "attach.bodyMode Buffered: agentgateway buffers 8 KB and refuses what is longer",
    ),
    (
        "buffered",
        "gke",
        {"attach": {"bodyMode": "Buffered"}},
        "attach.bodyMode Buffered: GKE's extensions have no such mode",
    ),
    (
        "deadline",
        "gke",
        {"config": {"ext_proc": {"request_deadline": "11s"}}},
        "config.ext_proc.request_deadline 11s is longer than the 10s that GKE gives an extension",
    ),
    (
        "tlsRequired",
        "gke",
        {"tls": {"existingSecret": ""}},
        "attach.provider gke calls extensions over TLS: create a Secret",
    ),
    (
        "tlsTrust",
        "istio",
        {"tls": {"existingSecret": "certificate"}},
        "attach.tls.caSecret is missing: without the CA of the sidecar's certificate",
    ),
    (
        "namespace",
        "gke",
        {"attach": {"namespace": "edge"}},
        "attach.namespace edge: a GKE extension calls Services of its Gateway's namespace only",
    ),
    (
        "responseHeaders",
        "gke",
        PREFILL_DECODE,
        "the prefill-decode step has to see decode's response headers, which a GCPRoutingExtension does not",
    ),
    *(
        (
            "parity",
            provider,
            PARITY,
            f"the sidecar's record, which attach.provider {provider} cannot express: set it to off",
        )
        for provider in ("kgateway", "agentgateway", "gke")
    ),
    (
        "servedStream",
        "agentgateway",
        CONDITIONAL,
        "the conditional-decode step streams a worker's answer through the filter, which agentgateway does",
    ),
    (
        "mergeType",
        "envoy-gateway",
        {"attach": {"envoyGateway": {"mergeType": "StrategicMerge"}}},
        "attach.envoyGateway.mergeType merges the policy of an HTTPRoute into that of its Gateway",
    ),
]
"""Problem, provider, values on top of the plain installation, and the beginning of what is said."""


@pytest.mark.parametrize(
    ("provider", "overrides", "message"),
    [
        pytest.param(provider, overrides, message, id=f"{name} {provider}")
        for name, provider, overrides, message in REFUSALS
    ],
)
def test_it_says_what_cannot_work(provider: str, overrides: dict[str, Any], message: str) -> None:
    """One problem gives one message, which names the values and what to do."""
    said = refusal(six_values(case(provider).values, overrides))
    assert message in said
    assert said.count("\n- ") == 1


def test_every_problem_has_its_test() -> None:
    """The table above has every refusal that the templates know."""
    template = (CHART / "templates/attach/_problems.tpl").read_text(encoding="utf-8")
    defined = set(re.findall(r'define "epd-sidecar\.attach\.problem\.(\w+)"', template))
    assert defined == {name for name, *_ in REFUSALS}
    asked = template.partition("range $name := list")[2].partition("-}}")[0]
    assert set(re.findall(r'"(\w+)"', asked)) == defined


@pytest.mark.parametrize(
    ("provider", "address"),
    [
        (
            "envoy-gateway",
            "http://inference-internal.envoy-gateway-system.svc:80 (Envoy Gateway puts",
        ),
        ("istio", "http://inference-internal-istio.inference.svc:80"),
        ("kgateway", "http://inference-internal.inference.svc:80"),
        ("agentgateway", "http://inference-internal.inference.svc:80"),
        ("gke", "http://10.0.0.5 (kubectl get gateway -n inference inference-internal prints its address)"),
    ],
)
def test_a_missing_address_is_shown_as_the_gateway_has_it(provider: str, address: str) -> None:
    """The example is where this gateway puts the Service; on a shared listener it is the attached one's."""
    missing = {"config": {"gateway": {"address": ""}}}
    said = refusal(six_values(case(provider).values, missing))
    assert f"the internal Gateway's Service, for example {address}" in said
    shared = refusal(six_values(case(provider, "shared-listener").values, missing))
    assert "the base URL of the attached Gateway's Service, for example http://" in shared
    assert "inference-internal" not in shared


def test_every_problem_is_reported_at_once() -> None:
    """An installation with several mistakes takes one attempt to learn them all."""
    said = refusal(
        six_values(
            case("gke").values,
            {"attach": {"bodyMode": "Buffered", "namespace": "edge"}, "tls": {"existingSecret": ""}},
            {"config": {"ext_proc": {"request_deadline": "1m"}}},
        )
    )
    assert said.count("\n- ") == 4


@pytest.mark.parametrize(
    ("provider", "overrides"),
    [
        ("gke", {"config": {"ext_proc": {"request_deadline": "10000ms"}}}),
        ("gke", BY_ADDRESS),
        ("gke", CONDITIONAL),
        ("istio", {"tls": {"existingSecret": "certificate"}, "attach": {"tls": {"caSecret": "ca"}}}),
        ("istio", {"attach": {"targetRefs": [{"name": "a"}, {"name": "b"}]}}),
        ("istio", {**BY_ADDRESS, "phases": {"service": {"name": "internal"}}}),
        ("kgateway", {"attach": {"targetRefs": [{"name": "inference-gateway", "sectionName": "https"}]}}),
        ("envoy-gateway", PARITY),
        ("envoy-gateway", PREFILL_DECODE),
        ("envoy-gateway", {**BY_ADDRESS, "phases": {"service": {"name": "internal"}}}),
        ("envoy-gateway", {**BY_ADDRESS, "phases": {"clientRoute": {"enabled": False}}}),
        ("envoy-gateway", {"phases": {"enabled": False, "gateway": {"name": ""}}}),
        (
            "envoy-gateway",
            {**ROUTES, "attach": {**ROUTES["attach"], "envoyGateway": {"mergeType": "JSONMerge"}}},
        ),
        ("agentgateway", PREFILL_DECODE),
        # The Gateway of the same name in another namespace is another one, and so is its Service.
        (
            "kgateway",
            {
                "phases": {"gateway": {"name": "inference-gateway", "namespace": "internal"}},
                "config": {"gateway": {"address": "http://inference-gateway.internal.svc"}},
            },
        ),
        ("kgateway", {"config": {"gateway": {"address": "http://inference-gateway-istio.inference.svc"}}}),
        ("istio", {"config": {"gateway": {"address": "http://inference-gateway.inference.svc"}}}),
        ("istio", {"config": {"gateway": {"address": "http://inference-internal-istio.inference.svc:80/"}}}),
        (
            "istio",
            {
                "config": {"gateway": {"address": "https://inference-internal-istio.inference.svc"}},
                "phases": {"service": {"name": "inference-internal-istio"}},
            },
        ),
        ("gke", {"config": {"gateway": {"address": "https://10.0.0.5/"}}}),
        ("envoy-gateway", {"phases": {"clientRoute": {"paths": [], "enabled": False}}}),
        (
            "kgateway",
            {
                "attach": {
                    "targetRefs": [{"kind": "HTTPRoute", "name": "chat"}],
                    "listenerPolicy": {"enabled": False},
                    "accessLog": {"enabled": False},
                }
            },
        ),
    ],
)
def test_what_works_is_not_refused(provider: str, overrides: dict[str, Any]) -> None:
    """The checks stop at their boundaries, and leave alone what is switched off."""
    values = six_values(case(provider).values, overrides)
    assert render(values).one("Deployment")
    assert lint(values) == []
