"""What an engine generated for one request, before it takes the shape of an API."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from sidecar.simulator.fields import JsonObject
    from sidecar.simulator.prompt import Api

FINGERPRINT = "vllm-simulated"
"""`system_fingerprint` of every answer."""


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
        prompt_tokens_details: whether `usage` tells the cached tokens (`--enable-prompt-tokens-details`).
        settings: the request body, for the settings that an answer repeats.
        prompt_echo: `prompt_token_ids` and `mm_placeholders` of an answer in the generate format.
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
    prompt_tokens_details: bool
    settings: JsonObject
    prompt_echo: dict[str, Any] = field(
        default_factory=lambda: {"prompt_token_ids": None, "mm_placeholders": None}
    )
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
        details = {"cached_tokens": self.cached_tokens} if self.prompt_tokens_details else None
        return self._counts() | {"prompt_tokens_details": details, "completion_tokens_details": None}

    def streamed_usage(self) -> dict[str, Any]:
        """`usage` of a stream's last chunk, which leaves out what is null."""
        return {name: value for name, value in self.usage().items() if value is not None}

    def _counts(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
        }


@dataclass(frozen=True, slots=True)
class Answer:
    """What a role generated, and how it is to be sent."""

    generation: Generation
    stream: bool
    include_usage: bool


def data_event(document: JsonObject) -> bytes:
    """One server-sent event without a name."""
    return b"data: " + msgspec.json.encode(document) + b"\n\n"


def named_event(document: JsonObject) -> bytes:
    """One server-sent event named after the document's `type`."""
    return b"event: " + str(document["type"]).encode() + b"\n" + data_event(document)
