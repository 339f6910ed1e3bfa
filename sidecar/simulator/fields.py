"""Typed access to the members of a request body; a wrong type is vLLM's validation error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sidecar.simulator.errors import bad_request, invalid_field
from sidecar.simulator.tokens import VOCABULARY

if TYPE_CHECKING:
    from collections.abc import Sequence

JsonObject = dict[str, Any]

MM_PAYLOADS = ("tensors", "none")
"""What `mm_payload` may be."""


def optional_string(body: JsonObject, name: str) -> str | None:
    """A string, or None when absent or null."""
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise invalid_field(name, "Input should be a valid string")
    return value


def optional_bool(body: JsonObject, name: str) -> bool | None:
    """A boolean, or None when absent or null."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise invalid_field(name, "Input should be a valid boolean")
    return value


def optional_int(body: JsonObject, name: str, *, minimum: int = 0) -> int | None:
    """An integer of at least `minimum`, or None when absent or null."""
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        raise invalid_field(name, "Input should be a valid integer")
    if value < minimum:
        raise invalid_field(name, f"{name} must be at least {minimum}, got {value}")
    return value


def optional_number(body: JsonObject, name: str) -> float | None:
    """A number, or None when absent or null."""
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise invalid_field(name, "Input should be a valid number")
    return value


def optional_object(body: JsonObject, name: str) -> JsonObject | None:
    """An object, or None when absent or null."""
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise invalid_field(name, "Input should be a valid dictionary")
    return value


def optional_choice(body: JsonObject, name: str, choices: Sequence[str]) -> str | None:
    """One of some strings, or None when absent or null."""
    value = optional_string(body, name)
    if value is not None and value not in choices:
        raise invalid_field(name, f"Input should be {' or '.join(map(repr, choices))}")
    return value


def required_list(body: JsonObject, name: str) -> list[Any]:
    """A list that is not empty."""
    value = body.get(name)
    if not isinstance(value, list):
        raise invalid_field(name, "Field required" if value is None else "Input should be a valid list")
    if not value:
        raise invalid_field(name, "List should have at least 1 item after validation, not 0")
    return value


def token_list(body: JsonObject, name: str) -> list[int]:
    """A list of token ids that is not empty."""
    tokens = required_list(body, name)
    if not all(type(token) is int and token >= 0 for token in tokens):
        raise invalid_field(name, "Input should be a list of integers greater than or equal to 0")
    if max(tokens) >= VOCABULARY:
        raise bad_request(f"Token id {max(tokens)} is out of vocabulary")
    return tokens
