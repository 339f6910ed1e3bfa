"""The phase token: where it may come from, and that it never goes anywhere else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from sidecar.config import ConfigError, describe, load_settings

if TYPE_CHECKING:
    from pathlib import Path

TOKEN = "s3cr3t-t0k3n-0123456789"
ADDRESSES = {
    "SIDECAR__GATEWAY__ADDRESS": "http://gateway",
    "SIDECAR__PIPELINE__STEPS__RENDER__PARAMS__ADDRESS": "http://render",
}
VARIABLE = "SIDECAR__GATEWAY__PHASE_TOKEN"


def test_token_from_file_variable_and_secret_file(tmp_path: Path) -> None:
    """The configuration file, a variable and a mounted secret all give the same token."""
    config = tmp_path / "sidecar.yaml"
    config.write_text(f"gateway: {{phase_token: {TOKEN}}}\n", encoding="utf-8")
    secret = tmp_path / "token"
    secret.write_text(f"{TOKEN}\n", encoding="utf-8")
    for settings, _ in (
        load_settings(config, ADDRESSES),
        load_settings(None, {**ADDRESSES, VARIABLE: TOKEN}),
        load_settings(None, {**ADDRESSES, VARIABLE: f"file:{secret}"}),
    ):
        assert settings.gateway.phase_token == TOKEN


@pytest.mark.parametrize(
    ("content", "text"), [("\n", "the file is empty; write the token into it"), ("short", "is too short")]
)
def test_bad_secret_files(tmp_path: Path, content: str, text: str) -> None:
    """An empty or short secret is refused: it would switch the protection off in silence."""
    secret = tmp_path / "token"
    secret.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_settings(None, {**ADDRESSES, VARIABLE: f"file:{secret}"})
    (line,) = caught.value.problems
    assert line.startswith(f"gateway.phase_token (from {VARIABLE}): {text}")


def test_token_is_not_printed() -> None:
    """Neither repr, str, a dump nor the described configuration shows the token, only that there is one."""
    settings, _ = load_settings(None, {**ADDRESSES, VARIABLE: TOKEN})
    for text in (
        repr(settings),
        str(settings.gateway),
        settings.model_dump_json(),
        str(settings.model_dump()),
    ):
        assert TOKEN not in text
    assert TOKEN not in describe(settings)
    assert "phase_token: set\n" in describe(settings)
    assert "phase_token: not set\n" in describe(load_settings(None, ADDRESSES)[0])


@pytest.mark.parametrize(
    "content",
    [
        "gateway: {{phase_token: [{0}]}}",
        "gateway: {{phase_token: '{0} x'}}",
        "gateway: {{phase_token: {0}ä}}",
        "gateway: {{phase_token: *{0}}}",
        "gateway: {{phase_token: !{0} x}}",
        "gateway: {{phase_token: @{0}}}",
        "gateway: {{phase_token: '{0}}}",
        'gateway: {{phase_token: "\\{0}"}}',
        "gateway: {{phase_token: {0}: x}}",
        "gateway: {{phase_token: {0}}}\nlog_level: [",
        "gateway: {{phase_token: {0}}}\nlog_level: loud",
        "gateway: {{phase_tokn: {0}}}",
        "gateway: {{phase_token: {{x: {0}}}}}",
        "gateway: {{address: 'http://user:{0}@gateway'}}",
        "gateway: {{address: 'http:user:{0}@gateway?x'}}",
        "gateway: [{0}]",
    ],
)
def test_token_is_not_in_errors(tmp_path: Path, content: str) -> None:
    """However a secret is mistyped, no message, cause or note repeats it."""
    config = tmp_path / "sidecar.yaml"
    config.write_text(content.format(TOKEN), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_settings(config, {})
    assert TOKEN not in str(caught.value)
    assert TOKEN[:8] not in "".join(caught.value.problems)


def test_variable_with_a_secret_is_named_without_it() -> None:
    """A mistyped variable is reported by its name only."""
    with pytest.raises(ConfigError) as caught:
        load_settings(None, {**ADDRESSES, "SIDECAR__GATEWAY__PHASE_TOKN": TOKEN, VARIABLE: f"{TOKEN} "})
    assert TOKEN not in str(caught.value)
    assert len(caught.value.problems) == 2
