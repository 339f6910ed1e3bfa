"""Answers of a generating engine, whole or as events, in the shape of each API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sidecar.simulator.generation import FINGERPRINT, Generation, data_event
from sidecar.simulator.messages_answer import message_document, message_events
from sidecar.simulator.responses_answer import response_document, response_events
from sidecar.simulator.tokens import text_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator

DONE = b"data: [DONE]\n\n"


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
            return response_document(generation)
        case "messages":
            return message_document(generation)


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
            yield from response_events(generation)
        case "messages":
            yield from message_events(generation)


def _head(generation: Generation, prefix: str, kind: str) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{generation.request_id}",
        "object": kind,
        "created": generation.created,
        "model": generation.model,
    }


def _chat(generation: Generation) -> dict[str, Any]:
    message = {
        "role": "assistant",
        "content": generation.text,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "reasoning": None,
    }
    choices = [
        {
            "index": index,
            "message": message,
            "logprobs": None,
            "finish_reason": generation.finish_reason,
            "stop_reason": None,
            "token_ids": None,
            "routed_experts": None,
        }
        for index in range(generation.choices)
    ]
    return (
        _head(generation, "chatcmpl", "chat.completion")
        | {
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": generation.usage(),
            "prompt_logprobs": None,
            "prompt_token_ids": None,
            "prompt_text": None,
            "metrics": None,
        }
        | generation.transfer
    )


def _chat_events(generation: Generation, *, include_usage: bool) -> Iterator[bytes]:
    head = _head(generation, "chatcmpl", "chat.completion.chunk")
    for index in range(generation.choices):
        choice: dict[str, Any] = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        yield data_event(head | {"choices": [choice], "prompt_token_ids": None, "prompt_text": None})
    last = len(generation.words) - 1
    for position, word in enumerate(generation.words):
        for index in range(generation.choices):
            choice = {
                "index": index,
                "delta": {"content": word},
                "logprobs": None,
                "finish_reason": None,
                "token_ids": None,
            }
            if position == last:
                choice |= {"finish_reason": generation.finish_reason, "stop_reason": None}
            yield data_event(head | {"choices": [choice]})
    if include_usage:
        usage = {"usage": generation.streamed_usage(), "system_fingerprint": FINGERPRINT}
        yield data_event(head | {"choices": []} | usage)
    yield DONE


def _completions(generation: Generation) -> dict[str, Any]:
    choices = [
        {
            "index": index,
            "text": generation.text,
            "logprobs": None,
            "finish_reason": generation.finish_reason,
            "stop_reason": None,
            "token_ids": None,
            "prompt_logprobs": None,
            "prompt_token_ids": None,
            "routed_experts": None,
        }
        for index in range(generation.choices)
    ]
    return (
        _head(generation, "cmpl", "text_completion")
        | {
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": generation.usage(),
            "metrics": None,
        }
        | generation.transfer
    )


def _completions_events(generation: Generation, *, include_usage: bool) -> Iterator[bytes]:
    head = _head(generation, "cmpl", "text_completion")
    last = len(generation.words) - 1
    for position, word in enumerate(generation.words):
        fingerprint = {"system_fingerprint": FINGERPRINT} if position == last and not include_usage else {}
        for index in range(generation.choices):
            choice = {
                "index": index,
                "text": word,
                "logprobs": None,
                "finish_reason": generation.finish_reason if position == last else None,
                "stop_reason": None,
                "prompt_token_ids": None,
                "token_ids": None,
            }
            yield data_event(head | {"choices": [choice]} | fingerprint)
    if include_usage:
        usage = {"usage": generation.streamed_usage(), "system_fingerprint": FINGERPRINT}
        yield data_event(head | {"choices": []} | usage)
    yield DONE


def _generate(generation: Generation) -> dict[str, Any]:
    token_ids = text_tokens(generation.text)
    choices = [
        _generate_choice(index, token_ids, generation.finish_reason) for index in range(generation.choices)
    ]
    return (
        {
            "request_id": f"generate-tokens-{generation.request_id}",
            "model": generation.model,
            "created": generation.created,
            "usage": generation.usage(),
            "prompt_logprobs": None,
            "prompt_token_id_logprobs": None,
            "metrics": None,
            "output_mode": "tokens",
            "choices": choices,
        }
        | generation.prompt_echo
        | generation.transfer
    )


def _generate_events(generation: Generation, *, include_usage: bool) -> Iterator[bytes]:
    head = {"request_id": f"generate-tokens-{generation.request_id}", "output_mode": "tokens"}
    echo = {name: value for name, value in generation.prompt_echo.items() if value is not None}
    last = len(generation.words) - 1
    for position, word in enumerate(generation.words):
        for index in range(generation.choices):
            choice = _generate_choice(
                index, text_tokens(word), generation.finish_reason if position == last else None
            )
            yield data_event(head | {"usage": None, "choices": [choice]} | (echo if position == 0 else {}))
    if include_usage:
        yield data_event(head | {"usage": generation.streamed_usage(), "choices": []})
    yield DONE


def _generate_choice(index: int, token_ids: list[int], finish_reason: str | None) -> dict[str, Any]:
    versions = [{"version": "default", "start": 0, "end": len(token_ids)}] if token_ids else []
    return {
        "index": index,
        "finish_reason": finish_reason,
        "stop_reason": None,
        "token_ids": token_ids,
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": None if finish_reason is None else versions,
        "logprobs": None,
    }
