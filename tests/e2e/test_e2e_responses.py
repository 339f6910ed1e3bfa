"""Responses through a real Envoy, as the official client sends and reads them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.e2e.e2e_client import CAT, DOG, MODEL, Picture, new_id
from tests.e2e.e2e_variants import NONE_NIXL, form_variant

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.e2e.e2e_stack import SimulatedWorkers, Stack, Variant

PATH = "/v1/responses"
STACKS = {
    "none-nixl": (NONE_NIXL, ("omitted", "content_parts", "mm_metadata")),
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


def client(stack: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.base}/v1", api_key="sk-test", max_retries=0, timeout=30)


def image(picture: Picture) -> dict[str, Any]:
    return {"type": "input_image", "image_url": picture.url, "detail": "auto"}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def conversation() -> list[Any]:
    """Several turns: a picture in the first, one in what a tool answered, a question last."""
    return [
        user(image(CAT), {"type": "input_text", "text": "This is my cat."}),
        {"role": "assistant", "content": "Shall I fetch the other picture?"},
        user({"type": "input_text", "text": "Yes."}),
        {"type": "function_call", "call_id": "c1", "name": "fetch", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": [image(DOG)]},
        user({"type": "input_text", "text": "Which is the cat?"}),
    ]


def names_in_order(text: str, *pictures: Picture) -> bool:
    """Whether the answer names exactly these pictures, in this order."""
    seen = re.findall(r"(\d+x\d+) jpeg \(sha256 ([0-9a-f]{8})\)", text)
    return seen == [picture.names for picture in pictures]


def ok_record(name: str, **changes: str) -> dict[str, str]:
    render, encode, prefill = STACKS[name][1]
    return {
        "api": "responses",
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


def seen_of(line: dict[str, Any], expected: dict[str, str]) -> dict[str, Any]:
    return {key: line[key] for key in expected}


def test_the_openai_client_gets_an_answer(name: str, stack: Stack, workers: SimulatedWorkers) -> None:
    """Pictures of a message and of a tool's output are named in order, from KV that prefill computed."""
    request_id = new_id()
    response = client(stack).responses.create(
        model=MODEL,
        input=conversation(),
        instructions="Be brief.",
        max_output_tokens=200,
        extra_headers={"x-request-id": request_id},
    )
    assert names_in_order(response.output_text, CAT, DOG), response.output_text
    assert "KV from prefill: hit" in response.output_text
    line = stack.log_line(request_id)
    expected = ok_record(name)
    assert seen_of(line, expected) == expected
    assert response.usage is not None
    assert str(response.usage.input_tokens) == line["prompt_tokens"]
    assert [exchange.path for exchange in workers.exchanges("decode")] == [PATH]
    assert "store" not in workers.exchanges("decode")[0].body


def test_the_openai_client_streams_an_answer(name: str, stack: Stack) -> None:
    """The same streamed: the pieces join to the text of the final event, the record says streamed."""
    request_id = new_id()
    stream = client(stack).responses.create(
        model=MODEL,
        input=conversation(),
        max_output_tokens=200,
        stream=True,
        extra_headers={"x-request-id": request_id},
    )
    events = list(stream)
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert names_in_order(text, CAT, DOG), text
    assert "KV from prefill: hit" in text
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == text
    expected = ok_record(name, stream="true")
    assert seen_of(stack.log_line(request_id), expected) == expected


def test_a_plain_string_is_not_encoded(stack: Stack, workers: SimulatedWorkers) -> None:
    """An input without pictures goes through render and prefill only."""
    request_id = new_id()
    response = client(stack).responses.create(
        model=MODEL, input="Hello", store=True, extra_headers={"x-request-id": request_id}
    )
    assert "I see no media" in response.output_text
    assert "KV from prefill: hit" in response.output_text
    assert workers.exchanges("encode") == []
    line = stack.log_line(request_id)
    assert (line["media"], line["encode_form"], line["fallback_reason"]) == ("", "skipped", "")
    assert workers.exchanges("decode")[0].body["store"] is True


def test_equal_pictures_are_encoded_once(stack: Stack, workers: SimulatedWorkers) -> None:
    """A picture that occurs twice is encoded once and named at both places, whatever its uuid."""
    twice: list[Any] = [user(image(CAT) | {"uuid": "../x"}, image(DOG)), user(image(CAT))]
    response = client(stack).responses.create(model=MODEL, input=twice)
    assert names_in_order(response.output_text, CAT, DOG, CAT), response.output_text
    assert "hit" in response.output_text
    assert len(workers.exchanges("encode")) == 2
    (decode,) = workers.exchanges("decode")
    first, second = decode.body["input"]
    assert first["content"][0]["uuid"] == second["content"][0]["uuid"] != first["content"][1]["uuid"]


def test_a_constrained_answer_is_decodes_alone(stack: Stack, workers: SimulatedWorkers) -> None:
    """The output format reaches decode and no earlier leg, which stores nothing either."""
    schema = {"type": "json_schema", "name": "s", "schema": {"type": "object"}}
    asked: list[Any] = [user(image(CAT))]
    response = client(stack).responses.create(
        model=MODEL, input=asked, extra_body={"text": {"format": schema, "verbosity": "low"}}
    )
    assert "KV from prefill: hit" in response.output_text
    assert workers.exchanges("decode")[0].body["text"]["format"] == schema
    for exchange in (*workers.exchanges("encode"), *workers.exchanges("prefill")):
        assert "format" not in exchange.body.get("text", {})
        if exchange.path == PATH:
            assert (exchange.body["store"], exchange.body["max_output_tokens"]) == (False, 1)


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"input": [user({"type": "input_image", "file_id": "f"})]}, "input[0].content[0].file_id"),
    ],
)
def test_a_servers_state_is_refused_by_name(
    members: dict[str, Any], param: str, stack: Stack, workers: SimulatedWorkers
) -> None:
    """The client's own exception, naming the field; no worker hears of it."""
    request_id = new_id()
    with pytest.raises(openai.BadRequestError) as refused:
        client(stack).responses.create(
            **{"model": MODEL, "input": "Hello", **members}, extra_headers={"x-request-id": request_id}
        )
    assert (refused.value.code, refused.value.param) == ("epd_bad_request", param)
    line = stack.log_line(request_id)
    assert (line["api"], line["outcome"], line["error"]) == ("responses", "client_error", "epd_bad_request")
    assert workers.exchanges("render") == workers.exchanges("decode") == []
