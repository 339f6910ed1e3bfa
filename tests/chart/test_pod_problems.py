"""Pods that Kubernetes or the sidecar would refuse are refused by the chart, which prints no secret."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.chart.attach_cases import PROVIDERS, case
from tests.chart.chart_rendering import CHART, refusal, render, six_values
from tests.chart.core_support import ALONE, ON_SOCKET, container, pod

TOKEN = "SECRETSECRETSECRET1234"
VARIABLE = "SIDECAR__GATEWAY__PHASE_TOKEN"


def on_socket(listen: str) -> dict[str, Any]:
    return {**ON_SOCKET, "config": {"ext_proc": {"listen": listen}}}


def listen(section: str, address: str) -> dict[str, Any]:
    return {"config": {section: {"listen": address}}}


REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    ("objectName", {"fullnameOverride": "1name"}, "the objects would be named 1name"),
    (
        "environmentToken",
        {"extraEnv": [{"name": VARIABLE, "value": TOKEN}]},
        f"extraEnv would show the value of {VARIABLE} to everybody who may read pods: put it into a Secret",
    ),
    (
        "environmentToken",
        {"extraEnv": [{"name": "SIDECAR__gateway__Phase_Token", "value": f"file:{TOKEN}"}]},
        "extraEnv would show the value of SIDECAR__gateway__Phase_Token",
    ),
    (
        "environmentToken",
        {
            "phaseToken": {"existingSecret": "phase"},
            "extraEnv": [{"name": VARIABLE, "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}],
        },
        "the phase token is set in phaseToken.existingSecret and in extraEnv: remove one of them",
    ),
    (
        "environmentTwice",
        {"extraEnv": [{"name": "A"}, {"name": "B"}, {"name": "A", "value": "1"}]},
        "extraEnv sets A twice: remove one of them",
    ),
    *(
        (
            "socketPath",
            on_socket(path),
            f'config.ext_proc.listen "{path}" is not the path of a file: write one without . and .. in it',
        )
        for path in (
            "unix:/run/x/",
            "unix:/run/sockets/../x/s.sock",
            "unix:/run/./s.sock",
            "unix:/run/x/..",
        )
    ),
    *(
        (
            "socketDirectory",
            on_socket(f"unix:{path}"),
            f"config.ext_proc.listen: uds.hostPath would be mounted at {directory}, over files of the",
        )
        for path, directory in (
            ("/s.sock", "/"),
            ("//s.sock", "/"),
            ("/etc/s.sock", "/etc"),
            ("/etc/epd-sidecar/s.sock", "/etc/epd-sidecar"),
            ("/etc/epd-sidecar-tls/s.sock", "/etc/epd-sidecar-tls"),
            ("///opt/epd-sidecar/s.sock", "/opt/epd-sidecar"),
        )
    ),
    (
        "annotationTwice",
        {"podAnnotations": {"checksum/config": "x"}},
        "podAnnotations sets checksum/config, by which a change of config rolls the pods",
    ),
    *(
        (
            "volumeTwice",
            {"extraVolumes": [{"name": name, "emptyDir": {}} for name in names]},
            f"extraVolumes: {names[-1]} is the name of another volume of the pod",
        )
        for names in (["config"], ["tls"], ["mine", "mine"])
    ),
    (
        "mountTwice",
        {"extraVolumeMounts": [{"name": "a", "mountPath": "/etc/epd-sidecar/"}]},
        "extraVolumeMounts: something is mounted at /etc/epd-sidecar already; use another mountPath",
    ),
    (
        "scaledWithoutRequest",
        {"autoscaling": {"enabled": True}, "resources": {"requests": {"cpu": None}}},
        "autoscaling.enabled compares CPU with resources.requests.cpu, which is missing",
    ),
]
"""Problem, values on top of the six, and the beginning of what is said."""


@pytest.mark.parametrize(
    ("overrides", "message"),
    [pytest.param(*rest, id=f"{index} {name}") for index, (name, *rest) in enumerate(REFUSALS)],
)
def test_it_says_what_cannot_work(overrides: dict[str, Any], message: str) -> None:
    """One problem gives one message, which names the values and what to do."""
    said = refusal(six_values(overrides))
    assert f"- {message}" in said
    assert said.count("\n- ") == 1


def test_every_problem_has_its_test() -> None:
    """The table above has every refusal of the template, and the template asks for each."""
    template = (CHART / "templates/_validations_pod.tpl").read_text(encoding="utf-8")
    defined = set(re.findall(r'define "epd-sidecar\.pod\.problem\.(\w+)"', template))
    assert defined == {name for name, *_ in REFUSALS}
    asked = template.partition("range $name := list")[2].partition("-}}")[0]
    assert set(re.findall(r'"(\w+)"', asked)) == defined


@pytest.mark.parametrize(
    "overrides",
    [
        {"extraEnv": [{"name": VARIABLE, "value": "file:/secrets/token"}]},
        {"extraEnv": [{"name": VARIABLE, "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}]},
        {"extraEnv": [{"name": "A"}, {"name": "a"}]},
        listen("admin", "0.0.0.0:65535"),
        on_socket("unix:///run/x/s.sock"),
        on_socket(f"unix:/run/{'x' * 102}"),
        on_socket("unix:/run/..x/s..sock"),
        on_socket("unix:/etcetera/s.sock"),
        {"extraVolumes": [{"name": "a", "emptyDir": {}}, {"name": "b", "emptyDir": {}}]},
        {"autoscaling": {"enabled": False}, "resources": {"requests": {"cpu": None}}},
    ],
)
def test_what_works_is_not_refused(overrides: dict[str, Any]) -> None:
    """The checks stop at their boundaries, and leave alone what is switched off."""
    assert pod(render(six_values(overrides)))


@pytest.mark.parametrize(
    "token", [TOKEN, f"{TOKEN}\n", f" {TOKEN}", f"{TOKEN} a", f"file:{TOKEN}", f"FILE:{TOKEN}"]
)
def test_a_literal_phase_token_is_refused_without_a_word_of_it(token: str) -> None:
    """Neither the schema's message nor the template's prints the secret, whatever is wrong with it."""
    said = refusal(six_values({"config": {"gateway": {"phase_token": token}}}))
    assert "config.gateway.phase_token would be readable in the ConfigMap" in said
    assert TOKEN not in said
    environment = {"extraEnv": [{"name": VARIABLE, "value": token}]}
    assert TOKEN not in refusal(six_values(environment))


def test_a_phase_token_in_a_mounted_file_is_taken() -> None:
    """The path is no secret."""
    mounted = {"config": {"gateway": {"phase_token": "file:/secrets/token"}}}
    text = render(six_values(mounted)).one("ConfigMap")["data"]["sidecar.yaml"]
    assert "phase_token: file:/secrets/token" in text


@pytest.mark.parametrize(
    ("path", "key"),
    [
        (("ext_proc", "read_timeout"), "config.ext_proc.read_timeout"),
        (("ext_proc", "request_deadline"), "config.ext_proc.request_deadline"),
        (("ext_proc", "drain_timeout"), "config.ext_proc.drain_timeout"),
        (("gateway", "timeout"), "config.gateway.timeout"),
        (("gateway", "idle_conn_timeout"), "config.gateway.idle_conn_timeout"),
    ],
)
@pytest.mark.parametrize("provider", PROVIDERS)
def test_durations_end_where_the_sidecar_s_do(provider: str, path: tuple[str, str], key: str) -> None:
    """What the sidecar would refuse at its start, whichever the gateway."""
    values = six_values(case(provider).values, {"config": {path[0]: {path[1]: "720h1s"}}})
    assert f'{key}: "720h1s" is too long; the limit is 720h' in refusal(values)


def test_durations_of_steps_end_there_too() -> None:
    """The message names step and key."""
    steps = [{"type": "render", "params": {"timeout": "999999h"}}, {"type": "prefill"}, {"type": "decode"}]
    said = refusal(six_values({"config": {"pipeline": {"steps": steps}}}))
    assert 'config.pipeline.steps[0].params.timeout: "999999h" is too long; the limit is 720h' in said


@pytest.mark.parametrize(
    ("address", "port"),
    [("0.0.0.0:09002", 9002), ("0.0.0.0:00070", 70), ("[::]:9002", 9002), ("10.0.0.1:10000", 10000)],
)
def test_ports_are_decimal(address: str, port: int) -> None:
    """Leading zeros are neither octal nor text, in YAML as in the sidecar."""
    rendered = render(six_values(listen("ext_proc", address)))
    assert rendered.one("Service", "epd-epd-sidecar")["spec"]["ports"][0]["port"] == port
    assert container(rendered)["ports"][0]["containerPort"] == port


@pytest.mark.parametrize(
    "address", ["LOCALHOST:9002", "[0:0:0:0:0:0:0:1]:9002", "[0000::0001]:9002", "127.0.0.2:9002"]
)
def test_the_loopback_by_any_name_is_refused(address: str) -> None:
    """No other pod could reach the listener."""
    said = refusal(six_values(listen("ext_proc", address)))
    assert f"config.ext_proc.listen {address} is reachable inside the pod only" in said


@pytest.mark.parametrize(("section", "address"), [("ext_proc", "0.0.0.0:65536"), ("admin", "0.0.0.0:99999")])
def test_a_port_that_does_not_exist_is_refused(section: str, address: str) -> None:
    """No Service could have it."""
    said = refusal(six_values(listen(section, address)))
    assert f'config.{section}.listen: "{address.rpartition(":")[2]}" is not a port' in said


@pytest.mark.parametrize("amount", ["08", "010", "00%", "01%"])
def test_pods_are_counted_without_leading_zeros(amount: str) -> None:
    """Kubernetes takes such a text for neither a number nor a percentage."""
    for key, other in (("minAvailable", "maxUnavailable"), ("maxUnavailable", "minAvailable")):
        budget = {"podDisruptionBudget": {key: amount, other: ""}}
        assert f'podDisruptionBudget.{key}: "{amount}" is neither a number' in refusal(six_values(budget))


def test_one_port_in_two_spellings_is_one_port() -> None:
    """The comparison is of numbers."""
    twice = {"config": {"ext_proc": {"listen": "0.0.0.0:9090"}, "admin": {"listen": "[::]:09090"}}}
    assert "share port 9090" in refusal(six_values(twice))


@pytest.mark.parametrize(
    ("lifecycle", "seconds"),
    [
        ({}, 40),
        ({"preStop": {"sleep": {"seconds": 60}}}, 100),
        ({"preStop": {"exec": {"command": ["true"]}}}, 40),
    ],
)
def test_a_sleep_before_sigterm_does_not_shorten_the_drain(lifecycle: dict[str, Any], seconds: int) -> None:
    """Kubernetes counts it as part of the grace period."""
    assert pod(render(six_values({"lifecycle": lifecycle})))["terminationGracePeriodSeconds"] == seconds


def test_a_certificate_the_chart_does_not_know_is_not_tested() -> None:
    """With cert_path of one's own there is no CA to trust: no test pod, no rule for it, no word of it."""
    own = {
        "config": {"ext_proc": {"tls": {"cert_path": "/certs"}}},
        "networkPolicy": {"enabled": True, "gateway": [{"podSelector": {}}]},
    }
    rendered = render(six_values(ALONE, own))
    assert rendered.all("Pod") == ()
    assert "helm test" not in rendered.notes
    (gateway, *_) = rendered.one("NetworkPolicy")["spec"]["ingress"]
    assert gateway["from"] == [{"podSelector": {}}]


@pytest.mark.parametrize(
    ("overrides", "kind", "path"),
    [
        ({"replicaCount": 1000000}, "Deployment", ("spec", "replicas")),
        (
            {"autoscaling": {"enabled": True, "minReplicas": 1000000, "maxReplicas": 1000000}},
            "HorizontalPodAutoscaler",
            ("spec", "minReplicas"),
        ),
        (
            {"replicaCount": 2000000, "podDisruptionBudget": {"minAvailable": 1000000, "maxUnavailable": ""}},
            "PodDisruptionBudget",
            ("spec", "minAvailable"),
        ),
    ],
)
def test_a_million_is_a_number(overrides: dict[str, Any], kind: str, path: tuple[str, ...]) -> None:
    """Helm has floating-point numbers only; what it prints as 1e+06 is a text for Kubernetes."""
    value: Any = render(six_values(overrides)).one(kind)
    for key in path:
        value = value[key]
    assert value == 1000000
