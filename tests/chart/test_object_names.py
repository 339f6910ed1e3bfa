"""Whatever Helm takes as the name of a release or a namespace, the objects' names are valid and their own."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import helm_python
import pytest

from tests.chart.attach_cases import PROVIDERS, Case, case
from tests.chart.attach_schemas import problems
from tests.chart.chart_rendering import (
    is_kubernetes_own,
    kubernetes_problems,
    refusal,
    render,
    six_values,
)
from tests.chart.core_support import ON_SOCKET, WITH_TLS, service

if TYPE_CHECKING:
    from tests.chart.chart_rendering import Document, Rendered

SERVICE = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")

EVERYTHING: dict[str, Any] = {
    "serviceMonitor": {"enabled": True},
    "prometheusRule": {"enabled": True},
    "autoscaling": {"enabled": True},
    "networkPolicy": {"enabled": True, "gateway": [{"podSelector": {}}]},
}


def invalid(objects: Rendered) -> list[str]:
    """What Kubernetes would say of types, names and labels."""
    found = []
    for item in objects.documents:
        name, labels = item["metadata"]["name"], item["metadata"]["labels"]
        form = SERVICE if item["kind"] == "Service" else SUBDOMAIN
        if not isinstance(name, str) or not form.fullmatch(name) or len(name) > 253:
            found.append(f"{item['kind']} {name!r}")
        if not isinstance(item["metadata"]["namespace"], str):
            found.append(f"{item['kind']}/{name}: namespace {item['metadata']['namespace']!r}")
        found += [
            f"{item['kind']}/{name}: label {label!r}"
            for label in labels.values()
            if not isinstance(label, str) or not LABEL_VALUE.fullmatch(label)
        ]
        found += kubernetes_problems(item) if is_kubernetes_own(item) else problems(item)
    return found


@pytest.mark.parametrize("values", [six_values(EVERYTHING), six_values(ON_SOCKET), six_values(WITH_TLS)])
@pytest.mark.parametrize(
    ("release", "namespace"),
    [
        ("true", "inference"),
        ("null", "inference"),
        ("on", "123"),
        ("e1", "true"),
        ("epd", "1e3"),
        ("epd", "0"),
        ("my.rel", "inference"),
        ("x.y.z", "inference"),
        ("a" * 44 + "." + "b" * 8, "inference"),
        ("a" * 49 + ".b", "inference"),
        ("a" * 49 + "--b", "inference"),
        ("a" * 53, "b" * 63),
    ],
)
def test_every_name_of_a_release_gives_valid_objects(
    values: dict[str, Any], release: str, namespace: str
) -> None:
    """Dots, words of YAML and digits reach the objects as names and texts."""
    objects = render(values, release=release, namespace=namespace)
    assert invalid(objects) == []


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize(("release", "namespace"), [("true", "456"), ("a" * 53, "b" * 63), ("my.rel", "1e3")])
def test_every_gateway_s_objects_are_valid_too(provider: str, release: str, namespace: str) -> None:
    """The same for the objects of the gateways' kinds."""
    assert invalid(render(case(provider).values, release=release, namespace=namespace)) == []


@pytest.mark.parametrize(
    "overrides",
    [
        {"nameOverride": "123"},
        {"nameOverride": "1e3"},
        {"nameOverride": "a.b"},
        {"nameOverride": "a..b"},
        {"fullnameOverride": "true"},
        {"fullnameOverride": "my.name"},
        {"fullnameOverride": "a" * 49 + "." + "b" * 5},
        {
            "phaseToken": {"existingSecret": "123", "key": "1e3"},
            "tls": {"existingSecret": "456", "caKey": "1", "serverName": "123"},
            "serviceAccount": {"name": "789"},
            "priorityClassName": "12",
            "serviceMonitor": {"enabled": True, "interval": "1m", "scrapeTimeout": "30s"},
        },
    ],
)
def test_values_that_look_like_numbers_stay_names(overrides: dict[str, Any]) -> None:
    """No value of these is read as a number, a boolean or nothing."""
    assert invalid(render(six_values(overrides))) == []


def test_dots_of_a_name_become_dashes() -> None:
    """One Service name for release and chart, and the label of the release as Helm knows it."""
    objects = render(six_values(), release="my.rel")
    found = objects.one("Service", "my-rel-epd-sidecar")
    assert found["spec"]["selector"]["app.kubernetes.io/instance"] == "my.rel"
    assert service(render(six_values()))


@pytest.mark.parametrize(
    ("overrides", "release", "named"),
    [
        ({}, "123", "123-epd-sidecar, and the name of a Service begins with a letter: choose another name"),
        ({}, "1e5", "1e5-epd-sidecar"),
        ({}, "1abc", "1abc-epd-sidecar"),
        ({"fullnameOverride": "123"}, "epd", "123, and the name of a Service begins with a letter: choose"),
        ({"fullnameOverride": "1name"}, "epd", "1name"),
    ],
)
def test_a_name_that_begins_with_a_digit_is_refused(
    overrides: dict[str, Any], release: str, named: str
) -> None:
    """No Service can have it; the message says the name and how to get another."""
    assert f"the objects would be named {named}" in refusal(six_values(overrides), release=release)
    renamed = render(six_values({"fullnameOverride": "epd"}), release=release)
    assert invalid(renamed) == []


@pytest.mark.parametrize(
    ("overrides", "path"),
    [
        ({"tls": {"existingSecret": "a..b"}}, "/tls/existingSecret"),
        ({"phases": {"decode": {"name": "a.b"}}}, "/phases/decode/name"),
        ({"phases": {"service": {"name": "a.b"}}}, "/phases/service/name"),
        ({"nameOverride": "x" * 64}, "/nameOverride"),
        ({"tls": {"serverName": "x: {y"}}, "/tls/serverName"),
        ({"attach": {"istio": {"clusterDomain": "a: {"}}}, "/attach/istio/clusterDomain"),
        ({"phaseToken": {"key": "a b"}}, "/phaseToken/key"),
    ],
)
def test_names_that_no_object_has_are_refused(overrides: dict[str, Any], path: str) -> None:
    """Nothing that Kubernetes or YAML would read as something else gets as far as the templates."""
    with pytest.raises((helm_python.HelmValuesError, helm_python.HelmRenderError)) as raised:
        render(six_values(overrides))
    said = str(raised.value)
    assert f"at '{path}'" in said or f"- {path.strip('/').replace('/', '.')}: " in said


def identities(objects: Rendered) -> set[tuple[str, str, str]]:
    return {
        (item["kind"], item["metadata"]["namespace"], item["metadata"]["name"]) for item in objects.documents
    }


@pytest.mark.parametrize("provider", [name for name in PROVIDERS if name != "gke"])
@pytest.mark.parametrize("tls", [False, True])
def test_releases_of_one_name_do_not_fight(provider: str, tls: bool) -> None:
    """Of two namespaces, with policies, phases and workers in others, no object is both releases'."""
    elsewhere = {
        "attach": {"namespace": "edge"},
        "phases": {
            "gateway": {"namespace": "internal"},
            "decode": {"namespace": "workers"},
            "encode": {"namespace": "workers"},
        },
    }
    values = six_values(Case(provider, tls=tls).values, elsewhere)
    places = ("one", "two", "one-internal", "edge", "internal", "workers")
    releases = [identities(render(values, namespace=place)) for place in places]
    assert len(set().union(*releases)) == sum(len(objects) for objects in releases)


def refs(document: Document) -> list[tuple[str, str]]:
    return [(ref["kind"], ref["name"]) for ref in document["spec"].get("targetRefs", [])]


@pytest.mark.parametrize("namespace", ["inference", "elsewhere"])
def test_objects_in_another_namespace_find_each_other(namespace: str) -> None:
    """What names another object of the chart names it as it is called there."""
    there = {"attach": {"namespace": "edge"}, "phases": {"gateway": {"namespace": "internal"}}}
    objects = render(six_values(case("envoy-gateway").values, there), namespace=namespace)
    routes = {("HTTPRoute", item["metadata"]["name"]) for item in objects.all("HTTPRoute")}
    assert {ref for item in objects.all("BackendTrafficPolicy") for ref in refs(item)} == routes
    filter_ = objects.one("EnvoyExtensionPolicy")["metadata"]["name"]
    proxy = objects.one("EnvoyProxy")
    (setting,) = proxy["spec"]["telemetry"]["accessLog"]["settings"]
    assert f"/edge/{filter_}/extproc/0:PLAIN" in setting["format"]["json"]["ext_proc"]
    assert f'"kind":"EnvoyProxy","name":"{proxy["metadata"]["name"]}"' in objects.notes
    objects = render(six_values(case("kgateway").values, there), namespace=namespace)
    named = objects.one("TrafficPolicy")["spec"]["extProc"]["extensionRef"]["name"]
    assert named == objects.one("GatewayExtension")["metadata"]["name"]
    assert named == f"epd-epd-sidecar.{namespace}"
