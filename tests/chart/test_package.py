"""The chart as a whole: it lints, packs, and tells people what to do next."""

from __future__ import annotations

import tarfile
from pathlib import Path

import helm_python
import pytest

from tests.chart.chart_rendering import (
    CHART,
    NAMESPACE,
    RELEASE,
    Rendered,
    kubernetes_problems,
    lint,
    refusal,
    render,
    schema_refusal,
    six_values,
)
from tests.chart.core_support import ALONE, NO_ADMIN, ON_SOCKET, WITH_TLS


@pytest.mark.parametrize(
    "values", [ALONE, ON_SOCKET, WITH_TLS, NO_ADMIN], ids=["tcp", "socket", "tls", "bare"]
)
def test_it_lints(values: dict[str, object]) -> None:
    """Helm has nothing to remark about the chart but the icon it lacks."""
    assert lint(six_values(values)) == []


def test_the_lint_sees_faults() -> None:
    """What lint() reports is not empty by nature: values that the schema refuses are an error."""
    assert any("replicaCount" in message for message in lint(six_values({"replicaCount": "many"})))


def test_the_package_holds_the_chart(tmp_path: Path) -> None:
    """`helm package` packs what the directory has, and the archive renders the same objects."""
    archive = Path(helm_python.package(CHART, destination=tmp_path))
    assert archive.name == "epd-sidecar-0.1.0.tgz"
    with tarfile.open(archive) as packed:
        names = {name.removeprefix("epd-sidecar/") for name in packed.getnames()}
    inside = {str(path.relative_to(CHART)) for path in CHART.rglob("*") if path.is_file()}
    assert names == inside
    values = six_values(ALONE)
    from_archive = helm_python.Chart.load(archive).render(values, name=RELEASE, namespace=NAMESPACE)
    from_directory = helm_python.Chart.load(CHART).render(values, name=RELEASE, namespace=NAMESPACE)
    assert from_archive == from_directory


def test_the_defaults_alone_say_what_is_missing() -> None:
    """`helm install` without values names what an installation has to say."""
    said = refusal({})
    assert "image.repository is missing" in said
    assert "config.gateway.address is missing" in said
    assert "render.address is missing" in said


def test_the_notes_name_the_next_commands() -> None:
    """Release, namespace and workload of the installation appear in commands that can be pasted."""
    notes = render(six_values(ALONE), release="mm", namespace="serving").notes
    assert "kubectl -n serving rollout status deployment/mm-epd-sidecar" in notes
    assert "helm test -n serving mm --logs" in notes
    assert "mm-epd-sidecar.serving.svc:9002 (plaintext, HTTP/2)" in notes
    assert "(TLS, HTTP/2)" in render(six_values(WITH_TLS)).notes
    socket = render(six_values(ON_SOCKET)).notes
    assert "daemonset/epd-epd-sidecar" in socket
    assert "unix:/run/epd-sidecar/ext_proc.sock, with /var/run/inference of the node" in socket


@pytest.mark.parametrize(
    ("provider", "command"),
    [
        ("envoy-gateway", "kubectl get envoyextensionpolicies,clienttrafficpolicies"),
        ("istio", "istioctl proxy-config listeners"),
        ("kgateway", "kubectl get gatewayextensions,trafficpolicies"),
        ("agentgateway", "kubectl get agentgatewaypolicies"),
    ],
)
def test_the_notes_say_how_to_check_the_filter(provider: str, command: str) -> None:
    """Each gateway has its own way to tell that it has accepted the filter."""
    notes = render(six_values({"attach": {"provider": provider}})).notes
    assert "2. Check that the gateway has accepted the filter" in notes
    assert command in notes


def test_strictness_of_the_test_helpers() -> None:
    """A key written twice, a wrong type and an unknown field do not pass these tests unseen."""
    deployment = render(six_values(ALONE)).one("Deployment")
    deployment["spec"]["replicsa"] = 2
    deployment["spec"]["replicas"] = "2"
    said = " ".join(kubernetes_problems(deployment))
    assert "replicsa" in said
    assert "'2' is not of type" in said
    with pytest.raises(AssertionError, match="written twice: name"):
        _ = Rendered({"a.yaml": "kind: Pod\nmetadata: {name: a, name: b}\n"}, "").documents
    with pytest.raises(pytest.fail.Exception):
        refusal(six_values(ALONE))
    with pytest.raises(pytest.fail.Exception):
        schema_refusal(six_values(ALONE))
