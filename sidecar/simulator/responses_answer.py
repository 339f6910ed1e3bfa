"""Answers in the shape of the Responses API."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from sidecar.simulator.generation import Generation, named_event

if TYPE_CHECKING:
    from collections.abc import Iterator

_REPEATED: dict[str, Any] = {
    "instructions": None,
    "metadata": None,
    "parallel_tool_calls": True,
    "temperature": 1.0,
    "tools": [],
    "top_p": 1.0,
    "background": False,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "previous_response_id": None,
    "prompt": None,
    "reasoning": None,
    "service_tier": "auto",
    "text": None,
    "top_logprobs": None,
    "truncation": "disabled",
    "user": None,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Settings of the request that the answer repeats, and what it says where the request leaves them out."""


def response_document(generation: Generation) -> dict[str, Any]:
    """The answer as one JSON object; ids are made up whatever `x-request-id` says."""
    return _finished(generation, _started(generation), _message(generation, _new_id("msg")))


def response_events(generation: Generation) -> Iterator[bytes]:
    """The answer as named events."""
    numbers = count()

    def event(kind: str, **members: Any) -> bytes:
        return named_event({"type": f"response.{kind}", "sequence_number": next(numbers)} | members)

    started = _started(generation)
    message = _message(generation, _new_id("msg"))
    item = {"output_index": 0}
    part = {"item_id": message["id"], "content_index": 0} | item
    yield event("created", response=started)
    yield event("in_progress", response=started)
    yield event("output_item.added", item=message | {"content": [], "status": "in_progress"}, **item)
    yield event("content_part.added", part=_text("") | {"logprobs": []}, **part)
    for word in generation.words:
        yield event("output_text.delta", delta=word, logprobs=[], **part)
    yield event("output_text.done", text=generation.text, logprobs=[], **part)
    yield event("content_part.done", part=_text(generation.text), **part)
    yield event("output_item.done", item=message, **item)
    yield event("completed", response=_finished(generation, started, message))


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid4().hex[:16]}"


def _started(generation: Generation) -> dict[str, Any]:
    settings = generation.settings
    asked = {name: value for name in _REPEATED if (value := settings.get(name)) is not None}
    tool_choice = settings.get("tool_choice") or ("auto" if settings.get("tools") else "none")
    return (
        {
            "id": _new_id("resp"),
            "created_at": generation.created,
            "incomplete_details": None,
            "model": generation.model,
            "object": "response",
            "output": [],
            "status": "in_progress",
            "tool_choice": tool_choice,
            "usage": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "input_messages": None,
            "output_messages": None,
        }
        | _REPEATED
        | asked
    )


def _finished(generation: Generation, started: dict[str, Any], message: dict[str, Any]) -> dict[str, Any]:
    cut = generation.finish_reason == "length"
    return (
        started
        | {
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": [message],
            "usage": _usage(generation),
        }
        | generation.transfer
    )


def _usage(generation: Generation) -> dict[str, Any]:
    return {
        "input_tokens": generation.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": generation.cached_tokens,
            "cache_write_tokens": 0,
            "input_tokens_per_turn": [],
            "cached_tokens_per_turn": [],
        },
        "output_tokens": generation.completion_tokens,
        "output_tokens_details": {
            "reasoning_tokens": 0,
            "tool_output_tokens": 0,
            "output_tokens_per_turn": [],
            "tool_output_tokens_per_turn": [],
        },
        "total_tokens": generation.prompt_tokens + generation.completion_tokens,
    }


def _message(generation: Generation, message_id: str) -> dict[str, Any]:
    return {
        "id": message_id,
        "content": [_text(generation.text)] if generation.words else [],
        "role": "assistant",
        "status": "completed",
        "type": "message",
        "phase": None,
    }


def _text(text: str) -> dict[str, Any]:
    return {"annotations": [], "text": text, "type": "output_text", "logprobs": None}
