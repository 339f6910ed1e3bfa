"""Writes the Kubernetes types that users fill in freely into the chart's values.schema.json.

    python -m deploy.envoy.chart.kubernetes_schema

Needs the dependency group `chart`: the types are those of kubernetes-validate's newest bundled version, its
strict ones, which know no key that Kubernetes does not. The API server would drop a typo in a security
context, and the hardening with it.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from kubernetes_validate.utils import latest_version, schema_contents

from deploy.envoy.chart.config_schema import SCHEMA

_CORE = "io.k8s.api.core.v1."
_REFERENCE = "#/$defs/"
_KEPT = frozenset(
    {"type", "properties", "items", "additionalProperties", "required", "enum", "oneOf", "$ref"}
)

_TYPES: dict[tuple[str, ...], str] = {
    ("podSecurityContext",): "PodSecurityContext",
    ("securityContext",): "SecurityContext",
    ("affinity",): "Affinity",
    ("lifecycle",): "Lifecycle",
    ("extraVolumes", "items"): "Volume",
    ("resources", "properties", "claims", "items"): "ResourceClaim",
}
"""Where in the values which type of the core API stands."""


def schema_text() -> str:
    """The text of values.schema.json, with the types of today."""
    version = latest_version()
    path = f"kubernetes-json-schema/v{version}-local-strict/_definitions.json"
    known = schema_contents(path, version)["$defs"]
    document = json.loads(SCHEMA.read_text(encoding="utf-8"))
    definitions: dict[str, Any] = {}
    for place, kind in _TYPES.items():
        holder, key = document["properties"], place[0]
        for step in place[1:]:
            holder, key = holder[key], step
        holder[key] = {"$ref": _below(f"{_CORE}{kind}")}
        _collect(f"{_CORE}{kind}", known, definitions)
    document["definitions"] = dict(sorted(definitions.items()))
    return f"{json.dumps(document, indent=2)}\n"


def _collect(name: str, known: dict[str, Any], found: dict[str, Any]) -> None:
    """Put a type and all it refers to into `found`."""
    short = _short(name)
    if short in found:
        return
    found[short] = {}
    found[short] = _reduced(known[name], known, found)


def _reduced(schema: Any, known: dict[str, Any], found: dict[str, Any]) -> Any:
    """The schema without its prose, with references to this document."""
    if not isinstance(schema, dict):
        return schema
    reduced: dict[str, Any] = {}
    for key, value in schema.items():
        if key not in _KEPT:
            continue
        if key == "$ref":
            name = value.removeprefix(_REFERENCE)
            _collect(name, known, found)
            reduced[key] = _below(name)
        elif key == "properties":
            reduced[key] = {field: _reduced(kind, known, found) for field, kind in value.items()}
        elif key == "oneOf":
            reduced[key] = [_reduced(kind, known, found) for kind in value]
        else:
            reduced[key] = _reduced(value, known, found)
    return reduced


def _short(name: str) -> str:
    return name.rpartition(".")[2]


def _below(name: str) -> str:
    return f"#/definitions/{_short(name)}"


if __name__ == "__main__":
    SCHEMA.write_text(schema_text(), encoding="utf-8")
    sys.stdout.write(f"{SCHEMA}: Kubernetes {latest_version()}\n")
