"""Chat requests with pictures, sent with the official client, and what comes back."""

from __future__ import annotations

import base64
import copy
import hashlib
import io
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from openai import OpenAI
from PIL import Image

from tests.vllm.vllm_engines import MODEL

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from openai.types.chat import ChatCompletionChunk
    from openai.types.chat.chat_completion import ChoiceLogprobs

TIMEOUT = 300.0
TILE = 14

# Engines share whole blocks of 32 tokens: this much text behind the last picture puts every picture into one.
LONG_TEXT = "Describe the picture and compare it with the other one, from the first to the last. " * 6


@dataclass(frozen=True)
class Picture:
    """A picture of random tiles that no engine has seen before; equal seeds give equal pictures."""

    seed: str
    width: int = 112
    height: int = 84
    format: str = "PNG"
    url: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        noise = random.Random(self.seed)  # noqa: S311 (pixels, not secrets)
        image = Image.new("RGB", (self.width, self.height))
        for left in range(0, self.width, TILE):
            for top in range(0, self.height, TILE):
                colour = (noise.randrange(256), noise.randrange(256), noise.randrange(256))
                image.paste(colour, (left, top, left + TILE, top + TILE))
        data = io.BytesIO()
        image.save(data, self.format)
        encoded = base64.b64encode(data.getvalue()).decode()
        object.__setattr__(self, "url", f"data:image/{self.format.lower()};base64,{encoded}")

    @property
    def part(self) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": self.url}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def chat(parts: Sequence[Mapping[str, Any]], salt: str, **more: Any) -> dict[str, Any]:
    """A chat request: the parts, then the long text.

    Args:
        parts: media parts, in prompt order.
        salt: keeps the prefix caches of the engines apart from those of other requests.
        more: further fields; those given here replace the defaults.
    """
    content = [*parts, text_part(LONG_TEXT)]
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 8,
        "min_tokens": 8,
        "temperature": 0,
        "seed": 1,
        "logprobs": True,
        "top_logprobs": 3,
        "cache_salt": salt,
        **more,
    }


def alone(body: Mapping[str, Any], salt: str) -> dict[str, Any]:
    """The same request for an engine that answers by itself.

    Its media carry names of their own: under their hashes the engine may know what other phases computed.
    """
    own = copy.deepcopy(dict(body))
    own["cache_salt"] = f"{salt}-alone"
    for message in own["messages"]:
        for part in message["content"] if isinstance(message["content"], list) else ():
            if part["type"] != "text":
                url = part[part["type"]]["url"]
                part["uuid"] = f"{salt}-alone-{hashlib.sha256(url.encode()).hexdigest()[:16]}"
    return own


Token = tuple[str, float, tuple[tuple[str, float], ...]]
"""Text, logprob and the most likely alternatives with theirs."""


@dataclass(frozen=True)
class Answer:
    """What a client gets, from a stream or in one piece.

    Attributes:
        texts: content per choice.
        tokens: tokens of the first choice.
        finish_reasons: one per choice.
        prompt_tokens: usage.
        calls: (name, arguments) of the tool calls of the first choice.
    """

    texts: tuple[str, ...]
    tokens: tuple[Token, ...]
    finish_reasons: tuple[str, ...]
    prompt_tokens: int
    calls: tuple[tuple[str, str], ...] = ()


def ask(
    base: str, body: Mapping[str, Any], *, stream: bool = False, headers: Mapping[str, str] | None = None
) -> Answer:
    """Send a chat request once; raises openai.APIStatusError for every status but 200."""
    fields: dict[str, Any] = dict(body)
    model, messages = fields.pop("model"), fields.pop("messages")
    with OpenAI(base_url=f"{base}/v1", api_key="unused", max_retries=0, timeout=TIMEOUT) as client:
        if stream:
            chunks = client.chat.completions.create(
                model=model,
                messages=messages,
                stream=True,
                stream_options={"include_usage": True},
                extra_body=fields,
                extra_headers=headers,
            )
            return _collect(chunks)
        completion = client.chat.completions.create(
            model=model, messages=messages, extra_body=fields, extra_headers=headers
        )
    assert completion.usage is not None
    first = completion.choices[0]
    calls = (call.function for call in first.message.tool_calls or () if call.type == "function")
    return Answer(
        texts=tuple(choice.message.content or "" for choice in completion.choices),
        tokens=_tokens(first.logprobs),
        finish_reasons=tuple(str(choice.finish_reason) for choice in completion.choices),
        prompt_tokens=completion.usage.prompt_tokens,
        calls=tuple((call.name, call.arguments) for call in calls),
    )


def _collect(chunks: Iterable[ChatCompletionChunk]) -> Answer:
    text, finish, prompt_tokens = "", "", 0
    tokens: list[Token] = []
    for chunk in chunks:
        if chunk.usage is not None:
            prompt_tokens = chunk.usage.prompt_tokens
        for choice in chunk.choices:
            text += choice.delta.content or ""
            tokens += _tokens(choice.logprobs)
            finish = choice.finish_reason or finish
    return Answer((text,), tuple(tokens), (finish,), prompt_tokens)


def _tokens(logprobs: ChoiceLogprobs | Any | None) -> tuple[Token, ...]:
    content = () if logprobs is None else logprobs.content or ()
    return tuple(
        (item.token, item.logprob, tuple((other.token, other.logprob) for other in item.top_logprobs))
        for item in content
    )


def difference(one: Answer, other: Answer) -> float:
    """The largest difference between logprobs, alternatives included; infinite when tokens differ."""
    if len(one.tokens) != len(other.tokens):
        return float("inf")
    largest = 0.0
    for (text, logprob, ranked), (other_text, other_logprob, other_ranked) in zip(
        one.tokens, other.tokens, strict=True
    ):
        if text != other_text or [name for name, _ in ranked] != [name for name, _ in other_ranked]:
            return float("inf")
        gaps = (abs(a - b) for (_, a), (_, b) in zip(ranked, other_ranked, strict=True))
        largest = max(largest, abs(logprob - other_logprob), *gaps)
    return largest
