from __future__ import annotations

import json
from typing import Any

import pytest

from sidecar.errors import StepFailed, StepRejected
from tests.unit.pipeline.pipeline_support import (
    FORWARDED,
    GRIDS,
    HASHES,
    METADATA,
    PHASE_TOKEN,
    REQUEST_ID,
    TENSORS,
    Deployment,
    answer,
    chat,
    descriptor,
    image,
    rendered,
    rendered_text,
    sent,
    two_images,
)

COVERED = {HASHES[i]: descriptor(GRIDS[i]) for i in range(2)}
KV = (
    '"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
    '"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)
HEAD = (
    '"request_id":"req-1","model":"m","stream":false,'
    '"sampling_params":{"temperature":0.5,"max_tokens":1,"stop":[]}'
)
IDS = '"token_ids":[1,10,7,7,7,7,11,8,8,12]'
PLACED = (
    f'"mm_hashes":{{"image":["{HASHES[0]}","{HASHES[1]}"]}},'
    '"mm_placeholders":{"image":[{"offset":2,"length":4},{"offset":7,"length":2}]}'
)


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


EC = f'"ec_transfer_params":{_compact(COVERED)}'


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        pytest.param(
            {},
            f'{{{HEAD},{IDS},"features":{{{PLACED},"kwargs_data":{{"image":["{TENSORS[0]}","{TENSORS[1]}"]}}}},'
            f"{KV}}}",
            id="kwargs_data",
        ),
        pytest.param(
            {"descriptors": COVERED},
            f'{{{HEAD},{IDS},"features":{{{PLACED},"kwargs_data":null,'
            f'"mm_metadata":{{"image":["{METADATA[0]}","{METADATA[1]}"]}}}},{KV},{EC}}}',
            id="mm_metadata",
        ),
        pytest.param(
            {"mm_payload": "none", "render": rendered(kwargs_data=None)},
            f'{{{HEAD},"token_ids":[1,10,7,11,8,12],"content_parts":['
            f'{{"type":"image_url","url":"data:image/png;base64,AAAA","uuid":"{HASHES[0]}"}},'
            f'{{"type":"image_url","url":"data:image/png;base64,BBBB","uuid":"{HASHES[1]}"}}],{KV}}}',
            id="content_parts",
        ),
        pytest.param({"render": rendered_text()}, f'{{{HEAD},"token_ids":[1,2,3],{KV}}}', id="tokens"),
        pytest.param(
            {"openai": True, "descriptors": COVERED},
            f'{{"model":"m","messages":[{{"role":"user","content":[{{"type":"text","text":"compare"}},'
            f'{{"type":"image_url","image_url":{{"url":"data:image/png;base64,AAAA"}},"uuid":"{HASHES[0]}"}},'
            f'{{"type":"image_url","image_url":{{"url":"data:image/png;base64,BBBB"}},"uuid":"{HASHES[1]}"}}]}}],'
            f'"max_tokens":1,"stream":false,{KV},{EC}}}',
            id="openai",
        ),
    ],
)
async def test_bodies_byte_for_byte(settings: dict[str, Any], expected: str) -> None:
    """The whole body of each form, written out."""
    deployment = Deployment(**settings)
    text_only = settings.get("render") == rendered_text()
    await deployment.run(chat({"type": "text", "text": "hi"}) if text_only else two_images())
    (call,) = deployment.prefills
    assert b"".join(call.body).decode() == expected
    openai = settings.get("openai", False)
    assert call.path == ("/v1/chat/completions" if openai else "/inference/v1/generate")


async def test_token_ids_are_forwarded_as_the_renderer_wrote_them() -> None:
    """Expanded ids are not parsed and written again, but sent as received."""
    render = json.dumps(rendered()).replace("[1, 10, 7,", "[ 1,10, 7,").encode()
    deployment = Deployment(render=answer(render))
    await deployment.run(two_images())
    assert b'"token_ids":[ 1,10, 7, 7' in b"".join(deployment.prefills[0].body)


@pytest.mark.parametrize("openai", [True, False])
async def test_the_cap_of_one_token(*, openai: bool) -> None:
    """One token, no minimum, not streamed: in the client's members and in the renderer's sampling alike."""
    sampling = {
        "max_tokens": 900,
        "min_tokens": 5,
        "n": 2,
        "best_of": 2,
        "logprobs": 3,
        "prompt_logprobs": 1,
        "structured_outputs": {"regex": "a"},
        "guided_decoding": {"regex": "a"},
        "temperature": 0.1,
        "extra_args": {
            "kv_transfer_params": {"remote_host": "10.6.6.6"},
            "ec_transfer_params": {"peer_host": "10.6.6.6"},
            "keep": 1,
        },
    }
    deployment = Deployment(openai=openai, render=rendered() | {"sampling_params": sampling})
    await deployment.run(two_images(max_tokens=500, min_tokens=5, stream=True, stream_options={}, n=2))
    body = deployment.prefill_body
    assert body["stream"] is False
    assert "stream_options" not in body
    assert "10.6.6.6" not in json.dumps(body)
    if openai:
        assert body["max_tokens"] == 1
        assert not {"min_tokens", "n", "sampling_params"} & set(body)
    else:
        assert body["sampling_params"] == {"temperature": 0.1, "extra_args": {"keep": 1}, "max_tokens": 1}
        assert not {"max_tokens", "min_tokens", "n"} & set(body)


@pytest.mark.parametrize("sampling", [None, {}, {"extra_args": None}, {"extra_args": "x"}])
async def test_unusual_sampling_params_are_still_capped(sampling: Any) -> None:
    """Whatever the renderer says about sampling, the leg makes one token."""
    deployment = Deployment(render=rendered() | {"sampling_params": sampling})
    await deployment.run(two_images())
    assert deployment.prefill_body["sampling_params"] == (sampling or {}) | {"max_tokens": 1}


@pytest.mark.parametrize("openai", [True, False])
async def test_tenants_stay_apart_in_every_format(*, openai: bool) -> None:
    """`cache_salt` and `priority` isolate prefix caches: they travel in both formats."""
    deployment = Deployment(openai=openai)
    await deployment.run(two_images(cache_salt="tenant-1", priority=-3))
    body = deployment.prefill_body
    assert (body["cache_salt"], body["priority"]) == ("tenant-1", -3)


@pytest.mark.parametrize("openai", [True, False])
@pytest.mark.parametrize("place", ["top", "vllm_xargs", "sampling_params", "render", "render-extra"])
async def test_forged_transfer_parameters_reach_no_worker(place: str, *, openai: bool) -> None:
    """Not from any place of the client's body, and not through a renderer that passes them on."""
    forged = {
        "kv_transfer_params": {"remote_host": "10.6.6.6"},
        "ec_transfer_params": {"peer_host": "10.6.6.6"},
    }
    members: dict[str, Any] = {}
    render = rendered()
    match place:
        case "top":
            members = forged
        case "vllm_xargs":
            members = {"vllm_xargs": forged}
        case "sampling_params":
            members = {"sampling_params": {"extra_args": forged}}
        case "render":
            render |= forged
        case "render-extra":
            render["sampling_params"]["extra_args"] = forged
    deployment = Deployment(openai=openai, render=render)
    rewrite = await deployment.run(two_images(**members))
    legs = [rewrite.body, *(call.body for call in deployment.gateway.calls)]
    if place not in {"render", "render-extra"}:
        legs += [call.body for call in deployment.renderer.calls]
    for leg in legs:
        assert b"10.6.6.6" not in b"".join(leg)


@pytest.mark.parametrize("kv", ["kv-nixl", "kv-shared-storage"])
async def test_the_kv_connector_speaks_on_prefill(kv: str) -> None:
    """Prefill is told its role by the configured connector."""
    deployment = Deployment(kv=kv)
    await deployment.run(two_images())
    params = deployment.prefill_body["kv_transfer_params"]
    assert (params["do_remote_decode"], params["do_remote_prefill"]) == (True, False)
    assert ("remote_host" in params) is (kv == "kv-nixl")


async def test_partial_coverage_is_still_sent() -> None:
    """A fallback to tensors carries the descriptors that do cover their entries, and only those."""
    evicted = {"item_indices": [0], "metadata": {}}
    deployment = Deployment(descriptors={HASHES[0]: evicted, HASHES[1]: COVERED[HASHES[1]]})
    await deployment.run(two_images())
    assert deployment.record.prefill_form == "kwargs_data"
    assert deployment.prefill_body["ec_transfer_params"] == {HASHES[1]: COVERED[HASHES[1]]}


async def test_shared_storage_sends_no_descriptors_in_the_openai_format() -> None:
    """The connector decides in both formats."""
    deployment = Deployment(openai=True, ec="ec-shared-storage", descriptors=COVERED)
    await deployment.run(two_images())
    assert "ec_transfer_params" not in deployment.prefill_body


async def test_modality_maps_are_complete_and_in_prompt_order() -> None:
    """Every map has the same modalities and lengths; content parts keep the order of the request."""
    audio = {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,AAAA"}}
    features: dict[str, Any] = {
        "mm_hashes": {"image": list(HASHES[:2]), "audio": [HASHES[2]]},
        "mm_placeholders": {
            "image": [{"offset": 2, "length": 4}, {"offset": 7, "length": 2}],
            "audio": [{"offset": 0, "length": 1}],
        },
        "kwargs_data": {"image": list(TENSORS[:2]), "audio": [TENSORS[2]]},
        "mm_metadata": {"image": [METADATA[0], None]},
    }
    parts = (image("AAAA"), audio, image("BBBB"))
    with_tensors = Deployment(render=rendered(**features))
    await with_tensors.run(chat(*parts))
    maps = with_tensors.prefill_body["features"]
    for name, items in maps.items():
        assert {key: len(value) for key, value in items.items()} == {"image": 2, "audio": 1}, name
    omitted = Deployment(render=rendered(**features | {"kwargs_data": None}), mm_payload="none")
    await omitted.run(chat(*parts))
    assert [part["uuid"] for part in omitted.prefill_body["content_parts"]] == [
        HASHES[0],
        HASHES[2],
        HASHES[1],
    ]


@pytest.mark.parametrize("openai", [True, False])
async def test_headers_name_the_phase_and_carry_the_token(*, openai: bool) -> None:
    """The call is a prefill of this request, marked as our own."""
    deployment = Deployment(openai=openai, phase_token=PHASE_TOKEN, headers=(("x-tenant", "t"),))
    await deployment.run(two_images())
    headers = dict(deployment.prefills[0].headers)
    assert headers["epp-profile"] == "prefill"
    assert headers["x-request-id"] == REQUEST_ID
    assert headers["x-epd-phase-token"] == PHASE_TOKEN
    assert headers["x-tenant"] == "t"


@pytest.mark.parametrize(
    ("status", "kind", "expected", "code"),
    [
        (400, StepRejected, 400, "epd_prefill_rejected"),
        (429, StepRejected, 429, "epd_prefill_rejected"),
        (500, StepFailed, 502, "epd_prefill_failed"),
        (503, StepFailed, 502, "epd_prefill_failed"),
        (302, StepFailed, 502, "epd_prefill_failed"),
        (204, StepFailed, 502, "epd_prefill_failed"),
    ],
)
async def test_other_statuses(status: int, kind: type[StepRejected], expected: int, code: str) -> None:
    """The status rule of all upstreams: a 4xx is the client's, the rest is 502."""
    deployment = Deployment(prefill=answer({"kv_transfer_params": {}}, status))
    with pytest.raises(kind) as failed:
        await deployment.run(two_images())
    assert (failed.value.status, failed.value.code) == (expected, code)
    assert deployment.record.stage == "prefill"


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        ("7", 7),
        ("999999", 999999),
        ("", None),
        ("-1", None),
        ("Wed, 21 Oct 2026 07:28:00 GMT", None),
        ("1" * 7, None),
    ],
)
async def test_a_worker_that_asks_for_patience_is_heard(given: str, passed: int | None) -> None:
    """The seconds of its retry-after reach the client with its 429; anything else does not."""
    deployment = Deployment(prefill=answer({"error": "busy"}, 429, {"retry-after": given}))
    with pytest.raises(StepRejected) as caught:
        await deployment.run(two_images())
    assert caught.value.retry_after == passed


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b"{", b'{"a":\xff}'])
async def test_a_malformed_answer_is_502(body: bytes) -> None:
    """A 200 with anything but a JSON object is a failed prefill."""
    deployment = Deployment(prefill=answer(body))
    with pytest.raises(StepFailed) as failed:
        await deployment.run(two_images())
    assert (failed.value.status, failed.value.code) == (502, "epd_prefill_failed")


async def test_a_header_of_prefill_reaches_decode() -> None:
    """A forwarded response header of prefill replaces the encoders'."""
    deployment = Deployment(
        encode=lambda _call: answer({}, headers={FORWARDED: "from-encode"}),
        prefill=answer({}, headers={FORWARDED: "from-prefill"}),
    )
    rewrite = await deployment.run(two_images())
    assert dict(deployment.prefills[0].headers)[FORWARDED] == "from-encode"
    assert dict(rewrite.set_headers)[FORWARDED] == "from-prefill"


async def test_a_client_cannot_set_a_forwarded_header() -> None:
    """The client's own value of it is on no leg, and removed from decode."""
    deployment = Deployment(headers=((FORWARDED, "forged"),))
    rewrite = await deployment.run(two_images())
    for call in (*deployment.renderer.calls, *deployment.gateway.calls):
        assert FORWARDED not in dict(call.headers)
    assert FORWARDED in rewrite.remove_headers
    assert "forged" not in str(sent(deployment.prefills[0])) + str(rewrite.set_headers)
