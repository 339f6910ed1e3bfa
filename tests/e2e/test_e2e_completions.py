"""Completions through a real Envoy, as the official client sends and reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.e2e.e2e_client import MODEL, new_id
from tests.e2e.e2e_variants import NONE_NIXL, form_variant

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.e2e.e2e_stack import SimulatedWorkers, Stack, Variant

PATH = "/v1/completions"
PROMPT = "Once upon a time there was a sidecar"
STACKS = {
    "tokens": ("none-nixl", NONE_NIXL),
    "openai": ("openai-none", form_variant(openai=True, mm_payload="none", descriptors=True)),
}
"""The form prefill takes, and the stack that makes it take that."""


@pytest.fixture(params=STACKS)
def prefill_form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def stack(
    prefill_form: str, workers: SimulatedWorkers, shared_stacks: Callable[[str, Variant], Stack]
) -> Iterator[Stack]:
    """The stack of the form; no request of a test may break vLLM's contract."""
    yield shared_stacks(*STACKS[prefill_form])
    assert workers.violations == []


def client(stack: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.base}/v1", api_key="sk-test", max_retries=0, timeout=30)


def ok_record(prefill_form: str, **changes: str) -> dict[str, str]:
    return {
        "api": "completions",
        "model": MODEL,
        "stream": "false",
        "outcome": "ok",
        "stage": "decode",
        "error": "",
        "media": "",
        "render_form": "text",
        "encode_form": "skipped",
        "prefill_form": prefill_form,
        "fallback_reason": "",
        **changes,
    }


def seen_of(line: dict[str, Any], expected: dict[str, str]) -> dict[str, Any]:
    return {key: line[key] for key in expected}


@pytest.mark.parametrize("prompt", [PROMPT, [300, 301, 302, 303]], ids=["text", "tokens"])
def test_the_openai_client_gets_an_answer(
    prompt: Any, prefill_form: str, stack: Stack, workers: SimulatedWorkers
) -> None:
    """A text or token prompt is answered from KV that prefill computed; nothing is encoded."""
    request_id = new_id()
    completion = client(stack).completions.create(
        model=MODEL, prompt=prompt, max_tokens=100, extra_headers={"x-request-id": request_id}
    )
    assert "I see no media" in completion.choices[0].text
    assert "KV from prefill: hit" in completion.choices[0].text
    line = stack.log_line(request_id)
    expected = ok_record(prefill_form)
    assert seen_of(line, expected) == expected
    assert completion.usage is not None
    assert str(completion.usage.prompt_tokens) == line["prompt_tokens"]
    assert workers.exchanges("encode") == []
    (render,) = workers.exchanges("render")
    assert (render.path, render.body["prompt"]) == (f"{PATH}/render", prompt)
    (decode,) = workers.exchanges("decode")
    assert decode.path == PATH
    assert len(decode.body["prompt"]) == completion.usage.prompt_tokens


def test_the_openai_client_streams_an_answer(prefill_form: str, stack: Stack) -> None:
    """The same streamed: the pieces join to the same text, the usage comes last, the record says streamed."""
    request_id = new_id()
    stream = client(stack).completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=100,
        stream=True,
        stream_options={"include_usage": True},
        extra_headers={"x-request-id": request_id},
    )
    chunks = list(stream)
    text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
    assert "KV from prefill: hit" in text
    assert len(chunks) > 5
    assert chunks[-1].usage is not None
    expected = ok_record(prefill_form, stream="true")
    assert seen_of(stack.log_line(request_id), expected) == expected


def test_several_choices_are_generated_by_decode_alone(stack: Stack, workers: SimulatedWorkers) -> None:
    """What asks for more than one plain token reaches decode and no earlier leg."""
    completion = client(stack).completions.create(
        model=MODEL, prompt=PROMPT, n=2, max_tokens=100, extra_body={"min_tokens": 2, "cache_salt": "tenant"}
    )
    assert [choice.index for choice in completion.choices] == [0, 1]
    assert all("KV from prefill: hit" in choice.text for choice in completion.choices)
    (prefill,) = workers.exchanges("prefill")
    assert prefill.body["cache_salt"] == "tenant"
    assert {"n", "min_tokens"}.isdisjoint(prefill.body | prefill.body.get("sampling_params", {}))


def test_an_echo_starts_from_the_clients_text(stack: Stack, workers: SimulatedWorkers) -> None:
    """Decode gets the text to echo, makes the tokens itself and still finds the KV of prefill."""
    completion = client(stack).completions.create(model=MODEL, prompt=PROMPT, echo=True, max_tokens=100)
    assert "KV from prefill: hit" in completion.choices[0].text
    (decode,) = workers.exchanges("decode")
    assert (decode.body["prompt"], decode.body["echo"]) == (PROMPT, True)


def test_a_batch_is_refused_by_name(stack: Stack, workers: SimulatedWorkers) -> None:
    """The client's own exception, naming the field; no worker hears of it."""
    request_id = new_id()
    with pytest.raises(openai.BadRequestError) as refused:
        client(stack).completions.create(
            model=MODEL, prompt=["one", "two"], extra_headers={"x-request-id": request_id}
        )
    assert (refused.value.code, refused.value.param) == ("epd_bad_request", "prompt")
    assert request_id in refused.value.message
    line = stack.log_line(request_id)
    assert (line["api"], line["outcome"], line["stage"]) == ("completions", "client_error", "request")
    assert line["error"] == "epd_bad_request"
    assert workers.exchanges("render") == workers.exchanges("decode") == []


def test_an_unknown_model_is_a_404(stack: Stack) -> None:
    """The renderer's verdict on the model reaches the client as what it is."""
    with pytest.raises(openai.NotFoundError) as unknown:
        client(stack).completions.create(model="nobody-serves-this", prompt=PROMPT)
    assert unknown.value.code == "epd_render_rejected"
