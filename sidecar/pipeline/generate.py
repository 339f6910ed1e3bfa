"""Bodies of the generate format (`/inference/v1/generate`, tokens in)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sidecar.api.openai_shape import plain_output, without_transfer_fields
from sidecar.jsontext import to_raw
from sidecar.multimodal.features import content_parts, kwargs_features, metadata_features
from sidecar.multimodal.spans import collapse

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sidecar.api.interface import JsonTree
    from sidecar.multimodal.forms import PrefillPlan
    from sidecar.pipeline.state import Prompt, RequestState

GENERATE_PATH = "/inference/v1/generate"

_ONE_TOKEN = {"max_tokens": 1}


def encode_body(state: RequestState, token_ids: list[int], media: Mapping[str, Any]) -> JsonTree:
    """Body of one encode call.

    Args:
        state: the request.
        token_ids: first token of the prompt, then the item's placeholders.
        media: `features` or `content_parts`.
    """
    return {
        **_model(state),
        "stream": False,
        "sampling_params": _ONE_TOKEN,
        "token_ids": to_raw(token_ids),
        **media,
    }


def prefill_body(state: RequestState, prompt: Prompt, plan: PrefillPlan) -> JsonTree:
    """Body of the prefill call for a form other than `openai`, without the transfer parameters."""
    token_ids = prompt.text
    media: dict[str, Any] = {}
    match plan.form:
        case "kwargs_data":
            media = {"features": kwargs_features(state.entries)}
        case "mm_metadata":
            media = {"features": metadata_features(state.entries, plan.metadata)}
        case "content_parts":
            # An engine expands content parts itself: each span becomes one placeholder again.
            media = {"content_parts": content_parts(state.entries, prompt.token_ids)}
            token_ids = to_raw(collapse(prompt.token_ids, (entry.span for entry in state.entries)))
    return {
        "request_id": state.inbound.request_id,
        **_model(state),
        "stream": False,
        "sampling_params": _capped_sampling(prompt),
        **state.body.tenancy,
        "token_ids": token_ids,
        **media,
    }


def _model(state: RequestState) -> JsonTree:
    return {} if state.body.model is None else {"model": state.body.model}


def _capped_sampling(prompt: Prompt) -> JsonTree:
    kept: JsonTree = plain_output(dict(prompt.sampling_params))
    if "extra_args" in kept:
        kept["extra_args"] = without_transfer_fields(kept["extra_args"])
    return {**kept, **_ONE_TOKEN}
