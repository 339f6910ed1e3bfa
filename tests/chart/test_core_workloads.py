"""Workloads, their Services and budgets, and who may reach them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chart.chart_rendering import render, six_values
from tests.chart.core_support import ALONE, ON_SOCKET, container, pod


def test_a_socket_makes_a_daemon_set() -> None:
    """One pod per node, the node's directory where the socket is, and no Service for Envoy."""
    rendered = render(six_values(ON_SOCKET))
    assert not rendered.all("Deployment")
    assert not rendered.all("PodDisruptionBudget")
    daemon_set = rendered.one("DaemonSet")
    assert daemon_set["spec"]["updateStrategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    spec = pod(rendered)
    (volume,) = [item for item in spec["volumes"] if item["name"] == "socket"]
    assert volume["hostPath"] == {"path": "/var/run/inference", "type": "Directory"}
    mounts = {item["name"]: item["mountPath"] for item in container(rendered)["volumeMounts"]}
    assert mounts["socket"] == "/run/epd-sidecar"
    assert "topologySpreadConstraints" not in spec
    assert [port["name"] for port in container(rendered)["ports"]] == ["metrics"]
    assert [item["metadata"]["name"] for item in rendered.all("Service")] == ["epd-epd-sidecar-metrics"]
    test_pod = rendered.one("Pod")["spec"]
    assert "unix:/run/epd-sidecar/ext_proc.sock" in test_pod["containers"][0]["args"]
    assert test_pod["volumes"] == [volume]


def test_replicas_are_spread() -> None:
    """Over zones and hosts, counting the sidecar's own pods; a selector of one's own is kept."""
    rendered = render(six_values(ALONE))
    constraints = pod(rendered)["topologySpreadConstraints"]
    keys = [item["topologyKey"] for item in constraints]
    assert keys == ["topology.kubernetes.io/zone", "kubernetes.io/hostname"]
    own = rendered.one("Deployment")["spec"]["selector"]
    assert all(item["labelSelector"] == own for item in constraints)
    selector = {"matchLabels": {"app": "mine"}}
    mine = {"maxSkew": 2, "topologyKey": "rack", "whenUnsatisfiable": "DoNotSchedule"}
    values = {"topologySpreadConstraints": [{**mine, "labelSelector": selector}]}
    (constraint,) = pod(render(six_values(ALONE, values)))["topologySpreadConstraints"]
    assert constraint == {**mine, "labelSelector": selector}


def test_the_autoscaler_owns_the_replicas() -> None:
    """With autoscaling the Deployment names no number, or every upgrade would set it back."""
    assert render(six_values(ALONE, {"replicaCount": 4})).one("Deployment")["spec"]["replicas"] == 4
    rendered = render(six_values(ALONE, {"autoscaling": {"enabled": True, "maxReplicas": 6}}))
    assert "replicas" not in rendered.one("Deployment")["spec"]
    scaler = rendered.one("HorizontalPodAutoscaler")["spec"]
    assert scaler["scaleTargetRef"]["name"] == rendered.one("Deployment")["metadata"]["name"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (2, 6)


def test_a_rollout_never_lowers_the_capacity() -> None:
    """The new pod is ready before an old one drains."""
    strategy = render(six_values(ALONE)).one("Deployment")["spec"]["strategy"]["rollingUpdate"]
    assert strategy == {"maxSurge": 1, "maxUnavailable": 0}


@pytest.mark.parametrize(
    ("budget", "bound"),
    [
        ({}, {"maxUnavailable": 1}),
        ({"minAvailable": 1, "maxUnavailable": ""}, {"minAvailable": 1}),
        ({"minAvailable": "50%", "maxUnavailable": ""}, {"minAvailable": "50%"}),
        ({"minAvailable": 0, "maxUnavailable": ""}, {"minAvailable": 0}),
    ],
)
def test_the_disruption_budget_has_one_bound(budget: dict[str, Any], bound: dict[str, Any]) -> None:
    """One of minAvailable and maxUnavailable, for the sidecar's pods; those that are not ready may go."""
    rendered = render(six_values(ALONE, {"podDisruptionBudget": budget}))
    spec = rendered.one("PodDisruptionBudget")["spec"]
    selector = rendered.one("Deployment")["spec"]["selector"]
    assert spec == {**bound, "selector": selector, "unhealthyPodEvictionPolicy": "AlwaysAllow"}


def test_selectors_never_match_the_test_pod() -> None:
    """Nobody sends requests to the pod of `helm test`."""
    rendered = render(six_values(ALONE))
    labels = rendered.one("Pod")["metadata"]["labels"].items()
    for item in rendered.all("Service"):
        assert not item["spec"]["selector"].items() <= labels
    assert not rendered.one("Deployment")["spec"]["selector"]["matchLabels"].items() <= labels
    template = rendered.one("Deployment")["spec"]["template"]["metadata"]["labels"].items()
    for item in rendered.all("Service"):
        assert item["spec"]["selector"].items() <= template


def test_labels_of_the_pods_do_not_touch_the_selector() -> None:
    """What podLabels says comes on top of the labels that Services and Deployment select by."""
    rendered = render(six_values(ALONE, {"podLabels": {"tier": "gateway"}, "commonLabels": {"team": "x"}}))
    workload = rendered.one("Deployment")["spec"]
    labels = workload["template"]["metadata"]["labels"]
    assert labels["tier"] == "gateway"
    assert labels["team"] == "x"
    assert workload["selector"]["matchLabels"].items() <= labels.items()
    assert not {"tier", "team"} & workload["selector"]["matchLabels"].keys()


@pytest.mark.parametrize(
    ("values", "release", "name"),
    [
        ({}, "epd", "epd-epd-sidecar"),
        ({}, "epd-sidecar", "epd-sidecar"),
        ({"nameOverride": "coordinator"}, "epd", "epd-coordinator"),
        ({"fullnameOverride": "coordinator"}, "epd", "coordinator"),
        ({}, "a" * 53, "a" * 50),
    ],
)
def test_names(values: dict[str, Any], release: str, name: str) -> None:
    """Names follow the release, and leave room for the suffixes of further objects."""
    rendered = render(six_values(ALONE, values), release=release)
    assert rendered.one("Deployment")["metadata"]["name"] == name
    assert all(len(item["metadata"]["name"]) <= 63 for item in rendered.documents)


def test_a_service_account_of_ones_own() -> None:
    """Without serviceAccount.create the named account is used, and none is made."""
    rendered = render(six_values(ALONE, {"serviceAccount": {"create": False, "name": "mine"}}))
    assert not rendered.all("ServiceAccount")
    assert pod(rendered)["serviceAccountName"] == "mine"


def test_the_network_policy_admits_the_gateway_and_monitoring() -> None:
    """The gRPC port for the gateway's peers and `helm test`, the admin port for monitoring, nothing else."""
    gateway = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "envoy"}}}]
    monitoring = [{"podSelector": {"matchLabels": {"app": "prometheus"}}}]
    values = {"networkPolicy": {"enabled": True, "gateway": gateway, "monitoring": monitoring}}
    rendered = render(six_values(ALONE, values))
    spec = rendered.one("NetworkPolicy")["spec"]
    assert spec["policyTypes"] == ["Ingress"]
    assert "egress" not in spec
    assert spec["podSelector"] == rendered.one("Deployment")["spec"]["selector"]
    by_port = {rule["ports"][0]["port"]: rule for rule in spec["ingress"]}
    assert by_port.keys() == {"grpc-ext-proc", "metrics"}
    *peers, test_pod = by_port["grpc-ext-proc"]["from"]
    assert peers == gateway
    labels = rendered.one("Pod")["metadata"]["labels"].items()
    assert test_pod["podSelector"]["matchLabels"].items() <= labels
    assert by_port["metrics"]["from"] == monitoring
    without = render(six_values(ALONE, values, {"tests": {"enabled": False}}))
    assert without.one("NetworkPolicy")["spec"]["ingress"][0]["from"] == gateway
    assert not without.all("Pod")


def test_egress_is_what_is_allowed_and_dns() -> None:
    """Restricted egress has the rules of the values, and DNS, without which no address resolves."""
    rules = [{"to": [{"podSelector": {"matchLabels": {"app": "render"}}}], "ports": [{"port": 8000}]}]
    policy = {"enabled": True, "gateway": [{"podSelector": {}}], "egress": {"enabled": True, "rules": rules}}
    spec = render(six_values(ALONE, {"networkPolicy": policy})).one("NetworkPolicy")["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    dns, *allowed = spec["egress"]
    assert {(port["port"], port["protocol"]) for port in dns["ports"]} == {(53, "UDP"), (53, "TCP")}
    assert allowed == rules


def test_a_socket_needs_no_way_in() -> None:
    """Over a socket only monitoring comes through the network."""
    spec = render(six_values(ON_SOCKET, {"networkPolicy": {"enabled": True}})).one("NetworkPolicy")["spec"]
    assert [rule["ports"][0]["port"] for rule in spec["ingress"]] == ["metrics"]
