"""Overrides from the environment."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from sidecar.config import ConfigError, Settings, load_settings

if TYPE_CHECKING:
    from pathlib import Path

BASE = {
    "SIDECAR__GATEWAY__ADDRESS": "http://gateway",
    "SIDECAR__PIPELINE__STEPS__RENDER__PARAMS__ADDRESS": "http://render",
}


def load(**variables: str) -> Settings:
    return load_settings(None, {**BASE, **variables})[0]


def problems(**variables: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load(**variables)
    return caught.value.problems


def test_scalars_are_parsed_into_the_kind_of_their_key(tmp_path: Path) -> None:
    """Variables are text: numbers, booleans, durations, sizes and levels are read from it."""
    for name in ("tls.crt", "tls.key"):
        (tmp_path / name).touch()
    settings = load(
        SIDECAR__LOG_LEVEL="4",
        SIDECAR__EXT_PROC__MAX_REQUEST_BODY_SIZE="16",
        SIDECAR__EXT_PROC__READ_TIMEOUT="1m",
        SIDECAR__EXT_PROC__TLS__CERT_PATH=str(tmp_path),
        SIDECAR__LIMITS__MAX_IN_FLIGHT_REQUESTS="3",
        SIDECAR__PIPELINE__EC_TRUST_DESCRIPTORS="true",
    )
    assert settings.log_level == "debug"
    assert settings.ext_proc.max_request_body_size == 16 << 20
    assert settings.ext_proc.read_timeout == 60.0
    assert settings.ext_proc.tls.cert_path == str(tmp_path)
    assert settings.limits.max_in_flight_requests == 3
    assert settings.pipeline.ec_trust_descriptors is True


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("Yes", True),
        ("on", True),
        ("1", True),
        ("FALSE", False),
        ("no", False),
        ("off", False),
    ],
)
def test_booleans(text: str, value: bool) -> None:
    """The usual spellings, in any case."""
    assert load(SIDECAR__ERRORS__EXPOSE_UPSTREAM=text).errors.expose_upstream is value


@pytest.mark.parametrize("text", ["off", "warn"])
def test_a_choice_that_looks_like_a_boolean(text: str) -> None:
    """A choice is text: `off` stays the word."""
    settings = load(SIDECAR__OBSERVABILITY__PROMPT_TOKEN_PARITY=text)
    assert settings.observability.prompt_token_parity == text


def test_variable_beats_file(tmp_path: Path) -> None:
    """The file sets a value, the variable another one: the variable counts."""
    file = tmp_path / "sidecar.yaml"
    file.write_text("pipeline: {use_openai_format: true}\nlog_level: error\n", encoding="utf-8")
    settings, _ = load_settings(file, {**BASE, "SIDECAR__PIPELINE__USE_OPENAI_FORMAT": "false"})
    assert settings.pipeline.use_openai_format is False
    assert settings.log_level == "error"


def test_step_by_type_and_by_index() -> None:
    """A step is named by its type with underscores, or by its index."""
    pipeline = load(
        SIDECAR__PIPELINE__STEPS__REPLACE_MEDIA_URLS__PARAMS__DOWNLOAD_TIMEOUT="3s",
        SIDECAR__PIPELINE__STEPS__2__PARAMS__MAX_PARALLEL="5",
        SIDECAR__PIPELINE__STEPS__PREFILL__PARAMS__USE_OPENAI_FORMAT="0",
    ).pipeline
    assert pipeline.media is not None
    assert pipeline.media.download_timeout == 3.0
    assert pipeline.encode is not None
    assert pipeline.encode.max_parallel == 5
    assert pipeline.prefill is not None
    assert pipeline.prefill.use_openai_format is False


def test_whole_list_of_steps_as_json() -> None:
    """The list of steps can be given whole; its items may still be overridden."""
    pipeline = load(
        SIDECAR__PIPELINE__STEPS='[{"type":"render","params":{"address":"http://a"}},{"type":"decode"}]',
        SIDECAR__PIPELINE__STEPS__RENDER__PARAMS__ADDRESS="http://b",
    ).pipeline
    assert [step.type for step in pipeline.steps] == ["render", "decode"]
    assert pipeline.render is not None
    assert pipeline.render.address == "http://b"


@pytest.mark.parametrize(
    ("text", "names"),
    [("x-a, X-B", ("x-a", "x-b")), ('["x-a", "x-b"]', ("x-a", "x-b")), ("", ()), ("[]", ())],
)
def test_lists(text: str, names: tuple[str, ...]) -> None:
    """Lists are comma-separated or JSON, and can be emptied."""
    assert load(SIDECAR__PIPELINE__FORWARD_RESPONSE_HEADERS=text).pipeline.forward_response_headers == names


def test_list_items_by_index() -> None:
    """An index replaces an item or appends the next one; 10 comes after 2."""
    variables = {f"SIDECAR__HEADERS__STRIP__{index}": f"x-{index}" for index in range(11)}
    assert load(**variables).headers.strip == tuple(f"x-{index}" for index in range(11))
    forwarded = load(
        SIDECAR__PIPELINE__FORWARD_RESPONSE_HEADERS__1="x-more"
    ).pipeline.forward_response_headers
    assert forwarded == ("x-llm-d-disagg-revision", "x-more")


def test_other_variables_are_not_looked_at() -> None:
    """Only the prefix with two underscores counts: Kubernetes sets SIDECAR_SERVICE_HOST by itself."""
    assert load(SIDECAR_SERVICE_HOST="10.0.0.1", SIDECAR_PORT="tcp://x", PATH="/bin") == load()


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        ("SIDECAR__FOO", "1", "SIDECAR__FOO: no such key 'foo'; known here are the keys: log_level,"),
        (
            "SIDECAR__GATEWAY__ADRESS",
            "1",
            "SIDECAR__GATEWAY__ADRESS: no such key 'adress'; did you mean address?",
        ),
        ("SIDECAR__", "1", "SIDECAR__: no such key ''"),
        (
            "SIDECAR__GATEWAY",
            "1",
            "SIDECAR__GATEWAY: names a section; set one of its keys: SIDECAR__GATEWAY__ADDRESS,",
        ),
        ("SIDECAR__LOG_LEVEL__X", "1", "SIDECAR__LOG_LEVEL__X: 'log_level' has no keys below it"),
        (
            "SIDECAR__HEADERS__STRIP",
            '["a"',
            'SIDECAR__HEADERS__STRIP: not a JSON list; write ["a", "b"] or a,b',
        ),
        (
            "SIDECAR__HEADERS__STRIP__1",
            "x",
            "SIDECAR__HEADERS__STRIP__1: the list has 0 items; use an index from 0 to 0",
        ),
        (
            "SIDECAR__PIPELINE__STEPS__9__TYPE",
            "x",
            "no step '9' in pipeline.steps; use an index or one of: replace_med",
        ),
        (
            "SIDECAR__PIPELINE__STEPS__ENCODE__PARAMS__X",
            "x",
            "no such key 'x'; known here are the keys: max_parallel,",
        ),
        (
            "SIDECAR__PIPELINE__STEPS__ENCODE",
            "x",
            "names a section; set one of its keys: SIDECAR__PIPELINE__STEPS__2__TYPE",
        ),
        ("SIDECAR__SERVER__READ_TIMEOUT", "1s", "SIDECAR__SERVER__READ_TIMEOUT: no such key 'server'"),
        (
            "SIDECAR__ERRORS__EXPOSE_UPSTREAM",
            "maybe",
            'errors.expose_upstream (from SIDECAR__ERRORS__EXPOSE_UPSTREAM): "m',
        ),
        (
            "SIDECAR__HEADERS__STRIP",
            "ok,a b",
            'headers.strip[1] (from SIDECAR__HEADERS__STRIP): "a b" is not a header name',
        ),
        (
            "SIDECAR__LIMITS__MAX_IN_FLIGHT_REQUESTS",
            "",
            '(from SIDECAR__LIMITS__MAX_IN_FLIGHT_REQUESTS): "" is not a wh',
        ),
    ],
)
def test_each_mistake_names_its_variable(variable: str, value: str, text: str) -> None:
    """Whatever is wrong with a variable, the message starts from the variable the reader has to change."""
    found = problems(**{variable: value})
    assert len(found) == 1
    assert text in found[0]


@pytest.mark.parametrize(
    ("content", "variable", "text"),
    [
        ("gateway: 4", "SIDECAR__GATEWAY__TIMEOUT", "the file has a value of another kind there"),
        ("headers: {strip: x}", "SIDECAR__HEADERS__STRIP__0", "the file has a value of another kind there"),
        (
            "pipeline: {steps: [{type: x}]}",
            "SIDECAR__PIPELINE__STEPS__0__PARAMS__X",
            "pipeline.steps[0] has no known type",
        ),
        (
            "pipeline: {steps: [x]}",
            "SIDECAR__PIPELINE__STEPS__0__PARAMS__X",
            "pipeline.steps[0] has no known type",
        ),
    ],
)
def test_variable_into_a_broken_file(tmp_path: Path, content: str, variable: str, text: str) -> None:
    """A variable that cannot be placed because the file is wrong there says so, next to the mistake."""
    file = tmp_path / "sidecar.yaml"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_settings(file, {variable: "1s"})
    assert f"{variable}: {text}" in caught.value.problems[0]
    assert len(caught.value.problems) > 1


def test_alias_is_overridden_in_one_place_only(tmp_path: Path) -> None:
    """Two steps that share their params by a YAML alias stay two steps."""
    file = tmp_path / "sidecar.yaml"
    file.write_text(
        "gateway: {address: http://g}\n"
        "pipeline:\n  steps:\n"
        "  - {type: encode, params: &shared {timeout: 5s}}\n"
        "  - {type: prefill, params: *shared}\n"
        "  - {type: decode}\n",
        encoding="utf-8",
    )
    settings, _ = load_settings(file, {"SIDECAR__PIPELINE__STEPS__ENCODE__PARAMS__TIMEOUT": "6s"})
    assert settings.pipeline.encode is not None
    assert settings.pipeline.prefill is not None
    assert (settings.pipeline.encode.timeout, settings.pipeline.prefill.timeout) == (6.0, 5.0)
