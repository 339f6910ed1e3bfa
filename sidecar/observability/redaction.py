"""Upstream text on its way into the log: bounded, on one line, without credentials and without the prompt."""

from __future__ import annotations

import re

_LENGTH = 512

_SECRETS = (
    (re.compile(r"(?i)\b(bearer|basic)\s+[^\s\"',}]+"), r"\1 [redacted]"),
    (
        re.compile(r"(?i)((?:api[-_ ]?key|token|password|secret|cookie)[\"']?\s*[:=]\s*[\"']?)[^\s\"',}]+"),
        r"\1[redacted]",
    ),
    (re.compile(r"\bsk-[A-Za-z0-9_-]{8,}"), "[redacted]"),
    (re.compile(r"(?i)data:[a-z]+/[^,\"'\s]*,[A-Za-z0-9+/=]*"), "[media]"),
    # A validation error repeats what it was given: the client's prompt.
    (re.compile(r"(?s)([\"']?input(?:_value)?[\"']?\s*[:=]).*"), r"\1 [left out]"),
)


def redacted(text: str) -> str:
    """At most 512 characters of the text, control characters escaped."""
    # Twice the length first: what is cut away must not hide that the rest is a secret.
    shown = text[: 2 * _LENGTH]
    for pattern, replacement in _SECRETS:
        shown = pattern.sub(replacement, shown)
    return shown[:_LENGTH].encode("unicode_escape").decode("ascii")
