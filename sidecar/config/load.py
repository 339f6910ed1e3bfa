"""A file and the environment become Settings, or one error that lists everything wrong with them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from sidecar.config.environment import overlay
from sidecar.config.problems import ConfigError, Location, problem, section_at, validation_problem
from sidecar.config.sequence import section, step_findings
from sidecar.config.settings import Settings
from sidecar.config.source import read_bounded, read_file
from sidecar.config.values import MEGABYTE, format_duration, parse_megabytes, quoted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_SERVER_KEYS = ("max_request_body_size", "read_timeout")
_LARGEST_SECRET = 1 << 16
_NO_SPANS = "this version exports no spans of its own; set it to false (trace context is always passed on)"

_Finding = tuple[Location, str]


def load_settings(path: Path | None, environ: Mapping[str, str]) -> tuple[Settings, tuple[str, ...]]:
    """Settings from a YAML file, overridden by `SIDECAR__…` variables.

    A coordinator.yaml loads as it is: of its `server` section `max_request_body_size` and `read_timeout`
    count unless `ext_proc` sets them, the rest is ignored with a warning. Numbers may be quoted, booleans of
    the file may not; a key without a value counts as absent.

    Args:
        path: the file, or None to use the environment and the defaults only.
        environ: environment variables; those without the prefix are not looked at.

    Returns:
        The settings, and warnings about what has no effect.

    Raises:
        ConfigError: with every problem, each with its dotted path and what to do; it never holds a secret.
    """
    raw, problems = read_file(path) if path else ({}, [])
    origins, warnings, findings = _adopt_coordinator_keys(raw)
    from_environment, misplaced = overlay(raw, environ)
    problems += misplaced
    origins |= from_environment
    findings += _resolve_phase_token(raw)
    findings += _cross_checks(raw)
    settings = None
    try:
        settings = Settings.model_validate(raw)
    except ValidationError as error:
        findings += [validation_problem(item, raw) for item in error.errors(include_url=False)]
    problems += [problem(location, text, origins) for location, text in findings]
    if settings is None or problems:
        raise ConfigError(problems)
    return settings, (*warnings, *_timeouts_without_effect(settings), *_doubtful_combinations(settings))


def _adopt_coordinator_keys(
    raw: dict[str, Any],
) -> tuple[dict[Location, str], list[str], list[_Finding]]:
    origins: dict[Location, str] = {}
    warnings: list[str] = []
    findings: list[_Finding] = []
    tracing = raw.pop("tracing", None)
    if tracing is True:
        findings.append((("tracing",), _NO_SPANS))
    elif tracing is not None and tracing is not False:
        findings.append((("tracing",), f"{quoted(tracing)} is not a boolean; write false, unquoted"))
    server = {} if raw.get("server") is None else raw["server"]
    raw.pop("server", None)
    if not isinstance(server, dict):
        findings.append((("server",), f"{quoted(server)} is not a mapping; write keys and values below it"))
        return origins, warnings, findings
    ext_proc = {} if raw.get("ext_proc") is None else raw["ext_proc"]
    for key, value in server.items():
        name = f"server.{key}" if isinstance(key, str) and key.isidentifier() else f"server.{quoted(key)}"
        if key not in _SERVER_KEYS:
            warnings.append(f"{name}: ignored, the sidecar has no HTTP listener for clients")
        elif not isinstance(ext_proc, dict) or ext_proc.get(key) is not None:
            warnings.append(f"{name}: ignored, ext_proc.{key} is set")
        elif value is not None:
            ext_proc = {**ext_proc, key: value}
            origins["ext_proc", key] = name
    raw["ext_proc"] = ext_proc
    return origins, warnings, findings


def _resolve_phase_token(raw: dict[str, Any]) -> list[_Finding]:
    gateway = section(raw, "gateway")
    token = gateway.get("phase_token")
    if not isinstance(token, str) or not token.startswith("file:"):
        return []
    location: Location = ("gateway", "phase_token")
    try:
        secret = read_bounded(Path(token.removeprefix("file:")), _LARGEST_SECRET).strip()
    except ValueError as error:
        raw["gateway"] = {**gateway, "phase_token": ""}
        return [(location, f"{error}; mount the secret there, or correct the path")]
    raw["gateway"] = {**gateway, "phase_token": secret}
    return [] if secret else [(location, "the file is empty; write the token into it")]


def _cross_checks(raw: Mapping[str, Any]) -> Iterator[_Finding]:
    """What one key alone cannot show; works on the raw values so that it is reported with everything else."""
    yield from step_findings(section(raw, "pipeline"))
    body = _size(raw, "ext_proc", "max_request_body_size")
    total = _size(raw, "limits", "max_in_flight_bytes")
    if body and total and total < body:
        text = f"{total / MEGABYTE:g} MB is less than ext_proc.max_request_body_size ({body / MEGABYTE:g} MB)"
        yield ("limits", "max_in_flight_bytes"), f"{text}; raise it, or lower the other"
    listen = _value(raw, "ext_proc", "listen")
    if isinstance(listen, str) and listen == _value(raw, "admin", "listen") and not listen.endswith(":0"):
        yield ("admin", "listen"), f"{quoted(listen)} is also ext_proc.listen; use another port"
    yield from _certificate(raw)
    if section(raw, "gateway").get("phase_token") and _value(raw, "ext_proc", "clear_route_cache") is False:
        text = "false lets a client choose its route by EPP-Profile where gateway.phase_token is used"
        yield ("ext_proc", "clear_route_cache"), f"{text}; set true"
    if section(raw, "observability").get("tracing") is True:
        yield ("observability", "tracing"), _NO_SPANS


def _certificate(raw: Mapping[str, Any]) -> Iterator[_Finding]:
    directory = section(section(raw, "ext_proc"), "tls").get("cert_path")
    if isinstance(directory, str) and directory:
        for name in ("tls.crt", "tls.key"):
            if not (Path(directory) / name).is_file():
                yield (
                    ("ext_proc", "tls", "cert_path"),
                    f"{quoted(directory)} has no {name}; mount the certificate",
                )


def _value(raw: Mapping[str, Any], name: str, key: str) -> Any:
    value = section(raw, name).get(key)
    return section_at((name,)).model_fields[key].default if value is None else value


def _size(raw: Mapping[str, Any], name: str, key: str) -> int | None:
    value = section(raw, name).get(key)
    if value is None:
        default: int = section_at((name,)).model_fields[key].default
        return default
    try:
        return parse_megabytes(value)
    except ValueError:
        return None  # validation reports it


def _timeouts_without_effect(settings: Settings) -> Iterator[str]:
    deadline = settings.ext_proc.request_deadline
    times = {"ext_proc.read_timeout": settings.ext_proc.read_timeout}
    for index, step in enumerate(settings.pipeline.steps):
        if step.type in ("render", "conditional-decode", "encode", "prefill", "prefill-decode"):
            times[f"pipeline.steps[{index}].params.timeout"] = step.params.timeout
        if (
            step.type in ("encode", "prefill", "prefill-decode")
            and step.params.timeout > settings.gateway.timeout
        ):
            yield (
                f"pipeline.steps[{index}].params.timeout: {format_duration(step.params.timeout)} never "
                f"passes, gateway.timeout ({format_duration(settings.gateway.timeout)}) ends each call first"
            )
    for path, seconds in times.items():
        if seconds > deadline:
            yield (
                f"{path}: {format_duration(seconds)} never passes, "
                f"ext_proc.request_deadline ({format_duration(deadline)}) ends the request first"
            )


def _doubtful_combinations(settings: Settings) -> Iterator[str]:
    pipeline = settings.pipeline
    if pipeline.conditional_decode is not None and pipeline.prefill_decode is not None:
        yield (
            "conditional-decode with prefill-decode: a decode engine in SGLang's disaggregation mode refuses "
            "a request without a prefill worker, and the client gets that refusal"
        )
    encode, prefill = pipeline.encode, pipeline.prefill or pipeline.prefill_decode
    if encode is not None and prefill is not None and encode.ec_connector != prefill.ec_connector:
        yield (
            f"ec_connector of the encode step: {encode.ec_connector} has no effect, what prefill is sent "
            f"follows its own ({prefill.ec_connector})"
        )
    compares = settings.observability.prompt_token_parity == "warn"  # noqa: S105 - tokens of a prompt
    if compares and pipeline.render is None:
        yield (
            "observability.prompt_token_parity: warn has no effect without a render step, whose count is "
            "compared with"
        )
