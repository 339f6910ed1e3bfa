"""Messages through a real Envoy, as the official client sends and reads them."""

from __future__ import annotations

import base64
import re
from typing import TYPE_CHECKING, Any

import anthropic
import pytest

from sidecar.simulator.recorder import without_bulk
from tests.e2e.e2e_client import CAT, DOG, MODEL, Picture, new_id
from tests.e2e.e2e_variants import NONE_NIXL, form_variant

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.e2e.e2e_stack import SimulatedWorkers, Stack, Variant

PATH = "/v1/messages"
STACKS = {
    "none-nixl": (NONE_NIXL, ("omitted", "content_parts", "mm_metadata")),
    "none-shared": (
        form_variant(openai=False, mm_payload="none", descriptors=False),
        ("omitted", "content_parts", "content_parts"),
    ),
    "tensors-shared": (
        form_variant(openai=False, mm_payload="tensors", descriptors=False),
        ("tensors", "features", "kwargs_data"),
    ),
    "openai-none": (
        form_variant(openai=True, mm_payload="none", descriptors=True),
        ("omitted", "openai", "openai"),
    ),
}
"""Stacks by name, each with the forms its requests take in render, encode and prefill."""


@pytest.fixture(params=STACKS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def stack(
    name: str, workers: SimulatedWorkers, shared_stacks: Callable[[str, Variant], Stack]
) -> Iterator[Stack]:
    """The stack of that name; no request of a test may break vLLM's contract."""
    yield shared_stacks(name, STACKS[name][0])
    assert workers.violations == []


def client(stack: Stack) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=stack.base, api_key="sk-test", max_retries=0, timeout=30)


def image(picture: Picture) -> dict[str, Any]:
    data = base64.b64encode(picture.data).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": "image/jpeg", "data": data}}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def conversation() -> list[Any]:
    """A tool's answer brings the cat; the user's own dog stands first, and comes second in the prompt."""
    return [
        user({"type": "text", "text": "Fetch my cat."}),
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "fetch", "input": {}}]},
        user(
            image(DOG),
            {"type": "tool_result", "tool_use_id": "t1", "content": [image(CAT)]},
            {"type": "text", "text": "Which is the cat?"},
        ),
    ]


def names_in_order(text: str, *pictures: Picture) -> bool:
    """Whether the answer names exactly these pictures, in this order."""
    seen = re.findall(r"(\d+x\d+) jpeg \(sha256 ([0-9a-f]{8})\)", text)
    return seen == [picture.names for picture in pictures]


def check_record(name: str, line: dict[str, Any], **changes: str) -> None:
    render, encode, prefill = STACKS[name][1]
    expected = {
        "api": "messages",
        "model": MODEL,
        "stream": "false",
        "outcome": "ok",
        "stage": "decode",
        "error": "",
        "media": "image:2",
        "render_form": render,
        "encode_form": encode,
        "encode_requests": "2",
        "prefill_form": prefill,
        **changes,
    }
    assert {key: line[key] for key in expected} == expected


def test_the_anthropic_client_gets_an_answer(name: str, stack: Stack, workers: SimulatedWorkers) -> None:
    """Pictures of a tool result and of the turn are named in prompt order, from KV that prefill computed."""
    request_id = new_id()
    message = client(stack).messages.create(
        model=MODEL,
        max_tokens=2000,
        messages=conversation(),
        system="Be brief.",
        thinking={"type": "enabled", "budget_tokens": 1024},
        extra_headers={"x-request-id": request_id},
    )
    (block,) = message.content
    assert block.type == "text"
    assert names_in_order(block.text, CAT, DOG), block.text
    assert "KV from prefill: hit" in block.text
    assert message.stop_reason == "end_turn"
    line = stack.log_line(request_id)
    check_record(name, line)
    assert str(message.usage.input_tokens) == line["prompt_tokens"]
    (decode,) = workers.exchanges("decode")
    assert decode.path == PATH
    assert decode.body["messages"] == without_bulk(conversation())


def test_the_anthropic_client_streams_an_answer(name: str, stack: Stack) -> None:
    """The same streamed: the pieces join to the same text, the record says streamed."""
    request_id = new_id()
    with client(stack).messages.stream(
        model=MODEL,
        max_tokens=200,
        messages=conversation(),
        extra_headers={"x-request-id": request_id},
    ) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    text = "".join(pieces)
    assert names_in_order(text, CAT, DOG), text
    assert "KV from prefill: hit" in text
    assert len(pieces) > 5
    assert final.stop_reason == "end_turn"
    check_record(name, stack.log_line(request_id), stream="true")


def test_a_text_conversation_is_not_encoded(stack: Stack, workers: SimulatedWorkers) -> None:
    """A conversation without pictures goes through render and prefill only."""
    request_id = new_id()
    message = client(stack).messages.create(
        model=MODEL,
        max_tokens=200,
        messages=[{"role": "user", "content": "Hello"}],
        extra_headers={"x-request-id": request_id},
    )
    (block,) = message.content
    assert block.type == "text"
    assert "I see no media" in block.text
    assert "KV from prefill: hit" in block.text
    assert workers.exchanges("encode") == []
    line = stack.log_line(request_id)
    assert (line["media"], line["encode_form"], line["fallback_reason"]) == ("", "skipped", "")


def test_equal_pictures_are_encoded_once(stack: Stack, workers: SimulatedWorkers) -> None:
    """A picture that occurs twice is encoded once and named at both places, whatever its uuid."""
    messages: list[Any] = [user(image(CAT) | {"uuid": "../x"}, image(DOG)), user(image(CAT))]
    message = client(stack).messages.create(model=MODEL, max_tokens=200, messages=messages)
    (block,) = message.content
    assert block.type == "text"
    assert names_in_order(block.text, CAT, DOG, CAT), block.text
    assert "hit" in block.text
    assert len(workers.exchanges("encode")) == 2
    for role in ("render", "encode", "prefill", "decode"):
        for exchange in workers.exchanges(role):
            assert "../x" not in str(exchange.body)


def test_a_url_source_may_hold_its_data(stack: Stack, workers: SimulatedWorkers) -> None:
    """A data URI in a URL source is what a download becomes: all legs read it like a base64 source."""
    by_url: dict[str, Any] = {"type": "image", "source": {"type": "url", "url": CAT.url}}
    messages: list[Any] = [user(by_url, image(CAT), image(DOG))]
    message = client(stack).messages.create(model=MODEL, max_tokens=200, messages=messages)
    (block,) = message.content
    assert block.type == "text"
    assert names_in_order(block.text, CAT, CAT, DOG), block.text
    assert "KV from prefill: hit" in block.text
    (decode,) = workers.exchanges("decode")
    assert decode.body["messages"] == without_bulk(messages)


def test_what_constrains_the_output_is_decodes_alone(stack: Stack, workers: SimulatedWorkers) -> None:
    """A forced tool and an output schema reach decode and no earlier leg of the client's format."""
    tools: list[Any] = [{"name": "f", "input_schema": {"type": "object"}}]
    config: Any = {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}}
    client(stack).messages.create(
        model=MODEL,
        max_tokens=200,
        messages=[{"role": "user", "content": "Hello"}],
        tools=tools,
        tool_choice={"type": "tool", "name": "f"},
        output_config=config,
    )
    (decode,) = workers.exchanges("decode")
    assert decode.body["tool_choice"] == {"type": "tool", "name": "f"}
    assert decode.body["output_config"] == config
    (prefill,) = workers.exchanges("prefill")
    if prefill.path == PATH:
        assert prefill.body["tool_choice"] == {"type": "auto"}
        assert prefill.body["output_config"] == {"effort": "low"}
        assert (prefill.body["max_tokens"], prefill.body["stream"]) == (1, False)


def test_the_anthropic_client_raises_what_the_sidecar_means(
    workers: SimulatedWorkers, shared_stacks: Callable[[str, Variant], Stack]
) -> None:
    """An unmodified Anthropic client reads our errors as its own exceptions, with type and request id."""
    stack = shared_stacks("none-nixl", NONE_NIXL)
    asking = client(stack).messages
    request_id = new_id()
    broken = image(CAT)
    broken["source"]["media_type"] = "image/tiff"
    messages: list[Any] = [user(broken)]
    with pytest.raises(anthropic.BadRequestError) as refused:
        asking.create(
            model=MODEL, max_tokens=9, messages=messages, extra_headers={"x-request-id": request_id}
        )
    body: Any = refused.value.body
    assert (body["type"], body["request_id"]) == ("error", request_id)
    assert body["error"]["type"] == "invalid_request_error"
    assert "image/tiff" in body["error"]["message"]
    line = stack.log_line(request_id)
    assert (line["api"], line["outcome"], line["error"]) == ("messages", "client_error", "epd_bad_request")
    with pytest.raises(anthropic.NotFoundError) as unknown:
        asking.create(model="nobody-serves-this", max_tokens=9, messages=conversation())
    missing: Any = unknown.value.body
    assert missing["error"]["type"] == "not_found_error"
    workers.configure(faults={"prefill": "status:500"})
    with pytest.raises(anthropic.InternalServerError) as failed:
        asking.create(model=MODEL, max_tokens=9, messages=conversation())
    assert failed.value.status_code == 502
    failure: Any = failed.value.body
    assert failure["error"]["type"] == "api_error"
