"""Writes the `config` part of the chart's values.schema.json from the sidecar's own settings.

    python -m deploy.envoy.chart.config_schema

The keys, kinds, choices and required sections are those of `sidecar.config`. What a text or a number may look
like is left to the chart's templates, with the sidecar's own words (`config_forms`): what a schema says of a
pattern tells nobody what to write, hides everything that a template would say, and prints the value, secret
or not.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BeforeValidator

from sidecar.config import Settings, values
from sidecar.config.section import Section
from sidecar.config.steps import STEP_TYPES

SCHEMA = Path(__file__).parent / "epd-sidecar/values.schema.json"

_TEXT = {"type": "string"}
_NUMBER_OR_TEXT = {"type": ["number", "string"]}

_FORMS: list[tuple[object, dict[str, Any]]] = [
    (values.Flag, {"type": "boolean"}),
    (str, _TEXT),
    (values.Duration, _NUMBER_OR_TEXT),
    (values.PositiveDuration, _NUMBER_OR_TEXT),
    (values.Megabytes, _NUMBER_OR_TEXT),
    (values.Count, _NUMBER_OR_TEXT),
    (values.CountOrUnlimited, _NUMBER_OR_TEXT),
    (values.Port, _NUMBER_OR_TEXT),
    (values.ListenAddress, _TEXT),
    (values.AdminAddress, _TEXT),
    (values.BaseUrl, _TEXT),
    (values.StrippedHeader, _TEXT),
    (values.ForwardedHeader, _TEXT),
    (values.ContentType, _TEXT),
    (values.Domain, _TEXT),
    (values.Namespace, _TEXT),
    (values.PhaseToken, _TEXT),
]
"""Kinds of the value types of `sidecar.config.values`. Patterns are the templates': see the module."""

_COORDINATOR_LEVELS = {"type": "integer", "minimum": 1, "maximum": 5}
"""What `log_level` takes besides the names."""


def config_schema() -> dict[str, Any]:
    """JSON Schema (draft-07) of the values below `config`."""
    schema = _section(Settings)
    properties = schema["properties"]
    properties["log_level"] = {"anyOf": [properties["log_level"], _COORDINATOR_LEVELS]}
    return schema


def _section(section: type[Section], *, complete: bool = True) -> dict[str, Any]:
    """A mapping of the file; `complete` where the chart's values.yaml has every key that is always set."""
    kinds = get_type_hints(section, include_extras=True)
    properties: dict[str, Any] = {}
    for name in section.model_fields:
        properties[name] = _steps() if name == "steps" else _value(kinds[name])
    schema: dict[str, Any] = {
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
    }
    if complete:
        # Helm deletes a key whose value is null; a template that reads it would fail without saying why.
        schema["required"] = [
            name
            for name, field in section.model_fields.items()
            if field.is_required() or field.default is not None
        ]
    return schema


def _steps() -> dict[str, Any]:
    """The list of steps: per type its own params, and a message that names the wrong one, not all of them."""
    branches = [
        {
            "if": {"properties": {"type": {"const": name}}},
            "then": {
                "properties": {
                    "params": _section(get_type_hints(step)["params"], complete=False)
                    | {"type": ["object", "null"]}
                }
            },
        }
        for name, step in STEP_TYPES.items()
    ]
    item = {
        "type": "object",
        "required": ["type"],
        "additionalProperties": False,
        "properties": {"type": {"enum": list(STEP_TYPES)}, "params": {}},
        "allOf": branches,
    }
    return {"type": "array", "items": item}


def _value(kind: Any) -> dict[str, Any]:
    for known, form in _FORMS:
        if kind == known:
            return form
    if hasattr(kind, "__metadata__"):
        return _annotated(kind)
    if isinstance(kind, type) and issubclass(kind, Section):
        return _section(kind)
    return _generic(kind)


def _annotated(kind: Any) -> dict[str, Any]:
    form = _value(get_args(kind)[0])
    if BeforeValidator(values.off_word) in kind.__metadata__:
        # What some readers of YAML make of an unquoted off.
        return {"enum": [*form["enum"], False]}
    return form


def _generic(kind: Any) -> dict[str, Any]:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is tuple and arguments[1:] == (...,):
        return {"type": "array", "items": _value(arguments[0])}
    if origin in (Union, UnionType) and arguments[1:] == (NoneType,):
        return _value(arguments[0])
    raise TypeError(f"no schema for {kind!r}; add it to _FORMS")


def schema_text() -> str:
    """values.schema.json as it should be: what it says now, with the `config` part of these settings."""
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    schema["properties"]["config"] = config_schema()
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    SCHEMA.write_text(schema_text(), encoding="utf-8")
    sys.stdout.write(f"{SCHEMA} written\n")
