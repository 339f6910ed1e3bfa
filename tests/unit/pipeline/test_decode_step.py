from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.pipeline.pipeline_support import (
    HASHES,
    PHASE_TOKEN,
    REQUEST_ID,
    TRACEPARENT,
    Deployment,
    answer,
    chat,
    image,
    rendered,
    rendered_text,
    two_images,
)

ANSWER = (
    b'{"choices":[],"kv_transfer_params":{"do_remote_prefill":false,"remote_block_ids":[[1,2]],'
    b'"remote_engine_id":"e","remote_host":"10.0.0.2","remote_port":5600,"remote_request_id":"r\\u0031",'
    b'"tp_size":1,"remote_blocks_expiry_time":1.50E+3,"future":{"a":null}}}'
)


@pytest.mark.parametrize("openai", [True, False])
async def test_decode_is_the_clients_body_with_uuids_and_transfer_parameters(*, openai: bool) -> None:
    """Uncapped, streamed as the client asked, every member as sent; only uuids and kv parameters are new."""
    body = two_images(
        stream=True,
        stream_options={"include_usage": True},
        max_tokens=500,
        min_tokens=5,
        n=2,
        logprobs=True,
        response_format={"type": "json_object"},
        tool_choice="required",
        cache_salt="s",
        unknown=[1.0],
    )
    deployment = Deployment(openai=openai, prefill=answer(ANSWER))
    decode = await deployment.decode(body)
    expected = json.loads(json.dumps(body))
    for part, name in zip(expected["messages"][0]["content"][1:], HASHES, strict=False):
        part["uuid"] = name
    expected["kv_transfer_params"] = json.loads(ANSWER)["kv_transfer_params"] | {
        "do_remote_decode": False,
        "do_remote_prefill": True,
    }
    assert decode == expected


async def test_prefills_parameters_are_handed_on_verbatim() -> None:
    """Numbers and strings of the answer keep their spelling; members nobody knows are kept."""
    deployment = Deployment(prefill=answer(ANSWER))
    text = b"".join((await deployment.run(two_images())).body)
    assert b'"remote_request_id":"r\\u0031","tp_size":1,"remote_blocks_expiry_time":1.50E+3' in text
    assert b'"future":{"a":null}' in text


@pytest.mark.parametrize("params", [None, ..., [], "x", 7, True])
async def test_an_answer_without_parameters(params: Any) -> None:
    """Anything but an object is no answer: with kv-nixl decode computes the prompt itself."""
    prefill = {} if params is ... else {"kv_transfer_params": params}
    nixl = Deployment(prefill=prefill)
    assert "kv_transfer_params" not in await nixl.decode(two_images())
    shared = Deployment(prefill=prefill, kv="kv-shared-storage")
    assert (await shared.decode(two_images()))["kv_transfer_params"] == {
        "do_remote_decode": False,
        "do_remote_prefill": True,
    }


async def test_shared_storage_sends_just_the_flags() -> None:
    """What prefill answered is not for decode when the store is shared."""
    deployment = Deployment(prefill=answer(ANSWER), kv="kv-shared-storage")
    assert (await deployment.decode(two_images()))["kv_transfer_params"] == {
        "do_remote_decode": False,
        "do_remote_prefill": True,
    }


@pytest.mark.parametrize("field", ["mm_processor_kwargs", "media_io_kwargs"])
@pytest.mark.parametrize(("value", "stamped"), [({}, False), ({"max_pixels": 1}, False), (None, True)])
async def test_processor_kwargs_decide_about_the_uuids(field: str, value: Any, *, stamped: bool) -> None:
    """A worker would hash the uuid again with the kwargs and miss: then no part carries one."""
    decode = await Deployment().decode(two_images(**{field: value}))
    uuids = [part.get("uuid") for part in decode["messages"][0]["content"]]
    assert uuids == ([None, *HASHES[:2]] if stamped else [None] * 3)
    assert decode[field] == value


async def test_a_clients_uuid_never_reaches_decode() -> None:
    """Stamped or not, the uuid is never the client's."""
    bodies: list[dict[str, Any]] = [{}, {"mm_processor_kwargs": {}}]
    for members in bodies:
        body = chat(image("AAAA") | {"uuid": "../x"}, image("BBBB") | {"uuid": "../x"}, **members)
        assert "../x" not in json.dumps(await Deployment().decode(body))


async def test_decode_has_neither_encoder_nor_renderer_fields() -> None:
    """Descriptors, features and token ids belong to the phases before."""
    decode = await Deployment(render=rendered()).decode(two_images(mm_payload="none"))
    assert not {"ec_transfer_params", "features", "token_ids", "content_parts", "mm_payload"} & set(decode)


async def test_headers_of_decode() -> None:
    """Phase, identity and hop guard are set, control headers of the client removed, the token left out."""
    deployment = Deployment(
        render=rendered_text(),
        phase_token=PHASE_TOKEN,
        headers=(("prefer", "if-available"), ("x-prefiller-url", "http://10.6.6.6"), ("x-tenant", "t")),
    )
    rewrite = await deployment.run(chat({"type": "text", "text": "hi"}))
    assert dict(rewrite.set_headers) == {
        "epp-profile": "decode",
        "x-request-id": REQUEST_ID,
        "traceparent": TRACEPARENT,
        "x-epd-hop": "1",
    }
    assert set(rewrite.remove_headers) == {"prefer", "x-prefiller-url"}


async def test_without_prefill_there_are_no_transfer_parameters() -> None:
    """A pipeline without a prefill step leaves the KV cache to decode."""
    deployment = Deployment(steps=("render", "decode"))
    assert "kv_transfer_params" not in await deployment.decode(two_images())
