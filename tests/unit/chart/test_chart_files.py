"""The chart's files say what the sidecar says: its keys, its defaults, its version."""

from __future__ import annotations

import json
import re
import tomllib
from typing import Annotated, Any

import pytest
import yaml
from pydantic import BeforeValidator

from deploy.envoy.chart import config_forms, config_schema, values_table
from deploy.envoy.chart.config_forms import TEMPLATE
from deploy.envoy.chart.config_schema import SCHEMA
from deploy.envoy.chart.values_table import README, VALUES, Undocumented, documented_values
from sidecar.config import Settings, load_settings
from sidecar.config.section import Section
from tests.unit.image.dockerfile_reader import ROOT

DEFAULTS: dict[str, Any] = yaml.safe_load(VALUES.read_text(encoding="utf-8"))
ADDRESSES = {
    "SIDECAR__GATEWAY__ADDRESS": "http://gateway",
    "SIDECAR__PIPELINE__STEPS__RENDER__PARAMS__ADDRESS": "http://render",
}


def keys(section: type[Section], prefix: str = "") -> set[str]:
    """Dotted paths of all keys below a section, but not below the steps."""
    found: set[str] = set()
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            found |= keys(kind, f"{prefix}{name}.")
        else:
            found.add(prefix + name)
    return found


def paths(values: dict[str, Any], prefix: str = "") -> set[str]:
    found: set[str] = set()
    for name, value in values.items():
        if isinstance(value, dict):
            found |= paths(value, f"{prefix}{name}.")
        else:
            found.add(prefix + name)
    return found


def test_the_schema_has_the_sidecars_keys() -> None:
    """values.schema.json is up to date: `python -m deploy.envoy.chart.config_schema` writes it."""
    assert SCHEMA.read_text(encoding="utf-8") == config_schema.schema_text()


def test_the_forms_are_the_sidecars() -> None:
    """_config_forms.tpl is up to date: `python -m deploy.envoy.chart.config_forms` writes it."""
    assert TEMPLATE.read_text(encoding="utf-8") == config_forms.template_text()


def test_every_form_is_a_template() -> None:
    """What _config_forms.tpl and the chart's own list name exists, and nothing else is defined."""
    text = (TEMPLATE.parent / "_forms.tpl").read_text(encoding="utf-8")
    defined = set(re.findall(r'define "epd-sidecar\.form\.(\w+)"', text))
    lists = text + TEMPLATE.read_text(encoding="utf-8")
    listed = set(re.findall(r"^[\w.\[\] -]+: (\w+)$", lists, re.MULTILINE))
    by_kind = {"quantity", "requiredServiceName"}
    shared = {"duration"}
    assert listed <= defined
    assert defined - listed <= by_kind | shared


def test_the_table_of_values_is_up_to_date() -> None:
    """The chart's README is up to date: `python -m deploy.envoy.chart.values_table` writes it."""
    assert README.read_text(encoding="utf-8") == values_table.readme_text()


def test_the_values_list_every_key_of_the_sidecar() -> None:
    """Whoever reads values.yaml sees what can be configured."""
    assert paths(DEFAULTS["config"]) == keys(Settings)


def test_the_values_have_the_sidecars_defaults(tmp_path: Any) -> None:
    """An installation that configures nothing runs like a sidecar whose file says nothing."""
    file = tmp_path / "sidecar.yaml"
    file.write_text(yaml.safe_dump(DEFAULTS["config"]))
    assert load_settings(file, ADDRESSES)[0] == load_settings(None, ADDRESSES)[0]


def test_the_chart_installs_this_version() -> None:
    """The tag of the image follows appVersion, which is the package's version."""
    chart = yaml.safe_load((SCHEMA.parent / "Chart.yaml").read_text(encoding="utf-8"))
    with (ROOT / "pyproject.toml").open("rb") as file:
        version = tomllib.load(file)["project"]["version"]
    assert chart["appVersion"] == version


def test_every_object_of_the_schema_is_closed() -> None:
    """A key that the chart or Kubernetes does not know is refused, except in maps of names."""
    open_objects: set[str] = set()

    def walk(schema: Any, path: str) -> None:
        if not isinstance(schema, dict):
            return
        if schema.get("type") == "object" and schema.get("additionalProperties") is not False:
            open_objects.add(path)
        for name, below in schema.get("properties", {}).items():
            walk(below, f"{path}.{name}" if path else name)
        walk(schema.get("items"), f"{path}[]")
        for name, below in schema.get("definitions", {}).items():
            walk(below, name)

    walk(json.loads(SCHEMA.read_text(encoding="utf-8")), "")
    labels = {"commonLabels", "podLabels", "nodeSelector", "podAnnotations"}
    annotations = {"service.annotations", "serviceAccount.annotations"}
    monitoring = {"serviceMonitor.labels", "prometheusRule.labels", "prometheusRule.alertLabels"}
    kubernetes = {
        "resources.limits",
        "resources.requests",
        "topologySpreadConstraints[].labelSelector.matchLabels",
    }
    selectors = {path for path in open_objects if path.startswith("networkPolicy.")}
    assert all(path.endswith("Selector.matchLabels") for path in selectors)
    helm = {"global"}
    assert open_objects == labels | annotations | monitoring | kubernetes | selectors | helm


def test_a_value_without_a_comment_is_an_error() -> None:
    """The table cannot leave a value out by accident."""
    with pytest.raises(Undocumented, match=r"second\.below"):
        documented_values("# -- One.\nfirst: 1\nsecond:\n  below: 2\n")


def test_comments_become_rows() -> None:
    """A comment documents the key right below it, over several lines, and what is below that key."""
    text = "# A title.\n\n# -- One\n# and more.\nfirst: {a: 1}\nsecond:\n  # -- Two.\n  below: [x]\n"
    rows = [(row.key, row.default, row.description) for row in documented_values(text)]
    assert rows == [
        ("first", '`{"a": 1}`', "One and more."),
        ("second.below", '`["x"]`', "Two."),
    ]


def test_a_new_kind_of_value_needs_a_form() -> None:
    """A settings type that schema or templates cannot express is reported, not let through."""

    class Unknown(Section):
        value: complex = 1j

    class Parsed(Section):
        value: Annotated[int, BeforeValidator(int)] = 1

    with pytest.raises(TypeError, match=r"no form for .* of value; add it to _FORMS"):
        list(config_forms._forms(Parsed))
    with pytest.raises(TypeError, match="no schema for <class 'complex'>; add it to _FORMS"):
        config_schema._section(Unknown)
