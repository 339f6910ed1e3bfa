"""Values that several tests of the chart's own objects start from, and the way to the pod."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.chart.chart_rendering import Document, Rendered

ALONE: dict[str, Any] = {"attach": {"provider": "none"}}
ON_SOCKET: dict[str, Any] = {
    **ALONE,
    "uds": {"enabled": True, "hostPath": "/var/run/inference"},
    "config": {"ext_proc": {"listen": "unix:/run/epd-sidecar/ext_proc.sock"}},
}
WITH_TLS: dict[str, Any] = {**ALONE, "tls": {"existingSecret": "certificate"}}
PORTS: dict[str, Any] = {
    **ALONE,
    "config": {"ext_proc": {"listen": "[::]:7002"}, "admin": {"listen": "0.0.0.0:7090"}},
}
NO_ADMIN: dict[str, Any] = {**ALONE, "config": {"admin": {"listen": ""}}}


def pod(rendered: Rendered) -> Document:
    (workload,) = (*rendered.all("Deployment"), *rendered.all("DaemonSet"))
    spec: Document = workload["spec"]["template"]["spec"]
    return spec


def container(rendered: Rendered) -> Document:
    (only,) = pod(rendered)["containers"]
    assert isinstance(only, dict)
    return only


def service(rendered: Rendered, suffix: str = "") -> Document:
    return rendered.one("Service", f"epd-epd-sidecar{suffix}")
