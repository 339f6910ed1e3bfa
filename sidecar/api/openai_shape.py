"""What the OpenAI-style APIs have in common: error shape, forbidden fields, the one-token cap."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from sidecar.errors import BadRequest
from sidecar.jsontext import (
    MalformedJson,
    Raw,
    RawObject,
    is_null,
    read_document,
    read_object,
    read_value,
    to_raw,
)

if TYPE_CHECKING:
    from sidecar.errors import SidecarError

_TRANSFER_FIELDS = ("kv_transfer_params", "ec_transfer_params")
_FORBIDDEN_FIELDS = (*_TRANSFER_FIELDS, "mm_payload", "return_mm_kwargs")

_OFF_CAPPED_LEGS = (
    "best_of",
    "echo",
    "logprobs",
    "min_tokens",
    "n",
    "prompt_logprobs",
    "response_format",
    "stream_options",
    "structured_outputs",
    "top_logprobs",
)
_OFF_CAPPED_LEGS_PREFIX = "guided_"

_ONE = Raw(b"1")
_FALSE = Raw(b"false")
_AUTO = Raw(b'"auto"')
_CALLER_CHOOSES = (b'"auto"', b'"none"', b"null")


def error_body(error: SidecarError, request_id: str, *, expose_upstream: bool) -> bytes:
    """`{"error": {"message", "type", "param", "code"}}`, as the OpenAI clients read it."""
    kind = "invalid_request_error" if error.outcome == "client_error" else "server_error"
    body: dict[str, object] = {
        "message": f"{error.message} (request id: {request_id})",
        "type": kind,
        "param": error.param if isinstance(error, BadRequest) else None,
        "code": error.code,
    }
    if expose_upstream and error.upstream_body:
        body["upstream"] = error.upstream_body
    return msgspec.json.encode({"error": body})


def read_body(body: bytes) -> RawObject:
    """The members of a client body, without those a client may not control; raises BadRequest."""
    try:
        document = read_document(body)
    except MalformedJson as error:
        raise BadRequest(f"the body must be one JSON object: {error}") from None
    for field in _FORBIDDEN_FIELDS:
        document.pop(field, None)
    _drop_nested_transfer_fields(document)
    return document


def _drop_nested_transfer_fields(document: RawObject) -> None:
    # The engine merges both places into its extra_args, where a forged peer_host would reach a worker.
    if "vllm_xargs" in document:
        document["vllm_xargs"] = _without_transfer_fields(document["vllm_xargs"])
    if "sampling_params" in document and _is_object(document["sampling_params"]):
        sampling_params = read_object(document["sampling_params"])
        if "extra_args" in sampling_params:
            sampling_params["extra_args"] = _without_transfer_fields(sampling_params["extra_args"])
            document["sampling_params"] = to_raw(sampling_params)


def _without_transfer_fields(value: Raw) -> Raw:
    if not _is_object(value):
        return value
    members = read_object(value)
    if not any(field in members for field in _TRANSFER_FIELDS):
        return value
    return to_raw({key: item for key, item in members.items() if key not in _TRANSFER_FIELDS})


def _is_object(value: Raw) -> bool:
    return bytes(memoryview(value)[:1]) == b"{"


def read_model(document: RawObject) -> str | None:
    """The requested model, None for the engine's default; raises BadRequest when it is not a string."""
    if is_null(document.get("model")):
        return None
    try:
        model = read_value(document["model"])
    except MalformedJson:
        model = None
    if not isinstance(model, str):
        raise BadRequest("model must be a string", param="model")
    return model


def read_stream(document: RawObject) -> bool:
    """Whether the client asks for a streamed answer; raises BadRequest when it is not a boolean."""
    if is_null(document.get("stream")):
        return False
    match bytes(document["stream"]):
        case b"true":
            return True
        case b"false":
            return False
        case _:
            raise BadRequest("stream must be true or false", param="stream")


def cap_to_one_token(document: RawObject, *cap_fields: str) -> RawObject:
    """The document as a leg that only fills caches sends it: one token, not streamed, one plain choice.

    Args:
        document: members of the client's body.
        cap_fields: further token limits of this API; capped where the client set them.
    """
    capped = {
        key: value
        for key, value in document.items()
        if key not in _OFF_CAPPED_LEGS and not key.startswith(_OFF_CAPPED_LEGS_PREFIX)
    }
    capped["max_tokens"] = _ONE
    for field in cap_fields:
        if field in capped:
            capped[field] = _ONE
    capped["stream"] = _FALSE
    if "tool_choice" in capped and bytes(capped["tool_choice"]) not in _CALLER_CHOOSES:
        capped["tool_choice"] = _AUTO
    return capped
