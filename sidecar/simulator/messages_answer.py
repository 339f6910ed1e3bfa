"""Answers in the shape of Anthropic's Messages API; members that would be null are left out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sidecar.simulator.generation import Generation, named_event

if TYPE_CHECKING:
    from collections.abc import Iterator


def message_document(generation: Generation) -> dict[str, Any]:
    """The answer as one JSON object."""
    transfer = {name: value for name, value in generation.transfer.items() if value is not None}
    return {
        "id": f"chatcmpl-{generation.request_id}",
        "type": "message",
        "role": "assistant",
        "content": [{"type": "text", "text": generation.text}],
        "model": generation.model,
        "stop_reason": _stop_reason(generation),
        "usage": _usage(generation),
    } | transfer


def message_events(generation: Generation) -> Iterator[bytes]:
    """The answer as named events."""
    start: dict[str, Any] = {
        "id": f"chatcmpl-{generation.request_id}",
        "type": "message",
        "role": "assistant",
        "content": [],
        "model": generation.model,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": generation.prompt_tokens, "output_tokens": 0},
    }
    yield named_event({"type": "message_start", "message": start})
    block = {"type": "text", "text": ""}
    yield named_event({"type": "content_block_start", "content_block": block, "index": 0})
    for word in generation.words:
        delta = {"type": "text_delta", "text": word}
        yield named_event({"type": "content_block_delta", "delta": delta, "index": 0})
    yield named_event({"type": "content_block_stop", "index": 0})
    yield named_event(
        {
            "type": "message_delta",
            "delta": {"stop_reason": _stop_reason(generation), "stop_sequence": None},
            "usage": _usage(generation),
        }
    )
    yield named_event({"type": "message_stop"})


def _stop_reason(generation: Generation) -> str:
    return "max_tokens" if generation.finish_reason == "length" else "end_turn"


def _usage(generation: Generation) -> dict[str, int]:
    usage = {"input_tokens": generation.prompt_tokens, "output_tokens": generation.completion_tokens}
    if generation.prompt_tokens_details:
        # Anthropic's input tokens are those that neither came from a cache nor went into one.
        usage["input_tokens"] = max(0, generation.prompt_tokens - generation.cached_tokens)
        usage |= {"cache_read_input_tokens": generation.cached_tokens, "cache_creation_input_tokens": 0}
    return usage
