"""Upstream text on its way into the log: bounded, on one line, without credentials and without the prompt."""

from __future__ import annotations

import re

_LENGTH = 512

_SECRETS = (
    (re.compile(r"(?i)data:[a-z]+\\*/[^\s]*"), "[media]"),
    (re.compile(r"(?i)\b(?:https?|file|s3)://[^\s]+"), "[url]"),
    (re.compile(r"(?i)\b(bearer|basic)\b[\s:=]+[^\s\"',}]+"), r"\1 [redacted]"),
    (re.compile(r"\bsk-[A-Za-z0-9_-]{8,}"), "[redacted]"),
    # From a key that holds a credential or the client's prompt on, nothing is shown: a validation error
    # repeats what it was given, and quotes may be nested to any depth.
    (
        re.compile(
            r"(?is)\b((?:x-)?api[-_ ]?key|(?:proxy-)?authorization|(?:set-)?cookie|password|secret"
            r"|(?:\w+_)?token|prompt|inputs?|input_value|messages|content)\b[\\\"']*\s*(?:[:=]|\s(?=\S+$)).*"
        ),
        r"\1 [left out]",
    ),
)


def redacted(text: str) -> str:
    """At most 512 characters of the text, control characters escaped."""
    # Twice the length first: what is cut away must not hide that the rest is a secret.
    shown = text[: 2 * _LENGTH]
    for pattern, replacement in _SECRETS:
        shown = pattern.sub(replacement, shown)
    return shown[:_LENGTH].encode("unicode_escape").decode("ascii")
