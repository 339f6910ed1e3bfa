"""Holds objects of the gateways' own kinds to the schemas in tests/chart/crds, unknown fields included.

A schema there is the part of a custom resource definition that the chart uses, with the siblings a typo
could turn into; its first lines name the source.
"""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import yaml

if TYPE_CHECKING:
    from tests.chart.chart_rendering import Document

CRDS = Path(__file__).parent / "crds"


def known_kinds() -> list[str]:
    """The kinds that have a schema here."""
    return sorted(path.stem for path in CRDS.glob("[A-Z]*.yaml"))


def problems(document: Document) -> list[str]:
    """What the schema of an object's kind says of it.

    Raises:
        FileNotFoundError: the kind has no schema here.
    """
    name = f"{document['kind']}/{document['metadata']['name']}"
    return [
        f"{name}: {error.json_path}: {error.message}"
        for error in _validator(document["kind"]).iter_errors(document)
    ]


@functools.cache
def _validator(kind: str) -> Any:
    loaded: dict[str, Any] = yaml.safe_load((CRDS / f"{kind}.yaml").read_text(encoding="utf-8"))
    definitions: dict[str, Any] = yaml.safe_load((CRDS / "_definitions.yaml").read_text(encoding="utf-8"))
    schema = {
        "type": "object",
        "required": ["apiVersion", "kind", "metadata", "spec"],
        "properties": {
            "apiVersion": {"const": loaded["apiVersion"]},
            "kind": {"const": kind},
            "metadata": {
                "type": "object",
                "required": ["name", "namespace"],
                "properties": {
                    "name": {"$ref": "#/$defs/name"},
                    "namespace": {"$ref": "#/$defs/namespace"},
                    "labels": {"type": "object", "additionalProperties": {"type": "string"}},
                },
            },
            "spec": loaded["spec"],
        },
        "$defs": definitions | loaded.get("$defs", {}),
    }
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(_closed(schema))


def _closed(schema: Any) -> Any:
    """The schema with `additionalProperties: false` in every object that lists its properties."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return copy.copy(schema)
    closed = {key: _closed(value) for key, value in schema.items()}
    if closed.get("type") == "object" and "properties" in closed:
        closed.setdefault("additionalProperties", False)
    return closed
