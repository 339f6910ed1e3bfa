"""From a file to settings, and every way it can be wrong."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from sidecar.config import ConfigError, Settings, load_settings

if TYPE_CHECKING:
    from pathlib import Path

FULL: dict[str, Any] = {
    "log_level": "info",
    "log_format": "json",
    "ext_proc": {
        "listen": "127.0.0.1:9002",
        "tls": {"cert_path": ""},
        "max_request_body_size": 64,
        "clear_route_cache": True,
        "read_timeout": "30s",
        "request_deadline": "120s",
        "drain_timeout": "30s",
    },
    "admin": {"listen": "127.0.0.1:9090"},
    "limits": {"max_in_flight_requests": 10, "max_in_flight_bytes": 128},
    "gateway": {"address": "http://gateway:80", "phase_token": "0123456789abcdef", "timeout": "60s"},
    "errors": {"expose_upstream": False},
    "headers": {"strip": ["x-one"]},
    "observability": {"metadata_namespace": "epd.sidecar", "tracing": False},
    "pipeline": {
        "kv_connector": "kv-nixl",
        "ec_connector": "ec-nixl",
        "ec_trust_descriptors": True,
        "use_openai_format": False,
        "forward_response_headers": ["x-rev"],
        "steps": [
            {
                "type": "replace-media-urls",
                "params": {"allowed_domains": ["img.example"], "max_download_size": 3},
            },
            {"type": "render", "params": {"address": "http://render:8000", "mm_payload": "none"}},
            {"type": "encode", "params": {"max_parallel": 2}},
            {"type": "prefill", "params": {"sparse_spans": "verbatim"}},
            {"type": "decode"},
        ],
    },
}

Path_ = tuple[str | int, ...]


def changed(path: Path_, value: object) -> dict[str, Any]:
    """FULL with one value set."""
    return put(copy.deepcopy(FULL), path, value)


def put(raw: dict[str, Any], path: Path_, value: object) -> dict[str, Any]:
    target: Any = raw
    for part in path[:-1]:
        target = target.setdefault(part, {}) if isinstance(target, dict) else target[part]
    target[path[-1]] = value
    return raw


def load(path: Path, raw: object, environ: dict[str, str] | None = None) -> Settings:
    path.write_text(yaml.safe_dump(raw), encoding="utf-8")
    return load_settings(path, environ or {})[0]


def problems(path: Path, raw: object, environ: dict[str, str] | None = None) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load(path, raw, environ)
    return caught.value.problems


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "sidecar.yaml"


def test_values_arrive_typed(file: Path) -> None:
    """Seconds are floats, sizes bytes, lists tuples."""
    settings = load(file, FULL)
    assert settings.ext_proc.read_timeout == 30.0
    assert settings.ext_proc.max_request_body_size == 64 << 20
    assert settings.limits.max_in_flight_bytes == 128 << 20
    assert settings.headers.strip == ("x-one",)
    assert settings.gateway.phase_token == "0123456789abcdef"
    pipeline = settings.pipeline
    assert pipeline.media is not None
    assert pipeline.media.max_download_size == 3 << 20
    assert pipeline.render is not None
    assert pipeline.render.mm_payload == "none"
    assert pipeline.prefill is not None
    assert pipeline.prefill.sparse_spans == "verbatim"
    assert [step.type for step in pipeline.steps] == [
        "replace-media-urls",
        "render",
        "encode",
        "prefill",
        "decode",
    ]


def test_defaults(file: Path) -> None:
    """Two addresses are enough; everything else has the documented default."""
    raw = {"gateway": {"address": "http://g"}}
    settings = load(file, raw, {"SIDECAR__PIPELINE__STEPS__RENDER__PARAMS__ADDRESS": "http://r"})
    assert settings.log_level == "info"
    assert settings.log_format == "json"
    assert settings.ext_proc.model_dump() == {
        "listen": "0.0.0.0:9002",
        "tls": {"cert_path": ""},
        "max_request_body_size": 64,
        "clear_route_cache": True,
        "read_timeout": "30s",
        "request_deadline": "2m",
        "drain_timeout": "30s",
    }
    assert settings.admin.listen == "0.0.0.0:9090"
    assert settings.limits.model_dump() == {"max_in_flight_requests": 1024, "max_in_flight_bytes": 2048}
    assert settings.gateway.model_dump() == {
        "address": "http://g",
        "phase_token": "not set",
        "timeout": "1m",
        "max_idle_conns_per_host": 200,
        "idle_conn_timeout": "1m30s",
    }
    assert settings.errors.expose_upstream is False
    assert settings.observability.metadata_namespace == "epd.sidecar"
    assert settings.observability.prompt_token_parity == "off"
    pipeline = settings.pipeline.model_dump()
    steps = {step["type"]: step["params"] for step in pipeline.pop("steps")}
    assert pipeline == {
        "kv_connector": "kv-shared-storage",
        "ec_connector": "ec-shared-storage",
        "ec_trust_descriptors": False,
        "use_openai_format": True,
        "forward_response_headers": ("x-llm-d-disagg-revision",),
    }
    assert steps["replace-media-urls"] == {
        "download_timeout": "10s",
        "max_concurrent_downloads": 10,
        "max_multimodal_entries": 0,
        "max_download_size": 10,
        "allow_private_networks": False,
        "allowed_domains": (),
        **{f"max_{modality}_download_size": None for modality in ("image", "audio", "video")},
        **{f"allowed_{modality}_content_types": () for modality in ("image", "audio", "video")},
    }
    assert steps["render"] | {"address": ""} == {
        "address": "",
        "timeout": "30s",
        "mm_payload": "tensors",
        "max_total_tokens": 0,
        "max_total_placeholder_tokens": 0,
        "max_idle_conns_per_host": 100,
        "idle_conn_timeout": "1m30s",
    }
    assert steps["encode"]["max_parallel"] == 8
    assert steps["encode"]["timeout"] == "1m"
    assert steps["prefill"]["sparse_spans"] == "openai"


def test_without_file_the_two_addresses_are_asked_for() -> None:
    """No file and no variables: exactly the two values that have no default are missing."""
    with pytest.raises(ConfigError) as caught:
        load_settings(None, {})
    assert [line.partition(":")[0] for line in caught.value.problems] == [
        "gateway.address",
        "pipeline.steps[1].params.address",
    ]
    assert all("set the base URL" in line for line in caught.value.problems)


def test_steps_inherit_and_override(file: Path) -> None:
    """A step takes timeout, format and connectors from gateway and pipeline unless it sets its own."""
    raw = changed(("gateway", "timeout"), "7s")
    put(raw, ("pipeline", "steps", 2, "params"), {"use_openai_format": True, "timeout": "3s"})
    put(raw, ("pipeline", "steps", 3, "params"), {"ec_connector": "ec-shared-storage"})
    pipeline = load(file, raw).pipeline
    assert pipeline.encode is not None
    assert pipeline.prefill is not None
    assert pipeline.decode is not None
    assert (pipeline.encode.use_openai_format, pipeline.prefill.use_openai_format) == (True, False)
    assert (pipeline.encode.timeout, pipeline.prefill.timeout) == (3.0, 7.0)
    assert (pipeline.encode.ec_connector, pipeline.prefill.ec_connector) == ("ec-nixl", "ec-shared-storage")
    assert (pipeline.prefill.kv_connector, pipeline.decode.kv_connector) == ("kv-nixl", "kv-nixl")


def test_conditional_decode_is_opt_in(file: Path) -> None:
    """Only a file that lists the step has it; its timeout is the gateway's unless it sets its own."""
    raw = changed(("gateway", "timeout"), "7s")
    assert load(file, raw).pipeline.conditional_decode is None
    environ = {"SIDECAR__PIPELINE__STEPS__RENDER__PARAMS__ADDRESS": "http://r"}
    assert load(file, {"gateway": {"address": "http://g"}}, environ).pipeline.conditional_decode is None
    raw["pipeline"]["steps"].insert(2, {"type": "conditional-decode"})
    conditional = load(file, raw).pipeline.conditional_decode
    assert conditional is not None
    assert conditional.timeout == 7.0
    variable = {"SIDECAR__PIPELINE__STEPS__CONDITIONAL_DECODE__PARAMS__TIMEOUT": "9s"}
    conditional = load(file, raw, variable).pipeline.conditional_decode
    assert conditional is not None
    assert conditional.timeout == 9.0


@pytest.mark.parametrize("place", [0, 1, 3, 4])
def test_conditional_decode_has_its_place(file: Path, place: int) -> None:
    """After render, before anything is computed."""
    raw = copy.deepcopy(FULL)
    raw["pipeline"]["steps"].insert(place, {"type": "conditional-decode"})
    assert any("must come before" in line for line in problems(file, raw))


def test_steps_that_are_not_listed_are_none(file: Path) -> None:
    """A pipeline of decode alone is valid in the OpenAI format."""
    raw = changed(("pipeline",), {"steps": [{"type": "decode"}]})
    pipeline = load(file, raw).pipeline
    assert (pipeline.media, pipeline.render, pipeline.encode, pipeline.prefill) == (None, None, None, None)
    assert pipeline.decode is not None


def test_null_counts_as_absent(file: Path) -> None:
    """A section or key without a value, as a chart leaves it, means the default."""
    raw = changed(("headers",), None)
    put(raw, ("ext_proc", "read_timeout"), None)
    put(raw, ("pipeline", "steps", 3, "params"), None)
    settings = load(file, raw)
    assert settings.headers.strip == ()
    assert settings.ext_proc.read_timeout == 30.0


def test_settings_are_frozen(file: Path) -> None:
    """Nobody changes settings at run time."""
    settings = load(file, FULL)
    with pytest.raises(ValueError, match="frozen"):
        settings.ext_proc.read_timeout = 1.0


@pytest.mark.parametrize(
    ("path", "value", "attribute"),
    [
        (("gateway", "address"), "https://Host:8443/base/", "https://Host:8443/base"),
        (("gateway", "address"), "http://[::1]:80", "http://[::1]:80"),
        (("ext_proc", "listen"), "unix:/run/epd.sock", "unix:/run/epd.sock"),
        (("ext_proc", "listen"), "[::]:0", "[::]:0"),
        (("admin", "listen"), "", ""),
        (("headers", "strip"), ["X-Upper"], ("x-upper",)),
        (("limits", "max_in_flight_requests"), "64", 64),
        (("ext_proc", "drain_timeout"), 0, 0.0),
        (("gateway", "phase_token"), "", ""),
    ],
)
def test_accepted(file: Path, path: tuple[str, str], value: object, attribute: object) -> None:
    """Spellings that are fine, and what becomes of them."""
    settings = load(file, changed(path, value))
    assert getattr(getattr(settings, path[0]), path[1]) == attribute


STEPS = ("pipeline", "steps")

WRONG: list[tuple[Path_, object, str]] = [
    (("log_levl",), "info", "log_levl: unknown key; did you mean log_level?"),
    (("zzz",), 1, "zzz: unknown key; known keys: log_level, log_format,"),
    (("two words\n",), 1, '"two words\\n": unknown key;'),
    (("log_level",), 7, "log_level: 7 is not a log level; use error, warning, info, debug"),
    (("log_format",), "xml", 'log_format: "xml" is not allowed; use json or text'),
    (("ext_proc", "tls"), "yes", 'ext_proc.tls: "yes" is not a mapping; write keys and values below it'),
    (("ext_proc",), [1], "ext_proc: a list is not a mapping"),
    (("ext_proc", "tls", "cert_path"), 4, "ext_proc.tls.cert_path: 4 is not text; put it in quotes"),
    (
        ("ext_proc", "clear_route_cache"),
        "false",
        'ext_proc.clear_route_cache: "false" is not a boolean; write true',
    ),
    (("ext_proc", "clear_route_cache"), 1, "ext_proc.clear_route_cache: 1 is not a boolean"),
    (
        ("ext_proc", "read_timeout"),
        30,
        'ext_proc.read_timeout: 30 has no unit; add a unit, for example "30s"',
    ),
    (
        ("ext_proc", "read_timeout"),
        "soon",
        'ext_proc.read_timeout: "soon" is not a duration; write one such as',
    ),
    (
        ("ext_proc", "request_deadline"),
        0,
        "ext_proc.request_deadline: 0 is not allowed here; write a time limit",
    ),
    (
        ("ext_proc", "request_deadline"),
        "721h",
        'ext_proc.request_deadline: "721h" is too long; the limit is 720h',
    ),
    (("ext_proc", "max_request_body_size"), "64MB", "is not a size; write a number of MB without a unit"),
    (("ext_proc", "max_request_body_size"), -1, "ext_proc.max_request_body_size: -1 MB is out of range"),
    (
        ("ext_proc", "max_request_body_size"),
        500,
        "limits.max_in_flight_bytes: 128 MB is less than ext_proc.max_req",
    ),
    (
        ("ext_proc", "listen"),
        ":9002",
        'ext_proc.listen: ":9002" is not an address to listen on; write host:port',
    ),
    (
        ("ext_proc", "listen"),
        9002,
        'ext_proc.listen: "9002" is not an address to listen on; write host:port',
    ),
    (("gateway", "address"), "http://host:80:80", '"80:80" is not a port'),
    (("ext_proc", "listen"), "h:99999", '"99999" is not a port; use 0..65535'),
    (("ext_proc", "listen"), "unix:run/x", 'is not a socket path; write "unix:" and an absolute path'),
    (
        ("ext_proc", "listen"),
        "127.0.0.1:9090",
        'admin.listen: "127.0.0.1:9090" is also ext_proc.listen; use another',
    ),
    (("admin", "listen"), "unix:/x", "admin.listen: unix sockets are not supported here"),
    (
        ("limits", "max_in_flight_requests"),
        0,
        "limits.max_in_flight_requests: 0 is too small; use at least 1",
    ),
    (("limits", "max_in_flight_requests"), 1.5, "limits.max_in_flight_requests: 1.5 is not a whole number"),
    (("limits", "max_in_flight_requests"), True, "limits.max_in_flight_requests: true is not a whole number"),
    (("gateway", "address"), None, "gateway.address: required; set the base URL of the gateway"),
    (
        ("gateway", "address"),
        "gateway:80",
        'gateway.address: "gateway:80" is not an http or https address with a host',
    ),
    (("gateway", "address"), "http://", "is not an http or https address with a host"),
    (("gateway", "address"), "http://h/?a=b", "gateway.address: an address has no query or fragment"),
    (("gateway", "address"), "http://h:0", '"0" is not a port; use 1..65535'),
    (("gateway", "address"), "http://h:", '"" is not a port; use 1..65535'),
    (("gateway", "address"), "http://[::1]:99999", '"99999" is not a port'),
    (("gateway", "address"), "http://[::1", "is not an address; write a base URL"),
    (("gateway", "address"), "http://a b", "has characters that an address cannot have"),
    (("gateway", "address"), 80, "gateway.address: 80 is not text; put it in quotes"),
    (("gateway", "phase_token"), "short", "gateway.phase_token: is too short; use at least 16 characters"),
    (("gateway", "phase_token"), "0123456789 abcdef", "gateway.phase_token: must be text of printable ASCII"),
    (("gateway", "phase_token"), 1234567890123456, "gateway.phase_token: must be text of printable ASCII"),
    (
        ("gateway", "phase_token"),
        "file:/no/such",
        'gateway.phase_token: cannot read "/no/such": No such file',
    ),
    (("headers", "strip"), "x-one", 'headers.strip: "x-one" is not a list; write [a, b]'),
    (
        ("headers", "strip"),
        ["x-*"],
        'headers.strip[0]: "x-*" is not a header name; write one name without wildcards',
    ),
    (("headers", "strip"), ["host"], 'headers.strip[0]: "host" cannot be stripped'),
    (
        ("pipeline", "forward_response_headers"),
        ["ok", "EPP-Profile"],
        'headers[1]: "epp-profile" cannot be forwarded',
    ),
    (
        ("observability", "metadata_namespace"),
        "",
        'observability.metadata_namespace: "" is not a metadata namespace',
    ),
    (("observability", "tracing"), True, "observability.tracing: this version exports no spans of its own"),
    (("tracing",), True, "tracing: this version exports no spans of its own; set it to false"),
    (("tracing",), "no thanks", 'tracing: "no thanks" is not a boolean'),
    (("server",), "x", 'server: "x" is not a mapping'),
    (
        ("pipeline", "kv_connector"),
        "kv-sglang",
        "with kv-sglang prefill answers only while decode runs; list the steps, with {type: prefill-decode}",
    ),
    (
        ("pipeline", "steps", 3, "params", "kv_connector"),
        "kv-sglang",
        "pipeline.steps[3]: with kv-sglang prefill answers only while decode runs",
    ),
    (
        ("pipeline", "steps", 4),
        {"type": "prefill-decode"},
        'pipeline.steps[4]: "prefill-decode" works with kv_connector kv-sglang only; set it, or use',
    ),
    (
        ("pipeline", "steps", 4),
        {"type": "prefill-decode", "params": {"kv_connector": "kv-sglang"}},
        'pipeline.steps[3]: "prefill" is part of "prefill-decode"; remove one of them',
    ),
    (
        ("pipeline", "steps", 4),
        {"type": "prefill-decode", "params": {"kv_connector": "kv-sglang", "bootstrap_port": 65536}},
        "pipeline.steps[4].params.bootstrap_port: 65536 is too large; use at most 65535",
    ),
    (
        ("pipeline", "steps", 4),
        {"type": "prefill-decode", "params": {"kv_connector": "kv-sglang", "bootstrap_port": 0}},
        "pipeline.steps[4].params.bootstrap_port: 0 is too small; use at least 1",
    ),
    (
        ("pipeline", "kv_connector"),
        "nixl",
        'pipeline.kv_connector: "nixl" is not allowed; use kv-nixl, kv-shared',
    ),
    (
        ("pipeline", "ec_connector"),
        {},
        "pipeline.ec_connector: a mapping is not allowed; use ec-nixl or ec-shared",
    ),
    (
        (*STEPS, 0, "params", "allowed_domains"),
        ["*.x"],
        '"*.x" is not a host name; write images.example.com, without',
    ),
    (
        (*STEPS, 1, "params", "mm_payload"),
        "metadata",
        '[1].params.mm_payload: "metadata" is not allowed; use tensors, none or auto',
    ),
    (
        (*STEPS, 1, "params", "address"),
        None,
        "pipeline.steps[1].params.address: required; set the base URL of the rend",
    ),
    (
        (*STEPS, 1, "params", "max_total_tokens"),
        -1,
        "params.max_total_tokens: -1 is too small; use at least 0",
    ),
    (
        (*STEPS, 2, "params", "maxparallel"),
        1,
        "[2].params.maxparallel: unknown key; did you mean max_parallel?",
    ),
    ((*STEPS, 2, "parms"), {}, "pipeline.steps[2].parms: unknown key; did you mean params?"),
    (
        (*STEPS, 3, "params", "sparse_spans"),
        "no",
        'sparse_spans: "no" is not allowed; use openai or verbatim',
    ),
    ((*STEPS, 3, "params"), 4, "pipeline.steps[3].params: 4 is not a mapping"),
    ((*STEPS, 3), "prefill", 'pipeline.steps[3]: "prefill" is not a mapping; write {type: ..., params: ...}'),
    (
        (*STEPS, 3, "type"),
        None,
        "pipeline.steps[3].type: required; known types: replace-media-urls, render, cond",
    ),
    (
        (*STEPS, 3, "type"),
        "tokenize",
        'no step "tokenize"; known types: replace-media-urls,',
    ),
    (
        (*STEPS, 3, "type"),
        "prefil",
        'pipeline.steps[3].type: this version has no step "prefil"; did you mean prefill?',
    ),
    ((*STEPS, 3, "type"), ["x"], "pipeline.steps[3].type: this version has no step a list"),
    ((*STEPS, 3), {"type": "encode"}, 'pipeline.steps[3]: "encode" is listed twice; remove one of them'),
    (
        (*STEPS, 4),
        {"type": "encode"},
        "pipeline.steps: the last step is missing; add {type: decode} at the end",
    ),
    (STEPS, [], "pipeline.steps: the last step is missing"),
    (STEPS, {"type": "decode"}, "pipeline.steps: a mapping is not a list"),
    (
        STEPS,
        [{"type": "decode"}],
        "pipeline.use_openai_format: false needs the token ids of a render step; add one",
    ),
]


@pytest.mark.parametrize(
    ("path", "value", "text"), WRONG, ids=[f"{p[-1]}-{i}" for i, (p, _, _) in enumerate(WRONG)]
)
def test_each_mistake_is_named(file: Path, path: Path_, value: object, text: str) -> None:
    """Every mistake is reported with its dotted path and what to write instead."""
    found = problems(file, changed(path, value))
    assert any(text in line for line in found), found
    assert all(line.isprintable() for line in found)


def test_step_order(file: Path) -> None:
    """A step in the wrong place is named, with the step it must precede and the whole order."""
    raw = copy.deepcopy(FULL)
    raw["pipeline"]["steps"].insert(0, raw["pipeline"]["steps"].pop(2))
    raw["pipeline"]["steps"].insert(3, raw["pipeline"]["steps"].pop(4))
    order = "the order is replace-media-urls, render, conditional-decode, encode, prefill, decode"
    assert problems(file, raw) == (
        f'pipeline.steps[1]: "replace-media-urls" must come before "encode"; {order}',
        f'pipeline.steps[2]: "render" must come before "encode"; {order}',
        f'pipeline.steps[4]: "prefill" must come before "decode"; {order}',
    )


def test_prefill_decode_takes_the_place_of_prefill_and_decode(file: Path) -> None:
    """It is the last step, inherits from pipeline and gateway, and brings a port of its own."""
    raw = changed(("pipeline", "kv_connector"), "kv-sglang")
    raw["pipeline"]["steps"][3:] = [{"type": "prefill-decode"}]
    raw["gateway"]["timeout"] = "7s"
    pipeline = load(file, raw).pipeline
    assert pipeline.prefill is None
    assert pipeline.decode is None
    assert pipeline.prefill_decode is not None
    assert pipeline.prefill_decode.bootstrap_port == 8998
    assert pipeline.prefill_decode.timeout == 7.0
    assert pipeline.prefill_decode.use_openai_format is False


def test_a_probe_before_prefill_decode_is_doubtful(file: Path) -> None:
    """A probe names no prefill worker, which SGLang's decode engines refuse: a warning, for pools mix."""
    raw = changed(("pipeline", "kv_connector"), "kv-sglang")
    raw["pipeline"]["steps"][2:] = [{"type": "conditional-decode"}, {"type": "prefill-decode"}]
    file.write_text(yaml.safe_dump(raw), encoding="utf-8")
    _, warnings = load_settings(file, {})
    assert any(line.startswith("conditional-decode with prefill-decode: ") for line in warnings)


def test_without_listed_steps_kv_sglang_asks_for_them(file: Path) -> None:
    """The usual steps are sequential: they do not fit this connector, and the message says what to list."""
    raw = changed(("pipeline",), {"kv_connector": "kv-sglang"})
    assert any(
        line.startswith("pipeline.kv_connector: with kv-sglang prefill answers only while")
        for line in problems(file, raw)
    )


def test_step_level_format_needs_render(file: Path) -> None:
    """A single step in the tokens-in format needs render too."""
    steps = [{"type": "prefill", "params": {"use_openai_format": False}}, {"type": "decode"}]
    found = problems(file, changed(("pipeline",), {"steps": steps}))
    assert len(found) == 1
    assert found[0].startswith("pipeline.steps[0].params.use_openai_format: false needs")


INDEPENDENT: list[tuple[Path_, object, str]] = [
    (("log_level",), "loud", "log_level"),
    (("log_format",), 3, "log_format"),
    (("extra",), 1, "extra"),
    (("tracing",), True, "tracing"),
    (("ext_proc", "listen"), "nowhere", "ext_proc.listen"),
    (("ext_proc", "read_timeout"), 5, "ext_proc.read_timeout"),
    (("ext_proc", "max_request_body_size"), 1000, "limits.max_in_flight_bytes"),
    (("ext_proc", "typo"), 5, "ext_proc.typo"),
    (("admin", "listen"), 5, "admin.listen"),
    (("gateway", "address"), "ftp://h", "gateway.address"),
    (("gateway", "phase_token"), "short", "gateway.phase_token"),
    (("headers", "strip"), ["a b"], "headers.strip[0]"),
    (("observability", "tracing"), True, "observability.tracing"),
    (("pipeline", "kv_connector"), "sglang", "pipeline.kv_connector"),
    (
        ("pipeline", "steps", 0, "params", "max_download_size"),
        0,
        "pipeline.steps[0].params.max_download_size",
    ),
    (("pipeline", "steps", 1, "params", "mm_payload"), "metadata", "pipeline.steps[1].params.mm_payload"),
    (("pipeline", "steps", 2, "type"), "encoder", "pipeline.steps[2].type"),
    (("pipeline", "steps", 4), {"type": "prefill"}, "pipeline.steps[4]"),
]


@hypothesis_settings(deadline=None)
@given(st.sets(st.sampled_from(range(len(INDEPENDENT))), min_size=1))
def test_any_set_of_mistakes_is_reported_completely(
    tmp_path_factory: pytest.TempPathFactory, chosen: set[int]
) -> None:
    """Mistakes do not hide each other: each chosen one has its line, and no line blames a right key."""
    raw = copy.deepcopy(FULL)
    for number in chosen:
        path, value, _ = INDEPENDENT[number]
        put(raw, path, value)
    expected = {INDEPENDENT[number][2] for number in chosen}
    if "pipeline.steps[4]" in expected:
        expected.add("pipeline.steps")  # decode is gone
    found = problems(tmp_path_factory.getbasetemp() / "subset.yaml", raw)
    assert {line.partition(": ")[0] for line in found} == expected
    assert len(found) == len(expected)


def test_warnings_about_timeouts_that_never_pass(file: Path) -> None:
    """A timeout longer than the deadline that contains it is worth a warning, no error."""
    raw = changed(("ext_proc", "request_deadline"), "20s")
    put(raw, ("pipeline", "steps", 2, "params", "timeout"), "5s")
    raw["pipeline"]["steps"].insert(2, {"type": "conditional-decode"})
    file.write_text(yaml.safe_dump(raw), encoding="utf-8")
    _, warnings = load_settings(file, {})
    assert [line.partition(": ")[0] for line in warnings] == [
        "ext_proc.read_timeout",
        "pipeline.steps[1].params.timeout",
        "pipeline.steps[2].params.timeout",
        "pipeline.steps[4].params.timeout",
    ]
    assert "30s never passes, ext_proc.request_deadline (20s) ends the request first" in warnings[0]


@pytest.mark.parametrize("render", [True, False])
def test_prompt_token_parity_needs_rendered_prompts(file: Path, *, render: bool) -> None:
    """Without a render step there is nothing to compare with: a warning."""
    steps = [{"type": "render", "params": {"address": "http://r"}}] if render else []
    raw = changed(("observability", "prompt_token_parity"), "warn")
    raw["pipeline"] = {"steps": [*steps, {"type": "decode"}]}
    file.write_text(yaml.safe_dump(raw), encoding="utf-8")
    settings, warnings = load_settings(file, {})
    assert settings.observability.prompt_token_parity == "warn"
    assert [line.partition(": ")[0] for line in warnings] == (
        [] if render else ["observability.prompt_token_parity"]
    )


def test_error_lists_all_problems_as_text() -> None:
    """The exception's text is fit to be printed as it is."""
    assert str(ConfigError(["a: x", "b: y"])) == "the configuration cannot be used:\n  a: x\n  b: y"


def test_a_certificate_that_is_not_there_is_found_before_the_start(tmp_path: Path) -> None:
    """Both files are looked for: a missing mount is a configuration problem, not a crash at start."""
    (tmp_path / "tls.crt").touch()
    config = copy.deepcopy(FULL)
    config["ext_proc"]["tls"] = {"cert_path": str(tmp_path)}
    path = tmp_path / "sidecar.yaml"
    path.write_text(yaml.safe_dump(config))
    with pytest.raises(ConfigError) as caught:
        load_settings(path, {})
    (found,) = caught.value.problems
    assert found.startswith("ext_proc.tls.cert_path: ")
    assert "tls.key" in found


@pytest.mark.parametrize(
    ("section", "key", "name"),
    [
        ("headers", "strip", "x-forwarded-for"),
        ("headers", "strip", "x-envoy-external-address"),
        ("pipeline", "forward_response_headers", "x-forwarded-host"),
        ("pipeline", "forward_response_headers", "authorization"),
        ("pipeline", "forward_response_headers", "cookie"),
    ],
)
def test_headers_that_would_break_every_request_are_refused(
    tmp_path: Path, section: str, key: str, name: str
) -> None:
    """Envoy refuses a rewrite of its own headers, and an upstream must not replace a client's credentials."""
    config = copy.deepcopy(FULL)
    config[section][key] = [name]
    path = tmp_path / "sidecar.yaml"
    path.write_text(yaml.safe_dump(config))
    with pytest.raises(ConfigError) as caught:
        load_settings(path, {})
    (found,) = caught.value.problems
    assert name in found


def test_a_phase_token_needs_the_route_cache_cleared(tmp_path: Path) -> None:
    """Without clearing it, a client's own EPP-Profile has chosen the route before it is removed."""
    config = copy.deepcopy(FULL)
    config["ext_proc"]["clear_route_cache"] = False
    path = tmp_path / "sidecar.yaml"
    path.write_text(yaml.safe_dump(config))
    with pytest.raises(ConfigError) as caught:
        load_settings(path, {})
    (found,) = caught.value.problems
    assert found.startswith("ext_proc.clear_route_cache: ")
    config["gateway"]["phase_token"] = ""
    path.write_text(yaml.safe_dump(config))
    load_settings(path, {})


def test_a_step_timeout_over_the_gateways_is_reported(tmp_path: Path) -> None:
    """Encode and prefill answer their head when they are done: gateway.timeout ends them first."""
    config = copy.deepcopy(FULL)
    config["gateway"]["timeout"] = "10s"
    path = tmp_path / "sidecar.yaml"
    path.write_text(yaml.safe_dump(config))
    variables = {"SIDECAR__PIPELINE__STEPS__PREFILL__PARAMS__TIMEOUT": "11s"}
    _, warnings = load_settings(path, variables)
    assert any("gateway.timeout (10s)" in warning for warning in warnings)
