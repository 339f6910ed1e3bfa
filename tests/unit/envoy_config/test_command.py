"""The command: its output, its head, its exit codes, and what it needs installed."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.unit.envoy_config.envoy_config_support import REPOSITORY, SHARED, SIDECAR_YAML, TOKEN

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.envoy_config.envoy_config_support import Command

WITHOUT_THE_EXTRA = (
    "import sys; sys.modules['envoy_data_plane'] = None; "
    "from sidecar.cli import main; sys.exit(main(sys.argv[1:]))"
)


def python(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd=REPOSITORY,
    )


def head(text: str) -> str:
    """The comment at the top."""
    return text.partition("\n\n")[0]


def test_without_the_extra_it_says_what_to_install() -> None:
    """Exit code 2 and the name of the extra; the other commands do not miss it."""
    done = python(WITHOUT_THE_EXTRA, "envoy-config", "--config", str(SIDECAR_YAML))
    assert (done.returncode, done.stdout) == (2, "")
    assert "install epd-sidecar[envoy-config]" in done.stderr
    assert "Traceback" not in done.stderr
    done = python(WITHOUT_THE_EXTRA, "check-config", "--config", str(SIDECAR_YAML))
    assert done.returncode == 0


def test_serving_loads_nothing_of_it() -> None:
    """Envoy's types are never in the request path."""
    program = (
        "import sys; import sidecar.app, sidecar.cli; "
        "sys.exit(sorted(name for name in sys.modules if name.partition('.')[0] in "
        "('envoy_data_plane', 'betterproto2')) or 0)"
    )
    done = python(program)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_head_says_how_to_make_it_again(command: Command) -> None:
    """The command with all its options, ready to be pasted, and how to run the result."""
    words = (
        "--body-mode",
        "buffered",
        "--sidecar",
        "unix:/run/a b.sock",
        "--decode",
        "a:1",
        "--decode",
        "b:2",
    )
    text = head(command(*words, "--admin-listen", "127.0.0.1:1").text)
    made = text.partition("# Written by: ")[2].partition("\n# Run:")[0].replace(" \\\n#  ", "")
    assert made == (
        f"epd-sidecar envoy-config --config {SIDECAR_YAML} --topology internal-listener --body-mode buffered "
        "--sidecar 'unix:/run/a b.sock' --admin-listen 127.0.0.1:1 --decode a:1 --decode b:2"
    )
    assert f"# Run: epd-sidecar serve --config {SIDECAR_YAML} &\n" in text


def test_variables_are_named_but_not_printed(command: Command) -> None:
    """The head names the variables that count; the phase token is nowhere, wherever it comes from."""
    printed = command("--topology", "shared-listener", env=SHARED)
    assert "SIDECAR__GATEWAY__ADDRESS, SIDECAR__GATEWAY__PHASE_TOKEN in the environment" in head(printed.text)
    for part in ("bootstrap", "listeners", "filter", "cluster", "access-log"):
        printed = command("--topology", "shared-listener", "--part", part, env=SHARED)
        assert printed.code == 0
        assert TOKEN not in printed.text + printed.complaint
    wrong = command("--topology", "shared-listener", "--listen", "x", env=SHARED)
    assert TOKEN not in wrong.complaint


@pytest.mark.parametrize("token_in_file", [True, False])
def test_a_token_of_the_file_is_not_printed_either(
    token_in_file: bool, command: Command, tmp_path: Path
) -> None:
    """Neither a token written into the file nor one it points to."""
    secret = tmp_path / "token"
    secret.write_text(TOKEN, encoding="utf-8")
    content = yaml.safe_load(SIDECAR_YAML.read_text(encoding="utf-8"))
    content["gateway"] = {
        "address": "http://127.0.0.1:10000",
        "phase_token": TOKEN if token_in_file else f"file:{secret}",
    }
    file = tmp_path / "sidecar.yaml"
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    printed = command("--topology", "shared-listener", config=file)
    assert printed.code == 0
    assert TOKEN not in printed.text + printed.complaint
    assert "with " not in head(printed.text).partition("Written by")[2]


def test_a_name_cannot_leave_the_comment(command: Command, tmp_path: Path) -> None:
    """A file name with a line break stays behind the #, whatever it says."""
    directory = tmp_path / "a\nadmin: {address: {pipe: {path: x}}}\u2028b\rc"
    directory.mkdir()
    file = directory / "sidecar.yaml"
    file.write_bytes(SIDECAR_YAML.read_bytes())
    text = command(config=file).text
    assert yaml.safe_load(text) == command().config
    assert all(line.startswith("#") for line in head(text).splitlines())


def test_warnings_go_beside_the_output(command: Command) -> None:
    """What the sidecar's configuration warns about is on standard error, the YAML on standard output."""
    printed = command(env={"SIDECAR__EXT_PROC__REQUEST_DEADLINE": "1s"})
    assert printed.complaint.startswith("warning: ")
    assert printed.config["admin"]


def test_it_works_from_the_environment_alone(command: Command) -> None:
    """Without --config the variables are the configuration, as for serve."""
    env = {
        "SIDECAR__GATEWAY__ADDRESS": "http://127.0.0.1:10001",
        "SIDECAR__PIPELINE__STEPS__RENDER__PARAMS__ADDRESS": "http://127.0.0.1:8000",
    }
    text = command(env=env, config=None).text
    assert "# Run: epd-sidecar serve &\n" in head(text)


def test_an_admin_interface_that_others_reach_is_marked(command: Command) -> None:
    """The comment does not promise loopback where there is none."""
    assert "loopback only" in command().text
    text = command("--admin-listen", "0.0.0.0:9901").text
    assert "loopback only" not in text
    assert "let nobody but its operators reach it" in text
