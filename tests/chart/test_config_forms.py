"""A configuration that the sidecar refuses at its start is refused by the chart, in the same words."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from sidecar.config.steps import STEP_TYPES
from tests.chart.chart_rendering import merged
from tests.chart.template_cases import DEFAULTS, answers, sidecar_problems

if TYPE_CHECKING:
    from pathlib import Path

CONNECTORS = ("kv-nixl", "kv-shared-storage", "kv-sglang")
RENDER = {"type": "render", "params": {"address": "http://render"}}


def step(kind: str, **params: Any) -> dict[str, Any]:
    return merged(RENDER if kind == "render" else {"type": kind}, {"params": params} if params else {})


def complete(config: dict[str, Any]) -> dict[str, Any]:
    """The chart's configuration with that of an installation, and what is asked about on top."""
    installed = {"gateway": {"address": "http://gateway"}, "pipeline": {"steps": [RENDER, step("decode")]}}
    return merged(DEFAULTS["config"], installed, config)


def sequences() -> list[dict[str, Any]]:
    """Every selection of steps in order, every order of three, and every pair, with each connector."""
    selections = itertools.chain.from_iterable(
        itertools.combinations(STEP_TYPES, length) for length in range(len(STEP_TYPES) + 1)
    )
    listed = itertools.chain(
        ((kinds, connector, True) for kinds in selections for connector in CONNECTORS),
        ((kinds, CONNECTORS[2], True) for kinds in itertools.permutations(STEP_TYPES, 3)),
        ((kinds, CONNECTORS[1], False) for kinds in itertools.product(STEP_TYPES, repeat=2)),
    )
    return [
        {"kv_connector": connector, "use_openai_format": openai, "steps": [step(kind) for kind in kinds]}
        for kinds, connector, openai in listed
    ]


OWN: list[list[dict[str, Any]]] = [
    [RENDER, step("prefill", kv_connector="kv-sglang"), step("decode")],
    [RENDER, step("prefill"), step("decode", kv_connector="kv-sglang")],
    [RENDER, step("prefill-decode", kv_connector="kv-nixl")],
    [RENDER, step("prefill-decode", kv_connector="kv-sglang")],
    [step("encode", use_openai_format=False), step("prefill", use_openai_format=False), step("decode")],
    [step("encode", use_openai_format=True), step("decode")],
    [{"type": "prefill", "params": None}, step("decode")],
]
"""Steps whose own params say something else than the pipeline."""


def test_the_steps_are_judged_as_by_the_sidecar(tmp_path: Path) -> None:
    """Order, duplicates, last step, connector and format: the same findings for every sequence."""
    pipelines = [*sequences(), *({"kv_connector": CONNECTORS[0], "steps": steps} for steps in OWN)]
    configs = [complete({"pipeline": pipeline}) for pipeline in pipelines]
    said = answers("epd-sidecar.problem.steps", [{"config": config} for config in configs])
    differing = {
        str(config["pipeline"]): (chart, sidecar)
        for config, chart in zip(configs, said, strict=True)
        if sorted(chart) != sorted(sidecar := sidecar_problems(config, tmp_path))
    }
    assert differing == {}
    assert sum(1 for findings in said if findings) > 300
    assert sum(1 for findings in said if not findings) > 50


CROSSED: list[dict[str, Any]] = [
    {},
    {"limits": {"max_in_flight_bytes": 32}},
    {"limits": {"max_in_flight_bytes": "63.5"}, "ext_proc": {"max_request_body_size": "64"}},
    {"limits": {"max_in_flight_bytes": 64}},
    {"ext_proc": {"clear_route_cache": False}},
    {"ext_proc": {"clear_route_cache": False}, "gateway": {"phase_token": "0123456789abcdef"}},
    {"gateway": {"phase_token": "0123456789abcdef"}},
    {"observability": {"tracing": True}},
]
"""Keys that contradict each other, and some that do not."""


def test_what_one_key_cannot_show_is_judged_as_by_the_sidecar(tmp_path: Path) -> None:
    """A body that the total does not hold, a token without a new choice of routes, spans: the same texts."""
    configs = [complete(config) for config in CROSSED]
    said = answers(
        "epd-sidecar.problem.crossChecks", [merged(DEFAULTS, {"config": item}) for item in configs]
    )
    assert said == [sidecar_problems(config, tmp_path) for config in configs]
    assert [len(findings) for findings in said] == [0, 1, 1, 0, 0, 1, 0, 1]


def at(path: str, value: Any) -> dict[str, Any]:
    for key in reversed(path.split(".")):
        value = {key: value}
    assert isinstance(value, dict)
    return value


def in_step(kind: str, key: str, value: Any) -> dict[str, Any]:
    steps = {
        "render": [step("render", **{key: value}), step("decode")],
        "prefill-decode": [RENDER, step("prefill-decode", **{key: value})],
    }
    earlier = [step(kind, **{key: value}), RENDER] if kind == "replace-media-urls" else [RENDER]
    later = [step(kind, **{key: value})] if kind in ("encode", "prefill", "conditional-decode") else []
    connector = "kv-sglang" if kind == "prefill-decode" else CONNECTORS[1]
    return {
        "pipeline": {
            "kv_connector": connector,
            "steps": steps.get(kind, [*earlier, *later, step("decode")]),
        }
    }


DURATIONS: list[Any] = [
    *("30s", "1m30s", ".5s", "1.5h", "500ms", "1h30m0.5s", "10µs", " 30s ", "720h", "1ns"),
    *(0, "0", "0s", "0h0m", 30, 0.5, "30", "1.5", "", "-1s", "1d", "30 s", "half a minute", "s", "721h"),
    *("1e3s", "30S", "1h 30m", "30ss", "9" * 19 + "s", "x" * 100),
]
SIZES: list[Any] = [
    *(64, "64", 0.5, "0.5", 1048576, "1048576", 0.001, " 8 "),
    *(0, "0", -1, "-1", 1048577, "1048577", "64Mi", "64 MB", "", "1e3", "0.0000009", ".5"),
]
COUNTS: list[Any] = [1, "1", 8.0, 123456789, "10", 0, "0", -1, "-5", 1.5, "1.5", "1.0", "many", "", "1e3"]
LISTENERS: list[Any] = [
    *(
        "0.0.0.0:9002",
        "[::]:9002",
        "[2001:db8::1]:9002",
        "localhost:9002",
        "a_b.c-d:1",
        "host:65535",
        "Host:1",
    ),
    *("unix:/run/ext_proc.sock", "unix:" + "/" * 107),
    *("9002", ":9002", "0.0.0.0", "0.0.0.0:", "0.0.0.0:65536", "0.0.0.0:123456", "0.0.0.0:90x2", "host:-1"),
    *("[::]9002", "::9002", "[0.0.0.0]:9002", "[host]:9002", "256.0.0.1:80", "01.2.3.4:80", "1.2.3:80"),
    *("-a:80", "a-:80", "a..b:80", "a b:80", "http://0.0.0.0:9002", "unix:run", "unix:", "unix:" + "/" * 108),
    "a" * 254 + ":80",
]
URLS: list[Any] = [
    *(
        "http://host",
        "https://host:8443",
        "http://host:80/",
        "http://host:80//",
        "http://a.b.svc:80/base/path",
    ),
    *("http://10.0.0.5", "http://[::1]:80", "HTTP://Host:80", "http://h:080", " http://host "),
    *(
        "host:80",
        "http://",
        "http:///path",
        "ftp://host",
        "http//host",
        "://host",
        "http://:80",
        "http://1.2.3",
    ),
    *("http://user@host", "http://user:secret@host", "http://host?a=b", "http://host#a", "http://ho st"),
    *(
        "http://hößt",
        "http://host\\x",
        "http://host:",
        "http://host:0",
        "http://host:65536",
        "http://host:port",
    ),
    *("http://-a", "http://a..b", "http://*.b", "http://256.1.1.1", "http://a/b?c"),
]
HEADERS: list[Any] = [
    *("x-internal-user", "X-Internal-User", "a", "x!y", "authorization", "x-envoy", "xx-forwarded-for"),
    *("", "x one", "x:one", "x-*", "x(y)", "host", "Host", "content-length", "x-request-id", "traceparent"),
    *("x-envoy-retry-on", "X-Forwarded-For", "epp-profile", "x-epd-hop", "cookie", "x-api-key", "naïve"),
]
CONTENT_TYPES: list[Any] = [
    *("image/png", "Image/PNG", "application/vnd.a+json", "image/x.y-z"),
    *("png", "image/", "image/*", "image/png; q=1", "/png", "image/" + "a" * 65, ""),
]
DOMAINS: list[Any] = [
    *("images.example.com", "Images.Example.com", "example.com.", "10.0.0.1", "localhost", "a_b.c"),
    *("https://a.example", "a.example:80", "*.example.com", "", "a..b", ".a", "a.1", "-a.b", "a b", "a@b"),
]
NAMESPACES: list[Any] = ["epd.sidecar", "A-1_b", "a", "", "epd sidecar", "epd/sidecar", "ä"]

VALUES: list[tuple[str, str, list[Any]]] = [
    ("", "ext_proc.drain_timeout", DURATIONS),
    ("", "ext_proc.read_timeout", DURATIONS),
    ("prefill", "timeout", DURATIONS),
    ("", "ext_proc.max_request_body_size", SIZES),
    ("replace-media-urls", "max_image_download_size", SIZES),
    ("", "limits.max_in_flight_requests", COUNTS),
    ("encode", "max_parallel", COUNTS),
    ("render", "max_total_tokens", COUNTS),
    ("prefill-decode", "bootstrap_port", [*COUNTS, 65535, "65535", 65536, 8998]),
    ("", "ext_proc.listen", LISTENERS),
    ("", "admin.listen", ["", *LISTENERS[1:]]),
    ("", "gateway.address", URLS),
    ("render", "address", URLS),
    ("", "headers.strip", [[value] for value in HEADERS]),
    ("", "pipeline.forward_response_headers", [[value] for value in HEADERS]),
    ("replace-media-urls", "allowed_image_content_types", [[value] for value in CONTENT_TYPES]),
    ("replace-media-urls", "allowed_domains", [["a.example", value] for value in DOMAINS]),
    ("", "observability.metadata_namespace", NAMESPACES),
]
"""Type of the step, or "" for the sections; the key; and its values, those that are taken first."""


def test_values_are_judged_as_by_the_sidecar(tmp_path: Path) -> None:
    """Durations, sizes, counts, addresses and names: the same texts for the same values."""
    cases = [(kind, key, value) for kind, key, values in VALUES for value in values]
    configs = [complete(in_step(kind, key, value) if kind else at(key, value)) for kind, key, value in cases]
    # A body larger than the total is another finding.
    for config in configs:
        config["limits"]["max_in_flight_bytes"] = 1048576
    said = answers("epd-sidecar.problem.forms", [merged(DEFAULTS, {"config": config}) for config in configs])
    differing = {
        f"{kind} {key}: {value!r}": (chart, sidecar)
        for (kind, key, value), config, chart in zip(cases, configs, said, strict=True)
        if chart != (sidecar := sidecar_problems(config, tmp_path))
    }
    assert differing == {}
    assert sum(1 for findings in said if findings) > 150
    assert sum(1 for findings in said if not findings) > 80
