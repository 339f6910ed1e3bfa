"""What the OpenAI-style APIs have in common: error shape, forbidden fields, the one-token cap."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, TypeVar

import msgspec

from sidecar.errors import BadRequest
from sidecar.jsontext import (
    MalformedJson,
    Raw,
    RawObject,
    is_null,
    opener,
    read_document,
    read_name,
    read_object,
    to_raw,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sidecar.errors import SidecarError

T = TypeVar("T")

PROCESSOR_KWARGS = ("mm_processor_kwargs", "media_io_kwargs")
"""Fields that change how media are processed, and with it their hashes."""
_MEDIA_MEMBERS = frozenset({"image_url", "audio_url", "video_url", "input_audio", "input_image"})
_MEDIA_ENDINGS = ("_embeds", "_pil")
_MOST_ITEMS = 16384
_TENANCY_FIELDS = ("cache_salt", "priority")
_TRANSFER_FIELDS = ("kv_transfer_params", "ec_transfer_params")
_WORKER_FIELDS = (
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "data_parallel_rank",
    "disagg_prefill_dp_rank",
    "routed_dp_rank",
)
"""Fields by which SGLang engines are told of another worker or of a rank: as control headers do."""
_FORBIDDEN_FIELDS = (*_TRANSFER_FIELDS, *_WORKER_FIELDS, "mm_payload", "return_mm_kwargs")

_OFF_CAPPED_LEGS = (
    "best_of",
    "echo",
    "logprob_token_ids",
    "logprobs",
    "min_tokens",
    "n",
    "prompt_logprob_start",
    "prompt_logprob_token_ids",
    "prompt_logprobs",
    "response_format",
    "stream_options",
    "structured_outputs",
    "top_logprobs",
    "use_beam_search",
)
_OFF_CAPPED_LEGS_PREFIX = "guided_"

_ONE = Raw(b"1")
_FALSE = Raw(b"false")
_AUTO = Raw(b'"auto"')
_CALLER_CHOOSES = (b'"auto"', b'"none"', b"null")


def error_body(error: SidecarError, request_id: str, *, expose_upstream: bool) -> bytes:
    """`{"error": {"message", "type", "param", "code"}}`, as the OpenAI clients read it."""
    kind = "invalid_request_error" if error.status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
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
        _drop_nested_transfer_fields(document)
    except MalformedJson as error:
        raise BadRequest(f"the body must be one JSON object: {error}") from None
    for field in _FORBIDDEN_FIELDS:
        document.pop(field, None)
    _refuse_beam_search(document)
    return document


def _refuse_beam_search(document: RawObject) -> None:
    """Refuse what ends a decode engine that fetches its KV cache: beams look for blocks nobody computed."""
    value = document.get("use_beam_search")
    if value is not None and not is_null(value) and bytes(memoryview(value)[:8]) != b"false":
        raise BadRequest(
            "use_beam_search is not supported with disaggregated prefill; leave it out",
            param="use_beam_search",
        )


def _drop_nested_transfer_fields(document: RawObject) -> None:
    # The engine merges both places into its extra_args, where a forged peer_host would reach a worker.
    if "vllm_xargs" in document:
        document["vllm_xargs"] = without_transfer_fields(document["vllm_xargs"])
    if "sampling_params" in document and _is_object(document["sampling_params"]):
        sampling_params = read_object(document["sampling_params"])
        if "extra_args" in sampling_params:
            sampling_params["extra_args"] = without_transfer_fields(sampling_params["extra_args"])
            document["sampling_params"] = to_raw(sampling_params)


def without_transfer_fields(value: Raw) -> Raw:
    """The object without `kv_transfer_params` and `ec_transfer_params`; any other value as it is."""
    if not _is_object(value):
        return value
    members = read_object(value)
    if not any(field in members for field in _TRANSFER_FIELDS):
        return value
    return to_raw({key: item for key, item in members.items() if key not in _TRANSFER_FIELDS})


def _is_object(value: Raw) -> bool:
    return opener(value) == b"{"


def other_media_member(members: Mapping[str, object], own: str) -> str:
    """A member of a media part, other than its own, that an engine takes for media; "" when there is none.

    With the uuid a part gets after render, an engine ignores its type and takes the first such member.
    """
    for name in members:
        if name != own and (name in _MEDIA_MEMBERS or name.endswith(_MEDIA_ENDINGS)):
            return name
    return ""


def check_count(items: Sequence[object], location: str) -> None:
    """Refuse more messages, items or parts than any conversation has: each costs time on every leg."""
    if len(items) > _MOST_ITEMS:
        raise BadRequest(f"{location} has {len(items)} items, the limit is {_MOST_ITEMS}", param=location)


def name_member(value: Raw | None, location: str) -> str:
    """A member that is a name, such as a type; raises BadRequest when it is missing, too long, no string."""
    if value is None or is_null(value):
        raise BadRequest(f"{location} is missing", param=location)
    try:
        return read_name(value)
    except MalformedJson as error:
        raise BadRequest(f"{location} must be a name: {error}", param=location) from None


def typed_member(decoder: msgspec.json.Decoder[T], value: Raw | None, location: str) -> T:
    """One member as the type of the decoder.

    Args:
        decoder: reads and checks the text.
        value: the member, None when it is absent.
        location: its place in the body, for the message: `messages[0].content`.

    Raises:
        BadRequest: absent, null, or of another type; names the place, never quotes the value.
    """
    if value is None or is_null(value):
        raise BadRequest(f"{location} is missing", param=location)
    try:
        return decoder.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        reason = str(error).replace(" - at `$", f" at `{location}")
        raise BadRequest(f"{location}: {reason}", param=location) from None
    except RecursionError:
        raise BadRequest(f"{location} is nested too deeply", param=location) from None


def read_model(document: RawObject) -> str | None:
    """The requested model, None for the engine's default; raises BadRequest when it is not a string."""
    if is_null(document.get("model")):
        return None
    try:
        return read_name(document["model"])
    except MalformedJson:
        raise BadRequest("model must be a string, a name of at most 4096 bytes", param="model") from None


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


def read_tenancy(document: RawObject) -> RawObject:
    """`cache_salt` and `priority`, where set: they isolate and order tenants on every leg."""
    return {field: document[field] for field in _TENANCY_FIELDS if not is_null(document.get(field))}


def sets_processor_kwargs(document: RawObject) -> bool:
    """Whether the body sets processor kwargs; JSON null counts as unset, `{}` as set."""
    return any(not is_null(document.get(field)) for field in PROCESSOR_KWARGS)


def item_context(document: RawObject) -> RawObject:
    """What an encode body keeps of the client's: the model, and what changes how media are processed."""
    fields = ("model", *PROCESSOR_KWARGS)
    return {field: document[field] for field in fields if not is_null(document.get(field))}


def plain_output(members: RawObject) -> RawObject:
    """The members without those that ask for more than one choice of plain tokens."""
    return {
        key: value
        for key, value in members.items()
        if key not in _OFF_CAPPED_LEGS and not key.startswith(_OFF_CAPPED_LEGS_PREFIX)
    }


def cap_to_one_token(document: RawObject, *cap_fields: str, limit: str = "max_tokens") -> RawObject:
    """The document as a leg that only fills caches sends it: one token, not streamed, one plain choice.

    Args:
        document: members of the client's body.
        cap_fields: further token limits of this API; capped where the client set them.
        limit: the token limit that is always set.
    """
    capped = plain_output(document)
    capped[limit] = _ONE
    for field in cap_fields:
        if field in capped:
            capped[field] = _ONE
    capped["stream"] = _FALSE
    if "tool_choice" in capped and bytes(capped["tool_choice"]) not in _CALLER_CHOOSES:
        capped["tool_choice"] = _AUTO
    return capped
