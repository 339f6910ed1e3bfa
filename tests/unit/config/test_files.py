"""Files: the coordinator's, the shipped example, and those that are not YAML."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from sidecar.config import ConfigError, describe, load_settings

COORDINATOR = Path(__file__).with_name("coordinator.yaml")
EXAMPLE = Path(__file__).parents[3] / "deploy" / "envoy" / "sidecar.yaml"
ADDRESSES = {
    "SIDECAR__GATEWAY__ADDRESS": "http://gateway",
    "SIDECAR__PIPELINE__STEPS__RENDER__PARAMS__ADDRESS": "http://render",
}


def problems(file: Path, content: bytes) -> tuple[str, ...]:
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_settings(file, ADDRESSES)
    return caught.value.problems


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "sidecar.yaml"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("off", "off"), ('"off"', "off"), ("Off", "off"), ("false", "off"), ("warn", "warn"), ("", "off")],
)
def test_off_needs_no_quotes(file: Path, text: str, expected: str) -> None:
    """YAML 1.1 makes a boolean of an unquoted `off`: it is read as the word, and printed as one."""
    file.write_text(f"observability: {{prompt_token_parity: {text}}}\n", encoding="utf-8")
    settings, _ = load_settings(file, ADDRESSES)
    assert settings.observability.prompt_token_parity == expected
    printed = yaml.safe_load(describe(settings))
    assert printed["observability"]["prompt_token_parity"] == expected


@pytest.mark.parametrize("text", ["on", "true", "warning", "1", "[warn]"])
def test_other_words_for_prompt_token_parity(file: Path, text: str) -> None:
    """Only the two words, and what YAML makes of one of them."""
    (problem,) = problems(file, f"observability: {{prompt_token_parity: {text}}}\n".encode())
    assert problem.startswith("observability.prompt_token_parity: ")
    assert problem.endswith("is not allowed; use off or warn")


def test_coordinator_file_loads_as_it_is() -> None:
    """Two server keys move to ext_proc, everything else keeps its meaning."""
    settings, warnings = load_settings(COORDINATOR, {})
    assert settings.log_level == "info"
    assert settings.ext_proc.read_timeout == 45.0
    assert settings.ext_proc.max_request_body_size == 32 << 20
    assert settings.gateway.address == "http://gateway.example:80"
    pipeline = settings.pipeline
    assert pipeline.forward_response_headers == ("x-llm-d-disagg-revision", "x-slice")
    assert pipeline.media is not None
    assert pipeline.media.allowed_domains == ("images.example.com",)
    assert pipeline.media.allow_private_networks is True
    assert pipeline.render is not None
    assert (pipeline.render.max_idle_conns_per_host, pipeline.render.idle_conn_timeout) == (101, 91.0)
    assert pipeline.encode is not None
    assert (pipeline.encode.use_openai_format, pipeline.encode.ec_connector) == (True, "ec-nixl")
    assert pipeline.encode.timeout == 70.0
    assert pipeline.prefill is not None
    assert (pipeline.prefill.use_openai_format, pipeline.prefill.ec_connector) == (False, "ec-shared-storage")
    assert pipeline.decode is not None
    assert pipeline.decode.kv_connector == "kv-nixl"
    assert [line.partition(":")[0] for line in warnings] == [
        "server.listen_addr",
        "server.metrics_port",
        "server.metrics_cert_dir",
        "server.secure_serving",
        "server.cert_path",
        "server.tls_min_version",
        "server.tls_cipher_suites",
        "server.write_timeout",
        "server.shutdown_timeout",
        "ec_connector of the encode step",
    ]


def test_ext_proc_beats_the_server_section(file: Path) -> None:
    """A key set in both places is taken from ext_proc, and the other one is reported as ignored."""
    file.write_text("server: {read_timeout: 5s}\next_proc: {read_timeout: 6s}\n", encoding="utf-8")
    settings, warnings = load_settings(file, ADDRESSES)
    assert settings.ext_proc.read_timeout == 6.0
    assert warnings == ("server.read_timeout: ignored, ext_proc.read_timeout is set",)


def test_variable_beats_the_server_section(file: Path) -> None:
    """The environment overrides what came from the server section."""
    file.write_text("server: {read_timeout: 5s}\n", encoding="utf-8")
    settings, _ = load_settings(file, {**ADDRESSES, "SIDECAR__EXT_PROC__READ_TIMEOUT": "7s"})
    assert settings.ext_proc.read_timeout == 7.0


def test_mistake_in_the_server_section_is_traced_back(file: Path) -> None:
    """A bad value that moved is reported with the place it came from."""
    assert problems(file, b"server: {read_timeout: 5}") == (
        'ext_proc.read_timeout (from server.read_timeout): 5 has no unit; add a unit, for example "5s"',
    )


def test_shipped_example_is_valid_and_shows_the_defaults() -> None:
    """The example loads without a warning, and differs from the defaults only in its addresses."""
    settings, warnings = load_settings(EXAMPLE, {})
    assert warnings == ()
    listeners = {"SIDECAR__EXT_PROC__LISTEN": "127.0.0.1:9002", "SIDECAR__ADMIN__LISTEN": "127.0.0.1:9090"}
    addresses = {
        "SIDECAR__GATEWAY__ADDRESS": "http://127.0.0.1:10001",
        "SIDECAR__PIPELINE__STEPS__RENDER__PARAMS__ADDRESS": "http://127.0.0.1:8000",
    }
    assert settings == load_settings(None, {**listeners, **addresses})[0]


@pytest.mark.parametrize(
    "content", [b"", b"# only a comment\n", b"---\n", b"{}", b"\xef\xbb\xbflog_level: info\n"]
)
def test_empty_file_means_defaults(file: Path, content: bytes) -> None:
    """An empty file is no file; a byte order mark is no content."""
    file.write_bytes(content)
    assert load_settings(file, ADDRESSES) == load_settings(None, ADDRESSES)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"a: b: c", "line 1, column 5: not valid YAML: mapping values are not allowed here"),
        (b"log_level: info\nadmin: [", "line 2, column 9: not valid YAML"),
        (b"- a", "the file must be a mapping at the top"),
        (b"log_level: info\nadmin: \xff", "line 2 is not UTF-8"),
        (b"log_level: \x01", "line 1: control characters are not allowed"),
        (b"---\na: 1\n---\nb: 1", "line 3, column 1: a second document starts here"),
        (b"log_level: !!python/name:os.system", "line 1, column 12: a tag that is not supported"),
        (b"log_level: *nobody", "line 1, column 12: an alias (*name) without its anchor"),
        (b"log_level: !!int x", "a value does not fit its YAML type; put it in quotes"),
        (b"[" * 20_000, "nested too deeply"),
        (b"#" * (1 << 20) + b"#", "larger than 1048576 bytes"),
    ],
    ids=lambda value: value[:12] if isinstance(value, bytes) else "",
)
def test_files_that_cannot_be_read(file: Path, content: bytes, text: str) -> None:
    """A file that is not usable YAML gives one message, with the line where there is one."""
    found = problems(file, content)
    assert len(found) == 1
    assert text in found[0]


def test_missing_file(tmp_path: Path) -> None:
    """The path is named, and the option it came from."""
    with pytest.raises(ConfigError) as caught:
        load_settings(tmp_path / "none.yaml", {})
    assert caught.value.problems[0].endswith(
        'none.yaml": No such file or directory; check the path given with --config'
    )


def test_directory_instead_of_file(tmp_path: Path) -> None:
    """A directory is reported as one."""
    with pytest.raises(ConfigError, match="Is a directory"):
        load_settings(tmp_path, {})


def test_duplicate_keys_are_reported_with_their_lines(file: Path) -> None:
    """YAML would keep the last value in silence; every repetition is a problem, next to all others."""
    found = problems(file, b"log_level: info\nadmin:\n  listen: ''\n  listen: ''\nlog_level: loud\n")
    assert found == (
        'line 4: "listen" is already set in line 3; remove one of them',
        'line 5: "log_level" is already set in line 1; remove one of them',
        'log_level: "loud" is not a log level; use error, warning, info, debug or the coordinator\'s 1..5',
    )


@pytest.mark.parametrize("content", [b"<<: {log_level: info}", b"? [a, b]\n: 1"])
def test_keys_that_are_no_text(file: Path, content: bytes) -> None:
    """Merge keys and structured keys are refused, not dropped."""
    assert problems(file, content) == ("line 1: keys must be plain text; merge keys (<<) are not supported",)


@pytest.mark.parametrize(
    "tail",
    [
        "log_level: *a30",
        "headers: {strip: *a30}",
        "ext_proc: {listen: *a30, read_timeout: *a30, max_request_body_size: *a30, tls: *a30}",
        "pipeline: {kv_connector: *a30}",
        "pipeline: {steps: *a30}",
        "pipeline: {steps: [{type: *a30}]}",
        "gateway: {address: *a30, phase_token: *a30}",
        "server: *a30",
        "tracing: *a30",
        "unknown: *a30",
    ],
)
@pytest.mark.timeout(20)
def test_nested_aliases_stay_small(file: Path, tail: str) -> None:
    """Thirty levels of aliases, 9^30 values when written out, are never written out."""
    levels = "".join(f"x{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 31))
    file.write_text(f"x0: &a0 [x]\n{levels}{tail}\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_settings(file, {})
    assert sum(map(len, caught.value.problems)) < 20_000


def test_recursive_alias(file: Path) -> None:
    """A value that contains itself is just a wrong value."""
    found = problems(file, b"headers: &h {strip: *h}\nerrors: &e {x: *e}")
    assert [line.partition(":")[0] for line in found] == ["errors.x", "headers.strip"]


def test_described_settings_load_again(file: Path) -> None:
    """`describe` is complete, valid YAML: read again it gives the same settings."""
    settings, _ = load_settings(COORDINATOR, {})
    text = describe(settings)
    file.write_text(text.replace("phase_token: not set", "phase_token: ''"), encoding="utf-8")
    assert load_settings(file, {})[0] == settings
    assert "max_request_body_size: 32\n" in text
    assert "idle_conn_timeout: 1m20s" in text
