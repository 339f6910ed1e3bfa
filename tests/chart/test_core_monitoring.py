"""ServiceMonitor and alerts."""

from __future__ import annotations

import re
from typing import Any, get_args

import pytest

from sidecar.errors import Outcome
from sidecar.limits import InFlightBudget
from sidecar.observability.metrics import Metrics
from tests.chart.attach_schemas import problems
from tests.chart.chart_rendering import render, six_values, strings
from tests.chart.core_support import ALONE, ON_SOCKET, service


def test_the_service_monitor_selects_the_metrics_service() -> None:
    """By the labels that only this Service has; its pods are scraped while they drain, too."""
    values = {"serviceMonitor": {"enabled": True, "interval": "15s", "labels": {"release": "prometheus"}}}
    rendered = render(six_values(ALONE, values))
    monitor = rendered.one("ServiceMonitor")
    assert problems(monitor) == []
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    selector = monitor["spec"]["selector"]["matchLabels"].items()
    matched = [
        item["metadata"]["name"]
        for item in rendered.all("Service")
        if selector <= item["metadata"]["labels"].items()
    ]
    assert matched == ["epd-epd-sidecar-metrics"]
    metrics = service(rendered, "-metrics")["spec"]
    assert metrics["ports"][0]["name"] == monitor["spec"]["endpoints"][0]["port"]
    assert metrics["publishNotReadyAddresses"] is True


@pytest.mark.parametrize("values", [ALONE, ON_SOCKET], ids=["deployment", "socket"])
def test_alerts_ask_for_metrics_that_exist(values: dict[str, Any]) -> None:
    """Every metric of an alert is one that the sidecar exposes, or a known one of others."""
    enabled = {"prometheusRule": {"enabled": True, "alertLabels": {"team": "inference"}}}
    rendered = render(six_values(values, enabled))
    rule = rendered.one("PrometheusRule")
    assert problems(rule) == []
    exposed = Metrics(InFlightBudget(1, 1), "0").exposition()[0].decode()
    known = set(re.findall(r"^# TYPE (\S+)", exposed, re.MULTILINE))
    elsewhere = {
        "up",
        "kube_deployment_status_replicas_available",
        "kube_daemonset_status_number_available",
    }
    alerts = rule["spec"]["groups"][0]["rules"]
    assert {item["alert"] for item in alerts} == {
        "EpdSidecarErrors",
        "EpdSidecarInternalErrors",
        "EpdSidecarOverloaded",
        "EpdSidecarDown",
        "EpdSidecarNotReady",
        "EpdSidecarPromptTokenMismatch",
    }
    for alert in alerts:
        selectors = re.findall(r"([a-z_]+)\{([^}]*)\}", alert["expr"])
        assert selectors
        assert {name for name, _ in selectors} <= known | elsewhere
        for name, labels in selectors:
            assert 'namespace="inference"' in labels
            kubernetes = name.startswith("kube_")
            owner = "daemonset" if values is ON_SOCKET else "deployment"
            expected = f'{owner}="epd-epd-sidecar"' if kubernetes else 'job="epd-epd-sidecar-metrics"'
            assert expected in labels
        assert alert["labels"]["team"] == "inference"
        assert alert["labels"]["severity"] in {"warning", "critical"}
        assert alert["annotations"]["summary"].endswith(".")


def test_alerts_name_outcomes_that_exist() -> None:
    """An outcome in an alert is one of the record's, so that none of them stays silent."""
    rule = render(six_values(ALONE, {"prometheusRule": {"enabled": True}})).one("PrometheusRule")
    text = " ".join(strings(rule["spec"]))
    named = {word for match in re.findall(r'outcome=~?"([^"]+)"', text) for word in match.split("|")}
    assert named == {"upstream_error", "timeout", "internal_error", "overloaded"}
    assert named <= set(get_args(Outcome))
    assert "api!=" in text


def test_the_error_ratio_is_configurable() -> None:
    """The threshold appears in the expression and in what people read."""
    values = {"prometheusRule": {"enabled": True, "errorRatio": 0.2}}
    rule = render(six_values(ALONE, values)).one("PrometheusRule")["spec"]["groups"][0]["rules"][0]
    assert rule["expr"].endswith("> 0.2")
    assert rule["annotations"]["summary"].startswith("More than 20 %")
