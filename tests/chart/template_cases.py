"""Asks one named template of the chart about many values at once: a render per value would take minutes."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import helm_python
import yaml

from sidecar.config import ConfigError, load_settings
from tests.chart.chart_rendering import CHART, NAMESPACE, RELEASE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DEFAULTS: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
"""The chart's own values."""

_ASK = (
    "{{- $said := list }}{{ range .Values.all }}"
    '{{ $said = append $said (include "%s" (dict "Values" .)) }}{{ end }}'
    '{{ toJson (dict "said" $said) }}'
)


def answers(name: str, values: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The lines that the chart's template `name` prints, for each of several complete values."""
    with tempfile.TemporaryDirectory() as directory:
        chart = Path(directory) / "chart"
        (chart / "templates").mkdir(parents=True)
        (chart / "Chart.yaml").write_text("apiVersion: v2\nname: ask\nversion: 0.1.0\n", encoding="utf-8")
        for template in (CHART / "templates").rglob("_*.tpl"):
            shutil.copy(template, chart / "templates" / f"{template.parent.name}{template.name}")
        (chart / "templates/ask.yaml").write_text(_ASK % name, encoding="utf-8")
        loaded = helm_python.Chart.load(chart)
        rendered = loaded.render({"all": list(values)}, name=RELEASE, namespace=NAMESPACE)
    said: list[str] = json.loads(rendered["ask/templates/ask.yaml"])["said"]
    return [[line.strip() for line in text.splitlines() if line.strip()] for text in said]


def sidecar_problems(config: Mapping[str, Any], directory: Path) -> list[str]:
    """What the sidecar says of a configuration at its start, with the keys of the chart."""
    file = directory / "sidecar.yaml"
    file.write_text(json.dumps(config), encoding="utf-8")
    try:
        load_settings(file, {})
    except ConfigError as error:
        return [f"config.{problem}" for problem in error.problems]
    return []
