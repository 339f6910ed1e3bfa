"""What is wrong with a configuration, in words that say which key to change and how."""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING, Any

from sidecar.config.section import Section
from sidecar.config.settings import Settings
from sidecar.config.steps import STEP_TYPES
from sidecar.config.values import quoted

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pydantic_core import ErrorDetails

Location = tuple[str | int, ...]
"""Where a value sits: keys and list indexes from the top of the file."""

_REQUIRED: dict[Location, str] = {
    (
        "gateway",
        "address",
    ): "required; set the base URL of the gateway, for example http://inference-gateway:80",
    ("params", "address"): "required; set the base URL of the render service, for example http://render:8000",
}
_WRONG_KIND = {
    "bool_type": "{} is not a boolean; write true or false, unquoted",
    "string_type": "{} is not text; put it in quotes",
    "tuple_type": "{} is not a list; write [a, b]",
    "union_tag_not_found": "{} is not a mapping; write {{type: ..., params: ...}}",
    "model_type": "{} is not a mapping; write keys and values below it",
    "model_attributes_type": "{} is not a mapping; write keys and values below it",
    "greater_than_equal": "{} is too small; use at least {ge}",
    "less_than_equal": "{} is too large; use at most {le}",
}


class ConfigError(Exception):
    """The configuration cannot be used.

    Attributes:
        problems: every problem found, one line each, without secrets.
    """

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(
            "the configuration cannot be used:\n" + "\n".join(f"  {line}" for line in self.problems)
        )


def dotted(location: Location) -> str:
    """`pipeline.steps[1].params.mm_payload` for a location; odd keys are quoted."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            name = part if re.fullmatch(r"[A-Za-z0-9_-]{1,60}", part) else quoted(part)
            text += f".{name}" if text else name
    return text


def problem(location: Location, text: str, origins: Mapping[Location, str]) -> str:
    """One line: the dotted path, the variable or key its value came from if not this one, and the text."""
    for end in range(len(location), 0, -1):
        if origin := origins.get(location[:end]):
            return f"{dotted(location)} (from {origin}): {text}"
    return f"{dotted(location)}: {text}"


def section_at(location: Location) -> type[Section]:
    """The section class a location is in or names; step types may stand behind a step's index."""
    section: type[Section] = Settings
    for part in location:
        if isinstance(part, int):
            continue
        if part in STEP_TYPES:
            section = STEP_TYPES[part]
        elif isinstance(annotation := section.model_fields[part].annotation, type) and issubclass(
            annotation, Section
        ):
            section = annotation
    return section


def suggestion(word: str, known: Iterable[str], what: str) -> str:
    """`did you mean x?`, or the list of what there is."""
    names = list(known)
    close = difflib.get_close_matches(word.lower(), names, n=1)
    return f"did you mean {close[0]}?" if close else f"known {what}: {', '.join(names)}"


def validation_problem(error: ErrorDetails, raw: Mapping[str, Any]) -> tuple[Location, str]:
    """Location (in the file) and plain text of one pydantic error."""
    location = _without_step_types(error["loc"])
    context = error.get("ctx", {})
    kind = error["type"]
    if kind.startswith("union_tag_") and isinstance(_value_at(raw, location), dict):
        return (*location, "type"), _step_type(_value_at(raw, (*location, "type")))
    if kind == "missing":
        return location, _REQUIRED.get(location[-2:], "required")
    if kind == "extra_forbidden":
        known = section_at(error["loc"][:-1]).model_fields
        return location, f"unknown key; {suggestion(str(location[-1]), known, 'keys')}"
    if kind == "value_error":
        return location, str(context["error"])
    value = _value_at(raw, location)
    if kind == "literal_error":
        choices = str(context["expected"]).replace("'", "")
        return location, f"{quoted(value)} is not allowed; use {choices}"
    text = _WRONG_KIND.get(kind, f"{{}} is not valid ({kind})")
    return location, text.format(quoted(value), **context)


def _step_type(found: object) -> str:
    if found is None:
        return f"required; {suggestion('', STEP_TYPES, 'types')}"
    word = found if isinstance(found, str) else ""
    return f"this version has no step {quoted(found)}; {suggestion(word, STEP_TYPES, 'types')}"


def _without_step_types(location: Location) -> Location:
    # Behind the index of a step pydantic names the step's type, which is no level of the file.
    return location[:3] + location[4:] if location[:2] == ("pipeline", "steps") else location


def _value_at(raw: Mapping[str, Any], location: Location) -> object:
    value: Any = raw
    for part in location:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            return None
    return value
