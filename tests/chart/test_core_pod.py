"""The sidecar's pod: what it may do, what it runs, how it is asked and how it ends."""

from __future__ import annotations

from typing import Any

import pytest

from sidecar.extproc.server import NOTICE
from sidecar.extproc.service import SERVICE_NAME
from tests.chart.chart_rendering import render, six_values, strings
from tests.chart.core_support import ALONE, NO_ADMIN, ON_SOCKET, PORTS, WITH_TLS, container, pod, service


def test_the_pod_is_confined() -> None:
    """Not root, no capabilities, no writable root file system, no token of the Kubernetes API."""
    rendered = render(six_values(ALONE))
    spec, only = pod(rendered), container(rendered)
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] == 65532
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert only["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert spec["automountServiceAccountToken"] is False
    assert rendered.one("ServiceAccount")["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    test_pod = rendered.one("Pod")["spec"]
    assert test_pod["automountServiceAccountToken"] is False
    assert test_pod["securityContext"] == spec["securityContext"]
    assert test_pod["containers"][0]["securityContext"] == only["securityContext"]


def test_the_image_is_what_the_values_say() -> None:
    """Registry and repository, then the digest, the tag, or the version of the chart."""
    default = container(render(six_values(ALONE)))
    assert default["image"] == "registry.example/epd-sidecar:0.1.0"
    image = {"registry": "mirror.example", "repository": "team/epd-sidecar", "tag": "1.2"}
    assert container(render(six_values(ALONE, {"image": image})))["image"] == (
        "mirror.example/team/epd-sidecar:1.2"
    )
    digest = {"digest": f"sha256:{'a' * 64}"}
    pinned = render(six_values(ALONE, {"image": {**image, **digest}}))
    assert container(pinned)["image"] == f"mirror.example/team/epd-sidecar@sha256:{'a' * 64}"
    assert pinned.one("Pod")["spec"]["containers"][0]["image"] == container(pinned)["image"]


@pytest.mark.parametrize(
    ("drain", "seconds"),
    [
        ("30s", 40),
        ("0s", 10),
        (0, 10),
        ("1m30s", 100),
        ("500ms", 11),
        ("1.5s", 12),
        (".1s", 11),
        ("0.1s", 11),
        ("2m", 130),
        ("1h", 3610),
        ("1000us", 11),
        ("5m0.2s", 311),
    ],
)
def test_the_grace_period_follows_the_drain(drain: object, seconds: int) -> None:
    """The notice, the drain time and five seconds more, in whole seconds rounded up."""
    rendered = render(six_values(ALONE, {"config": {"ext_proc": {"drain_timeout": drain}}}))
    assert pod(rendered)["terminationGracePeriodSeconds"] == seconds


def test_health_checks_are_faster_than_the_notice() -> None:
    """A draining pod is seen as not ready while it still serves."""
    probe = container(render(six_values(ALONE)))["readinessProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] < NOTICE


def test_probes_ask_over_grpc() -> None:
    """Readiness by the name of the ext_proc service, liveness and start by the empty one."""
    only = container(render(six_values(PORTS)))
    assert only["readinessProbe"]["grpc"] == {"port": 7002, "service": SERVICE_NAME}
    assert only["livenessProbe"]["grpc"] == {"port": 7002}
    assert only["startupProbe"]["grpc"] == {"port": 7002}


@pytest.mark.parametrize("values", [WITH_TLS, ON_SOCKET], ids=["tls", "socket"])
def test_probes_ask_the_admin_listener_where_grpc_probes_cannot(values: dict[str, Any]) -> None:
    """The kubelet's gRPC probes speak neither TLS nor to unix sockets."""
    only = container(render(six_values(values)))
    assert only["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "metrics"}
    assert only["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "metrics"}
    assert only["startupProbe"]["httpGet"] == {"path": "/healthz", "port": "metrics"}
    assert {"name": "metrics", "containerPort": 9090, "protocol": "TCP"} in only["ports"]
    assert not any("grpc" in only[name] for name in ("readinessProbe", "livenessProbe", "startupProbe"))


def test_ports_follow_the_configuration() -> None:
    """Container, Services, test pod and network policy use the ports that the sidecar listens on."""
    policy = {"networkPolicy": {"enabled": True, "gateway": [{"podSelector": {}}]}}
    rendered = render(six_values(PORTS, policy))
    ports = {port["name"]: port["containerPort"] for port in container(rendered)["ports"]}
    assert ports == {"grpc-ext-proc": 7002, "metrics": 7090}
    (grpc,) = service(rendered)["spec"]["ports"]
    assert (grpc["name"], grpc["port"], grpc["targetPort"]) == ("grpc-ext-proc", 7002, "grpc-ext-proc")
    assert grpc["appProtocol"] == "kubernetes.io/h2c"
    (metrics,) = service(rendered, "-metrics")["spec"]["ports"]
    assert (metrics["port"], metrics["targetPort"]) == (7090, "metrics")
    assert "epd-epd-sidecar.inference.svc:7002" in rendered.one("Pod")["spec"]["containers"][0]["args"]


def test_without_an_admin_listener_nothing_refers_to_it() -> None:
    """No port, no Service and no rule for metrics."""
    policy = {"networkPolicy": {"enabled": True, "gateway": [{"podSelector": {}}]}}
    rendered = render(six_values(NO_ADMIN, policy))
    assert [port["name"] for port in container(rendered)["ports"]] == ["grpc-ext-proc"]
    assert [item["metadata"]["name"] for item in rendered.all("Service")] == ["epd-epd-sidecar"]
    assert "metrics" not in set(strings(rendered.one("NetworkPolicy")["spec"]))
