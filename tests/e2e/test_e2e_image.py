"""The steps of the Dockerfile, run here without Docker.

Needs what a build of the image needs: an index with the packages that constraints.txt pins, as wheels for
this Python (`make setup` uses the same one). The base image is played by a fresh virtual environment without
access to this one's packages, and the paths of the image are folders below the test's own.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import venv
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import yaml

from deploy.envoy.local_stack import SIDECAR, SIDECAR_ADMIN, free_ports
from tests.e2e.e2e_stack import wait_for
from tests.unit.image.dockerfile_reader import DOCKERFILE, ROOT, Instruction, Stage, stages

if TYPE_CHECKING:
    from pathlib import Path

IMAGE_PATHS = ("/usr/local", "/opt/epd-sidecar", "/wheels", "/src", "/etc/epd-sidecar")
BUILD_SECONDS = 400


@dataclass(frozen=True)
class Image:
    """What the Dockerfile made of a folder.

    Attributes:
        root: stands for `/` of the image.
        final: the last stage.
        environment: what a process of the image starts with.
    """

    root: Path
    final: Stage
    environment: dict[str, str]

    def command(self, instruction: Instruction) -> list[str]:
        return [located(word, self.root) for word in instruction.command]


def located(text: str, root: Path) -> str:
    """A text with the image's own paths below `root`."""
    for path in IMAGE_PATHS:
        text = re.sub(rf"(?<![\w./-]){re.escape(path)}(?![\w-])", str(root / path[1:]), text)
    return text


def outside_environment(root: Path) -> dict[str, str]:
    """This environment, without what belongs to the virtual environment of the tests."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    system = [folder for folder in os.defpath.split(":") if folder]
    return {**kept, "PATH": ":".join([str(root / "usr/local/bin"), *system]), "HOME": str(root / "root")}


def run_build_stage(stage: Stage, root: Path) -> None:
    directory = root / "src"
    for item in stage.instructions:
        if item.name == "WORKDIR":
            directory = root / item.text[1:]
            directory.mkdir(parents=True)
        elif item.name == "COPY":
            *sources, target = item.words
            for source in sources:
                copy(ROOT / source, directory / target, source if target == "./" else "")
        else:
            assert item.name == "RUN", item
            run(item, root, directory)


def copy(source: Path, target: Path, name: str) -> None:
    if source.is_dir():
        shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        target.mkdir(exist_ok=True)
        shutil.copy(source, target / name)


def files(directory: Path) -> set[Path]:
    return {path for path in directory.rglob("*") if path.is_file()}


def run(item: Instruction, root: Path, directory: Path) -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", located(item.text, root)],
        cwd=directory,
        env=outside_environment(root),
        capture_output=True,
        text=True,
        check=False,
        timeout=BUILD_SECONDS,
    )
    assert done.returncode == 0, f"Dockerfile line {item.line}: {done.stdout}{done.stderr}"


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    """The build stage in folders, then the final stage's clean-up and environment."""
    root = tmp_path_factory.mktemp("image")
    venv.create(root / "usr/local", with_pip=True, symlinks=True)
    build, final = stages(DOCKERFILE.read_text(encoding="utf-8"))
    run_build_stage(build, root)
    for item in final.all("RUN"):
        run(item, root, root)
    environment = outside_environment(root)
    for name, value in re.findall(r'(\w+)="?([^"\s]+)"?', located(final.one("ENV").text, root)):
        environment[name] = value.replace("$PATH", environment["PATH"])
    return Image(root, final, environment)


@pytest.mark.timeout(BUILD_SECONDS * 2)
def test_the_image_serves_says_so_and_drains(image: Image, tmp_path: Path) -> None:
    """Entrypoint and command serve the mounted file, the health check passes, and SIGTERM ends it with 0.

    No file is written meanwhile: the root file system may be read-only.
    """
    ports = free_ports([SIDECAR, SIDECAR_ADMIN])
    mounted = image.root / "etc/epd-sidecar"
    mounted.mkdir(parents=True)
    settings = {
        "ext_proc": {"listen": f"0.0.0.0:{ports[SIDECAR]}"},
        "admin": {"listen": f"127.0.0.1:{ports[SIDECAR_ADMIN]}"},
        "gateway": {"address": "http://127.0.0.1:1"},
        "pipeline": {"steps": [{"type": "decode"}]},
    }
    (mounted / "sidecar.yaml").write_text(yaml.safe_dump(settings))
    entrypoint = image.command(image.final.one("ENTRYPOINT"))
    check = image.final.one("HEALTHCHECK")
    health = Instruction("CMD", check.text.partition("CMD ")[2], check.line)
    executable = shutil.which(entrypoint[0], path=image.environment["PATH"])
    assert executable is not None

    def healthy() -> bool:
        asked = subprocess.run(
            image.command(health), env=image.environment, cwd=tmp_path, capture_output=True, check=False
        )
        return asked.returncode == 0

    assert not healthy()
    before = files(image.root)
    log = tmp_path / "sidecar.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [executable, *image.command(image.final.one("CMD"))],
            env=image.environment,
            cwd=tmp_path,
            stdout=output,
            stderr=output,
        )
    try:
        wait_for(healthy, f"the sidecar of the image: {log.read_text()}")
        process.send_signal(getattr(signal, image.final.one("STOPSIGNAL").text))
        assert process.wait(timeout=30) == 0, log.read_text()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    assert "stopped" in log.read_text()
    assert not healthy()
    assert files(image.root) == before
    assert files(tmp_path) == {log}


@pytest.mark.timeout(BUILD_SECONDS * 2)
def test_what_the_image_has_no_use_for_is_not_in_it(image: Image) -> None:
    """Neither what builds nor what installs packages comes along, and no extra of the sidecar."""
    (site,) = (image.root / "opt/epd-sidecar/lib").glob("python3*/site-packages")
    distributions = {path.name.partition("-")[0].lower() for path in site.glob("*.dist-info")}
    assert {"epd_sidecar", "grpcio", "aiohttp"} <= distributions
    assert not distributions & {"pip", "setuptools", "wheel", "hatchling", "pytest", "pillow"}
    (base,) = (image.root / "usr/local/lib").glob("python3*/site-packages")
    assert not list(base.iterdir())
    assert not list((image.root / "usr/local/bin").glob("pip*"))
    assert not list((image.root / "opt/epd-sidecar/bin").glob("pip*"))
