"""Combinations that cannot work are refused, each with what to do about it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chart.attach_cases import PREFILL_DECODE
from tests.chart.chart_rendering import lint, merged, refusal, render, six_values

SOCKET = {"ext_proc": {"listen": "unix:/run/epd-sidecar/ext_proc.sock"}}
DETACHED = {"attach": {"provider": "none"}}
ON_SOCKET = {**DETACHED, "uds": {"enabled": True}, "config": SOCKET}
RENDER_HERE = {"type": "render", "params": {"address": "http://render:8000"}}
NO_PORT = {"config": {"admin": {"listen": ""}}}

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "image",
        {"image": {"repository": ""}},
        "image.repository is missing: no image is published; build the repository's Dockerfile, push it",
    ),
    (
        "gateway address",
        {"config": {"gateway": {"address": ""}}},
        "config.gateway.address is missing: set the base URL of the internal Gateway's Service, for example",
    ),
    (
        "render address",
        {"render": {"address": ""}},
        "render.address is missing: set the base URL of the render service, for example http://render.inf",
    ),
    (
        "render address without a step for it",
        {"config": {"pipeline": {"steps": [{"type": "prefill"}, {"type": "decode"}]}}},
        "render.address is set, but config.pipeline.steps has no render step",
    ),
    (
        "no steps",
        {"config": {"pipeline": {"steps": []}}, "render": {"address": ""}},
        "config.pipeline.steps: the last step is missing; add {type: decode} at the end",
    ),
    (
        "SGLang's connector with the usual steps",
        {"config": {"pipeline": {"kv_connector": "kv-sglang"}}},
        "config.pipeline.steps[3]: with kv-sglang prefill answers only while decode runs; list the steps,",
    ),
    (
        "prefill-decode with another connector",
        merged(PREFILL_DECODE, {"config": {"pipeline": {"kv_connector": "kv-nixl"}}}),
        'config.pipeline.steps[3]: "prefill-decode" works with kv_connector kv-sglang only; set it, or use',
    ),
    (
        "tokens in without a renderer",
        {
            "config": {"pipeline": {"use_openai_format": False, "steps": [{"type": "decode"}]}},
            "render": {"address": ""},
        },
        "config.pipeline.use_openai_format: false needs the token ids of a render step",
    ),
    (
        "prefill-decode and a plain Service",
        merged(PREFILL_DECODE, {"phases": {"prefill": {"kind": "Service"}}}),
        "phases.prefill.kind Service: the prefill-decode step reserves a prefill worker and pins its call",
    ),
    (
        "prefill-decode and a plain Service, without a provider",
        merged(PREFILL_DECODE, DETACHED, {"phases": {"prefill": {"kind": "Service"}}}),
        "phases.prefill.kind Service: the prefill-decode step reserves a prefill worker",
    ),
    (
        "a body that does not fit into the total",
        {"config": {"limits": {"max_in_flight_bytes": 32}}},
        "config.limits.max_in_flight_bytes: 32 MB is less than ext_proc.max_request_body_size (64 MB)",
    ),
    (
        "a token, and routes that are not chosen again",
        {"config": {"ext_proc": {"clear_route_cache": False}}, "phaseToken": {"existingSecret": "phase"}},
        "config.ext_proc.clear_route_cache: false lets a client choose its route by EPP-Profile",
    ),
    (
        "tracing",
        {"config": {"observability": {"tracing": True}}},
        "config.observability.tracing: this version exports no spans of its own",
    ),
    (
        "render address twice",
        {"config": {"pipeline": {"steps": [RENDER_HERE, {"type": "decode"}]}}},
        "the address of the render step is set in render.address and in config.pipeline.steps",
    ),
    (
        "phase token in the values",
        {"config": {"gateway": {"phase_token": "0123456789abcdef"}}},
        "config.gateway.phase_token would be readable in the ConfigMap",
    ),
    (
        "phase token twice",
        {"config": {"gateway": {"phase_token": "file:/token"}}, "phaseToken": {"existingSecret": "phase"}},
        "the phase token is set in phaseToken.existingSecret and in config.gateway.phase_token",
    ),
    (
        "shared listener without phase token",
        {"attach": {"topology": "shared-listener"}, "phases": {"gateway": {"name": ""}}},
        "attach.topology shared-listener needs a phase token",
    ),
    (
        "socket behind a Service",
        {"config": SOCKET},
        "config.ext_proc.listen is a unix socket, which no Service reaches: set uds.enabled",
    ),
    (
        "uds without a socket",
        {**DETACHED, "uds": {"enabled": True}},
        "uds.enabled needs a socket in config.ext_proc.listen",
    ),
    (
        "uds with a provider",
        {"uds": {"enabled": True}, "config": SOCKET},
        "attach.provider envoy-gateway reaches the sidecar through its Service, which uds.enabled leaves out",
    ),
    (
        "uds with autoscaling",
        {**ON_SOCKET, "autoscaling": {"enabled": True}},
        "autoscaling.enabled has nothing to scale: uds.enabled runs one pod per node",
    ),
    (
        "listener on the loopback",
        {"config": {"ext_proc": {"listen": "127.0.0.1:9002"}}},
        "config.ext_proc.listen 127.0.0.1:9002 is reachable inside the pod only: use 0.0.0.0:9002",
    ),
    (
        "listener on any free port",
        {"config": {"ext_proc": {"listen": "0.0.0.0:0"}}},
        "config.ext_proc.listen 0.0.0.0:0 takes any free port, which nobody could find",
    ),
    (
        "admin listener on the loopback",
        {"config": {"admin": {"listen": "[::1]:9090"}}},
        "config.admin.listen [::1]:9090 is reachable inside the pod only: use 0.0.0.0:9090",
    ),
    (
        "one port twice",
        {"config": {"admin": {"listen": "0.0.0.0:9002"}}},
        "config.admin.listen and config.ext_proc.listen share port 9002",
    ),
    (
        "TLS without admin listener",
        {**NO_PORT, "tls": {"existingSecret": "certificate"}},
        "config.admin.listen must not be empty with TLS or uds: the kubelet's gRPC probes reach neither",
    ),
    (
        "socket without admin listener",
        {**ON_SOCKET, "config": {**SOCKET, **NO_PORT["config"]}},
        "config.admin.listen must not be empty with TLS or uds",
    ),
    (
        "ServiceMonitor without metrics",
        {**NO_PORT, "serviceMonitor": {"enabled": True}},
        "serviceMonitor and prometheusRule need /metrics: set config.admin.listen",
    ),
    (
        "PrometheusRule without metrics",
        {**NO_PORT, "prometheusRule": {"enabled": True}},
        "serviceMonitor and prometheusRule need /metrics: set config.admin.listen",
    ),
    (
        "certificate twice",
        {"tls": {"existingSecret": "certificate"}, "config": {"ext_proc": {"tls": {"cert_path": "/tls"}}}},
        "the certificate is set in tls.existingSecret and in config.ext_proc.tls.cert_path",
    ),
    (
        "fewer replicas at most than at least",
        {"autoscaling": {"enabled": True, "minReplicas": 5, "maxReplicas": 4}},
        "autoscaling.minReplicas 5 is more than autoscaling.maxReplicas 4",
    ),
    (
        "disruption budget with both bounds",
        {"podDisruptionBudget": {"minAvailable": 1}},
        "podDisruptionBudget takes one of minAvailable and maxUnavailable",
    ),
    (
        "disruption budget with neither bound",
        {"podDisruptionBudget": {"maxUnavailable": ""}},
        "podDisruptionBudget takes one of minAvailable and maxUnavailable",
    ),
    (
        "disruption budget that keeps the only replica",
        {"replicaCount": 1, "podDisruptionBudget": {"minAvailable": 1, "maxUnavailable": ""}},
        "podDisruptionBudget.minAvailable 1 of 1 replicas would never let a node drain",
    ),
    (
        "disruption budget that keeps the fewest replicas",
        {
            "autoscaling": {"enabled": True, "minReplicas": 2},
            "podDisruptionBudget": {"minAvailable": 2, "maxUnavailable": ""},
            "replicaCount": 5,
        },
        "podDisruptionBudget.minAvailable 2 of 2 replicas would never let a node drain",
    ),
    (
        "disruption budget that keeps everything",
        {"podDisruptionBudget": {"minAvailable": "100%", "maxUnavailable": ""}},
        "podDisruptionBudget.minAvailable 100% of 2 replicas would never let a node drain",
    ),
    (
        "disruption budget whose percentage is rounded up",
        {"replicaCount": 1, "podDisruptionBudget": {"minAvailable": "50%", "maxUnavailable": ""}},
        "podDisruptionBudget.minAvailable 50% of 1 replicas would never let a node drain",
    ),
    (
        "disruption budget that lets nothing go",
        {"podDisruptionBudget": {"maxUnavailable": 0}},
        "podDisruptionBudget.maxUnavailable 0 would never let a node drain: use 1",
    ),
    (
        "less memory than the sidecar may hold",
        {"resources": {"limits": {"memory": "3071Mi"}}},
        "resources.limits.memory 3071Mi is less than one and a half times config.limits.max_in_flight_bytes",
    ),
    (
        "more in flight than the memory holds",
        {"config": {"limits": {"max_in_flight_bytes": "2049"}}},
        "resources.limits.memory 3Gi is less than one and a half times config.limits.max_in_flight_bytes",
    ),
    (
        "network policy that lets nobody in",
        {"networkPolicy": {"enabled": True}},
        "networkPolicy.gateway is empty, which would let nobody in",
    ),
    (
        "network policy that lets nothing out",
        {"networkPolicy": {"enabled": True, "gateway": [{"podSelector": {}}], "egress": {"enabled": True}}},
        "networkPolicy.egress.rules is empty, which would cut the sidecar off",
    ),
]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [pytest.param(overrides, message, id=name) for name, overrides, message in REFUSED],
)
def test_it_says_what_cannot_work(overrides: dict[str, Any], message: str) -> None:
    """One problem gives one message, which names the values and what to do."""
    said = refusal(six_values(overrides))
    assert f"- {message}" in said
    assert said.count("\n- ") == 1


def test_every_problem_is_reported_at_once() -> None:
    """An installation with several mistakes takes one attempt to learn them all."""
    mistakes: list[dict[str, Any]] = [
        {"render": {"address": ""}},
        {"config": {"gateway": {"address": "", "phase_token": "0123456789abcdef"}}},
        {"replicaCount": 1, "podDisruptionBudget": {"minAvailable": 1, "maxUnavailable": ""}},
    ]
    said = refusal(six_values(*mistakes))
    assert said.count("\n- ") == 4


def test_the_phase_token_is_never_repeated() -> None:
    """The refusal of a literal token does not print it."""
    assert "0123456789abcdef" not in refusal(
        six_values({"config": {"gateway": {"phase_token": "0123456789abcdef"}}})
    )


def test_what_the_schema_would_have_refused() -> None:
    """A duration or a quantity that cannot be read is refused by the templates that compute with it, too."""
    drain = {"config": {"ext_proc": {"drain_timeout": "half a minute"}}}
    assert (
        'config.ext_proc.drain_timeout: "half a minute" is not a duration; write one such as "30s"'
        in refusal(six_values(drain), schema=False)
    )
    memory = {"resources": {"limits": {"memory": "3 gigabytes"}}}
    assert 'resources.limits.memory: "3 gigabytes" is not a quantity of Kubernetes; write one' in refusal(
        six_values(memory), schema=False
    )


@pytest.mark.parametrize(
    "overrides",
    [
        {"resources": {"limits": {"memory": "3Gi"}}},
        {"resources": {"limits": {"memory": 3221225472}}},
        {"resources": {"limits": {"memory": "3221225472"}}},
        {"resources": {"limits": {"memory": "3.3G"}}},
        {"resources": {"limits": {"memory": None}}},
        {"resources": {"limits": None}},
        {"resources": {"limits": {"memory": "96Mi"}}, "config": {"limits": {"max_in_flight_bytes": 64}}},
        {"replicaCount": 1},
        {"replicaCount": 0},
        {"replicaCount": 2, "podDisruptionBudget": {"minAvailable": "50%", "maxUnavailable": ""}},
        {"replicaCount": 1, "podDisruptionBudget": {"maxUnavailable": "1%"}},
        {"replicaCount": 1, "podDisruptionBudget": {"enabled": False, "minAvailable": 1}},
        {"autoscaling": {"minReplicas": 20}},
        {"networkPolicy": {"egress": {"enabled": True}}},
        {"phaseToken": {"existingSecret": "phase"}},
        {**DETACHED, "attach": {"provider": "none", "topology": "shared-listener"}},
        PREFILL_DECODE,
        merged(PREFILL_DECODE, {"phases": {"enabled": False, "prefill": {"kind": "Service"}}}),
        merged(
            PREFILL_DECODE, DETACHED, {"phases": {"gateway": {"name": ""}, "prefill": {"kind": "Service"}}}
        ),
    ],
)
def test_what_works_is_not_refused(overrides: dict[str, Any]) -> None:
    """The checks stop at their boundaries, and leave alone what is switched off."""
    assert render(six_values(overrides)).one("Deployment")


def test_the_six_values_are_enough() -> None:
    """An installation that says the six things has no errors and no warnings."""
    assert lint(six_values()) == []
