"""The prefill role."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.simulator.simulator_caller import (
    CHAT,
    FOR_PREFILL,
    GENERATE,
    IMAGE_PAD,
    Caller,
    chat,
    image_url,
    prefill_body,
)

if TYPE_CHECKING:
    from sidecar.simulator import Simulator

URL = image_url()
NIXL_KEYS = {
    "do_remote_prefill", "do_remote_decode", "remote_block_ids", "remote_engine_id", "remote_request_id",
    "remote_host", "remote_port", "tp_size", "remote_num_tokens",
}  # fmt: skip


async def _encoded(caller: Caller, url: str = URL) -> tuple[dict[str, Any], dict[str, Any]]:
    """A render answer, and the descriptors of its only image."""
    rendered = await caller.render(chat(url))
    (key,) = rendered["features"]["mm_hashes"]["image"]
    return rendered, await caller.encode(url, key)


async def test_metadata_only_with_descriptors(caller: Caller) -> None:
    """The cheapest form: metadata and descriptors, with nothing to complain about."""
    rendered, descriptors = await _encoded(caller)
    body = prefill_body(rendered, form="mm_metadata", descriptors=descriptors)
    status, answer = await caller.post("prefill", GENERATE, body)
    assert status == 200
    assert set(answer["kv_transfer_params"]) > NIXL_KEYS
    assert answer["kv_transfer_params"]["remote_num_tokens"] == len(rendered["token_ids"])
    assert answer["usage"]["prompt_tokens"] == len(rendered["token_ids"])
    assert caller.violations == []


async def test_tensors_need_no_descriptors(caller: Caller) -> None:
    """With kwargs_data the engine encodes by itself."""
    rendered = await caller.render(chat(URL))
    status, answer = await caller.post("prefill", GENERATE, prefill_body(rendered, form="kwargs_data"))
    assert (status, caller.violations) == (200, [])
    assert answer["kv_transfer_params"]["do_remote_prefill"] is True


async def test_content_parts_with_collapsed_ids(caller: Caller) -> None:
    """One placeholder per item expands to the rendered prompt."""
    rendered = await caller.render(chat(URL))
    (span,) = rendered["features"]["mm_placeholders"]["image"]
    tokens = rendered["token_ids"]
    collapsed = [*tokens[: span["offset"]], IMAGE_PAD, *tokens[span["offset"] + span["length"] :]]
    body = _content_parts(collapsed)
    status, answer = await caller.post("prefill", GENERATE, body)
    assert (status, caller.violations) == (200, [])
    assert answer["usage"]["prompt_tokens"] == len(tokens)


async def test_expanded_ids_with_content_parts_grow_the_prompt(caller: Caller) -> None:
    """VLLM accepts them and computes another prompt: a violation."""
    rendered = await caller.render(chat(URL))
    status, answer = await caller.post("prefill", GENERATE, _content_parts(rendered["token_ids"]))
    assert status == 200
    assert answer["usage"]["prompt_tokens"] > len(rendered["token_ids"])
    assert len(caller.violations) == 1
    assert "silently grow" in caller.violations[0]


def _content_parts(token_ids: list[int]) -> dict[str, Any]:
    return {
        "sampling_params": {"max_tokens": 1},
        "token_ids": token_ids,
        "content_parts": [{"type": "image_url", "url": URL, "uuid": "k"}],
        "kv_transfer_params": FOR_PREFILL,
    }


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat(URL, max_tokens=1, kv_transfer_params=FOR_PREFILL)),
        ("/v1/completions", {"prompt": [1, 2], "max_tokens": 1, "kv_transfer_params": FOR_PREFILL}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 1, "kv_transfer_params": FOR_PREFILL}),
        (
            "/v1/messages",
            {
                "messages": [{"role": "user", "content": "x"}],
                "max_tokens": 1,
                "kv_transfer_params": FOR_PREFILL,
            },
        ),
    ],
)
async def test_openai_formats(caller: Caller, path: str, body: dict[str, Any]) -> None:
    """Each client API prefills with a one-token cap of its own name."""
    status, answer = await caller.post("prefill", path, body)
    assert (status, caller.violations) == (200, [])
    assert answer["kv_transfer_params"]["remote_request_id"]


async def test_shared_storage_answers_no_params(simulator: Simulator, caller: Caller) -> None:
    """With shared storage the blocks are found by prompt, so there is nothing to answer."""
    simulator.configure({"kv_connector": "shared"})
    rendered = await caller.render(chat(URL))
    _, answer = await caller.post("prefill", GENERATE, prefill_body(rendered, form="kwargs_data"))
    assert answer["kv_transfer_params"] is None


async def test_metadata_only_without_any_descriptor_is_refused(caller: Caller) -> None:
    """Validation asks for truthy ec_transfer_params."""
    rendered = await caller.render(chat(URL))
    status, answer = await caller.post("prefill", GENERATE, prefill_body(rendered, form="mm_metadata"))
    assert status == 400
    assert "metadata-only multimodal items require ec_transfer_params" in answer["error"]["message"]
    assert (answer["error"]["type"], answer["error"]["param"]) == ("Bad Request", "body")


async def test_metadata_only_without_encoder_output_kills_the_engine(
    caller: Caller, caplog: pytest.LogCaptureFixture
) -> None:
    """It is answered like a dead engine, recorded, and logged loudly."""
    rendered = await caller.render(chat(URL))
    body = prefill_body(rendered, form="mm_metadata", descriptors={"x": {}})
    with caplog.at_level(logging.ERROR):
        status, answer = await caller.post("prefill", GENERATE, body)
    assert status == 500
    assert answer["error"]["message"].startswith("EngineCore encountered an issue")
    assert len(caller.fatal) == 1
    assert "WOULD CRASH THE ENGINE: prefill: image" in caplog.text


async def test_evicted_output_kills_the_engine(simulator: Simulator, caller: Caller) -> None:
    """A key without address and metadata is no coverage."""
    simulator.configure({"descriptors": "evicted"})
    rendered, descriptors = await _encoded(caller)
    body = prefill_body(rendered, form="mm_metadata", descriptors=descriptors)
    assert (await caller.post("prefill", GENERATE, body))[0] == 500
    assert len(caller.fatal) == 1


async def test_lost_peer_address_fails_the_request_only(caller: Caller) -> None:
    """With NIXL a descriptor that lost its address makes the output unreachable; the engine survives."""
    rendered, descriptors = await _encoded(caller)
    for descriptor in descriptors.values():
        del descriptor["peer_port"]
    body = prefill_body(rendered, form="mm_metadata", descriptors=descriptors)
    assert (await caller.post("prefill", GENERATE, body))[0] == 500
    assert (len(caller.violations), caller.fatal) == (1, [])


async def test_shared_storage_finds_outputs_by_key(simulator: Simulator, caller: Caller) -> None:
    """Plain descriptors need no address."""
    simulator.configure({"descriptors": "plain"})
    rendered, descriptors = await _encoded(caller)
    body = prefill_body(rendered, form="mm_metadata", descriptors=descriptors)
    assert (await caller.post("prefill", GENERATE, body))[0] == 200


async def test_stale_output_kills_the_engine(simulator: Simulator, caller: Caller) -> None:
    """An encoder that still knows the item announces metadata for an output that is gone."""
    simulator.configure({"descriptors": "stale"})
    rendered, descriptors = await _encoded(caller)
    assert [bool(descriptor["metadata"]) for descriptor in descriptors.values()] == [True]
    body = prefill_body(rendered, form="mm_metadata", descriptors=descriptors)
    assert (await caller.post("prefill", GENERATE, body))[0] == 500
    assert len(caller.fatal) == 1
    assert (await caller.post("prefill", GENERATE, prefill_body(rendered, form="kwargs_data")))[0] == 200


async def test_mixed_span_kills_the_engine(simulator: Simulator, caller: Caller) -> None:
    """In the features forms every token of a span needs an embedding."""
    simulator.config.sparse_spans = True
    rendered = await caller.render(chat(URL))
    status, _ = await caller.post("prefill", GENERATE, prefill_body(rendered, form="kwargs_data"))
    assert (status, len(caller.fatal)) == (500, 1)
    assert "mixes tokens" in caller.fatal[0]


async def test_mixed_span_is_safe_in_the_openai_format(simulator: Simulator, caller: Caller) -> None:
    """The engine then expands the prompt itself."""
    simulator.config.sparse_spans = True
    body = chat(URL, max_tokens=1, kv_transfer_params=FOR_PREFILL)
    assert (await caller.post("prefill", CHAT, body))[0] == 200
    assert caller.violations == []


async def test_span_that_does_not_fit_the_grid_kills_the_engine(caller: Caller) -> None:
    """Metadata of one image over the span of another."""
    rendered, descriptors = await _encoded(caller)
    other = await caller.render(chat(image_url(320, 240)))
    rendered["features"]["mm_metadata"] = other["features"]["mm_metadata"]
    body = prefill_body(rendered, form="mm_metadata", descriptors=descriptors)
    assert (await caller.post("prefill", GENERATE, body))[0] == 500
    assert len(caller.fatal) == 1


@pytest.mark.parametrize("form", ["mm_metadata", "openai"])
async def test_processor_mismatch_kills_the_engine(simulator: Simulator, caller: Caller, form: str) -> None:
    """An encoder output of another length is loaded in every form."""
    simulator.config.encode_max_pixels = 50176
    rendered, descriptors = await _encoded(caller)
    (key,) = descriptors
    fields = {"max_tokens": 1, "kv_transfer_params": FOR_PREFILL, "ec_transfer_params": descriptors}
    path, body = (
        (CHAT, chat(URL, uuids=[key], **fields))
        if form == "openai"
        else (GENERATE, prefill_body(rendered, form="mm_metadata", descriptors=descriptors))
    )
    assert (await caller.post("prefill", path, body))[0] == 500
    assert len(caller.fatal) == 1
    assert "encoder output has" in caller.fatal[0]


async def test_tensors_under_the_wrong_hash_are_noticed(caller: Caller) -> None:
    """Two images of one size with swapped tensors."""
    rendered = await caller.render(chat(URL, image_url(640, 480, colour=99)))
    rendered["features"]["kwargs_data"]["image"].reverse()
    status, _ = await caller.post("prefill", GENERATE, prefill_body(rendered, form="kwargs_data"))
    assert status == 200
    assert [("tensors of another item" in message) for message in caller.violations] == [True, True]


async def test_null_items_need_the_processor_cache(caller: Caller) -> None:
    """A key the engine processed before may come without data; an unknown one fails the request."""
    rendered = await caller.render(chat(URL))
    body = prefill_body(rendered, form="kwargs_data")
    nulled = body | {"features": body["features"] | {"kwargs_data": {"image": [None]}}}
    assert (await caller.post("prefill", GENERATE, nulled))[0] == 500
    assert (len(caller.violations), caller.fatal) == (1, [])
    assert (await caller.post("prefill", GENERATE, body))[0] == 200
    assert (await caller.post("prefill", GENERATE, nulled))[0] == 200


def _features(**changes: Any) -> dict[str, Any]:
    features = {
        "mm_hashes": {"image": ["a", "b"]},
        "mm_placeholders": {"image": [{"offset": 1, "length": 2}, {"offset": 3, "length": 2}]},
        "kwargs_data": None,
    } | changes
    return {
        "sampling_params": {"max_tokens": 1},
        "token_ids": [9, 8, 8, 8, 8],
        "features": features,
        "kv_transfer_params": FOR_PREFILL,
    }


def _spans(*spans: tuple[object, object]) -> dict[str, Any]:
    return {"image": [{"offset": offset, "length": length} for offset, length in spans]}


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (_features(mm_hashes=None), 400, "are required"),
        (
            _features(mm_hashes={"image": ["a"]}),
            400,
            "image mm_placeholders and mm_hashes must have the same length",
        ),
        (_features(mm_placeholders={"video": []}), 400, "mm_placeholders must use the same modalities"),
        (
            _features(kwargs_data={"image": [None]}),
            400,
            "image kwargs_data and mm_hashes must have the same length",
        ),
        (_features(mm_metadata={}), 400, "mm_metadata must use the same modalities"),
        (_features(mm_hashes={"image": ["a", 5]}), 400, "valid string"),
        (_features(mm_hashes=[1]), 400, "dictionary of lists"),
        (_features(mm_placeholders=_spans((1, 3), (3, 2))), 400, "non-overlapping"),
        (_features(mm_placeholders=_spans((1, 2), (3, 3))), 400, "within the token_ids sequence"),
        (_features(mm_placeholders=_spans((1, 0), (3, 2))), 400, "length > 0"),
        (_features(mm_placeholders=_spans((-1, 2), (3, 2))), 400, "offset must be >= 0"),
        (_features(mm_placeholders=_spans((1, True), (3, 2))), 400, "valid integers"),
        (_features(kwargs_data={"image": ["AAA", None]}), 400, "truncated"),
        (_features(kwargs_data={"image": [7, None]}), 400, "valid string"),
        (_features() | {"ec_transfer_params": [1]}, 400, "valid dictionary"),
        (_features() | {"kv_transfer_params": "x"}, 400, "valid dictionary"),
    ],
)
async def test_wrong_features_are_refused(
    caller: Caller, body: dict[str, Any], status: int, message: str
) -> None:
    """Maps must be complete, spans disjoint and inside the prompt, items decodable."""
    answered, answer = await caller.post("prefill", GENERATE, body)
    assert answered == status
    assert message in answer["error"]["message"]


TEXT = {"prompt": "x", "max_tokens": 1, "kv_transfer_params": FOR_PREFILL}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_transfer_params": None}, "without kv_transfer_params.do_remote_decode"),
        ({"kv_transfer_params": FOR_PREFILL | {"do_remote_prefill": True}}, "do_remote_prefill"),
        ({"stream": True}, "stream: true"),
        ({"max_tokens": 5}, "one token is enough"),
        ({"n": 2}, "2 choices"),
        ({"return_mm_kwargs": False}, "return_mm_kwargs belongs"),
        ({"sampling_params": {"extra_args": {"ec_transfer_params": {}}}}, "sampling_params.extra_args"),
    ],
)
async def test_mistakes_vllm_does_not_refuse_are_violations(
    caller: Caller, changes: dict[str, Any], message: str
) -> None:
    """What vLLM accepts without a word is recorded."""
    async with caller.send("prefill", "/v1/completions", TEXT | changes) as response:
        assert response.status == 200
    assert len(caller.violations) == 1
    assert message in caller.violations[0]


TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("path", "choice", "message"),
    [
        (CHAT, None, '"auto" tool choice requires --enable-auto-tool-choice'),
        (CHAT, "auto", '"auto" tool choice requires --enable-auto-tool-choice'),
        (CHAT, "required", 'tool_choice="required" requires --tool-call-parser'),
        (CHAT, {"type": "function", "function": {"name": "f"}}, 'tool_choice=function "f" requires'),
        (CHAT, "none", None),
        ("/v1/messages", {"type": "auto"}, '"auto" tool choice requires --enable-auto-tool-choice'),
        ("/v1/messages", {"type": "any"}, 'tool_choice="required" requires --tool-call-parser'),
        ("/v1/messages", {"type": "tool", "name": "f"}, 'tool_choice=function "f" requires'),
        ("/v1/messages", {"type": "none"}, None),
    ],
)
async def test_tool_choices_need_a_tool_parser(
    simulator: Simulator, caller: Caller, path: str, choice: object, message: str | None
) -> None:
    """A deployment without one refuses every choice but `none`; with one all are taken."""
    body = chat(max_tokens=1, tools=TOOLS, kv_transfer_params=FOR_PREFILL)
    body |= {} if choice is None else {"tool_choice": choice}
    assert (await caller.post("prefill", path, body))[0] == 200
    simulator.config.tool_parser = False
    status, answer = await caller.post("prefill", path, body)
    assert status == (400 if message else 200)
    assert message is None or message in answer["error"]["message"]


@pytest.mark.parametrize(
    ("params", "budget", "status"),
    [(None, 1, 400), ({"do_remote_decode": False}, 1, 400), (None, 0, 200), (FOR_PREFILL, 1024, 200)],
)
async def test_thinking_budget_is_below_the_limit_unless_prefilled(
    caller: Caller, params: object, budget: int, status: int
) -> None:
    """The budget of a Messages body counts only where it is going to decode."""
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 1,
        "thinking": {"type": "enabled", "budget_tokens": budget},
        "kv_transfer_params": params,
    }
    answered, answer = await caller.post("prefill", "/v1/messages", body)
    assert answered == status
    assert status == 200 or answer["error"]["param"] == "body"


@pytest.mark.parametrize(
    ("changes", "status", "document"),
    [
        ({"model": "other"}, 404, {"type": "error", "error": {"type": "NotFoundError"}}),
        (
            {"max_tokens": None},
            400,
            {"error": {"type": "Bad Request", "param": "body.max_tokens", "code": 400}},
        ),
    ],
)
async def test_messages_errors_have_two_shapes(
    caller: Caller, changes: dict[str, Any], status: int, document: dict[str, Any]
) -> None:
    """The handler speaks Anthropic's, body validation OpenAI's."""
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1} | changes
    answered, answer = await caller.post("prefill", "/v1/messages", body)
    assert answered == status
    assert answer["error"].pop("message")
    assert answer == document


@pytest.mark.parametrize(("rank", "status"), [("0", 200), ("one", 200), ("7", 400), ("-1", 400)])
async def test_an_engine_obeys_a_rank_header(caller: Caller, rank: str, status: int) -> None:
    """A rank the engine does not have is refused, and its arrival is a violation in any case."""
    answered, answer = await caller.post("prefill", "/v1/completions", TEXT, **{"x-data-parallel-rank": rank})
    assert answered == status
    assert status == 200 or answer["error"]["message"] == f"data_parallel_rank {rank} is out of range [0, 1)."
    assert len(caller.violations) == 1


async def test_prompt_is_echoed_on_request(caller: Caller) -> None:
    """`return_token_ids` shows the expanded prompt and its spans."""
    rendered = await caller.render(chat(URL))
    body = prefill_body(rendered, form="kwargs_data") | {"return_token_ids": True}
    _, answer = await caller.post("prefill", GENERATE, body)
    assert answer["prompt_token_ids"] == rendered["token_ids"]
    assert answer["mm_placeholders"] == rendered["features"]["mm_placeholders"]


async def test_wrong_mm_payload_is_refused_by_engines_too(caller: Caller) -> None:
    """Engines read the client APIs with the same types as the renderer; generate does not know the field."""
    status, answer = await caller.post("prefill", CHAT, chat(mm_payload="bogus", max_tokens=1))
    assert (status, answer["error"]["param"]) == (400, "body.mm_payload")
    body = {"token_ids": [1], "sampling_params": {"max_tokens": 1}, "mm_payload": "bogus"}
    assert (await caller.post("prefill", GENERATE, body))[0] == 200


async def test_min_tokens_above_the_cap_is_refused(caller: Caller) -> None:
    """The engine's own error for a cap that forgot min_tokens."""
    status, answer = await caller.post("prefill", "/v1/completions", TEXT | {"min_tokens": 5})
    assert status == 400
    assert "min_tokens must be less than or equal to max_tokens=1, got 5" in answer["error"]["message"]
