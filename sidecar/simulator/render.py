"""The render role: a client body in, token ids and features out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import uuid4

import msgspec

from sidecar.simulator import serialization
from sidecar.simulator.fields import MM_PAYLOADS, JsonObject, optional_bool, optional_choice, optional_object
from sidecar.simulator.prompt import read_prompt
from sidecar.simulator.sampling import client_transfer_params, read_sampling, rendered_sampling_params
from sidecar.simulator.tools import check_tool_choice

if TYPE_CHECKING:
    from sidecar.simulator.deployment import Call, Deployment
    from sidecar.simulator.prompt import Api, Entry, Prompt

_ID_PREFIX: dict[Api, str] = {
    "chat": "chatcmpl-",
    "completions": "cmpl-",
    "messages": "chatcmpl-",
}
_STREAM_OPTIONS: JsonObject = {"include_usage": False, "continuous_usage_stats": False}
_REAL_BYTES_PER_EMBED = 4 * 1176
"""Four merged patches of 14 x 14 x 3 x 2 bytes, as Qwen2-VL's processor lays them out."""


def render(deployment: Deployment, call: Call, api: Api, request_id: str, fault: str) -> bytes:
    """The JSON answer to a render request; completions get an array of one.

    Args:
        deployment: state of the deployment.
        call: the request.
        api: API of the body.
        request_id: id of the request without prefix.
        fault: a name of RENDER_FAULTS to spoil the answer with, or "".

    Raises:
        ApiError: what vLLM answers to a body it refuses.
    """
    with_tensors = _wants_tensors(deployment, call)
    sampling = read_sampling(deployment, api, call.body)
    check_tool_choice(deployment, api, call.body)
    prompt = read_prompt(deployment, call, api)
    room = deployment.config.max_model_len - len(prompt.token_ids)
    features = _features(deployment, prompt, with_tensors=with_tensors) if prompt.entries else None
    options = optional_object(call.body, "stream_options")
    if features is not None:
        _spoil(features, fault, len(prompt.token_ids))
    answer: dict[str, Any] = {
        "request_id": f"resp_{uuid4().hex[:16]}" if api == "responses" else _ID_PREFIX[api] + request_id,
        "token_ids": prompt.token_ids,
        "token_offsets": None,
        "features": features,
        "content_parts": None,
        "sampling_params": rendered_sampling_params(deployment, api, call.body, sampling, room),
        "model": sampling.model,
        "reasoning_ended": None,
        "reasoning_parser_kwargs": None,
        "return_token_ids": None,
        "output_mode": "tokens",
        "stream": sampling.stream,
        "stream_options": options and _STREAM_OPTIONS | options,
        "cache_salt": prompt.cache_salt or None,
        "priority": call.body.get("priority", 0),
        "kv_transfer_params": None,
        "ec_transfer_params": None,
    }
    if deployment.config.vllm_version != "0.32":
        answer |= client_transfer_params(call.body)
    return msgspec.json.encode([answer] if api == "completions" else answer)


def _wants_tensors(deployment: Deployment, call: Call) -> bool:
    if not deployment.config.mm_payload_supported:
        return True
    payload = optional_choice(call.body, "mm_payload", MM_PAYLOADS)
    alias = optional_bool(call.body, "return_mm_kwargs")
    if payload is None:
        return alias is not False
    return payload == "tensors"


def _features(deployment: Deployment, prompt: Prompt, *, with_tensors: bool) -> dict[str, Any]:
    by_modality: dict[str, list[Entry]] = {}
    for entry in prompt.entries:
        by_modality.setdefault(entry.modality, []).append(entry)
    features: dict[str, Any] = {
        "mm_hashes": {name: [entry.key for entry in group] for name, group in by_modality.items()},
        "mm_placeholders": prompt.placeholders(),
        "kwargs_data": None,
        "mm_metadata": None,
    }
    if not with_tensors:
        return features
    features["kwargs_data"] = {
        name: [_kwargs(deployment, entry) for entry in group] for name, group in by_modality.items()
    }
    if deployment.config.render_metadata:
        features["mm_metadata"] = {
            name: [
                serialization.metadata_item(entry.modality, entry.grid, entry.embeds or 0) for entry in group
            ]
            for name, group in by_modality.items()
        }
    return features


def _kwargs(deployment: Deployment, entry: Entry) -> msgspec.Raw:
    embeds = entry.embeds or 0
    size = deployment.config.tensor_bytes
    return msgspec.Raw(
        serialization.kwargs_item(
            entry.modality,
            entry.grid,
            embeds,
            key=entry.key,
            tensor_bytes=embeds * _REAL_BYTES_PER_EMBED if size == "real" else size,
        )
    )


def _spoil(features: dict[str, Any], fault: str, prompt_length: int) -> None:
    spans = [span for group in features["mm_placeholders"].values() for span in group]
    match fault:
        case "wrong-counts":
            next(iter(features["mm_hashes"].values())).pop()
        case "overlapping-spans":
            # Two entries are needed to overlap; they share their first token.
            for span in spans[1:]:
                span["offset"] = spans[0]["offset"]
        case "span-out-of-range":
            spans[-1]["length"] = prompt_length - spans[-1]["offset"] + 1
        case "null-kwargs":
            features["kwargs_data"] = None
        case "null-items" if features["kwargs_data"] is not None:
            features["kwargs_data"] = {
                name: [None] * len(items) for name, items in features["kwargs_data"].items()
            }
