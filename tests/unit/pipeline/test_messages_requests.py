"""A messages request through the whole pipeline."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

import pytest

from sidecar.api.messages import MessagesApi
from sidecar.errors import BadRequest, StepFailed
from tests.unit.pipeline.media_deployment import MediaDeployment
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

TEXT = {"type": "text", "text": "compare"}
GRID_OF = {HASHES[0]: GRIDS[0], HASHES[1]: GRIDS[1]}
NO_TENSORS: dict[str, Any] = {"kwargs_data": None}
URL = "https://cdn.example/a.png"
PNG = b"\x89PNG" + bytes(range(200))
PNG_URI = "data:image/png;base64," + base64.b64encode(PNG).decode()


def by_data(data: str, media_type: str = "image/png", **members: Any) -> dict[str, Any]:
    return {
        "type": "image",
        "source": {"type": "base64", "media_type": media_type, "data": data},
        **members,
    }


def by_url(url: str, **members: Any) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "url", "url": url}, **members}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def conversation(nested: dict[str, Any], own: dict[str, Any]) -> list[dict[str, Any]]:
    """One image of the user's own, and ahead of it in the prompt one in what a tool answered."""
    return [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
        user(own, {"type": "tool_result", "tool_use_id": "t", "content": [TEXT, nested]}, TEXT),
    ]


def asking(messages: Any = None, **members: Any) -> dict[str, Any]:
    messages = conversation(by_data("AAAA"), by_data("BBBB")) if messages is None else messages
    return {"model": "m", "messages": messages, "max_tokens": 500, **members}


def encode(call: Call) -> Answer:
    """An encoder that hashes a bare image itself and takes the uuid of any other item."""
    body = sent(call)
    if "messages" in body:
        (block,) = body["messages"][0]["content"]
        key = {"AAAA": HASHES[0], "BBBB": HASHES[1]}.get(block["source"].get("data"), HASHES[0])
    elif "content_parts" in body:
        key = body["content_parts"][0]["uuid"]
    else:
        key = body["features"]["mm_hashes"]["image"][0]
    return answer({"content": [], "ec_transfer_params": {key: descriptor(GRID_OF[key])}})


def deployment(**settings: Any) -> MediaDeployment:
    chosen: dict[str, Any] = {"api": MessagesApi(), "encode": encode, **settings}
    return MediaDeployment(**chosen)


def one_image(**features: Any) -> dict[str, Any]:
    placed: dict[str, Any] = {
        "mm_hashes": {"image": [HASHES[0]]},
        "mm_placeholders": {"image": [{"offset": 2, "length": 4}]},
        "kwargs_data": {"image": ["dDA="]},
    }
    return rendered(**placed | features)


async def test_in_the_clients_format_every_leg_speaks_the_clients_api() -> None:
    """Render, one encode per image, prefill and decode; capped and unstreamed but for decode."""
    epd = deployment(openai=True)
    shaping = {"system": "be brief", "thinking": {"type": "enabled", "budget_tokens": 1024}}
    body = asking(stream=True, tools=[{"name": "f", "input_schema": {}}], **shaping)
    forced = {"tool_choice": {"type": "tool", "name": "f"}}
    decode = await epd.decode(body | forced)
    assert [call.path for call in epd.renderer.calls] == ["/v1/messages/render"]
    assert sent(epd.renderer.calls[0]) == body | forced
    assert {call.path for call in epd.gateway.calls} == {"/v1/messages"}
    capped = {"max_tokens": 1, "stream": False}
    assert [sent(call) for call in epd.encodes] == [
        {"model": "m", "messages": [user(by_data(name))], **capped} for name in ("AAAA", "BBBB")
    ]
    prefill = epd.prefill_body
    assert list(prefill.pop("ec_transfer_params")) == list(HASHES[:2])
    # With it engines accept the thinking budget next to one token.
    assert prefill.pop("kv_transfer_params")["do_remote_decode"] is True
    assert prefill == body | capped | {"tool_choice": {"type": "auto"}}
    assert decode.pop("kv_transfer_params") == {
        "remote_host": "10.0.0.2",
        "do_remote_decode": False,
        "do_remote_prefill": True,
    }
    assert decode == body | forced


@pytest.mark.parametrize(
    ("mm_payload", "features", "encode_form"),
    [("tensors", {}, "features"), ("none", NO_TENSORS, "content_parts")],
)
async def test_in_the_generate_format_the_media_travel_by_hash(
    mm_payload: str, features: dict[str, Any], encode_form: str
) -> None:
    """Encode and prefill take tokens; decode is the client's body, with no uuid anywhere."""
    epd = deployment(mm_payload=mm_payload, render=rendered(**features))
    decode = await epd.decode(asking(cache_salt="s"))
    assert {call.path for call in epd.gateway.calls} == {"/inference/v1/generate"}
    assert (epd.record.encode_form, epd.record.prefill_form) == (encode_form, "mm_metadata")
    assert (epd.prefill_body["token_ids"], epd.prefill_body["cache_salt"]) == (TOKEN_IDS, "s")
    assert decode.pop("kv_transfer_params")
    assert decode == asking(cache_salt="s")


async def test_entries_pair_with_images_in_the_order_engines_place_them() -> None:
    """The first placeholder is the nested image's: its hash goes with its data, whatever stands first."""
    epd = deployment(mm_payload="none", render=rendered(**NO_TENSORS), ec="ec-shared-storage")
    await epd.run(asking(conversation(by_data("AAAA", "image/webp"), by_data("BBBB"))))
    assert epd.prefill_body["content_parts"] == [
        {"type": "image_url", "url": "data:image/webp;base64,AAAA", "uuid": HASHES[0]},
        {"type": "image_url", "url": "data:image/png;base64,BBBB", "uuid": HASHES[1]},
    ]
    assert [sent(call)["content_parts"] for call in epd.encodes] == [
        [part] for part in epd.prefill_body["content_parts"]
    ]


@pytest.mark.parametrize("openai", [True, False])
async def test_a_download_takes_the_place_of_its_url(*, openai: bool) -> None:
    """Every leg that carries the image gets its data URI as the URL of the same source."""
    epd = deployment(openai=openai, render=one_image(**NO_TENSORS), mm_payload="none")
    epd.media = {URL: ("image/png", PNG)}
    body = [user(by_url(URL, cache_control={"type": "ephemeral"}), TEXT)]
    decode = await epd.decode(asking(body))
    assert epd.downloads.fetched == [URL]
    inlined = [user(by_url(PNG_URI, cache_control={"type": "ephemeral"}), TEXT)]
    assert decode["messages"] == inlined
    assert sent(epd.renderer.calls[0])["messages"] == inlined
    (encoded,) = epd.encodes
    if openai:
        assert epd.prefill_body["messages"] == inlined
        assert sent(encoded)["messages"] == [user(by_url(PNG_URI, cache_control={"type": "ephemeral"}))]
    else:
        assert sent(encoded)["content_parts"] == [{"type": "image_url", "url": PNG_URI, "uuid": HASHES[0]}]


async def test_inline_data_are_made_plain() -> None:
    """Escapes in base64 data, and a data URI that is spelt oddly, reach every leg in canonical form."""
    epd = deployment(openai=True)
    head = b'{"model":"m","messages":[{"role":"user","content":['
    odd = (
        rb'{"type":"image","source":{"type":"base64","media_type":"image/png","data":"AA\/A"}},'
        rb'{"type":"image","source":{"type":"url","url":"DATA:image/PNG;x=y;base64,BBBB"}}]}]}'
    )
    decode = await epd.decode(head + odd)
    assert decode["messages"] == [user(by_data("AA/A"), by_url("data:image/png;base64,BBBB"))]
    assert epd.downloads.fetched == []


@pytest.mark.parametrize(
    ("block", "named"),
    [
        (by_data("AAAA", "image/svg+xml"), "image format 'image/svg+xml' is not allowed"),
        (
            by_data("AAAA", "IMAGE/PNG"),
            "allowed here: image/gif, image/jpeg, image/jpg, image/png, image/webp",
        ),
        (by_data("AAAA", "audio/wav"), "'audio/wav'"),
        (by_data("AAAA", "png"), "'png'"),
        (by_data("AAAA", "image/png;base64,X"), "not allowed"),
        (by_data("A*AA"), "base64"),
        (by_data("AAA"), "multiple of 4"),
        (by_data("data:image/png;base64,AAAA"), "base64"),
        (by_url("data:image/svg+xml;base64,AAAA"), "image/svg+xml"),
        (by_url("data:image/png;base64,A*AA"), "base64"),
        (by_url("file:///etc/passwd"), "http"),
        (by_url("/a.png"), "http"),
    ],
)
@pytest.mark.parametrize("nested", [True, False])
async def test_bad_images_are_refused_by_place(block: Any, named: str, *, nested: bool) -> None:
    """A bad image is a 400 that names its place, before any call."""
    epd = deployment()
    good = by_data("AAAA")
    with pytest.raises(BadRequest) as refused:
        await epd.run(asking(conversation(block, good) if nested else conversation(good, block)))
    place = "messages[2].content[1].content[1]: " if nested else "messages[2].content[0]: "
    assert refused.value.message.startswith(place)
    assert named in refused.value.message
    assert (epd.renderer.calls, epd.gateway.calls) == ([], [])


@pytest.mark.parametrize("openai", [True, False])
async def test_a_clients_uuid_reaches_no_upstream(*, openai: bool) -> None:
    """Neither the renderer nor a worker sees the client's name for an image."""
    epd = deployment(openai=openai)
    own = conversation(by_data("AAAA", uuid="../x"), by_data("BBBB", uuid="../x"))
    decode = await epd.decode(asking(own))
    assert decode["messages"] == conversation(by_data("AAAA"), by_data("BBBB"))
    calls = [*epd.renderer.calls, *epd.gateway.calls]
    assert "../x" not in str([sent(call) for call in calls])


@pytest.mark.parametrize("openai", [True, False])
async def test_text_is_not_encoded(*, openai: bool) -> None:
    """A conversation without images goes through render and prefill only."""
    epd = deployment(openai=openai, render=rendered_text())
    messages = [{"role": "user", "content": "hello"}]
    decode = await epd.decode(asking(messages))
    assert (epd.encodes, decode["messages"], epd.record.media) == ([], messages, "")
    assert epd.record.encode_form == "skipped"


async def test_the_record_counts_images_wherever_they_stand() -> None:
    """A user's own images and those of tool results count alike."""
    epd = deployment()
    await epd.run(asking(stream=True))
    record = epd.record
    assert (record.api, record.model, record.stream, record.media) == ("messages", "m", True, "image:2")


@pytest.mark.parametrize(
    ("block", "kind"),
    [
        ({"type": "document", "source": {"type": "url", "url": "http://d"}}, "document"),
        ({"type": "image", "source": {"type": "file", "file_id": "f"}}, "image from file"),
    ],
)
async def test_an_unknown_block_that_became_media_is_the_clients_fault(block: Any, kind: str) -> None:
    """A renderer that placed more items than there are images: 400 with an unknown block, else 502."""
    epd = deployment()
    with pytest.raises(BadRequest, match=kind):
        await epd.run(asking([user(by_data("AAAA"), block)]))
    with pytest.raises(StepFailed):
        await epd.run(asking([user(by_data("AAAA"), TEXT)]))
    assert epd.gateway.calls == []


@pytest.mark.parametrize(
    "block",
    [
        {"type": "document", "source": {"type": "text", "data": "x"}},
        {"type": "image", "source": {"type": "file", "media_type": "image/png", "data": "AAAA"}},
    ],
)
async def test_an_unknown_block_is_refused_before_anything_leaves(block: dict[str, Any]) -> None:
    """A renderer may take it for media, past the checks of this API."""
    epd = deployment(openai=True)
    with pytest.raises(BadRequest):
        await epd.decode(asking([user(by_data("AAAA"), block, by_data("BBBB"))]))
    assert epd.renderer.calls == []
