"""How many tokens a request asks for, in each API's own fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sidecar.simulator.errors import bad_request
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
_NUMBERS = ("temperature", "top_p", "presence_penalty", "frequency_penalty")


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
        ApiError: 400 for a wrong type or `min_tokens` above `max_tokens`, 404 for an unknown model.
    """
    model = optional_string(body, "model")
    for name in TRANSFER_FIELDS:
        optional_object(body, name)
    settings: JsonObject = (optional_object(body, "sampling_params") or {}) if api == "generate" else body
    for name in _NUMBERS:
        optional_number(settings, name)
    max_tokens = _max_tokens(api, settings)
    min_tokens = optional_int(settings, "min_tokens") or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise bad_request(
            f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {min_tokens}.",
            "min_tokens",
        )
    choices = optional_int(settings, "n", minimum=1) or 1
    if choices > MAX_CHOICES:
        raise bad_request(f"n must be at most {MAX_CHOICES}, got {choices}.", "n")
    options = optional_object(body, "stream_options")
    stream = optional_bool(body, "stream") or False
    if options is not None and not stream:
        raise bad_request("Stream options can only be defined when `stream=True`.", "stream_options")
    return Sampling(
        max_tokens,
        min_tokens,
        choices,
        stream,
        bool(options and options.get("include_usage")),
        deployment.served_model(model),
    )


def rendered_sampling_params(api: Api, body: JsonObject, sampling: Sampling, room: int) -> dict[str, Any]:
    """`sampling_params` of a render answer; `room` is the number of tokens left for output.

    A `max_tokens` of 16 is the engine's own default and therefore missing, and transfer parameters of the
    client end up in `extra_args`, as in vLLM 0.32.
    """
    wanted = min(room if sampling.max_tokens is None else sampling.max_tokens, room)
    params: dict[str, Any] = {
        "temperature": body.get("temperature", 1.0),
        "top_p": body.get("top_p", 1.0),
        "min_p": body.get("min_p", 0.0),
        "presence_penalty": body.get("presence_penalty", 0.0),
        "frequency_penalty": body.get("frequency_penalty", 0.0),
        "stop": body.get("stop", []),
        "stop_token_ids": [],
        "bad_words": [],
        "output_kind": 1 if sampling.stream else 2,
        "skip_clone": True,
        "skip_reading_prefix_cache": False,
    }
    if wanted != COMPLETIONS_DEFAULT:
        params["max_tokens"] = wanted
    if sampling.min_tokens:
        params["min_tokens"] = sampling.min_tokens
    if sampling.choices != 1:
        params["n"] = sampling.choices
    if api == "chat" and body.get("top_logprobs") is not None:
        params["logprobs"] = body["top_logprobs"]
    if extra := {name: body[name] for name in TRANSFER_FIELDS if body.get(name)}:
        params["extra_args"] = extra
    return params


def _max_tokens(api: Api, settings: JsonObject) -> int | None:
    match api:
        case "chat":
            completion = optional_int(settings, "max_completion_tokens", minimum=1)
            legacy = optional_int(settings, "max_tokens", minimum=1)
            return legacy if completion is None else completion
        case "responses":
            return optional_int(settings, "max_output_tokens", minimum=1)
        case "completions":
            limit = optional_int(settings, "max_tokens", minimum=1)
            return COMPLETIONS_DEFAULT if limit is None else limit
        case "messages" | "generate":
            return optional_int(settings, "max_tokens", minimum=1)
