"""Every provider, with and without TLS, over TCP and a socket, in both topologies."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from sidecar.config import Settings, load_settings
from tests.chart.chart_rendering import (
    Rendered,
    is_kubernetes_own,
    kubernetes_problems,
    lint,
    merged,
    refusal,
    render,
    six_values,
)

if TYPE_CHECKING:
    from pathlib import Path

PROVIDERS = ("none", "envoy-gateway", "istio", "kgateway", "agentgateway", "gke")
TOPOLOGIES = ("internal-listener", "shared-listener")

EVERYTHING: dict[str, Any] = {
    "autoscaling": {"enabled": True, "behavior": {"scaleDown": {"stabilizationWindowSeconds": 300}}},
    "networkPolicy": {
        "enabled": True,
        "gateway": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "envoy"}}}],
        "egress": {"enabled": True, "rules": [{"to": [{"podSelector": {}}], "ports": [{"port": 8000}]}]},
    },
    "serviceMonitor": {"enabled": True, "interval": "30s", "scrapeTimeout": "10s"},
    "prometheusRule": {"enabled": True},
    "serviceAccount": {"annotations": {"example.com/owner": "inference"}},
    "service": {"annotations": {"example.com/owner": "inference"}},
    "commonLabels": {"team": "inference"},
    "podAnnotations": {"example.com/scrape": "false"},
    "podLabels": {"tier": "gateway"},
    "extraEnv": [{"name": "GRPC_VERBOSITY", "value": "error"}],
    "extraVolumes": [{"name": "scratch", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
    "imagePullSecrets": [{"name": "registry"}],
    "nodeSelector": {"kubernetes.io/os": "linux"},
    "tolerations": [{"key": "dedicated", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
    "priorityClassName": "inference",
    "lifecycle": {"preStop": {"sleep": {"seconds": 1}}},
}
"""Every optional part of the chart switched on."""


@dataclass(frozen=True)
class Combination:
    """One cell of the matrix."""

    provider: str
    topology: str = TOPOLOGIES[0]
    tls: bool = False
    uds: bool = False

    def __str__(self) -> str:
        words = (self.provider, self.topology, "tls" * self.tls, "uds" * self.uds)
        return " ".join(word for word in words if word)

    @property
    def works(self) -> bool:
        """Gateways reach a Service, not a socket; GKE calls over TLS only."""
        return not (self.uds and self.provider != "none") and not (self.provider == "gke" and not self.tls)

    @property
    def values(self) -> dict[str, Any]:
        """The six values, and what the combination needs besides."""
        layers: list[dict[str, Any]] = [{"attach": {"provider": self.provider, "topology": self.topology}}]
        if self.tls:
            layers.append({"tls": {"existingSecret": "certificate"}, "attach": {"tls": {"caSecret": "ca"}}})
        if self.uds:
            listen = "unix:/run/epd-sidecar/ext_proc.sock"
            layers.append({"uds": {"enabled": True}, "config": {"ext_proc": {"listen": listen}}})
        if self.topology == "shared-listener":
            layers.append({"phaseToken": {"existingSecret": "phase"}, "phases": {"gateway": {"name": ""}}})
        if self.provider == "gke":
            layers.append({"config": {"ext_proc": {"request_deadline": "10s"}}})
        return six_values(*layers)


MATRIX = [
    Combination(provider, topology, tls, uds)
    for provider, topology, tls, uds in itertools.product(PROVIDERS, TOPOLOGIES, (False, True), (False, True))
]


def loaded(rendered: Rendered, directory: Path) -> Settings:
    """The rendered file through the sidecar's own loader, with a certificate where the Secret is mounted."""
    text = rendered.one("ConfigMap")["data"]["sidecar.yaml"]
    config = yaml.safe_load(text)
    if config["ext_proc"]["tls"]["cert_path"]:
        for name in ("tls.crt", "tls.key"):
            (directory / name).touch()
        text = text.replace(config["ext_proc"]["tls"]["cert_path"], str(directory))
    file = directory / "sidecar.yaml"
    file.write_text(text)
    settings, warnings = load_settings(file, {})
    assert not [warning for warning in warnings if "never passes" not in warning]
    return settings


@pytest.mark.parametrize("extras", [False, True], ids=["defaults", "everything"])
@pytest.mark.parametrize("combination", [item for item in MATRIX if item.works], ids=str)
def test_what_comes_out_is_what_kubernetes_takes(
    combination: Combination, extras: bool, tmp_path: Path
) -> None:
    """Every object of Kubernetes' own passes its schema, unknown fields refused; the file loads."""
    values = combination.values
    if extras:
        values = merged(values, EVERYTHING, {"autoscaling": {"enabled": not combination.uds}})
    rendered = render(values)
    own = [document for document in rendered.documents if is_kubernetes_own(document)]
    assert [problem for document in own for problem in kubernetes_problems(document)] == []
    names = rendered.names()
    assert len(names) == len(set(names))
    kinds = {document["kind"] for document in own}
    assert ("DaemonSet" in kinds, "Deployment" in kinds) == (combination.uds, not combination.uds)
    assert lint(values) == []
    settings = loaded(rendered, tmp_path)
    assert settings.gateway.address == values["config"]["gateway"]["address"]
    assert settings.pipeline.render is not None
    assert settings.pipeline.render.address == values["render"]["address"]
    assert bool(settings.ext_proc.tls.cert_path) == combination.tls
    assert settings.ext_proc.listen.startswith("unix:") == combination.uds
    assert settings.gateway.phase_token == ""


@pytest.mark.parametrize("combination", [item for item in MATRIX if not item.works], ids=str)
def test_what_cannot_be_combined_is_refused(combination: Combination) -> None:
    """The rest of the matrix fails with a message about what cannot be."""
    said = refusal(combination.values)
    assert ("uds" in said) == combination.uds
    assert ("over TLS" in said) == (combination.provider == "gke" and not combination.tls)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_labels_and_namespace_are_everywhere(provider: str) -> None:
    """Every object is found by release, carries the common labels, and names its namespace."""
    values = merged(
        Combination(provider, tls=True).values,
        {"commonLabels": {"team": "inference"}},
        {"serviceMonitor": {"enabled": True}, "prometheusRule": {"enabled": True}},
    )
    for document in render(values).documents:
        labels = document["metadata"]["labels"]
        assert labels["app.kubernetes.io/instance"] == "epd"
        assert labels["app.kubernetes.io/managed-by"] == "Helm"
        assert labels["team"] == "inference"
        assert document["metadata"]["namespace"] == "inference"
