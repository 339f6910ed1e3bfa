"""What the image promises, read from the Dockerfile."""

from __future__ import annotations

import re
import tomllib

import pytest

from sidecar.config import AdminSettings, ExtProcSettings
from tests.unit.image.dockerfile_reader import DOCKERFILE, DOCKERIGNORE, ROOT, Stage, instructions, stages

TEXT = DOCKERFILE.read_text(encoding="utf-8")


@pytest.fixture
def build() -> Stage:
    return stages(TEXT)[0]


@pytest.fixture
def final() -> Stage:
    return stages(TEXT)[-1]


def test_two_stages_from_one_image_that_can_be_pinned() -> None:
    """Both stages start from one argument, so that one digest pins the build; no tag is `latest`."""
    build, final = stages(TEXT)
    arguments = [item.text for item in instructions(TEXT) if item.name == "ARG"]
    assert build.base == final.base == "${PYTHON_IMAGE}"
    assert build.name == "build"
    assert len(arguments) == 1
    name, _, image = arguments[0].partition("=")
    assert name == "PYTHON_IMAGE"
    assert re.fullmatch(r"python:3\.\d+-slim-[a-z]+", image)
    assert "--build-arg PYTHON_IMAGE=" in TEXT
    assert "@sha256:" in TEXT


def test_the_base_image_runs_a_python_the_package_supports() -> None:
    """The base image's version is one that pyproject.toml allows and the tests are typed for."""
    image = next(item.text for item in instructions(TEXT) if item.name == "ARG")
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)
    version = re.search(r"python:(3\.\d+)-", image)
    assert version is not None
    assert version[1] == project["tool"]["mypy"]["python_version"]
    assert project["project"]["requires-python"] == f">={version[1]}"


def test_every_package_is_pinned(build: Stage) -> None:
    """Each pip that resolves something is held to constraints.txt, and what it builds with is, too."""
    runs = [item.text for item in build.all("RUN")]
    commands = [part.strip() for text in runs for part in text.split("&&")]
    installs = [text for text in commands if re.search(r"\bpip\b.*\binstall\b", text)]
    assert len(installs) == 2
    assert all("--constraint constraints.txt" in text for text in installs)
    wheels = [text for text in commands if re.search(r"\bpip\b.*\bwheel\b", text)]
    assert len(wheels) == 1
    assert "--no-deps" in wheels[0]
    assert "--no-build-isolation" in wheels[0]
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    with (ROOT / "pyproject.toml").open("rb") as file:
        backend = tomllib.load(file)["build-system"]["requires"]
    assert [re.split("[>=<]", item)[0] for item in backend] == ["hatchling"]
    assert re.search(r"^hatchling==", pinned, re.MULTILINE)


def test_nothing_is_installed_in_the_final_stage(final: Stage) -> None:
    """The final stage holds what the build stage made, and has lost the base image's pip and ensurepip."""
    runs = [item.text for item in final.all("RUN")]
    assert len(runs) == 1
    assert runs[0].startswith("rm -rf ")
    removed = runs[0].split()[2:]
    assert "/usr/local/bin/pip*" in removed
    assert "/usr/local/lib/python3*/ensurepip" in removed
    assert "/usr/local/lib/python3*/site-packages/*" in removed
    assert [(item.options, item.words) for item in final.all("COPY")] == [
        ({"from": "build"}, ["/opt/epd-sidecar", "/opt/epd-sidecar"])
    ]


def test_no_pip_in_the_environment(build: Stage) -> None:
    """The environment that is copied is made without pip and filled from outside."""
    text = " ".join(item.text for item in build.all("RUN"))
    assert "-m venv --without-pip /opt/epd-sidecar" in text
    assert "-m pip --python /opt/epd-sidecar/bin/python install" in text


def test_it_does_not_run_as_root(final: Stage) -> None:
    """The user is the chart's, by number: Kubernetes cannot check a name against runAsNonRoot."""
    assert final.one("USER").text == "65532:65532"
    after = final.instructions[final.instructions.index(final.one("USER")) :]
    assert not {item.name for item in after} & {"RUN", "COPY", "ADD"}


def test_the_process_is_the_sidecar(final: Stage) -> None:
    """Entrypoint and command are in exec form, so that the sidecar gets SIGTERM itself and drains."""
    assert final.one("ENTRYPOINT").command == ["epd-sidecar"]
    assert final.one("CMD").command == ["serve", "--config", "/etc/epd-sidecar/sidecar.yaml"]
    assert final.one("STOPSIGNAL").text == "SIGTERM"
    assert '"/opt/epd-sidecar/bin:$PATH"' in final.one("ENV").text


def test_the_health_check_asks_the_sidecar(final: Stage) -> None:
    """`epd-sidecar health` with the file that is served, within its own time limit."""
    check = final.one("HEALTHCHECK")
    options, _, command = check.text.partition("CMD ")
    assert command == '["epd-sidecar", "health", "--config", "/etc/epd-sidecar/sidecar.yaml"]'
    # Beyond the command's own 3 s, so that it can say what is wrong.
    assert "--timeout=5s" in options


def test_the_default_ports_are_exposed(final: Stage) -> None:
    """EXPOSE names the ports of the default configuration."""
    ports = {address.rpartition(":")[2] for address in (ExtProcSettings().listen, AdminSettings().listen)}
    assert set(final.one("EXPOSE").text.split()) == ports


def test_no_secret_and_no_remote_file(build: Stage, final: Stage) -> None:
    """Nothing is downloaded by URL, and no argument or variable carries a credential."""
    for stage in (build, final):
        assert not stage.all("ADD")
        for item in (*stage.all("ARG"), *stage.all("ENV")):
            assert not re.search(r"token|secret|password|key", item.text, re.IGNORECASE)


def test_the_context_holds_only_what_is_copied(build: Stage) -> None:
    """.dockerignore admits the sources that COPY names, and nothing else."""
    lines = [
        line
        for line in DOCKERIGNORE.read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    ]
    assert lines[0] == "*"
    admitted = {line.removeprefix("!") for line in lines if line.startswith("!")}
    copied = {word for item in build.all("COPY") for word in item.words[:-1]}
    assert admitted == copied
    assert all((ROOT / name).exists() for name in copied)
    assert {"**/__pycache__", "**/*.pyc"} <= set(lines)


def test_what_the_package_is_built_from_is_copied(build: Stage) -> None:
    """The files that pyproject.toml names reach the build."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)
    needed = {
        project["project"]["readme"],
        *project["project"]["license-files"],
        *project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"],
        "pyproject.toml",
    }
    assert needed <= {word for item in build.all("COPY") for word in item.words[:-1]}
