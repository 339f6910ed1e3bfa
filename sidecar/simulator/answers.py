"""Answers of a generating engine, whole or as events, in the shape of each API."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from sidecar.simulator.tokens import text_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sidecar.simulator.prompt import Api

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Generation:
    """What an engine generated for one request.

    Attributes:
        api: the API to answer in.
        request_id: id without the API's prefix.
        model: name of the model.
        words: output text in pieces, one per output token.
        finish_reason: `stop` or `length`.
        choices: how many times the same output is returned.
        prompt_tokens: length of the prompt.
        cached_tokens: how many of them came out of a cache.
        transfer: `kv_transfer_params` and `ec_transfer_params` of the answer.
    """

    api: Api
    request_id: str
    model: str
    words: tuple[str, ...]
    finish_reason: str
    choices: int
    prompt_tokens: int
    cached_tokens: int
    transfer: dict[str, Any] = field(
        default_factory=lambda: {"kv_transfer_params": None, "ec_transfer_params": None}
    )
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def text(self) -> str:
        """The output as one string."""
        return "".join(self.words)

    @property
    def completion_tokens(self) -> int:
        """Output tokens over all choices."""
        return len(self.words) * self.choices

    def usage(self) -> dict[str, Any]:
        """`usage` in the shape of chat, completions and generate."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


def document(generation: Generation) -> dict[str, Any]:
    """The answer as one JSON object."""
    match generation.api:
        case "chat":
            return _chat(generation)
        case "completions":
            return _completions(generation)
        case "generate":
            return _generate(generation)
        case "responses":
            return _response(generation, "completed") | generation.transfer
        case "messages":
            return _message(generation) | generation.transfer


def events(generation: Generation, *, include_usage: bool) -> Iterator[bytes]:
    """The answer as server-sent events; transfer parameters are never part of them."""
    match generation.api:
        case "chat":
            yield from _chat_events(generation, include_usage=include_usage)
        case "completions":
            yield from _completions_events(generation, include_usage=include_usage)
        case "generate":
            yield from _generate_events(generation, include_usage=include_usage)
        case "responses":
            yield from _response_events(generation)
        case "messages":
            yield from _message_events(generation)


def _data(document: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(document) + b"\n\n"


def _named(document: dict[str, Any]) -> bytes:
    return b"event: " + str(document["type"]).encode() + b"\n" + _data(document)


def _head(generation: Generation, prefix: str, kind: str) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{generation.request_id}",
        "object": kind,
        "created": generation.created,
        "model": generation.model,
    }


def _chat(generation: Generation) -> dict[str, Any]:
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": generation.text},
            "logprobs": None,
            "finish_reason": generation.finish_reason,
            "stop_reason": None,
        }
        for index in range(generation.choices)
    ]
    return (
        _head(generation, "chatcmpl", "chat.completion")
        | {"choices": choices, "usage": generation.usage()}
        | generation.transfer
    )


def _chat_events(generation: Generation, *, include_usage: bool) -> Iterator[bytes]:
    head = _head(generation, "chatcmpl", "chat.completion.chunk")

    def chunk(index: int, delta: dict[str, str], finish_reason: str | None = None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return _data(head | {"choices": [choice]})

    indices = range(generation.choices)
    for index in indices:
        yield chunk(index, {"role": "assistant", "content": ""})
    for word in generation.words:
        for index in indices:
            yield chunk(index, {"content": word})
    for index in indices:
        yield chunk(index, {}, generation.finish_reason)
    if include_usage:
        yield _data(head | {"choices": [], "usage": generation.usage()})
    yield DONE


def _completions(generation: Generation) -> dict[str, Any]:
    choices = [
        {
            "index": index,
            "text": generation.text,
            "logprobs": None,
            "finish_reason": generation.finish_reason,
            "stop_reason": None,
        }
        for index in range(generation.choices)
    ]
    return (
        _head(generation, "cmpl", "text_completion")
        | {"choices": choices, "usage": generation.usage()}
        | generation.transfer
    )


def _completions_events(generation: Generation, *, include_usage: bool) -> Iterator[bytes]:
    head = _head(generation, "cmpl", "text_completion")
    last = len(generation.words) - 1
    for position, word in enumerate(generation.words):
        for index in range(generation.choices):
            finish_reason = generation.finish_reason if position == last else None
            choice = {"index": index, "text": word, "logprobs": None, "finish_reason": finish_reason}
            yield _data(head | {"choices": [choice]})
    if include_usage:
        yield _data(head | {"choices": [], "usage": generation.usage()})
    yield DONE


def _generate(generation: Generation) -> dict[str, Any]:
    choices = [
        {
            "index": index,
            "finish_reason": generation.finish_reason,
            "stop_reason": None,
            "token_ids": text_tokens(generation.text),
            "logprobs": None,
        }
        for index in range(generation.choices)
    ]
    return {
        "request_id": f"generate-tokens-{generation.request_id}",
        "model": generation.model,
        "created": generation.created,
        "output_mode": "tokens",
        "choices": choices,
        "usage": generation.usage(),
        "prompt_logprobs": None,
        "prompt_token_ids": None,
        "mm_placeholders": None,
    } | generation.transfer


def _generate_events(generation: Generation, *, include_usage: bool) -> Iterator[bytes]:
    head = {"request_id": f"generate-tokens-{generation.request_id}", "output_mode": "tokens"}
    last = len(generation.words) - 1
    for position, word in enumerate(generation.words):
        for index in range(generation.choices):
            choice = {
                "index": index,
                "finish_reason": generation.finish_reason if position == last else None,
                "stop_reason": None,
                "token_ids": text_tokens(word),
                "logprobs": None,
            }
            yield _data(head | {"usage": None, "choices": [choice]})
    if include_usage:
        yield _data(head | {"usage": generation.usage(), "choices": []})
    yield DONE


def _response(generation: Generation, status: str) -> dict[str, Any]:
    done = status == "completed"
    text: dict[str, Any] = {
        "type": "output_text",
        "text": generation.text,
        "annotations": [],
        "logprobs": None,
    }
    message = {
        "id": f"msg_{generation.request_id}",
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [text],
    }
    usage = {
        "input_tokens": generation.prompt_tokens,
        "input_tokens_details": {"cached_tokens": generation.cached_tokens},
        "output_tokens": generation.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": generation.prompt_tokens + generation.completion_tokens,
    }
    return {
        "id": f"resp_{generation.request_id}",
        "object": "response",
        "created_at": generation.created,
        "model": generation.model,
        "status": status,
        "output": [message] if done else [],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": usage if done else None,
    }


def _response_events(generation: Generation) -> Iterator[bytes]:
    yield _named({"type": "response.created", "response": _response(generation, "in_progress")})
    place = {"item_id": f"msg_{generation.request_id}", "output_index": 0, "content_index": 0}
    for word in generation.words:
        yield _named({"type": "response.output_text.delta", "delta": word} | place)
    yield _named({"type": "response.output_text.done", "text": generation.text} | place)
    yield _named({"type": "response.completed", "response": _response(generation, "completed")})


def _message(generation: Generation) -> dict[str, Any]:
    return {
        "id": f"msg_{generation.request_id}",
        "type": "message",
        "role": "assistant",
        "model": generation.model,
        "content": [{"type": "text", "text": generation.text}],
        "stop_reason": _message_stop_reason(generation),
        "stop_sequence": None,
        "usage": {
            "input_tokens": generation.prompt_tokens,
            "cache_read_input_tokens": generation.cached_tokens,
            "output_tokens": generation.completion_tokens,
        },
    }


def _message_stop_reason(generation: Generation) -> str:
    return "max_tokens" if generation.finish_reason == "length" else "end_turn"


def _message_events(generation: Generation) -> Iterator[bytes]:
    start = _message(generation) | {"content": [], "stop_reason": None}
    start["usage"] = start["usage"] | {"output_tokens": 0}
    yield _named({"type": "message_start", "message": start})
    yield _named({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}})
    for word in generation.words:
        delta = {"type": "text_delta", "text": word}
        yield _named({"type": "content_block_delta", "index": 0, "delta": delta})
    yield _named({"type": "content_block_stop", "index": 0})
    yield _named(
        {
            "type": "message_delta",
            "delta": {"stop_reason": _message_stop_reason(generation), "stop_sequence": None},
            "usage": {"output_tokens": generation.completion_tokens},
        }
    )
    yield _named({"type": "message_stop"})
