"""A responses request through the whole pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from sidecar.api.responses import ResponsesApi
from sidecar.errors import BadRequest, StepFailed
from tests.unit.pipeline.api_deployment import ApiDeployment
from tests.unit.pipeline.pipeline_support import (
    GRIDS,
    HASHES,
    TOKEN_IDS,
    answer,
    descriptor,
    rendered,
    rendered_text,
    sent,
)

if TYPE_CHECKING:
    from sidecar.upstream.client import Answer, Call

TEXT = {"type": "input_text", "text": "compare"}
COVERED = {HASHES[0]: descriptor(GRIDS[0]), HASHES[1]: descriptor(GRIDS[1])}
NO_TENSORS: dict[str, Any] = {"kwargs_data": None}


def image(name: str, **members: Any) -> dict[str, Any]:
    return {"type": "input_image", "image_url": f"data:image/png;base64,{name}", **members}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def conversation(first: dict[str, Any], second: dict[str, Any]) -> list[dict[str, Any]]:
    """One image in a message, one in what a tool answered."""
    return [
        user(first, TEXT),
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": [TEXT, second]},
    ]


def asking(value: Any = None, **members: Any) -> dict[str, Any]:
    value = conversation(image("AAAA"), image("BBBB")) if value is None else value
    return {"model": "m", "input": value, "max_output_tokens": 50, **members}


def encode_by_uuid(call: Call) -> Answer:
    """An encoder that names its descriptor by the part's uuid."""
    body = sent(call)
    if "content_parts" in body:
        key = body["content_parts"][0]["uuid"]
    elif "features" in body:
        key = body["features"]["mm_hashes"]["image"][0]
    else:
        key = body["input"][0]["content"][0].get("uuid", "invented")
    return answer({"output": [], "ec_transfer_params": {key: COVERED.get(key, descriptor(GRIDS[0]))}})


def deployment(**settings: Any) -> ApiDeployment:
    return ApiDeployment(api=ResponsesApi(), encode=encode_by_uuid, **settings)


STAMPED = conversation(image("AAAA", uuid=HASHES[0]), image("BBBB", uuid=HASHES[1]))


async def test_in_the_openai_format_every_leg_speaks_the_clients_api() -> None:
    """Render, one encode per image, prefill and decode: capped, unstored and unstreamed but for decode."""
    epd = deployment(openai=True)
    decode = await epd.decode(asking(stream=True, store=True, instructions="be brief"))
    assert [call.path for call in epd.renderer.calls] == ["/v1/responses/render"]
    assert {call.path for call in epd.gateway.calls} == {"/v1/responses"}
    capped = {"max_output_tokens": 1, "stream": False, "store": False}
    assert [sent(call) for call in epd.encodes] == [
        {"model": "m", "input": [user(image(name, uuid=key))], **capped}
        for name, key in (("AAAA", HASHES[0]), ("BBBB", HASHES[1]))
    ]
    prefill = epd.prefill_body
    assert prefill.pop("ec_transfer_params") == COVERED
    assert prefill.pop("kv_transfer_params")["do_remote_decode"] is True
    assert prefill == asking(STAMPED, instructions="be brief") | capped
    assert decode.pop("kv_transfer_params") == {
        "remote_host": "10.0.0.2",
        "do_remote_decode": False,
        "do_remote_prefill": True,
    }
    assert decode == asking(STAMPED, stream=True, store=True, instructions="be brief")


@pytest.mark.parametrize(
    ("mm_payload", "features", "encode_form"),
    [("tensors", {}, "features"), ("none", NO_TENSORS, "content_parts")],
)
async def test_in_the_generate_format_the_media_travel_by_hash(
    mm_payload: str, features: dict[str, Any], encode_form: str
) -> None:
    """Encode and prefill take tokens; decode is the client's body with the hashes as uuids."""
    epd = deployment(mm_payload=mm_payload, render=rendered(**features))
    decode = await epd.decode(asking(cache_salt="s"))
    assert {call.path for call in epd.gateway.calls} == {"/inference/v1/generate"}
    assert (epd.record.encode_form, epd.record.prefill_form) == (encode_form, "mm_metadata")
    assert (epd.prefill_body["token_ids"], epd.prefill_body["cache_salt"]) == (TOKEN_IDS, "s")
    assert sorted(epd.prefill_body["ec_transfer_params"]) == sorted(COVERED)
    assert decode["input"] == STAMPED
    assert "ec_transfer_params" not in decode
    assert "mm_payload" not in epd.prefill_body | decode


async def test_uncovered_images_travel_as_content_parts_under_their_hash() -> None:
    """Without descriptors the whole request sends its images again, each by its data URL."""
    epd = deployment(mm_payload="none", render=rendered(**NO_TENSORS), ec="ec-shared-storage")
    await epd.run(asking())
    assert epd.prefill_body["content_parts"] == [
        {"type": "image_url", "url": image(name)["image_url"], "uuid": key}
        for name, key in (("AAAA", HASHES[0]), ("BBBB", HASHES[1]))
    ]


@pytest.mark.parametrize("openai", [True, False])
async def test_a_clients_uuid_is_replaced_by_the_hash(*, openai: bool) -> None:
    """No upstream sees the client's name for an image, the renderer sees none."""
    epd = deployment(openai=openai)
    own = conversation(image("AAAA", uuid="../x"), image("BBBB", uuid="../x"))
    decode = await epd.decode(asking(own))
    assert sent(epd.renderer.calls[0])["input"] == conversation(image("AAAA"), image("BBBB"))
    assert decode["input"] == STAMPED
    assert "../x" not in str([sent(call) for call in epd.gateway.calls])


async def test_processor_kwargs_leave_the_uuids_off() -> None:
    """An engine would hash a uuid again with the kwargs: all three legs do without, or none."""
    epd = deployment(openai=True)
    body = asking(mm_processor_kwargs={"max_pixels": 9})
    assert (await epd.decode(body))["input"] == body["input"]
    assert epd.prefill_body["input"] == body["input"]
    for call in epd.encodes:
        assert "uuid" not in sent(call)["input"][0]["content"][0]
        assert sent(call)["mm_processor_kwargs"] == {"max_pixels": 9}


async def test_equal_images_are_encoded_once() -> None:
    """Two places, one hash, one encode call."""
    twice = rendered(
        [1, 10, 7, 7, 7, 7, 11, 7, 7, 7, 7, 12],
        mm_hashes={"image": [HASHES[0]] * 2},
        mm_placeholders={"image": [{"offset": 2, "length": 4}, {"offset": 7, "length": 4}]},
    )
    epd = deployment(openai=True, render=twice)
    decode = await epd.decode(asking(conversation(image("AAAA"), image("AAAA"))))
    assert len(epd.encodes) == 1
    stamped = image("AAAA", uuid=HASHES[0])
    assert decode["input"] == conversation(stamped, stamped)


@pytest.mark.parametrize("openai", [True, False])
async def test_text_is_not_encoded(*, openai: bool) -> None:
    """A plain string goes through render and prefill only."""
    epd = deployment(openai=openai, render=rendered_text())
    decode = await epd.decode(asking("hello"))
    assert (epd.encodes, decode["input"], epd.record.media) == ([], "hello", "")
    assert (epd.record.encode_form, epd.record.prefill_form) == ("skipped", "openai" if openai else "tokens")


async def test_the_record_counts_images_wherever_they_stand() -> None:
    """Messages and tool outputs count alike."""
    epd = deployment(openai=True)
    await epd.run(asking(stream=True))
    record = epd.record
    assert (record.api, record.model, record.stream, record.media) == ("responses", "m", True, "image:2")
    assert (record.encode_form, record.encode_requests, record.prefill_form) == ("openai", 2, "openai")


async def test_without_a_render_step_nothing_is_stamped() -> None:
    """There is no hash to name an image by; every image is encoded and prefill has the descriptors."""
    epd = deployment(openai=True, steps=("encode", "prefill", "decode"))
    body = asking()
    assert (await epd.decode(body))["input"] == body["input"]
    assert len(epd.encodes) == 2
    assert list(epd.prefill_body["ec_transfer_params"]) == ["invented"]


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": {"id": "c"}}, "conversation"),
        ({"background": True}, "background"),
        ({"input": None}, "input"),
        ({"input": [user({"type": "input_image", "file_id": "f"})]}, "input[0].content[0].file_id"),
    ],
)
async def test_a_refused_request_reaches_no_upstream(members: dict[str, Any], param: str) -> None:
    """What the phases cannot see alike is a 400 that names the field, before any call."""
    epd = deployment()
    with pytest.raises(BadRequest) as refused:
        await epd.run(asking(**members))
    assert refused.value.param == param
    assert (epd.renderer.calls, epd.gateway.calls) == ([], [])
    assert epd.record.api == "responses"


async def test_an_unknown_part_that_became_media_is_the_clients_fault() -> None:
    """A renderer that placed more items than there are images: 400 with a part of unknown type, else 502."""
    epd = deployment()
    embeds = {"type": "image_embeds", "image_embeds": "AAAA"}
    with pytest.raises(BadRequest, match="image_embeds"):
        await epd.run(asking([user(image("AAAA"), embeds)]))
    with pytest.raises(StepFailed):
        await epd.run(asking([user(image("AAAA"), TEXT)]))
    assert epd.gateway.calls == []
