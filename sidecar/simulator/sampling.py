"""How many tokens a request asks for, in each API's own fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sidecar.simulator.errors import bad_request, invalid_body, invalid_field
from sidecar.simulator.fields import (
    JsonObject,
    optional_bool,
    optional_int,
    optional_number,
    optional_object,
    optional_string,
)

if TYPE_CHECKING:
    from sidecar.simulator.deployment import Deployment
    from sidecar.simulator.prompt import Api

MAX_CHOICES = 128
COMPLETIONS_DEFAULT = 16
"""`max_tokens` of a completions request that sets none; also the default render leaves out."""
TRANSFER_FIELDS = ("kv_transfer_params", "ec_transfer_params")
_NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_LIMIT_FIELDS: dict[Api, tuple[str, ...]] = {
    "chat": ("max_completion_tokens", "max_tokens"),
    "completions": ("max_tokens",),
    "responses": ("max_output_tokens",),
    "messages": ("max_tokens",),
    "generate": ("max_tokens",),
}


@dataclass(frozen=True, slots=True)
class Sampling:
    """The part of a request that says how much to generate, and how to send it.

    Attributes:
        max_tokens: output tokens asked for, None for as many as fit.
        min_tokens: fewest output tokens.
        choices: `n`.
        stream: whether the answer is an event stream.
        include_usage: whether the stream ends with a usage chunk.
        model: the model asked for, or the first one served.
    """

    max_tokens: int | None
    min_tokens: int
    choices: int
    stream: bool
    include_usage: bool
    model: str


def read_sampling(deployment: Deployment, api: Api, body: JsonObject) -> Sampling:
    """Read and validate the generation settings of a body.

    Raises:
        ApiError: 400 for a wrong type or limits that contradict each other or the model, 404 for an unknown
            model.
    """
    model = optional_string(body, "model")
    for name in TRANSFER_FIELDS:
        optional_object(body, name)
    settings: JsonObject = (optional_object(body, "sampling_params") or {}) if api == "generate" else body
    for name in _NUMBERS:
        optional_number(settings, name)
    limit_name, max_tokens = _limit(api, settings)
    if api == "messages":
        _check_messages_limit(deployment, body, max_tokens)
    min_tokens = optional_int(settings, "min_tokens") or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise bad_request(
            f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {min_tokens}."
        )
    choices = optional_int(settings, "n", minimum=1) or 1
    if choices > MAX_CHOICES:
        raise bad_request(f"n must be at most {MAX_CHOICES}, got {choices}.", "n")
    options = optional_object(body, "stream_options")
    stream = optional_bool(body, "stream") or False
    if options is not None and not stream:
        raise bad_request("Stream options can only be defined when `stream=True`.", "stream_options")
    served = deployment.served_model(model)
    longest = deployment.config.max_model_len
    if api != "generate" and max_tokens is not None and max_tokens > longest:
        raise bad_request(
            f"{limit_name}={max_tokens} cannot be greater than max_model_len={longest}. "
            "Please request fewer output tokens.",
            limit_name,
        )
    return Sampling(
        max_tokens, min_tokens, choices, stream, bool(options and options.get("include_usage")), served
    )


def rendered_sampling_params(
    deployment: Deployment, api: Api, body: JsonObject, sampling: Sampling, room: int
) -> dict[str, Any]:
    """`sampling_params` of a render answer; `room` is the number of tokens left for output.

    A `max_tokens` of 16 is the engine's own default and therefore missing, and vLLM 0.32 puts the transfer
    parameters of the client into `extra_args`.
    """
    wanted = min(room if sampling.max_tokens is None else sampling.max_tokens, room)
    params: dict[str, Any] = {
        "presence_penalty": _number(body, "presence_penalty", 0.0),
        "frequency_penalty": _number(body, "frequency_penalty", 0.0),
        "repetition_penalty": _number(body, "repetition_penalty", 1.0),
        "temperature": _number(body, "temperature", 1.0),
        "stop": body.get("stop") or [],
        "stop_token_ids": [],
        "bad_words": [],
        "output_kind": 1 if sampling.stream else 2,
        "skip_clone": True,
        "skip_reading_prefix_cache": False,
    }
    if params["temperature"] > 0:
        params |= {"top_p": _number(body, "top_p", 1.0), "min_p": _number(body, "min_p", 0.0)}
    if wanted != COMPLETIONS_DEFAULT:
        params["max_tokens"] = wanted
    if sampling.min_tokens:
        params["min_tokens"] = sampling.min_tokens
    if sampling.choices != 1:
        params["n"] = sampling.choices
    if api == "chat" and body.get("top_logprobs") is not None:
        params["logprobs"] = body["top_logprobs"]
    extra = client_transfer_params(body) if deployment.config.vllm_version == "0.32" else {}
    if extra or api == "responses":
        params["extra_args"] = extra
    return params


def client_transfer_params(body: JsonObject) -> dict[str, Any]:
    """The transfer parameters a body brings along."""
    return {name: body[name] for name in TRANSFER_FIELDS if body.get(name)}


def _limit(api: Api, settings: JsonObject) -> tuple[str, int | None]:
    """The field that limits the output, and its value."""
    limits = {name: optional_int(settings, name, minimum=1) for name in _LIMIT_FIELDS[api]}
    for name, value in limits.items():
        if value is not None:
            return name, value
    return _LIMIT_FIELDS[api][-1], COMPLETIONS_DEFAULT if api == "completions" else None


def _check_messages_limit(deployment: Deployment, body: JsonObject, max_tokens: int | None) -> None:
    if max_tokens is None:
        raise invalid_field("max_tokens", "Field required")
    thinking = optional_object(body, "thinking") or {}
    budget = optional_int(thinking, "budget_tokens") if thinking.get("type") == "enabled" else None
    # A prefill body is capped to one token and never decodes, so its budget does not matter; SGLang compares
    # the two in no body.
    excused = bool((optional_object(body, "kv_transfer_params") or {}).get("do_remote_decode"))
    excused = excused or deployment.config.kv_connector == "sglang"
    if budget is not None and budget >= max_tokens and not excused:
        raise invalid_body("thinking.budget_tokens must be less than max_tokens")


def _number(body: JsonObject, name: str, default: float) -> float:
    value = optional_number(body, name)
    return default if value is None else value
