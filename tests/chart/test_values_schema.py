"""values.schema.json lets through what the sidecar loads, and says what is wrong with the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import helm_python
import pytest
import yaml

from sidecar.config import ConfigError, load_settings
from tests.chart.chart_rendering import CHART, ROOT, merged, render, schema_refusal, six_values

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DEFAULTS: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
FREE = {("podSecurityContext",), ("securityContext",), ("resources", "requests"), ("resources", "limits")}
"""Mappings of the defaults whose keys are Kubernetes' own."""
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


def accepted(values: dict[str, Any]) -> bool:
    try:
        helm_python.Chart.load(CHART).validate_schema(values)
    except helm_python.HelmValuesError:
        return False
    return True


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
        ({"image": {"repository": ""}}, "at '/image/repository': minLength"),
        ({"image": {"digest": "sha256:abc"}}, "at '/image/digest'"),
        ({"podDisruptionBudget": {"unhealthyPodEvictionPolicy": "Always"}}, "unhealthyPodEvictionPolicy"),
        ({"extraEnv": [{"nmae": "A"}]}, "at '/extraEnv/0'"),
        ({"tolerations": [{"effect": "Never"}]}, "at '/tolerations/0/effect'"),
        ({"networkPolicy": {"gateway": [{"namespace": "envoy"}]}}, "at '/networkPolicy/gateway/0'"),
        (
            {"commonLabels": {"app.kubernetes.io/name": "mine"}},
            "invalid propertyName 'app.kubernetes.io/name'",
        ),
        ({"resources": {"limits": {"memory": "3 GB"}}}, "at '/resources/limits/memory'"),
        ({"uds": {"hostPath": "run"}}, "at '/uds/hostPath'"),
        ({"render": {"address": "render:8000"}}, "at '/render/address'"),
        ({"config": {"ext_proc": {"drain_timeout": 30}}}, "at '/config/ext_proc/drain_timeout'"),
        ({"config": {"log_level": "verbose"}}, "at '/config/log_level'"),
        ({"config": {"server": {"port": 8080}}}, "at '/config': additional properties 'server'"),
    ],
)
def test_the_message_names_the_key(overrides: dict[str, Any], message: str) -> None:
    """A wrong type, choice or form is refused with its path."""
    assert message in schema_refusal(six_values(overrides))


def step(kind: str, **params: Any) -> dict[str, Any]:
    return {"pipeline": {"steps": [{"type": kind, "params": params}, {"type": "decode"}]}}


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
    assert accepted(six_values({"config": config}))


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
        {"gateway": {"phase_token": "with a space in it"}},
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
    assert not accepted(six_values({"config": config}))


def test_the_shipped_configuration_is_accepted() -> None:
    """The file that documents every key can be pasted below `config`."""
    shipped = yaml.safe_load((ROOT / "deploy/envoy/sidecar.yaml").read_text(encoding="utf-8"))
    assert accepted(six_values({"config": shipped}))


def test_a_subchart_may_be_given_globals() -> None:
    """Helm puts `global` into every chart's values; it is not a typo."""
    assert accepted(six_values({"global": {"region": "eu"}}))
