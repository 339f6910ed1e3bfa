"""Overrides from the environment: `SIDECAR__PIPELINE__USE_OPENAI_FORMAT=false`.

Two underscores separate the levels. An item of a list is named by its index, a step also by its type with
underscores for dashes (`SIDECAR__PIPELINE__STEPS__REPLACE_MEDIA_URLS__PARAMS__DOWNLOAD_TIMEOUT`). A list is
comma-separated or JSON. Booleans are true/false, yes/no, on/off or 1/0.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, get_origin

from sidecar.config.problems import Location, suggestion
from sidecar.config.section import Section
from sidecar.config.settings import Settings
from sidecar.config.steps import STEP_TYPES, default_steps

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic.fields import FieldInfo

PREFIX = "SIDECAR__"
_STEPS: Location = ("pipeline", "steps")
_FLAGS = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}


class _Misplaced(Exception):
    """The variable's name or list cannot be used; the text says why, and never holds its value."""


def overlay(raw: dict[str, Any], environ: Mapping[str, str]) -> tuple[dict[Location, str], list[str]]:
    """Write the variables into `raw`, parsed only as far as the kind of their key needs.

    Returns:
        Which variable set which location, and the problems with variables that could not be placed.
    """
    origins: dict[Location, str] = {}
    problems: list[str] = []
    overrides = {
        variable: variable.removeprefix(PREFIX).lower().split("__")
        for variable in environ
        if variable.startswith(PREFIX)
    }
    for variable, names in sorted(overrides.items(), key=lambda item: _natural(item[1])):
        try:
            location = _into_section(raw, Settings, names, environ[variable], ())
        except _Misplaced as error:
            problems.append(f"{variable}: {error}")
        else:
            origins[location] = variable
    return origins, problems


def _natural(names: list[str]) -> list[tuple[int, str]]:
    # A whole list comes before its items, and item 2 before item 10.
    return [(int(name), "") if _is_index(name) else (-1, name) for name in names]


def _is_index(name: str) -> bool:
    return re.fullmatch(r"[0-9]{1,4}", name) is not None


def _into_section(
    container: dict[str, Any], section: type[Section], names: list[str], text: str, location: Location
) -> Location:
    if not names:
        raise _Misplaced(f"names a section; set one of its keys: {_variables(location, section)}")
    key, below = names[0], names[1:]
    field = section.model_fields.get(key)
    if field is None:
        hint = suggestion(key, section.model_fields, "keys").replace("known", "known here are the")
        raise _Misplaced(f"no such key {key!r}; {hint}")
    location = (*location, key)
    kind = field.annotation
    if isinstance(kind, type) and issubclass(kind, Section):
        return _into_section(_own_copy(container, key, {}), kind, below, text, location)
    if not below:
        container[key] = _parsed(kind, text)
        return location
    if get_origin(kind) is not tuple:
        raise _Misplaced(f"{key!r} has no keys below it")
    if location == _STEPS:
        return _into_steps(_own_copy(container, key, default_steps()), below, text)
    return _into_list(_own_copy(container, key, _default(field)), below, text, location)


def _into_steps(steps: list[Any], names: list[str], text: str) -> Location:
    types = [step.get("type") if isinstance(step, dict) else None for step in steps]
    labels = [kind.replace("-", "_") if isinstance(kind, str) else "" for kind in types]
    if _is_index(names[0]) and int(names[0]) < len(steps):
        index = int(names[0])
    elif names[0] in labels:
        index = labels.index(names[0])
    else:
        raise _Misplaced(
            f"no step {names[0]!r} in pipeline.steps; use an index or one of: {', '.join(labels)}"
        )
    section = STEP_TYPES.get(types[index] or "")
    if section is None:
        raise _Misplaced(f"pipeline.steps[{index}] has no known type; correct the step first")
    return _into_section(_own_copy(steps, index, {}), section, names[1:], text, (*_STEPS, index))


def _into_list(items: list[Any], names: list[str], text: str, location: Location) -> Location:
    if len(names) != 1 or not _is_index(names[0]) or int(names[0]) > len(items):
        raise _Misplaced(
            f"the list has {len(items)} items; use an index from 0 to {len(items)}, or set the whole list"
        )
    index = int(names[0])
    items[index : index + 1] = [text]
    return (*location, index)


def _own_copy(container: Any, key: str | int, default: Any) -> Any:
    # Aliases share one object between several places of the file; the variable is meant for one of them.
    value = default if isinstance(key, str) and container.get(key) is None else container[key]
    if type(value) is not type(default):
        raise _Misplaced("the file has a value of another kind there; correct the file first")
    container[key] = value.copy()
    return container[key]


def _default(field: FieldInfo) -> list[Any]:
    return list(field.get_default())


def _variables(location: Location, section: type[Section]) -> str:
    prefix = PREFIX + "".join(f"{part}__" for part in location).upper()
    return ", ".join(prefix + key.upper() for key in section.model_fields)


def _parsed(kind: object, text: str) -> Any:
    if kind is bool:
        return _FLAGS.get(text.strip().lower(), text)
    if get_origin(kind) is not tuple:
        return text
    if not text.lstrip().startswith("["):
        return [item.strip() for item in text.split(",") if item.strip()]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise _Misplaced('not a JSON list; write ["a", "b"] or a,b') from None
