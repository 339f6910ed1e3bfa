"""Whole configurations: what Envoy says of them, what it does not check, and the files that are shipped."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from betterproto2 import Casing
from envoy_data_plane.envoy.config.bootstrap.v3 import Bootstrap

from deploy.envoy.local_stack import envoy_binary
from tests.unit.envoy_config.envoy_config_support import (
    REPOSITORY,
    SHARED,
    TOKEN,
    cluster,
    ext_proc,
    listener,
    manager,
    values_of,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.envoy_config.envoy_config_support import Command

TOPOLOGIES = ("internal-listener", "reroute", "shared-listener")
BODY_MODES = ("full-duplex-streamed", "buffered")
EXT_PROC = "envoy.filters.http.ext_proc"
ROUTER = "envoy.filters.http.router"

SIDECARS: dict[str, list[str]] = {
    "one": [],
    "tls": ["--sidecar=127.0.0.1:9002", "--sidecar=127.0.0.1:9003", "--encode=encode.svc:8000"],
    "socket-picker": ["--sidecar=unix:/run/epd/sidecar.sock", "--picker=127.0.0.1:9010"],
    "tls-names-picker": ["--sidecar=a.svc:9002", "--sidecar=b.svc:9002", "--picker=picker.svc:9002"],
}
"""Kinds of sidecar addresses, TLS and endpoint picker; each meets every topology and body mode."""

CASES = {" ".join(case): case for case in itertools.product(TOPOLOGIES, BODY_MODES, SIDECARS)}

SHIPPED = {
    "bootstrap.yaml": "internal-listener",
    "reroute.yaml": "reroute",
    "shared-listener.yaml": "shared-listener",
}
WITH_A_DEFAULT = {"failure_mode_allow", "request_body_mode", "response_body_mode"}
"""Fields that are printed although they have their default."""


def environment(topology: str, kind: str, certificate: Path) -> dict[str, str]:
    shared = SHARED if topology == "shared-listener" else {}
    tls = {"SIDECAR__EXT_PROC__TLS__CERT_PATH": str(certificate)} if kind.startswith("tls") else {}
    return shared | tls


def options(topology: str, body_mode: str, kind: str, certificate: Path) -> list[str]:
    tls = [f"--sidecar-ca={certificate / 'tls.crt'}", "--sidecar-name=sidecar.test"]
    return [
        *(f"--topology={topology}", f"--body-mode={body_mode}"),
        *(*SIDECARS[kind], *(tls if kind.startswith("tls") else [])),
    ]


def validate(text: str, directory: Path) -> None:
    file = directory / "envoy.yaml"
    file.write_text(text, encoding="utf-8")
    words = [str(envoy_binary()), "--mode", "validate", "-c", str(file)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60, cwd=directory)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("case", CASES)
def test_envoy_accepts_every_combination(
    case: str, command: Command, certificate: Path, tmp_path: Path
) -> None:
    """Envoy accepts the text, every cluster that is named exists, and it is what the typed models say."""
    topology, body_mode, kind = CASES[case]
    words = options(topology, body_mode, kind, certificate)
    printed = command(*words, env=environment(topology, kind, certificate))
    config = printed.config
    validate(printed.text, tmp_path)
    known = {item["name"] for item in config["static_resources"]["clusters"]}
    routed = {item["cluster"] for item in values_of(config, "route") if isinstance(item, dict)}
    called = {service["envoy_grpc"]["cluster_name"] for service in values_of(config, "grpc_service")}
    assert routed | called == known
    assert called == {"epd_sidecar"} | ({"picker"} if "picker" in kind else set())
    assert typed(config) == without_defaults(config)
    assert TOKEN not in printed.text


def typed(config: Any) -> dict[str, Any]:
    return Bootstrap.from_dict(config).to_dict(casing=Casing.SNAKE)


def without_defaults(node: Any) -> Any:
    if isinstance(node, list):
        return [without_defaults(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        key: without_defaults(value)
        for key, value in node.items()
        if key not in WITH_A_DEFAULT or value not in (False, "NONE")
    }


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_file_is_what_the_command_prints(
    name: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make envoy-config` changes nothing; run it after a change of the generator."""
    monkeypatch.chdir(REPOSITORY)
    shared = SHARED if name == "shared-listener.yaml" else {}
    file = (REPOSITORY / "deploy" / "envoy" / "sidecar.yaml").relative_to(REPOSITORY)
    printed = command("--topology", SHIPPED[name], env=shared, config=file)
    assert printed.complaint == ""
    assert printed.text == (REPOSITORY / "deploy" / "envoy" / name).read_text(encoding="utf-8")


def filters(config: Any, name: str) -> list[str]:
    return [item["name"] for item in manager(config, name)["http_filters"]]


@pytest.mark.parametrize(
    ("topology", "on_clients", "on_internal"),
    [("internal-listener", False, True), ("reroute", True, True), ("shared-listener", True, None)],
)
def test_the_picker_is_where_its_topology_needs_it(
    topology: str,
    on_clients: bool,
    on_internal: bool | None,
    command: Command,
) -> None:
    """It runs after the sidecar, enabled at the listener, fails closed, and names every worker."""
    env = SHARED if topology == "shared-listener" else {}
    config = command("--topology", topology, "--picker", "10.0.0.9:9002", env=env).config
    clients = "shared" if on_internal is None else "external"
    picker = [f"{EXT_PROC}/picker"]
    assert filters(config, clients) == [EXT_PROC, *(picker if on_clients else []), ROUTER]
    if on_internal is not None:
        assert filters(config, "internal") == [*picker, ROUTER]
    where = manager(config, clients if on_clients else "internal")["http_filters"][-2]
    assert "disabled" not in where
    assert where["typed_config"]["failure_mode_allow"] is False
    mode = where["typed_config"]["processing_mode"]
    assert (mode["request_body_mode"], mode["request_trailer_mode"]) == ("FULL_DUPLEX_STREAMED", "SEND")
    assert mode["response_header_mode"] == "SKIP"
    for phase in ("encode", "prefill", "decode"):
        found = cluster(config, phase)
        assert (found["type"], found["lb_policy"]) == ("ORIGINAL_DST", "CLUSTER_PROVIDED")
        assert found["original_dst_lb_config"] == {
            "use_http_header": True,
            "http_header_name": "x-gateway-destination-endpoint",
        }
        assert "load_assignment" not in found


@pytest.mark.parametrize("topology", ["internal-listener", "reroute"])
def test_control_headers_are_removed_before_routing(topology: str, command: Command) -> None:
    """Phase and token go first of all; with a picker so does the address it would write. Never the guard."""

    def removed(*words: str) -> list[Any]:
        extensions = manager(command("--topology", topology, *words).config, "external")
        (early,) = extensions["early_header_mutation_extensions"]
        mutations: list[Any] = early["typed_config"]["mutations"]
        return mutations

    assert removed() == [{"remove": "epp-profile"}, {"remove": "x-epd-phase-token"}]
    address = {"remove_on_match": {"key_matcher": {"prefix": "x-gateway-destination-endpoint"}}}
    assert removed("--picker", "127.0.0.1:1") == [*removed(), address]


def test_a_shared_listener_removes_nothing_before_the_filter(command: Command) -> None:
    """There the sub-requests carry the very headers; the sidecar tells the two apart."""
    config = command("--topology", "shared-listener", env=SHARED).config
    assert "early_header_mutation_extensions" not in manager(config, "shared")
    assert [item["name"] for item in config["static_resources"]["listeners"]] == ["shared"]


def test_buffered_mode_takes_its_limits_from_the_sidecar(command: Command) -> None:
    """Largest body plus room for the rewrite, deadline plus 10 s; the internal listener streams."""
    env = {
        "SIDECAR__EXT_PROC__MAX_REQUEST_BODY_SIZE": "3",
        "SIDECAR__EXT_PROC__REQUEST_DEADLINE": "1m30s500ms",
    }
    config = command("--body-mode", "buffered", env=env).config
    assert ext_proc(config)["processing_mode"]["request_body_mode"] == "BUFFERED"
    assert ext_proc(config)["message_timeout"] == "100.500s"
    assert listener(config, "external")["per_connection_buffer_limit_bytes"] == 4 << 20
    assert listener(config, "internal")["per_connection_buffer_limit_bytes"] == 1 << 20


@pytest.mark.parametrize(
    ("deadline", "message_timeout", "idle_timeout"),
    [("120s", "130s", "900s"), ("14m", "850s", "900s"), ("20m", "1210s", "1260s"), ("2h", "3600s", "7260s")],
)
def test_timeouts_follow_the_deadline(
    deadline: str, message_timeout: str, idle_timeout: str, command: Command
) -> None:
    """The filter waits longer than the sidecar works, up to Envoy's limit; an idle stream longer still."""
    config = command(env={"SIDECAR__EXT_PROC__REQUEST_DEADLINE": deadline}).config
    assert ext_proc(config)["message_timeout"] == message_timeout
    for name in ("external", "internal"):
        assert manager(config, name)["stream_idle_timeout"] == idle_timeout


def test_the_metadata_namespace_is_the_sidecars(command: Command) -> None:
    """Filter and access log name the configured namespace, and no other."""
    printed = command(env={"SIDECAR__OBSERVABILITY__METADATA_NAMESPACE": "org.example"})
    assert ext_proc(printed.config)["metadata_options"] == {
        "receiving_namespaces": {"untyped": ["org.example"]}
    }
    assert "%DYNAMIC_METADATA(org.example:outcome)%" in printed.text
    assert "epd.sidecar" not in printed.text


def test_prefill_decode_sees_the_head_of_the_answer(command: Command, tmp_path: Path) -> None:
    """A pipeline that ends with prefill-decode gets response headers; its body never."""
    content = yaml.safe_load((REPOSITORY / "deploy" / "envoy" / "sidecar.yaml").read_text(encoding="utf-8"))
    content["pipeline"] |= {"kv_connector": "kv-sglang"}
    content["pipeline"]["steps"][-2:] = [{"type": "prefill-decode"}]
    file = tmp_path / "sidecar.yaml"
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    mode = ext_proc(command(config=file).config)["processing_mode"]
    assert (mode["response_header_mode"], mode["response_body_mode"]) == ("SEND", "NONE")
    both = ("--prefill", "127.0.0.1:1", "--prefill", "127.0.0.1:2")
    assert any("use --picker" in line for line in command(*both, config=file).problems)
    assert command(*both).code == 0
    assert "/generate" in _not_for_clients(command(config=file).config)
    validate(command(config=file).text, tmp_path)
    mode = ext_proc(command().config)["processing_mode"]
    assert (mode["response_header_mode"], mode["response_body_mode"]) == ("SKIP", "NONE")
    assert "/generate" not in _not_for_clients(command().config)


def _not_for_clients(config: dict[str, Any]) -> list[str]:
    """Which of some paths are answered 404."""
    text = json.dumps(config)
    patterns = re.findall(
        r'"name": "not-for-clients[a-z-]*", "match": {"safe_regex": {"regex": "([^"]*)"', text
    )
    paths = ("/generate", "/api/chat", "/v1/score", "/invocations", "/v1/chat/completions", "/generate/x")
    return [path for path in paths if any(re.fullmatch(pattern, path) for pattern in patterns)]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_prompt_token_parity_adds_an_observer(topology: str, command: Command, tmp_path: Path) -> None:
    """It follows the sidecar on the clients' listener, before any picker, as its documentation shows it."""
    env = {"SIDECAR__OBSERVABILITY__PROMPT_TOKEN_PARITY": "warn"}
    name, env = ("shared", env | SHARED) if topology == "shared-listener" else ("external", env)
    printed = command("--topology", topology, "--picker", "127.0.0.1:1", env=env)
    observer, picker = f"{EXT_PROC}/prompt-token-parity", f"{EXT_PROC}/picker"
    assert filters(printed.config, name)[:2] == [EXT_PROC, observer]
    assert filters(printed.config, name)[2:] in ([ROUTER], [picker, ROUTER])
    assert printed.text.count(f"name: {observer}\n") == 1
    documentation = (REPOSITORY / "docs" / "prompt-token-parity.md").read_text(encoding="utf-8")
    (documented,) = yaml.safe_load(
        re.findall(r"^```yaml\n(- name: .*?)^```", documentation, re.MULTILINE | re.DOTALL)[0]
    )
    assert manager(printed.config, name)["http_filters"][1] == documented
    validate(printed.text, tmp_path)


def test_parts_fit_into_a_configuration(command: Command, tmp_path: Path) -> None:
    """Filter, cluster and access log, pasted into the rest of a bootstrap, are the bootstrap again."""
    whole = command().config
    assert command("--part", "listeners").config == whole["static_resources"]["listeners"]
    parts = {part: command("--part", part).config for part in ("filter", "cluster", "access-log")}
    config = command().config
    http = manager(config, "external")
    http["http_filters"] = [*parts["filter"], http["http_filters"][-1]]
    http["access_log"] = parts["access-log"]
    config["static_resources"]["clusters"][0:1] = parts["cluster"]
    assert config == whole
    validate(yaml.safe_dump(config), tmp_path)
