"""The decode role."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import openai
import pytest

from sidecar.simulator.tokens import tokens_text
from tests.unit.simulator.simulator_caller import (
    CHAT,
    FOR_PREFILL,
    GENERATE,
    Caller,
    audio_url,
    chat,
    decode_body,
    image_url,
    prefill_body,
)

if TYPE_CHECKING:
    from sidecar.simulator import Simulator

URL = image_url()


@pytest.fixture(autouse=True)
def _usage_tells_cached_tokens(simulator: Simulator) -> None:
    simulator.config.prompt_tokens_details = True


async def _prefilled(caller: Caller, *urls: str) -> dict[str, Any]:
    rendered = await caller.render(chat(*urls))
    body = prefill_body(rendered, form="kwargs_data") if urls else _text_prefill(rendered)
    status, answer = await caller.post("prefill", GENERATE, body)
    assert status == 200
    assert isinstance(answer, dict)
    return answer


def _text_prefill(rendered: dict[str, Any]) -> dict[str, Any]:
    return {
        "token_ids": rendered["token_ids"],
        "sampling_params": {"max_tokens": 1},
        "kv_transfer_params": FOR_PREFILL,
    }


def _without_nulls(usage: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in usage.items() if value is not None}


async def _events(caller: Caller, path: str, body: dict[str, Any]) -> list[Any]:
    """The data of all events; `[DONE]` stays a string."""
    async with caller.send("decode", path, body) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        text = await response.text()
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


@pytest.mark.parametrize("connector", ["nixl", "shared"])
async def test_answer_names_what_decode_saw(simulator: Simulator, caller: Caller, connector: str) -> None:
    """The text lists every item in order, and the KV of prefill is found."""
    simulator.configure({"kv_connector": connector})
    urls = (URL, image_url(320, 200), audio_url(4000))
    prefilled = await _prefilled(caller, *urls)
    status, answer = await caller.post("decode", CHAT, decode_body(chat(*urls), prefilled))
    text = answer["choices"][0]["message"]["content"]
    tokens = answer["usage"]["prompt_tokens"]
    assert status == 200
    assert text.startswith("I see 2 images and 1 audio: 640x480 jpeg (sha256 ")
    assert text.index("640x480") < text.index("320x200 jpeg") < text.index("4000-byte wav")
    assert text.endswith(f"; prompt {tokens} tokens, KV from prefill: hit")
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == tokens
    assert answer["usage"]["total_tokens"] == tokens + answer["usage"]["completion_tokens"]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert caller.violations == []


async def test_without_prefill_the_kv_is_missed(caller: Caller) -> None:
    """An ordinary request without transfer parameters is answered, with nothing cached."""
    status, answer = await caller.post("decode", CHAT, chat())
    assert status == 200
    assert answer["choices"][0]["message"]["content"].startswith("I see no media; prompt ")
    assert answer["choices"][0]["message"]["content"].endswith("KV from prefill: miss")
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert caller.violations == []


async def test_usage_tells_no_cached_tokens_unless_enabled(simulator: Simulator, caller: Caller) -> None:
    """As without `--enable-prompt-tokens-details`: null in OpenAI answers, absent in Anthropic ones."""
    simulator.config.prompt_tokens_details = False
    _, answer = await caller.post("decode", CHAT, chat())
    assert answer["usage"]["prompt_tokens_details"] is None
    body = {"max_tokens": 1, "messages": [{"role": "user", "content": "hello"}]}
    _, answer = await caller.post("decode", "/v1/messages", body)
    assert set(answer["usage"]) == {"input_tokens", "output_tokens"}


async def test_kv_of_another_prompt_is_a_violation(caller: Caller) -> None:
    """Two images in the other order are another prompt."""
    first, second = image_url(640, 480), image_url(640, 480, colour=77)
    prefilled = await _prefilled(caller, first, second)
    _, answer = await caller.post("decode", CHAT, decode_body(chat(second, first), prefilled))
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert len(caller.violations) == 1
    assert "another prompt" in caller.violations[0]


async def test_uuid_is_part_of_the_prompt(simulator: Simulator, caller: Caller) -> None:
    """Blocks are found by media keys: the render hash as uuid hits, another uuid misses."""
    simulator.configure({"kv_connector": "shared"})
    rendered = await caller.render(chat(URL))
    await caller.post("prefill", GENERATE, prefill_body(rendered, form="kwargs_data"))
    cached = []
    for uuid in (rendered["features"]["mm_hashes"]["image"][0], "other"):
        _, answer = await caller.post("decode", CHAT, chat(URL, uuids=[uuid]))
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0)
    assert cached == [True, False]


async def test_cache_salt_isolates_tenants(simulator: Simulator, caller: Caller) -> None:
    """Blocks of one salt are not found under another."""
    simulator.configure({"kv_connector": "shared"})
    body = {"prompt": "x", "max_tokens": 1, "kv_transfer_params": FOR_PREFILL, "cache_salt": "a"}
    await caller.post("prefill", "/v1/completions", body)
    cached = []
    for salt in ("a", "b"):
        _, answer = await caller.post("decode", "/v1/completions", {"prompt": "x", "cache_salt": salt})
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0)
    assert cached == [True, False]


async def test_incomplete_remote_params_are_a_500(caller: Caller) -> None:
    """NIXL needs all remote keys."""
    body = chat(kv_transfer_params={"do_remote_prefill": True, "do_remote_decode": False})
    status, answer = await caller.post("decode", CHAT, body)
    assert (status, answer["error"]["type"]) == (500, "InternalServerError")
    assert "remote_request_id" in caller.violations[0]


async def test_unknown_remote_request_is_a_violation(caller: Caller) -> None:
    """Blocks that nobody computed."""
    prefilled = await _prefilled(caller)
    prefilled["kv_transfer_params"]["remote_request_id"] = "forged"
    status, answer = await caller.post("decode", CHAT, decode_body(chat(), prefilled))
    assert (status, answer["usage"]["prompt_tokens_details"]["cached_tokens"]) == (200, 0)
    assert len(caller.violations) == 1


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"mm_payload": "none"}, "mm_payload"),
        ({"return_mm_kwargs": False}, "return_mm_kwargs"),
        ({"ec_transfer_params": {"k": {}}}, "ec_transfer_params"),
        ({"kv_transfer_params": {"do_remote_decode": True}}, "do_remote_decode"),
    ],
)
async def test_fields_of_other_phases_are_violations(
    caller: Caller, fields: dict[str, Any], name: str
) -> None:
    """Decode gets the client's body and the KV parameters, nothing else."""
    assert (await caller.post("decode", CHAT, chat(**fields)))[0] == 200
    assert len(caller.violations) == 1
    assert name in caller.violations[0]


async def test_chat_stream(caller: Caller) -> None:
    """Role first, then words, a finish reason, the usage, and the end mark."""
    whole = (await caller.post("decode", CHAT, chat(URL)))[1]
    events = await _events(caller, CHAT, chat(URL, stream=True, stream_options={"include_usage": True}))
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"] == []
    assert events[-2]["usage"] == _without_nulls(whole["usage"])
    chunks = events[:-2]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == whole["choices"][0]["message"]["content"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert not any("kv_transfer_params" in chunk for chunk in chunks)


async def test_stream_without_usage(caller: Caller) -> None:
    """The usage chunk comes only when asked for."""
    events = await _events(caller, CHAT, chat(stream=True))
    assert all("usage" not in event for event in events[:-1])


async def test_several_choices(caller: Caller) -> None:
    """`n` answers as many times, streamed and whole."""
    _, answer = await caller.post("decode", CHAT, chat(n=3))
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    events = await _events(caller, CHAT, chat(n=3, stream=True))
    texts = ["", "", ""]
    for event in events[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == [choice["message"]["content"] for choice in answer["choices"]]


async def test_token_limit_cuts_the_answer(caller: Caller) -> None:
    """The answer ends with `length` after the tokens asked for."""
    _, answer = await caller.post("decode", CHAT, chat(max_completion_tokens=2, max_tokens=50))
    assert answer["choices"][0]["message"]["content"] == "I see "
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 2


async def test_completions(caller: Caller) -> None:
    """A prompt of text or tokens, whole and streamed."""
    body = {"model": "simulated-vl", "prompt": [1, 2, 3], "max_tokens": 50}
    status, answer = await caller.post("decode", "/v1/completions", body)
    assert (status, answer["object"], answer["usage"]["prompt_tokens"]) == (200, "text_completion", 3)
    events = await _events(caller, "/v1/completions", body | {"stream": True})
    text = "".join(event["choices"][0]["text"] for event in events[:-1])
    assert text == answer["choices"][0]["text"]
    assert events[-2]["choices"][0]["finish_reason"] == "stop"


async def test_generate_answers_in_tokens(caller: Caller) -> None:
    """Token ids read back as the text, whole and streamed."""
    rendered = await caller.render(chat(URL))
    prefilled = (await caller.post("prefill", GENERATE, prefill_body(rendered, form="kwargs_data")))[1]
    body = decode_body(prefill_body(rendered, form="kwargs_data"), prefilled) | {"sampling_params": {}}
    _, answer = await caller.post("decode", GENERATE, body)
    text = tokens_text(answer["choices"][0]["token_ids"])
    assert "640x480 jpeg" in text
    assert text.endswith("KV from prefill: hit")
    events = await _events(
        caller, GENERATE, body | {"stream": True, "stream_options": {"include_usage": True}}
    )
    streamed = [
        token for event in events[:-1] for choice in event["choices"] for token in choice["token_ids"]
    ]
    assert tokens_text(streamed) == text
    assert events[-2]["usage"] == _without_nulls(answer["usage"])
    assert caller.violations == []


async def test_metadata_only_without_kv_kills_the_engine(caller: Caller) -> None:
    """Decode has no encoder output to fall back to."""
    rendered = await caller.render(chat(URL))
    body = prefill_body(rendered, form="mm_metadata", descriptors={"x": {}})
    body |= {"kv_transfer_params": None, "sampling_params": {}}
    assert (await caller.post("decode", GENERATE, body))[0] == 500
    assert len(caller.fatal) == 1


async def test_responses(caller: Caller) -> None:
    """The Responses shape, whole and as named events."""
    body = {"model": "simulated-vl", "input": "hello"}
    _, answer = await caller.post("decode", "/v1/responses", body)
    text = answer["output"][0]["content"][0]["text"]
    assert (answer["object"], answer["status"]) == ("response", "completed")
    events = await _events(caller, "/v1/responses", body | {"stream": True})
    assert (events[0]["type"], events[-1]["type"]) == ("response.created", "response.completed")
    order = list(dict.fromkeys(event["type"].removeprefix("response.") for event in events))
    assert order == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == text == events[-1]["response"]["output"][0]["content"][0]["text"]


async def test_response_that_was_cut(caller: Caller) -> None:
    """A limit leaves the response incomplete and is repeated in it."""
    body = {"input": "hello", "max_output_tokens": 2, "temperature": 0}
    _, answer = await caller.post("decode", "/v1/responses", body)
    assert (answer["status"], answer["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    assert (answer["max_output_tokens"], answer["temperature"], answer["top_p"]) == (2, 0, 1.0)


async def test_messages(caller: Caller) -> None:
    """The Anthropic shape, whole and as named events."""
    body = {
        "model": "simulated-vl",
        "max_tokens": 3,
        "messages": [{"role": "user", "content": "hello"}],
    }
    _, answer = await caller.post("decode", "/v1/messages", body)
    assert (answer["type"], answer["stop_reason"]) == ("message", "max_tokens")
    events = await _events(caller, "/v1/messages", body | {"stream": True})
    deltas = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(deltas) == answer["content"][0]["text"]
    assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop")


async def test_unknown_model_and_wrong_bodies(caller: Caller) -> None:
    """Errors come in vLLM's shape, also for a body that is no JSON."""
    assert (await caller.post("decode", CHAT, chat() | {"model": "x"}))[0] == 404
    assert (await caller.post("decode", CHAT, chat(n=0)))[0] == 400
    assert (await caller.post("decode", CHAT, chat(n=129)))[0] == 400
    assert (await caller.post("decode", "/v1/completions", {"prompt": ["a", "b"]}))[0] == 400
    url = caller.simulator.url("decode") + CHAT
    for raw, param in ((b"{broken", "body.1"), (b"[1]", "body"), (b"\xff", "body"), (b"", "body")):
        async with caller.session.post(url, data=raw, headers={"EPP-Profile": "decode"}) as response:
            assert response.status == 400
            error = (await response.json())["error"]
            assert (error["type"], error["param"]) == ("Bad Request", param)


async def test_probe_is_answered_only_from_known_prompts(simulator: Simulator, caller: Caller) -> None:
    """`Prefer: if-available` gets 412 until prefill computed the prompt."""
    simulator.configure({"kv_connector": "shared"})
    probe = {"Prefer": "if-available"}
    assert (await caller.post("decode", CHAT, chat(), **probe))[0] == 412
    await _prefilled(caller)
    assert (await caller.post("decode", CHAT, chat(), **probe))[0] == 200


async def test_openai_client_understands_the_answers(caller: Caller) -> None:
    """The official client reads chat and Responses answers, whole and streamed."""
    client = openai.AsyncOpenAI(
        base_url=caller.simulator.url("decode") + "/v1",
        api_key="unused",
        default_headers={"EPP-Profile": "decode"},
        max_retries=0,
    )
    async with client:
        body = chat(URL)
        whole = await client.chat.completions.create(**body)
        text = whole.choices[0].message.content
        assert text
        stream = await client.chat.completions.create(**body, stream=True)
        deltas = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(deltas) == text
        response = await client.responses.create(model="simulated-vl", input="hello")
        events = await client.responses.create(model="simulated-vl", input="hello", stream=True)
        pieces = [event.delta async for event in events if event.type == "response.output_text.delta"]
        assert "".join(pieces) == response.output_text
    assert caller.violations == []
