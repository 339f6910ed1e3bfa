"""Tokens in, tokens out through a real Envoy: the client renders its prompt itself."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import openai
import pytest

from sidecar.simulator.recorder import without_bulk
from sidecar.simulator.tokens import tokens_text
from tests.e2e.e2e_client import CAT, DOG, MODEL, Answer, Picture, chat, new_id, request
from tests.e2e.e2e_variants import NONE_NIXL, form_variant

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.e2e.e2e_stack import SimulatedWorkers, Stack, Variant

PATH = "/inference/v1/generate"
STACKS = {
    "none-nixl": NONE_NIXL,
    "openai-none": form_variant(openai=True, mm_payload="none", descriptors=True),
}


@pytest.fixture(params=STACKS)
def stack(
    request: pytest.FixtureRequest, workers: SimulatedWorkers, shared_stacks: Callable[[str, Variant], Stack]
) -> Iterator[Stack]:
    """A running stack; no request of a test may break vLLM's contract."""
    yield shared_stacks(request.param, STACKS[request.param])
    assert workers.violations == []


def render(workers: SimulatedWorkers, *pictures: Picture) -> dict[str, Any]:
    """What a client that renders itself gets from the renderer, tensors included."""
    base = f"http://127.0.0.1:{workers.ports['render']}"
    answer = request(base, "POST", "/v1/chat/completions/render", chat("Look", *pictures))
    assert answer.status == 200, answer.body
    rendered: dict[str, Any] = answer.json
    return rendered


def asking(rendered: dict[str, Any], **members: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "token_ids": rendered["token_ids"],
        "sampling_params": {"max_tokens": 200, "temperature": 0},
        **members,
    }


def features(rendered: dict[str, Any]) -> dict[str, Any]:
    return {key: rendered["features"][key] for key in ("mm_hashes", "mm_placeholders", "kwargs_data")}


def collapsed(rendered: dict[str, Any]) -> list[int]:
    """The prompt with one placeholder per item, as content parts need it."""
    ids: list[int] = list(rendered["token_ids"])
    for span in sorted(
        rendered["features"]["mm_placeholders"]["image"], key=lambda item: item["offset"], reverse=True
    ):
        start = span["offset"]
        ids[start : start + span["length"]] = ids[start : start + 1]
    return ids


def part(picture: Picture, **members: Any) -> dict[str, Any]:
    return {"type": "image_url", "url": picture.url, **members}


def text_of(answer: Answer) -> str:
    assert answer.status == 200, answer.body
    return tokens_text(answer.json["choices"][0]["token_ids"])


def names_in_order(text: str, *pictures: Picture) -> bool:
    """Whether the answer names exactly these pictures, in this order."""
    seen = re.findall(r"(\d+x\d+) jpeg \(sha256 ([0-9a-f]{8})\)", text)
    return seen == [picture.names for picture in pictures]


def check_record(line: dict[str, Any], **changes: str) -> None:
    expected = {
        "api": "generate",
        "model": MODEL,
        "stream": "false",
        "outcome": "ok",
        "stage": "decode",
        "error": "",
        "mm_payload": "",
        "render_form": "",
        "encode_form": "skipped",
        "encode_requests": "0",
        "fallback_reason": "",
        **changes,
    }
    assert {key: line[key] for key in expected} == expected


def test_features_of_the_client_reach_prefill_and_decode(stack: Stack, workers: SimulatedWorkers) -> None:
    """Tensors the client rendered are encoded by prefill; decode finds its KV and names both pictures."""
    rendered = render(workers, CAT, DOG)
    body = asking(rendered, features=features(rendered), cache_salt="tenant")
    answer, line = stack.coordinate(body, path=PATH)
    text = text_of(answer)
    assert names_in_order(text, CAT, DOG), text
    assert "KV from prefill: hit" in text
    check_record(line, prefill_form="kwargs_data", media="image:2")
    assert int(line["prompt_tokens"]) == len(rendered["token_ids"])
    spans = rendered["features"]["mm_placeholders"]["image"]
    assert int(line["placeholder_tokens"]) == sum(span["length"] for span in spans)
    assert workers.exchanges("encode") == []
    (prefill,) = workers.exchanges("prefill")
    (decode,) = workers.exchanges("decode")
    assert (prefill.path, decode.path) == (PATH, PATH)
    assert (prefill.body["sampling_params"], prefill.body["stream"]) == (
        {"max_tokens": 1, "temperature": 0},
        False,
    )
    sent = {key: value for key, value in decode.body.items() if key != "kv_transfer_params"}
    assert sent == without_bulk(body)


def test_content_parts_are_named_by_the_sidecar(stack: Stack, workers: SimulatedWorkers) -> None:
    """Pictures sent as data URLs are named alike on prefill and decode, whatever the client calls them."""
    rendered = render(workers, CAT, DOG, CAT)
    parts = [part(CAT, uuid="../x"), part(DOG, uuid="../x"), part(CAT)]
    body = asking(rendered, content_parts=parts, token_ids=collapsed(rendered))
    answer, line = stack.coordinate(body, path=PATH)
    text = text_of(answer)
    assert names_in_order(text, CAT, DOG, CAT), text
    assert "KV from prefill: hit" in text
    check_record(line, prefill_form="content_parts", media="image:3", placeholder_tokens="0")
    (prefill,) = workers.exchanges("prefill")
    (decode,) = workers.exchanges("decode")
    assert prefill.body["content_parts"] == decode.body["content_parts"]
    names = [item["uuid"] for item in decode.body["content_parts"]]
    assert names[0] == names[2] != names[1]
    assert all(re.fullmatch(r"[0-9a-f]{64}", item) for item in names)


def test_plain_tokens_are_streamed(stack: Stack) -> None:
    """Tokens without media come back as events, the usage last."""
    request_id = new_id()
    body = {
        "model": MODEL,
        "token_ids": [40, 41, 42],
        "sampling_params": {"max_tokens": 200, "min_tokens": 3},
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = stack.post(body, path=PATH, headers={"x-request-id": request_id})
    assert answer.status == 200, answer.body
    *events, done = [line[6:] for line in answer.body.decode().splitlines() if line.startswith("data: ")]
    assert done == "[DONE]"
    chunks = [json.loads(event) for event in events]
    tokens = [token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"]]
    text = tokens_text(tokens)
    assert "I see no media; prompt 3 tokens, KV from prefill: hit" in text
    assert len(chunks) > 5
    assert chunks[-1]["usage"]["prompt_tokens"] == 3
    check_record(stack.log_line(request_id), stream="true", prefill_form="tokens", media="")


def test_pictures_are_streamed(stack: Stack, workers: SimulatedWorkers) -> None:
    """The same with pictures."""
    rendered = render(workers, DOG)
    body = asking(rendered, features=features(rendered), stream=True)
    answer, line = stack.coordinate(body, path=PATH)
    assert answer.status == 200, answer.body
    events = [line[6:] for line in answer.body.decode().splitlines() if line.startswith("data: {")]
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    text = tokens_text(token for choice in choices for token in choice["token_ids"])
    assert names_in_order(text, DOG), text
    assert "KV from prefill: hit" in text
    check_record(line, stream="true", prefill_form="kwargs_data", media="image:1")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"sampling_params": None}, "sampling_params"),
        ({"content_parts": [part(CAT)]}, "content_parts"),
        (
            {"features": None, "content_parts": [part(CAT) | {"url": "file:///etc/passwd"}]},
            "content_parts[0]",
        ),
        ({"features": None, "content_parts": [part(CAT) | {"type": "hologram"}]}, "content_parts[0].type"),
    ],
)
def test_what_an_engine_would_not_survive_reaches_none(
    change: dict[str, Any], named: str, stack: Stack, workers: SimulatedWorkers
) -> None:
    """A 400 in the OpenAI shape that names the field; no worker hears of it."""
    rendered = render(workers, CAT)
    answer, line = stack.coordinate(asking(rendered, **{"features": features(rendered), **change}), path=PATH)
    assert answer.status == 400, answer.body
    assert answer.json["error"]["code"] == "epd_bad_request"
    assert answer.json["error"]["param"].startswith(named)
    assert (line["api"], line["outcome"], line["error"]) == ("generate", "client_error", "epd_bad_request")
    assert workers.exchanges("prefill") == workers.exchanges("decode") == []


def test_a_mixed_span_reaches_no_engine(stack: Stack, workers: SimulatedWorkers) -> None:
    """Features of a model whose spans mix tokens would kill the engine: 400 naming the item."""
    workers.configure(sparse_spans=True)
    rendered = render(workers, CAT)
    answer, line = stack.coordinate(asking(rendered, features=features(rendered)), path=PATH)
    assert answer.status == 400, answer.body
    assert "image[0] mixes tokens" in answer.json["error"]["message"]
    assert (line["stage"], line["error"]) == ("request", "epd_bad_request")
    assert workers.exchanges("prefill") == []


def test_the_openai_client_raises_what_the_sidecar_means(stack: Stack, workers: SimulatedWorkers) -> None:
    """An unmodified OpenAI client, sent to the path, reads answers and errors as its own."""
    asks = openai.OpenAI(base_url=stack.base, api_key="sk-test", max_retries=0, timeout=30)
    rendered = render(workers, CAT)
    body = asking(rendered, features=features(rendered))
    answer: Any = asks.post(PATH, body=body, cast_to=object)
    assert names_in_order(tokens_text(answer["choices"][0]["token_ids"]), CAT)
    with pytest.raises(openai.BadRequestError) as refused:
        asks.post(PATH, body=body | {"token_ids": [-1]}, cast_to=object)
    assert (refused.value.code, refused.value.param) == ("epd_bad_request", "token_ids")
    with pytest.raises(openai.NotFoundError) as unknown:
        asks.post(PATH, body=body | {"model": "nobody-serves-this"}, cast_to=object)
    assert unknown.value.code == "epd_prefill_rejected"
