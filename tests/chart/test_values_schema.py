"""values.schema.json knows keys, kinds and choices; with the templates it takes what the sidecar loads."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import helm_python
import pytest
import yaml

from deploy.envoy.chart import kubernetes_schema
from deploy.envoy.chart.config_schema import SCHEMA
from sidecar.config import ConfigError, load_settings
from tests.chart.chart_rendering import CHART, ROOT, merged, refusal, render, schema_refusal, six_values

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DEFAULTS: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
FREE = {("resources", "requests"), ("resources", "limits")}
"""Mappings of the defaults whose keys are names."""
RENDER = {"type": "render", "params": {"address": "http://render"}}


def at(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    for key in reversed(path):
        value = {key: value}
    assert isinstance(value, dict)
    return value


def mappings(values: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if path in FREE:
        return
    yield path
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from mappings(value, (*path, key))


def values_below(values: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in values.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from values_below(value, (*path, key))


def refused(values: dict[str, Any]) -> str:
    """What the chart says to these values; nothing if it installs them."""
    try:
        render(values)
    except (helm_python.HelmValuesError, helm_python.HelmRenderError) as error:
        return str(error)
    return ""


def loads(config: dict[str, Any], tmp_path: Path) -> bool:
    """Whether the sidecar starts with these keys on top of the chart's and of an installation's."""
    complete = merged(DEFAULTS["config"], {"gateway": {"address": "http://gateway"}})
    complete["pipeline"]["steps"] = [RENDER, {"type": "prefill"}, {"type": "decode"}]
    file = tmp_path / "sidecar.yaml"
    file.write_text(yaml.safe_dump(merged(complete, config)))
    try:
        load_settings(file, {})
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("path", list(mappings(DEFAULTS)), ids=".".join)
def test_a_key_that_does_not_exist_is_refused(path: tuple[str, ...]) -> None:
    """A typo on any level is named, instead of being ignored."""
    said = schema_refusal(six_values(at((*path, "tpyo"), 1)))
    assert "additional properties 'tpyo' not allowed" in said


@pytest.mark.parametrize("path", list(values_below(DEFAULTS)), ids=".".join)
def test_a_value_that_is_taken_away(path: tuple[str, ...]) -> None:
    """Null deletes a default in Helm: what the chart cannot do without is named, not stumbled over."""
    values = six_values(at(path, None))
    try:
        render(values)
    except helm_python.HelmValuesError as error:
        assert f"missing property '{path[-1]}'" in str(error)  # noqa: PT017 - either outcome is right


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"replicaCount": "3"}, "at '/replicaCount': got string, want integer"),
        ({"attach": {"provider": "nginx"}}, "at '/attach/provider': value must be one of 'none'"),
        ({"attach": {"bodyMode": "FULL_DUPLEX_STREAMED"}}, "at '/attach/bodyMode': value must be one of"),
        ({"podDisruptionBudget": {"unhealthyPodEvictionPolicy": "Always"}}, "unhealthyPodEvictionPolicy"),
        ({"extraEnv": [{"nmae": "A"}]}, "at '/extraEnv/0'"),
        ({"tolerations": [{"effect": "Never"}]}, "at '/tolerations/0/effect'"),
        ({"networkPolicy": {"gateway": [{"namespace": "envoy"}]}}, "at '/networkPolicy/gateway/0'"),
        (
            {"commonLabels": {"app.kubernetes.io/name": "mine"}},
            "invalid propertyName 'app.kubernetes.io/name'",
        ),
        ({"config": {"ext_proc": {"drain_timeout": True}}}, "at '/config/ext_proc/drain_timeout'"),
        ({"config": {"ext_proc": {"listen": 9002}}}, "at '/config/ext_proc/listen': got number, want string"),
        ({"config": {"log_level": "verbose"}}, "at '/config/log_level'"),
        ({"config": {"server": {"port": 8080}}}, "at '/config': additional properties 'server'"),
    ],
)
def test_the_message_names_the_key(overrides: dict[str, Any], message: str) -> None:
    """A wrong kind or choice is refused with its path."""
    assert message in schema_refusal(six_values(overrides))


def every(node: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Each keyword of a schema with the path of the value it is about; not those of Kubernetes' own types."""
    if isinstance(node, dict):
        for key, below in node.items():
            yield path, key
            yield from every(below, f"{path}.{key}" if key not in ("properties", "items") else path)
    elif isinstance(node, list):
        for below in node:
            yield from every(below, path)


def test_no_pattern_hides_what_a_template_says() -> None:
    """A schema's refusal of a text prints a regular expression, and keeps every template from running."""
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    found = {path for path, keyword in every(schema["properties"]) if keyword in ("pattern", "minItems")}
    quantities_of_kubernetes = {
        ".autoscaling.behavior.scaleDown.tolerance.anyOf",
        ".autoscaling.behavior.scaleUp.tolerance.anyOf",
        ".extraEnv.valueFrom.resourceFieldRef.divisor.anyOf",
    }
    assert found == quantities_of_kubernetes


FORMS: list[tuple[dict[str, Any], str]] = [
    ({"image": {"digest": "sha256:abc"}}, 'image.digest: "sha256:abc" is not a digest; write sha256: and 64'),
    ({"resources": {"limits": {"memory": "3 GB"}}}, 'resources.limits.memory: "3 GB" is not a quantity of'),
    ({"resources": {"requests": {"cpu": "0"}}}, 'resources.requests.cpu: "0" is nothing; write more than 0'),
    ({"uds": {"hostPath": "run"}}, 'uds.hostPath: "run" is not an absolute directory; write one such as'),
    (
        {"render": {"address": "render:8000"}},
        'render.address: "render:8000" is not an http or https address with a host; write a base URL such as',
    ),
    (
        {"config": {"ext_proc": {"drain_timeout": 30}}},
        'config.ext_proc.drain_timeout: 30 has no unit; add a unit, for example "30s"',
    ),
    (
        {"config": {"ext_proc": {"drain_timeout": "half a minute"}}},
        'config.ext_proc.drain_timeout: "half a minute" is not a duration; write one such as "30s"',
    ),
    ({"attach": {"namespace": "A"}}, 'attach.namespace: "A" is not a namespace; use up to 63 lower-case'),
    (
        {"attach": {"targetRefs": [{"name": "inference-gateway", "sectionName": "no_section"}]}},
        'attach.targetRefs[0].sectionName: "no_section" is not a name of Kubernetes; use lower-case letters',
    ),
    ({"attach": {"gateways": [{"name": ""}]}}, "attach.gateways[0].name: must not be empty"),
    (
        {
            "attach": {"istio": {"clusterDomain": "a: {"}},
            "config": {"gateway": {"address": "http://internal.inference"}},
        },
        'attach.istio.clusterDomain: "a: {" is not the domain of a cluster; write one such as cluster.local',
    ),
    ({"imagePullSecrets": [{"name": ""}]}, "imagePullSecrets[0].name: must not be empty"),
    ({"phases": {"gateway": {"name": "Internal"}}}, 'phases.gateway.name: "Internal" is not a name of'),
    ({"phases": {"service": {"name": "a.b"}}}, 'phases.service.name: "a.b" is not the name of a Service'),
    ({"phases": {"decode": {"name": "a.b"}}}, 'phases.decode.name: "a.b" is not the name of a Service'),
    ({"phases": {"decode": {"name": ""}}}, "phases.decode.name: must not be empty"),
    (
        {"phases": {"clientRoute": {"paths": [{"type": "Exact", "value": "v1/models"}]}}},
        'phases.clientRoute.paths[0].value: "v1/models" is not a path; begin it with /',
    ),
    ({"tls": {"existingSecret": "a..b"}}, 'tls.existingSecret: "a..b" is not a name of Kubernetes'),
    ({"tls": {"caKey": ""}}, 'tls.caKey: "" is not a key of a Secret; use letters, digits and . _ -'),
    ({"tls": {"serverName": "x: {y"}}, 'tls.serverName: "x: {y" is not a name in a certificate'),
    ({"phaseToken": {"key": "a b"}}, 'phaseToken.key: "a b" is not a key of a Secret'),
    ({"nameOverride": "x" * 64}, "cannot be part of a name; use up to 63 lower-case letters"),
    ({"extraEnv": [{"name": ""}]}, "extraEnv[0].name: must not be empty"),
    (
        {"podDisruptionBudget": {"maxUnavailable": "some"}},
        '"some" is neither a number of pods nor a percentage',
    ),
    ({"podDisruptionBudget": {"maxUnavailable": -1}}, "-1 is neither a number of pods nor a percentage"),
    ({"serviceMonitor": {"interval": "often"}}, 'serviceMonitor.interval: "often" is not a duration of'),
]
"""Values of the right kind with a wrong form, and what the chart says."""


@pytest.mark.parametrize(("overrides", "message"), FORMS, ids=lambda item: str(item)[:60])
def test_the_message_says_what_to_write(overrides: dict[str, Any], message: str) -> None:
    """A text that cannot be is refused with its key, itself, and what is right; nothing else is said."""
    said = refusal(six_values(overrides))
    assert message in said
    assert said.count("\n- ") == 1


def test_a_wrong_form_does_not_hide_the_rest() -> None:
    """Forms are told together with the combinations that cannot work, whatever computes with them."""
    mistakes: list[dict[str, Any]] = [
        {
            "config": {
                "ext_proc": {"drain_timeout": 30, "request_deadline": "soon"},
                "gateway": {"address": ""},
            }
        },
        {"config": {"pipeline": {"steps": []}}, "attach": {"targetRefs": []}},
        {"resources": {"limits": {"memory": "plenty"}}, "phases": {"clientRoute": {"paths": []}}},
    ]
    said = refusal(six_values(*mistakes))
    for part in (
        "config.ext_proc.drain_timeout: 30 has no unit",
        'config.ext_proc.request_deadline: "soon" is not a duration',
        "config.gateway.address is missing",
        "config.pipeline.steps: the last step is missing; add {type: decode} at the end",
        "attach.targetRefs is empty: name the Gateway",
        'resources.limits.memory: "plenty" is not a quantity',
    ):
        assert part in said, part


def step(kind: str, **params: Any) -> dict[str, Any]:
    return {"pipeline": {"steps": [{"type": kind, "params": params}, {"type": "decode"}]}}


def installation(config: dict[str, Any]) -> dict[str, Any]:
    """An installation without a gateway, and with a render step where the steps are the chart's own."""
    steps = config.get("pipeline", {}).get("steps", [{"type": "render"}])
    plain = any(item.get("type") == "render" and not item.get("params") for item in steps)
    listen = str(config.get("ext_proc", {}).get("listen", ""))
    return six_values(
        {"attach": {"provider": "none"}, "phases": {"enabled": False}, "config": config},
        {} if plain else {"render": {"address": ""}},
        {"uds": {"enabled": listen.startswith("unix:")}},
    )


@pytest.mark.parametrize(
    "config",
    [
        {"log_level": 3},
        {"log_level": "debug"},
        {"log_format": "text"},
        {"ext_proc": {"drain_timeout": 0}},
        {"ext_proc": {"drain_timeout": "0"}},
        {"ext_proc": {"read_timeout": "1m30s"}},
        {"ext_proc": {"read_timeout": ".5s"}},
        {"ext_proc": {"max_request_body_size": "64"}},
        {"ext_proc": {"max_request_body_size": 0.5}},
        {"ext_proc": {"listen": "unix:/run/ext_proc.sock"}},
        {"ext_proc": {"listen": "[::]:9002"}},
        {"admin": {"listen": ""}},
        {"limits": {"max_in_flight_requests": "10"}},
        {"headers": {"strip": ["X-Internal-User"]}},
        {"observability": {"prompt_token_parity": "warn"}},
        {"observability": {"prompt_token_parity": False}},
        {"pipeline": {"kv_connector": "kv-nixl", "ec_connector": "ec-nixl", "use_openai_format": False}},
        {"pipeline": {"forward_response_headers": []}},
        step(
            "replace-media-urls",
            download_timeout="3s",
            max_image_download_size=5,
            allowed_domains=["a.example"],
        ),
        step("replace-media-urls", allowed_image_content_types=["image/png"], allow_private_networks=True),
        step(
            "render", address="http://render", mm_payload="none", max_total_tokens=0, idle_conn_timeout="1s"
        ),
        step("conditional-decode", timeout="1s"),
        step("encode", on_failure="local", max_parallel=2, ec_connector="ec-nixl"),
        step("prefill", sparse_spans="verbatim", kv_connector="kv-nixl"),
        {"pipeline": {"steps": [{"type": "prefill", "params": None}, {"type": "decode"}]}},
        {
            "pipeline": {
                "kv_connector": "kv-sglang",
                "steps": [{"type": "prefill-decode", "params": {"bootstrap_port": 8998}}],
            }
        },
    ],
    ids=str,
)
def test_what_the_sidecar_loads_is_accepted(config: dict[str, Any], tmp_path: Path) -> None:
    """The forms that a file may use are the forms of the values."""
    assert loads(config, tmp_path)
    assert refused(installation(config)) == ""


@pytest.mark.parametrize(
    "config",
    [
        {"log_level": 6},
        {"log_level": True},
        {"log_format": "xml"},
        {"ext_proc": {"read_timeout": "0s"}},
        {"ext_proc": {"read_timeout": "30"}},
        {"ext_proc": {"drain_timeout": "-1s"}},
        {"ext_proc": {"drain_timeout": "1d"}},
        {"ext_proc": {"max_request_body_size": 0}},
        {"ext_proc": {"max_request_body_size": "64Mi"}},
        {"ext_proc": {"max_request_body_size": 1048577}},
        {"ext_proc": {"clear_route_cache": "true"}},
        {"ext_proc": {"listen": "9002"}},
        {"admin": {"listen": "unix:/run/admin.sock"}},
        {"limits": {"max_in_flight_requests": 0}},
        {"limits": {"max_in_flight_requests": 1.5}},
        {"gateway": {"address": "gateway:80"}},
        {"gateway": {"address": "http://user@gateway"}},
        {"headers": {"strip": "x-one"}},
        {"headers": {"strip": ["x one"]}},
        {"observability": {"metadata_namespace": "epd sidecar"}},
        {"observability": {"prompt_token_parity": "on"}},
        {"pipeline": {"kv_connector": "kv-carrier-pigeon"}},
        {"pipeline": {"steps": []}},
        {"pipeline": {"steps": [{"params": {}}]}},
        {"pipeline": {"steps": [{"type": "transcode"}, {"type": "decode"}]}},
        step("prefill", max_parallel=2),
        step("encode", max_parallel=0),
        step("render", address="http://render", mm_payload="some"),
        step("replace-media-urls", allowed_domains=["https://a.example"]),
        step("replace-media-urls", allowed_image_content_types=["png"]),
        step("prefill", timeout="0s"),
    ],
    ids=str,
)
def test_what_the_sidecar_refuses_is_refused(config: dict[str, Any], tmp_path: Path) -> None:
    """What would make every pod end at its start does not get so far."""
    assert not loads(config, tmp_path)
    assert refused(installation(config))


def test_the_shipped_configuration_is_accepted() -> None:
    """The file that documents every key can be pasted below `config`, with the addresses of a cluster."""
    shipped = yaml.safe_load((ROOT / "deploy/envoy/sidecar.yaml").read_text(encoding="utf-8"))
    addresses = {
        "gateway": {"address": "http://internal.inference"},
        "ext_proc": {"listen": "0.0.0.0:9002"},
        "admin": {"listen": "0.0.0.0:9090"},
    }
    values = six_values({"config": shipped}, {"config": addresses}, {"render": {"address": ""}})
    assert refused(values) == ""


def test_the_types_of_kubernetes_are_up_to_date() -> None:
    """`python -m deploy.envoy.chart.kubernetes_schema` writes those that rendered objects are held to."""
    assert SCHEMA.read_text(encoding="utf-8") == kubernetes_schema.schema_text()


@pytest.mark.parametrize(
    "overrides",
    [
        {"podSecurityContext": {"runAsNonroot": True}},
        {"podSecurityContext": {"seccompProfile": {"kind": "RuntimeDefault"}}},
        {"securityContext": {"readOnlyRootFileystem": True}},
        {"securityContext": {"capabilities": {"dropp": ["ALL"]}}},
        {"affinity": {"nodeAffinity": {"required": []}}},
        {"affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"wait": 1}]}}},
        {"extraVolumes": [{"name": "a", "emptydir": {}}]},
        {"lifecycle": {"preStop": {"execute": {"command": ["sleep"]}}}},
        {"resources": {"claims": [{"nam": "gpu"}]}},
    ],
    ids=str,
)
def test_a_typo_in_a_type_of_kubernetes_is_refused(overrides: dict[str, Any]) -> None:
    """The API server would drop it, and what it was for with it."""
    assert "additional properties" in schema_refusal(six_values(overrides))


def test_what_kubernetes_knows_is_accepted() -> None:
    """Types that users fill in take everything of the core API."""
    selector = {"matchLabels": {"app": "x"}}
    render(
        six_values(
            {
                "podSecurityContext": {"supplementalGroups": [1], "fsGroupChangePolicy": "OnRootMismatch"},
                "securityContext": {"runAsUser": 65532, "capabilities": {"drop": ["ALL"]}},
                "affinity": {
                    "podAntiAffinity": {
                        "requiredDuringSchedulingIgnoredDuringExecution": [
                            {"topologyKey": "kubernetes.io/hostname", "labelSelector": selector}
                        ]
                    }
                },
                "extraVolumes": [
                    {"name": "a", "emptyDir": {"sizeLimit": "1Gi"}},
                    {"name": "b", "projected": {"sources": [{"secret": {"name": "s"}}]}},
                ],
            }
        )
    )


def test_a_subchart_may_be_given_globals() -> None:
    """Helm puts `global` into every chart's values; it is not a typo."""
    assert refused(six_values({"global": {"region": "eu"}})) == ""
