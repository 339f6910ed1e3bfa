"""The prompt tokens an engine reports in the `usage` of its answer, as vLLM 0.32 writes it.

| API | member | where a stream has it |
|---|---|---|
| chat, completions, generate | `prompt_tokens` | last chunk, with `stream_options.include_usage` |
| responses | `input_tokens` | in the `response` of `response.completed` |
| messages | `input_tokens` + cache counts | in the `message` of `message_start`; in `message_delta` |

Anthropic's `input_tokens` are what neither came from a cache nor went into one. vLLM subtracts both and names
them beside it when it runs with `--enable-prompt-tokens-details`, and else counts the whole prompt as input.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidecar.jsontext import MalformedJson, Raw, read_array, read_object

if TYPE_CHECKING:
    from sidecar.jsontext import RawObject

_ENVELOPES = {"responses": "response", "messages": "message"}
_MOST_DIGITS = 18


def reported_prompt_tokens(api: str, answer: RawObject) -> int | None:
    """Prompt tokens by a whole answer or by one event of a streamed one.

    Args:
        api: short name of the API that the answer is in.
        answer: the members of the answer, or of the event's data.

    Returns:
        None when they are not reported, or not as a positive integer: 0 is what engines write while they do
        not know, and no prompt is empty.
    """
    usage = _object(answer.get("usage"))
    if usage is None and api in _ENVELOPES:
        envelope = _object(answer.get(_ENVELOPES[api]))
        usage = _object((envelope or {}).get("usage"))
    if usage is None:
        return None
    match api:
        case "chat" | "completions" | "generate":
            return _count(usage.get("prompt_tokens")) or None
        case "responses":
            return _first_turn(usage) or None
        case "messages":
            return _with_cached(usage) or None
        case _:
            return None


def _first_turn(usage: RawObject) -> int | None:
    """The prompt alone: an engine that runs tools itself sums the prompts of all its turns."""
    details = _object(usage.get("input_tokens_details")) or {}
    try:
        turns = read_array(details.get("input_tokens_per_turn", Raw(b"[]")))
    except MalformedJson:
        turns = []
    return _count(turns[0] if turns else usage.get("input_tokens"))


def _with_cached(usage: RawObject) -> int | None:
    uncached = _count(usage.get("input_tokens"))
    if uncached is None:
        return None
    read = _count(usage.get("cache_read_input_tokens")) or 0
    created = _count(usage.get("cache_creation_input_tokens")) or 0
    if not uncached and read and created:
        # vLLM cuts a negative difference off at 0: then the parts overlap and their sum says nothing.
        return None
    return uncached + read + created


def _object(value: Raw | None) -> RawObject | None:
    if value is None:
        return None
    try:
        return read_object(value)
    except MalformedJson:
        return None


def _count(value: Raw | None) -> int | None:
    if value is None:
        return None
    text = memoryview(value)
    # Longer numbers count no tokens; reading them takes time quadratic in their length.
    if not 0 < len(text) <= _MOST_DIGITS or not (digits := bytes(text)).isdigit():
        return None
    return int(digits)
