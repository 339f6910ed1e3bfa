"""How values become the sidecar's file, its environment and its mounts."""

from __future__ import annotations

from typing import Any

import yaml

from tests.chart.chart_rendering import render, six_values
from tests.chart.core_support import ALONE, WITH_TLS, container, pod


def test_a_change_of_the_configuration_rolls_the_pods() -> None:
    """The pods carry a checksum of the file, which changes with it and with nothing else."""

    def checksum(*layers: dict[str, Any]) -> str:
        template = render(six_values(ALONE, *layers)).one("Deployment")["spec"]["template"]
        return str(template["metadata"]["annotations"]["checksum/config"])

    assert checksum() == checksum({"replicaCount": 3, "podLabels": {"a": "b"}})
    assert checksum() != checksum({"config": {"log_level": "debug"}})
    assert checksum() != checksum({"render": {"address": "http://other:8000"}})


def test_the_phase_token_comes_from_the_secret() -> None:
    """The token is a reference in the environment, and in no object of the release."""
    rendered = render(six_values(ALONE, {"phaseToken": {"existingSecret": "phase", "key": "token"}}))
    assert container(rendered)["env"] == [
        {
            "name": "SIDECAR__GATEWAY__PHASE_TOKEN",
            "valueFrom": {"secretKeyRef": {"name": "phase", "key": "token"}},
        }
    ]
    assert not rendered.all("Secret")
    config = yaml.safe_load(rendered.one("ConfigMap")["data"]["sidecar.yaml"])
    assert config["gateway"]["phase_token"] == ""


def test_the_render_address_keeps_the_other_params() -> None:
    """render.address is merged into the step, wherever it stands and whatever else it says."""
    steps: list[dict[str, Any]] = [
        {"type": "render", "params": {"timeout": "5s"}},
        {"type": "prefill"},
        {"type": "decode"},
    ]
    rendered = render(six_values(ALONE, {"config": {"pipeline": {"steps": steps}}}))
    config = yaml.safe_load(rendered.one("ConfigMap")["data"]["sidecar.yaml"])
    address = "http://render.inference.svc.cluster.local:8000"
    steps[0]["params"] = {"timeout": "5s", "address": address}
    assert config["pipeline"]["steps"] == steps


def test_large_numbers_stay_whole() -> None:
    """Helm reads numbers as floating point; the file has them as they were written."""
    limits = {"max_in_flight_requests": 12345678, "max_in_flight_bytes": 1048576}
    values = {"config": {"limits": limits}, "resources": {"limits": {"memory": "1.5Ti"}}}
    text = render(six_values(ALONE, values)).one("ConfigMap")["data"]["sidecar.yaml"]
    assert yaml.safe_load(text)["limits"] == limits
    assert "e+" not in text


def test_tls_mounts_the_secret() -> None:
    """The Secret is where the configuration looks for the certificate; the test pod sees only the CA."""
    rendered = render(six_values(WITH_TLS))
    (mount,) = [item for item in container(rendered)["volumeMounts"] if item["name"] == "tls"]
    (volume,) = [item for item in pod(rendered)["volumes"] if item["name"] == "tls"]
    config = yaml.safe_load(rendered.one("ConfigMap")["data"]["sidecar.yaml"])
    assert config["ext_proc"]["tls"]["cert_path"] == mount["mountPath"]
    assert volume["secret"]["secretName"] == "certificate"
    test_pod = rendered.one("Pod")["spec"]
    assert test_pod["volumes"][0]["secret"]["items"] == [{"key": "ca.crt", "path": "ca.crt"}]
    arguments = test_pod["containers"][0]["args"]
    assert arguments[arguments.index("--ca") + 1] == f"{mount['mountPath']}/ca.crt"
    assert arguments[arguments.index("--name") + 1] == "epd-epd-sidecar.inference.svc"


def test_a_certificate_of_ones_own_volume() -> None:
    """config.ext_proc.tls.cert_path with volumes of one's own switches the probes as the Secret does."""
    values = {
        "config": {"ext_proc": {"tls": {"cert_path": "/tls"}}},
        "extraVolumes": [{"name": "spiffe", "csi": {"driver": "csi.cert-manager.io", "readOnly": True}}],
        "extraVolumeMounts": [{"name": "spiffe", "mountPath": "/tls", "readOnly": True}],
    }
    rendered = render(six_values(ALONE, values))
    assert "httpGet" in container(rendered)["readinessProbe"]
    assert values["extraVolumes"][0] in pod(rendered)["volumes"]  # type: ignore[index]  # a list, as above
