"""The other client APIs: the answer through the phases is the one the decode engine gives by itself."""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING, Any
from urllib.request import Request, urlopen

import pytest

from tests.vllm.vllm_client import LONG_TEXT, TIMEOUT, Picture, chat
from tests.vllm.vllm_engines import MODEL
from tests.vllm.vllm_lab import GENERATE, NONE_TRUST, OPENAI, TENSORS_TRUST

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tests.vllm.vllm_lab import Lab, Variant

MODEL_FOLDER = "qwen2.5-vl"

BY_FORMAT = pytest.mark.parametrize("variant", [OPENAI, TENSORS_TRUST, NONE_TRUST], ids=str)


def post(base: str, path: str, body: Mapping[str, Any], request_id: str = "") -> Any:
    """The answer to a request that must succeed."""
    headers = {"content-type": "application/json", "x-request-id": request_id or uuid.uuid4().hex}
    request = Request(base + path, json.dumps(body).encode(), headers)  # noqa: S310 (a loopback URL)
    with urlopen(request, timeout=TIMEOUT) as response:  # noqa: S310 (as above)
        return json.loads(response.read())


def completions(salt: str) -> dict[str, Any]:
    return {"model": MODEL, "prompt": LONG_TEXT + salt, "max_tokens": 8, "temperature": 0, "logprobs": 1}


def responses(salt: str) -> dict[str, Any]:
    images = [
        {"type": "input_image", "detail": "auto", "image_url": picture.url}
        for picture in (Picture(f"{salt}1"), Picture(f"{salt}2", 140, 112, "JPEG"))
    ]
    content = [*images, {"type": "input_text", "text": LONG_TEXT + salt}]
    item = {"role": "user", "content": content}
    return {"model": MODEL, "input": [item], "max_output_tokens": 8, "temperature": 0}


def messages(salt: str) -> dict[str, Any]:
    inline = Picture(f"{salt}1").url.partition(",")[2]
    sources = [
        {"type": "base64", "media_type": "image/png", "data": inline},
        {"type": "url", "url": Picture(f"{salt}2", 140, 112, "JPEG").url},
    ]
    blocks = [{"type": "image", "source": source} for source in sources]
    content = [*blocks, {"type": "text", "text": LONG_TEXT + salt}]
    turns = [{"role": "user", "content": content}]
    return {"model": MODEL, "messages": turns, "max_tokens": 8, "temperature": 0}


def said(answer: Any) -> Any:
    """What the model said, in any API's answer, with the logprobs where the API gives them."""
    if "choices" in answer:
        choice = answer["choices"][0]
        return (
            choice.get("text"),
            choice.get("token_ids"),
            (choice.get("logprobs") or {}).get("token_logprobs"),
        )
    return [part["text"] for item in answer.get("output", [answer]) for part in item.get("content", [])]


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", completions), ("/v1/responses", responses), ("/v1/messages", messages)],
    ids=["completions", "responses", "messages"],
)
@BY_FORMAT
def test_the_answer_of_an_api_is_that_of_one_engine_alone(
    lab: Lab, salt: str, variant: Variant, path: str, body: Callable[[str], dict[str, Any]]
) -> None:
    """Each API is rendered, encoded and prefilled, and decode says what it says without the phases."""
    images = 0 if body is completions else 2
    request_id = uuid.uuid4().hex
    answer = post(lab.stack(variant).base, path, body(salt), request_id)
    record = lab.stack(variant).log_line(request_id)
    assert record["outcome"] == "ok"
    assert record["media"] == (f"image:{images}" if images else "")
    assert record["encode_requests"] == str(images)
    if images:
        assert record["prefill_form"] == variant.prefill_form
    assert lab.engines.stored("kv"), "prefill stored no KV block"
    lab.engines.clear("kv")
    assert said(answer) == said(post(lab.engines.url("decode"), path, body(salt)))


@BY_FORMAT
def test_a_client_that_brings_tokens_and_tensors_is_served(lab: Lab, salt: str, variant: Variant) -> None:
    """The client's own features reach prefill and decode; nothing is rendered or encoded for it."""
    rendered = lab.render(chat([Picture(salt).part], salt))
    body = {
        "model": MODEL,
        "token_ids": rendered["token_ids"],
        "features": rendered["features"],
        "sampling_params": {"max_tokens": 8, "temperature": 0, "seed": 1},
    }
    request_id = uuid.uuid4().hex
    answer = post(lab.stack(variant).base, GENERATE, body, request_id)
    record = lab.stack(variant).log_line(request_id)
    assert (record["prefill_form"], record["encode_form"]) == ("kwargs_data", "skipped")
    assert record["media"] == "image:1"
    lab.engines.clear("kv")
    assert said(answer) == said(post(lab.engines.url("decode"), GENERATE, body))
