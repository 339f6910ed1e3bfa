"""Writes the `config` part of the chart's values.schema.json from the sidecar's own settings.

    python -m deploy.envoy.chart.config_schema

The keys, choices and required sections are those of `sidecar.config`; a value's form is what its parser there
takes, as far as JSON Schema can say it in a pattern that Go reads too. What it cannot say (the order of steps
or a size that exceeds another) the sidecar reports itself: `epd-sidecar check-config`.
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

_NUMBER_PART = r"([0-9]+(\.[0-9]*)?|\.[0-9]+)(ns|us|µs|ms|s|m|h)"
_DURATION = {"type": "string", "pattern": f"^({_NUMBER_PART})+$"}
_LARGEST_MEGABYTES = 1 << 20


def _whole_number(lowest: int, highest: int | None = None) -> dict[str, Any]:
    number: dict[str, Any] = {"type": "integer", "minimum": lowest}
    if highest is not None:
        number["maximum"] = highest
    return {"anyOf": [number, {"type": "string", "pattern": "^[0-9]{1,18}$"}]}


_FORMS: list[tuple[object, dict[str, Any]]] = [
    (values.Flag, {"type": "boolean"}),
    (str, {"type": "string"}),
    (values.Duration, {"anyOf": [_DURATION, {"enum": [0, "0"]}]}),
    (values.PositiveDuration, {"allOf": [_DURATION, {"pattern": "[1-9]"}]}),
    (
        values.Megabytes,
        {
            "anyOf": [
                {"type": "number", "exclusiveMinimum": 0, "maximum": _LARGEST_MEGABYTES},
                {"type": "string", "pattern": r"^[0-9]{1,18}(\.[0-9]{1,18})?$"},
            ]
        },
    ),
    (values.Count, _whole_number(1)),
    (values.CountOrUnlimited, _whole_number(0)),
    (values.Port, _whole_number(1, 65535)),
    (values.ListenAddress, {"type": "string", "pattern": "^(unix:/.+|.+:[0-9]{1,5})$"}),
    (values.AdminAddress, {"type": "string", "pattern": "^(.+:[0-9]{1,5})?$"}),
    # Empty passes here: the chart says which address is missing, and what to write.
    (values.BaseUrl, {"type": "string", "pattern": r"^(https?://[^\s@?#]+)?$"}),
    (values.StrippedHeader, {"type": "string", "pattern": "^[!#$%&'+.^_`|~0-9A-Za-z-]+$"}),
    (values.ForwardedHeader, {"type": "string", "pattern": "^[!#$%&'+.^_`|~0-9A-Za-z-]+$"}),
    (values.ContentType, {"type": "string", "pattern": "^[A-Za-z]+/[A-Za-z0-9][A-Za-z0-9.+-]*$"}),
    (values.Domain, {"type": "string", "pattern": "^[^/:@*]+$"}),
    (values.Namespace, {"type": "string", "pattern": "^[A-Za-z0-9._-]+$"}),
    (values.PhaseToken, {"type": "string", "pattern": "^[!-~]*$"}),
]
"""Schemas of the value types of `sidecar.config.values`, in the forms that a file may use."""

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
    return {"type": "array", "minItems": 1, "items": item}


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
