"""Installations with a gateway, and what their objects say about things that every gateway has."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.chart.chart_rendering import NAME, Rendered, render, six_values

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.chart.chart_rendering import Document

PROVIDERS = ("envoy-gateway", "istio", "kgateway", "agentgateway", "gke")
TOPOLOGIES = ("internal-listener", "shared-listener")
BODY_MODES = ("FullDuplexStreamed", "Buffered")
TARGET_KINDS = ("Gateway", "HTTPRoute")
CLIENTS = "inference-gateway"
"""The Gateway that clients reach."""

PREFILL_DECODE: dict[str, Any] = {
    "config": {
        "pipeline": {
            "kv_connector": "kv-sglang",
            "steps": [
                *({"type": name} for name in ("replace-media-urls", "render", "encode")),
                {"type": "prefill-decode"},
            ],
        }
    },
    "phases": {"prefill": {"kind": "InferencePool", "name": "prefill-pool"}},
}
"""Values under which the sidecar sees the headers of decode's answer; prefill has an endpoint picker."""

PARITY: dict[str, Any] = {"config": {"observability": {"prompt_token_parity": "warn"}}}
"""Values under which a second filter observes decode's answer."""


@dataclass(frozen=True)
class Case:
    """One installation with a gateway."""

    provider: str
    topology: str = TOPOLOGIES[0]
    body: str = BODY_MODES[0]
    kind: str = TARGET_KINDS[0]
    tls: bool = False

    def __str__(self) -> str:
        return " ".join(
            (self.provider, self.topology, self.body, self.kind, "TLS" if self.tls else "plaintext")
        )

    @property
    def values(self) -> dict[str, Any]:
        """The six values, and what the case needs besides."""
        target = {"kind": self.kind, "name": CLIENTS if self.kind == "Gateway" else "chat"}
        attach: dict[str, Any] = {
            "provider": self.provider,
            "topology": self.topology,
            "bodyMode": self.body,
            "targetRefs": [target],
        }
        layers: list[dict[str, Any]] = [{"attach": attach}]
        if self.kind == "HTTPRoute":
            layers.append({"attach": {"gateways": [{"name": CLIENTS}]}})
        if self.tls:
            layers.append({"tls": {"existingSecret": "certificate"}, "attach": {"tls": {"caSecret": "ca"}}})
        if self.topology == "shared-listener":
            layers.append({"phaseToken": {"existingSecret": "phase"}, "phases": {"gateway": {"name": ""}}})
        if self.provider == "gke":
            layers.append({"config": {"ext_proc": {"request_deadline": "10s"}}})
        return six_values(*layers)

    @property
    def refused_for(self) -> list[str]:
        """What is wrong with it, in words of the refusals; nothing if it works."""
        routes = self.kind == "HTTPRoute"
        buffered = self.body == "Buffered"
        reasons = {
            "attaches to whole Gateways only": routes and self.provider in ("istio", "gke"),
            "needs the filter on every route": routes and self.topology == "shared-listener",
            "agentgateway buffers 8 KB": buffered and self.provider == "agentgateway",
            "GKE's extensions have no such mode": buffered and self.provider == "gke",
            "calls extensions over TLS": self.provider == "gke" and not self.tls,
        }
        return [reason for reason, applies in reasons.items() if applies]


MATRIX = [
    Case(*combination)
    for combination in itertools.product(PROVIDERS, TOPOLOGIES, BODY_MODES, TARGET_KINDS, (False, True))
]
WORKING = [case for case in MATRIX if not case.refused_for]
REFUSED = [case for case in MATRIX if case.refused_for]


def case(provider: str, topology: str = TOPOLOGIES[0]) -> Case:
    """The plain installation with a gateway; with TLS where it takes that."""
    return Case(provider, topology, tls=provider == "gke")


@functools.cache
def rendered(item: Case) -> Rendered:
    """What the installation consists of."""
    return render(item.values)


def rendered_with(provider: str, *overrides: Mapping[str, Any], topology: str = TOPOLOGIES[0]) -> Rendered:
    """The plain installation with a gateway and other values on top."""
    return render(six_values(case(provider, topology).values, *overrides))


def istio_patches(filters: Document, apply_to: str) -> list[dict[str, Any]]:
    """The patches of an EnvoyFilter for one place."""
    return [patch for patch in filters["spec"]["configPatches"] if patch["applyTo"] == apply_to]


def fails_closed(item: Rendered, provider: str) -> list[bool]:
    """For each filter of the sidecar, whether a request ends when the sidecar does not answer."""
    match provider:
        case "envoy-gateway":
            return [not item.one("EnvoyExtensionPolicy")["spec"]["extProc"][0]["failOpen"]]
        case "istio":
            first = istio_patches(item.one("EnvoyFilter", NAME), "HTTP_FILTER")[0]
            return [not first["patch"]["value"]["typed_config"]["failure_mode_allow"]]
        case "kgateway":
            return [not item.one("GatewayExtension")["spec"]["extProc"]["failOpen"]]
        case "agentgateway":
            policies = [policy["spec"].get("traffic", {}) for policy in item.all("AgentgatewayPolicy")]
            return [
                traffic["extProc"]["failureMode"] == "FailClosed"
                for traffic in policies
                if "extProc" in traffic
            ]
        case "gke":
            chains = item.one("GCPRoutingExtension")["spec"]["extensionChains"]
            return [not extension["failOpen"] for chain in chains for extension in chain["extensions"]]
    raise ValueError(provider)


def removed_before_routing(item: Rendered, provider: str) -> list[str]:
    """The request headers that the clients' listeners drop before a route is chosen."""
    match provider:
        case "envoy-gateway":
            policy = item.one("ClientTrafficPolicy", NAME)["spec"]["headers"]
            return list(policy.get("earlyRequestHeaders", {}).get("remove", []))
        case "istio":
            (patch,) = istio_patches(item.one("EnvoyFilter", NAME), "NETWORK_FILTER")
            extensions = patch["patch"]["value"]["typed_config"].get("early_header_mutation_extensions", [])
            return [
                mutation["remove"]
                for extension in extensions
                for mutation in extension["typed_config"]["mutations"]
            ]
        case "kgateway":
            settings = item.one("ListenerPolicy", NAME)["spec"]["default"]["httpSettings"]
            return list(settings.get("earlyRequestHeaderModifier", {}).get("remove", []))
        case "agentgateway":
            policies = [policy["spec"].get("traffic", {}) for policy in item.all("AgentgatewayPolicy")]
            return [
                name
                for traffic in policies
                if traffic.get("phase") == "PreRouting" and "transformation" in traffic
                for name in traffic["transformation"]["request"]["remove"]
            ]
        case "gke":
            return []
    raise ValueError(provider)
