"""Runs `epd-sidecar envoy-config` in the test process, and finds things in what it printed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from sidecar import cli

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

REPOSITORY = Path(__file__).parents[3]
SIDECAR_YAML = REPOSITORY / "deploy" / "envoy" / "sidecar.yaml"
TOKEN = "a-token-for-the-tests-0123456789"  # guards nothing

SHARED = {
    "SIDECAR__GATEWAY__ADDRESS": "http://127.0.0.1:10000",
    "SIDECAR__GATEWAY__PHASE_TOKEN": TOKEN,
}
"""What the shared-listener topology asks of the sidecar's configuration."""


@dataclass(frozen=True)
class Printed:
    """What one run did."""

    code: int
    text: str
    complaint: str

    @property
    def config(self) -> Any:
        assert self.code == 0, self.complaint
        return yaml.load(self.text, yaml.CSafeLoader)

    @property
    def problems(self) -> list[str]:
        """The lines below the first of an error."""
        assert (self.code, self.text) == (2, "")
        return [line.strip() for line in self.complaint.splitlines()[1:]]


@dataclass(frozen=True)
class Command:
    """The command with nothing of the sidecar's in the environment."""

    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]

    def __call__(
        self, *options: str, env: dict[str, str] | None = None, config: Path | None = SIDECAR_YAML
    ) -> Printed:
        file = ["--config", str(config)] if config else []
        with self.monkeypatch.context() as patch:
            for name, value in (env or {}).items():
                patch.setenv(name, value)
            code = cli.main(["envoy-config", *file, *options])
        captured = self.capsys.readouterr()
        return Printed(code, captured.out, captured.err)


def named(items: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(item for item in items if item["name"] == name)


def listener(config: Any, name: str) -> dict[str, Any]:
    found: dict[str, Any] = named(config["static_resources"]["listeners"], name)
    return found


def manager(config: Any, name: str) -> dict[str, Any]:
    """The connection manager of one listener."""
    found: dict[str, Any] = listener(config, name)["filter_chains"][0]["filters"][0]["typed_config"]
    return found


def ext_proc(config: Any, name: str = "external") -> dict[str, Any]:
    """Configuration of the sidecar's filter."""
    found: dict[str, Any] = manager(config, name)["http_filters"][0]["typed_config"]
    return found


def cluster(config: Any, name: str) -> dict[str, Any]:
    return named(config["static_resources"]["clusters"], name)


def addresses(config: Any, name: str) -> list[str]:
    """The endpoints of a cluster, as the options write them."""
    endpoints = cluster(config, name)["load_assignment"]["endpoints"][0]["lb_endpoints"]
    found = [item["endpoint"]["address"] for item in endpoints]
    return [
        f"unix:{item['pipe']['path']}"
        if "pipe" in item
        else f"{item['socket_address']['address']}:{item['socket_address']['port_value']}"
        for item in found
    ]


def values_of(node: Any, key: str) -> Iterator[Any]:
    """Every value that stands under a key, at any depth."""
    if isinstance(node, list):
        for item in node:
            yield from values_of(item, key)
    elif isinstance(node, dict):
        for name, value in node.items():
            if name == key:
                yield value
            yield from values_of(value, key)
