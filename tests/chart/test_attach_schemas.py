"""The schemas of the gateways' kinds refuse what a control plane would refuse, or drop in silence."""

from __future__ import annotations

import copy
import functools
import re
from typing import TYPE_CHECKING, Any

import pytest

from tests.chart.attach_cases import PARITY, PREFILL_DECODE, PROVIDERS, Case, rendered, rendered_with
from tests.chart.attach_schemas import CRDS, known_kinds, problems
from tests.chart.chart_rendering import is_kubernetes_own

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.chart.chart_rendering import Document

Path = tuple[str | int, ...]

FREE = {
    # Envoy's own configuration, which Envoy itself validates.
    ("EnvoyFilter", "value"),
    # The operator's keys.
    ("EnvoyProxy", "json"),
    ("ListenerPolicy", "jsonFormat"),
}
"""Kind and field below which any key is right."""


@functools.cache
def samples() -> dict[str, Document]:
    """The largest object of each kind that the chart writes."""
    objects = [
        *(rendered(Case(provider, tls=True)) for provider in PROVIDERS),
        rendered_with("envoy-gateway", PARITY, PREFILL_DECODE),
        rendered_with("agentgateway", {"attach": {"namespace": "edge"}}),
    ]
    documents = [
        document for item in objects for document in item.documents if not is_kubernetes_own(document)
    ]
    return {
        document["kind"]: document for document in sorted(documents, key=lambda document: len(str(document)))
    }


def keys(node: Any, kind: str, path: Path = ()) -> Iterator[Path]:
    """Where a typo could be: the path of every key below `spec`."""
    if isinstance(node, list):
        for index, item in enumerate(node):
            yield from keys(item, kind, (*path, index))
    elif isinstance(node, dict):
        for key, value in node.items():
            yield (*path, key)
            if (kind, key) not in FREE:
                yield from keys(value, kind, (*path, key))


def parent(document: Document, path: Path) -> Any:
    node: Any = document
    for step in path[:-1]:
        node = node[step]
    return node


def replaced(kind: str, path: Path, value: Any) -> Document:
    """A sample with another value in one place; the place has to exist."""
    document = copy.deepcopy(samples()[kind])
    assert path[-1] in parent(document, path) or isinstance(path[-1], int)
    parent(document, path)[path[-1]] = value
    return document


def without(kind: str, path: Path) -> Document:
    """A sample without one field."""
    document = copy.deepcopy(samples()[kind])
    del parent(document, path)[path[-1]]
    return document


@pytest.mark.parametrize("kind", known_kinds())
def test_a_schema_names_its_source(kind: str) -> None:
    """The head of the file says repository, file, and a version to look up: release, commit or pull."""
    head = (CRDS / f"{kind}.yaml").read_text(encoding="utf-8").split("apiVersion:")[0]
    assert re.match(r"# [\w-]+/[\w-]+, \S+\.(go|proto|yaml)", head), head
    assert re.search(r"\b(release [0-9]|commit [0-9a-f]{7}|pull [0-9]+)", head), head


def test_the_samples_are_valid_and_of_every_kind() -> None:
    """What the other tests break is right before, and each gateway schema has an object to break."""
    monitoring = {"ServiceMonitor", "PrometheusRule"}
    assert set(known_kinds()) - monitoring == set(samples())
    assert [problem for document in samples().values() for problem in problems(document)] == []


@pytest.mark.parametrize("kind", sorted(set(known_kinds()) - {"ServiceMonitor", "PrometheusRule"}))
def test_a_typo_is_refused_wherever_it_is(kind: str) -> None:
    """Every key of the object, with one letter more, is unknown."""
    document = samples()[kind]
    places = list(keys(document["spec"], kind, ("spec",)))
    assert places
    for path in places:
        broken = copy.deepcopy(document)
        node = parent(broken, path)
        node[f"{path[-1]}x"] = node.pop(path[-1])
        assert problems(broken), path


EXT_PROC: Path = ("spec", "extProc", 0)
EXTENSION: Path = ("spec", "extensionChains", 0, "extensions", 0)

WRONG: list[tuple[str, Path, Any]] = [
    ("EnvoyExtensionPolicy", (*EXT_PROC, "processingMode", "request", "body"), "FULL_DUPLEX_STREAMED"),
    ("EnvoyExtensionPolicy", (*EXT_PROC, "failOpen"), True),
    ("EnvoyExtensionPolicy", (*EXT_PROC, "messageTimeout"), 130),
    ("EnvoyExtensionPolicy", (*EXT_PROC, "metadata", "writableNamespaces"), ["envoy.filters.http.rbac"]),
    ("EnvoyExtensionPolicy", ("spec", "extProc", 1, "processingMode", "response", "body"), "Buffered"),
    ("ClientTrafficPolicy", ("spec", "path", "escapedSlashesAction"), "REJECT_REQUEST"),
    ("ClientTrafficPolicy", ("spec", "headers", "requestID"), "Keep"),
    ("EnvoyProxy", ("spec", "telemetry", "accessLog", "settings", 0, "format", "type"), "Json"),
    ("BackendTrafficPolicy", ("spec", "circuitBreaker", "maxConnections"), "100000"),
    ("EnvoyFilter", ("spec", "targetRefs", 0, "kind"), "HTTPRoute"),
    ("EnvoyFilter", ("spec", "configPatches", 0, "patch", "operation"), "InsertFirst"),
    ("EnvoyFilter", ("spec", "configPatches", 0, "applyTo"), "HTTPFILTER"),
    ("DestinationRule", ("spec", "trafficPolicy", "tls", "mode"), "Simple"),
    ("GatewayExtension", ("spec", "extProc", "processingMode", "requestBodyMode"), "FullDuplexStreamed"),
    ("GatewayExtension", ("spec", "extProc", "failOpen"), "no"),
    ("TrafficPolicy", ("spec", "targetRefs", 0, "kind"), "Service"),
    ("ListenerPolicy", ("spec", "default", "httpSettings", "streamIdleTimeout"), "forever"),
    ("BackendConfigPolicy", ("spec", "circuitBreakers", "maxRequests"), -1),
    ("AgentgatewayPolicy", ("spec", "frontend"), {"accessLog": {"attributes": {"add": []}}}),
    ("GCPRoutingExtension", (*EXTENSION, "timeout"), "11s"),
    ("GCPRoutingExtension", (*EXTENSION, "requestBodySendMode"), "Buffered"),
    ("GCPRoutingExtension", (*EXTENSION, "supportedEvents"), ["RequestHeaders", "RequestBody"]),
    (
        "GCPRoutingExtension",
        (*EXTENSION, "supportedEvents"),
        ["RequestHeaders", "RequestBody", "RequestTrailers", "ResponseHeaders"],
    ),
    ("HealthCheckPolicy", ("spec", "default", "config", "type"), "GRPCS"),
    ("GCPBackendPolicy", ("spec", "default", "timeoutSec"), "3600s"),
    ("HTTPRoute", ("spec", "rules", 0, "matches", 0, "path", "type"), "Prefix"),
    ("HTTPRoute", ("spec", "rules", 0, "backendRefs", 0), {"kind": "Service", "name": "encode"}),
    ("ReferenceGrant", ("spec", "to", 0, "kind"), ""),
    ("BackendTLSPolicy", ("spec", "validation", "wellKnownCACertificates"), "system"),
]
"""Kind, place, and a value that the API does not take there."""


@pytest.mark.parametrize(("kind", "path", "value"), WRONG, ids=lambda item: str(item)[-40:])
def test_a_wrong_value_is_refused(kind: str, path: Path, value: Any) -> None:
    """Words of another API, numbers for texts, and what a gateway's own rules exclude."""
    assert problems(replaced(kind, path, value))


MISSING: list[tuple[str, Path]] = [
    ("EnvoyExtensionPolicy", ("spec", "targetRefs")),
    ("EnvoyExtensionPolicy", (*EXT_PROC, "backendRefs")),
    ("EnvoyExtensionPolicy", (*EXT_PROC, "backendRefs", 0, "port")),
    ("ClientTrafficPolicy", ("spec", "targetRefs", 0, "kind")),
    ("EnvoyProxy", ("spec", "telemetry", "accessLog", "settings", 0, "sinks")),
    ("EnvoyProxy", ("spec", "telemetry", "accessLog", "settings", 0, "sinks", 0, "file")),
    ("BackendTrafficPolicy", ("spec", "targetRefs")),
    ("EnvoyFilter", ("spec", "configPatches", 0, "patch")),
    ("DestinationRule", ("spec", "host")),
    ("GatewayExtension", ("spec", "extProc", "grpcService")),
    ("TrafficPolicy", ("spec", "extProc", "extensionRef", "name")),
    ("ListenerPolicy", ("spec", "targetRefs", 0, "name")),
    ("BackendConfigPolicy", ("spec", "targetRefs", 0, "name")),
    ("AgentgatewayPolicy", ("spec", "targetRefs")),
    ("GCPRoutingExtension", (*EXTENSION, "authority")),
    ("GCPRoutingExtension", (*EXTENSION, "supportedEvents")),
    ("HealthCheckPolicy", ("spec", "targetRef")),
    ("GCPBackendPolicy", ("spec", "targetRef", "name")),
    ("HTTPRoute", ("spec", "rules", 0, "backendRefs", 0, "name")),
    ("ReferenceGrant", ("spec", "from", 0, "namespace")),
    ("BackendTLSPolicy", ("spec", "validation", "hostname")),
]
"""Kind, and a field that its API requires."""


@pytest.mark.parametrize(("kind", "path"), MISSING, ids=lambda item: str(item)[-40:])
def test_a_missing_field_is_refused(kind: str, path: Path) -> None:
    """What the API requires cannot be left out."""
    assert problems(without(kind, path))


def test_another_version_of_an_api_is_refused() -> None:
    """An object of the wrong apiVersion is not of this kind."""
    for kind in samples():
        assert problems(replaced(kind, ("apiVersion",), "example.com/v1")), kind
