from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest

from sidecar.errors import EncodeMismatch, SidecarError, StepFailed, StepRejected, StepTimeout
from sidecar.upstream.client import Answer, Call
from tests.unit.pipeline.pipeline_support import (
    FORWARDED,
    GRIDS,
    HASHES,
    METADATA,
    MIXED_IDS,
    PHASE_TOKEN,
    REQUEST_ID,
    TENSORS,
    TRACEPARENT,
    Deployment,
    answer,
    chat,
    descriptor,
    image,
    item_of,
    rendered,
    rendered_text,
    sent,
    two_images,
)

OMITTED: dict[str, Any] = {"mm_payload": "none", "render": rendered(kwargs_data=None)}
FORMS = pytest.mark.parametrize(
    "settings", [{}, OMITTED, {"openai": True}], ids=["features", "content_parts", "openai"]
)
TEXT = {"type": "text", "text": "compare"}
INPUT_AUDIO = {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}
VIDEO = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}


def body_of(call: Call) -> bytes:
    return b"".join(call.body)


# --- bodies ---------------------------------------------------------------------------------------------


async def test_features_form_is_the_first_token_and_the_span_itself() -> None:
    """BOS and the span copied from the prompt, mixed tokens included, with the entry's own tensors."""
    deployment = Deployment(render=rendered(MIXED_IDS))
    await deployment.run(two_images())
    assert sorted(map(body_of, deployment.encodes)) == sorted(
        f'{{"model":"m","stream":false,"sampling_params":{{"max_tokens":1}},"token_ids":{ids},'
        f'"features":{{"mm_hashes":{{"image":["{HASHES[i]}"]}},'
        f'"mm_placeholders":{{"image":[{{"offset":1,"length":{length}}}]}},'
        f'"kwargs_data":{{"image":["{TENSORS[i]}"]}}}}}}'.encode()
        for i, (ids, length) in enumerate([("[1,7,7,9,7]", 4), ("[1,8,8]", 2)])
    )
    assert {call.path for call in deployment.encodes} == {"/inference/v1/generate"}


async def test_content_parts_form_is_flat_and_named_by_the_hash() -> None:
    """BOS and one placeholder, the item's URL flat, the render hash as uuid; no features."""
    deployment = Deployment(**OMITTED)
    await deployment.run(two_images())
    assert sorted(map(body_of, deployment.encodes)) == sorted(
        f'{{"model":"m","stream":false,"sampling_params":{{"max_tokens":1}},"token_ids":{ids},'
        f'"content_parts":[{{"type":"image_url","url":"data:image/png;base64,{data}",'
        f'"uuid":"{HASHES[i]}"}}]}}'.encode()
        for i, (ids, data) in enumerate([("[1,7]", "AAAA"), ("[1,8]", "BBBB")])
    )
    assert {call.path for call in deployment.encodes} == {"/inference/v1/generate"}


async def test_every_modality_has_its_content_part_type() -> None:
    """Audio and video travel flat too; inline audio as a data URL."""
    features: dict[str, Any] = {
        "mm_hashes": {"image": [HASHES[0]], "audio": [HASHES[1]], "video": [HASHES[2]]},
        "mm_placeholders": {
            "video": [{"offset": 7, "length": 2}],
            "audio": [{"offset": 2, "length": 4}],
            "image": [{"offset": 0, "length": 1}],
        },
        "kwargs_data": None,
    }
    deployment = Deployment(mm_payload="none", render=rendered(**features))
    await deployment.run(chat(image("AAAA"), INPUT_AUDIO, VIDEO))
    parts = [part for call in deployment.encodes for part in sent(call)["content_parts"]]
    assert {(part["type"], part["uuid"]) for part in parts} == {
        ("image_url", HASHES[0]),
        ("audio_url", HASHES[1]),
        ("video_url", HASHES[2]),
    }
    urls = {part["type"]: part["url"] for part in parts}
    assert urls["audio_url"].startswith("data:audio/")
    assert urls["audio_url"].endswith(";base64,UklGRg==")
    assert all(isinstance(url, str) for url in urls.values())


async def test_openai_form_is_one_turn_with_the_stamped_part() -> None:
    """The client's path, just the part under its hash, one token."""
    deployment = Deployment(openai=True)
    await deployment.run(two_images(max_tokens=50, stream=True, tools=[]))
    assert {call.path for call in deployment.encodes} == {"/v1/chat/completions"}
    assert sorted(map(body_of, deployment.encodes)) == sorted(
        f'{{"model":"m","messages":[{{"role":"user","content":[{{"type":"image_url",'
        f'"image_url":{{"url":"data:image/png;base64,{data}"}},"uuid":"{HASHES[i]}"}}]}}],'
        f'"max_tokens":1,"stream":false}}'.encode()
        for i, data in enumerate(["AAAA", "BBBB"])
    )


@pytest.mark.parametrize("openai", [True, False])
async def test_processor_kwargs_take_the_uuid_off_openai_bodies(*, openai: bool) -> None:
    """An engine would hash the uuid again with the kwargs and miss: no leg in this format carries one."""
    deployment = Deployment(openai=openai)
    decode = await deployment.decode(two_images(mm_processor_kwargs={"max_pixels": 9}))
    openai_bodies = [decode, *(sent(call) for call in deployment.gateway.calls if openai)]
    assert all("uuid" not in json.dumps(body) for body in openai_bodies)
    if openai:
        assert all(sent(call)["mm_processor_kwargs"] == {"max_pixels": 9} for call in deployment.encodes)


async def test_a_body_without_a_model_names_none() -> None:
    """The engine's default model is not spelt out."""
    forms: list[dict[str, Any]] = [{}, OMITTED, {"openai": True}]
    for settings in forms:
        deployment = Deployment(**settings)
        body = two_images()
        del body["model"]
        await deployment.run(body)
        assert all("model" not in sent(call) for call in deployment.gateway.calls)


@FORMS
async def test_no_body_names_the_request(settings: dict[str, Any]) -> None:
    """Encode bodies have no request id of their own: the header has it."""
    deployment = Deployment(**settings, headers=(("authorization", "Bearer k"),), phase_token=PHASE_TOKEN)
    await deployment.run(two_images())
    for call in deployment.encodes:
        assert "request_id" not in sent(call)
        headers = dict(call.headers)
        assert headers["x-request-id"] == REQUEST_ID
        assert headers["traceparent"] == TRACEPARENT
        assert headers["epp-profile"] == "encode"
        assert headers["x-epd-phase-token"] == PHASE_TOKEN
        assert headers["authorization"] == "Bearer k"


# --- how many -------------------------------------------------------------------------------------------


@FORMS
async def test_equal_items_are_encoded_once(settings: dict[str, Any]) -> None:
    """One call per distinct hash; its descriptor counts for every entry of that hash."""
    settings = dict(settings)
    render = rendered(
        [1, 7, 7, 9, 7, 7, 8, 7, 7],
        mm_hashes={"image": [HASHES[0], HASHES[1], HASHES[0]]},
        mm_placeholders={"image": [{"offset": o, "length": n} for o, n in ((1, 2), (4, 2), (7, 2))]},
        kwargs_data=None if "mm_payload" in settings else {"image": [TENSORS[0], TENSORS[1], TENSORS[0]]},
    )
    settings["render"] = render
    deployment = Deployment(
        **settings,
        descriptors={HASHES[0]: descriptor([1, 2, 4]), HASHES[1]: descriptor([1, 2, 4])},
    )
    await deployment.run(chat(image("AAAA"), image("BBBB"), image("AAAA")))
    assert sorted(map(item_of, deployment.encodes)) == sorted(HASHES[:2])
    assert deployment.record.encode_requests == 2
    assert set(deployment.prefill_body["ec_transfer_params"]) == set(HASHES[:2])
    assert deployment.record.prefill_form == ("openai" if settings.get("openai") else "mm_metadata")


async def test_one_hash_in_two_modalities_is_two_items() -> None:
    """Distinct means distinct modality and hash."""
    features: dict[str, Any] = {
        "mm_hashes": {"image": [HASHES[0]], "video": [HASHES[0]]},
        "mm_placeholders": {
            "image": [{"offset": 2, "length": 4}],
            "video": [{"offset": 7, "length": 2}],
        },
        "kwargs_data": {"image": [TENSORS[0]], "video": [TENSORS[1]]},
    }
    deployment = Deployment(render=rendered(**features))
    await deployment.run(chat(image(), VIDEO))
    assert len(deployment.encodes) == 2


async def test_without_render_equal_urls_are_equal_items() -> None:
    """Without hashes an item is known by its URL, and no uuid is made up."""
    deployment = Deployment(openai=True, steps=("encode", "prefill", "decode"))
    decode = await deployment.decode(chat(image("AAAA"), image("BBBB"), image("AAAA")))
    assert len(deployment.encodes) == 2
    assert deployment.renderer.calls == []
    for body in (decode, *map(sent, deployment.gateway.calls)):
        assert "uuid" not in json.dumps(body)


@pytest.mark.parametrize(("limit", "expected"), [(1, 1), (3, 3), (50, 9)])
async def test_no_more_than_max_parallel_at_a_time(limit: int, expected: int) -> None:
    """The step's limit bounds its calls in flight; all of them are made."""
    running = 0
    most = 0

    async def slow(_call: Call) -> Answer:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(5):
            await asyncio.sleep(0)
        running -= 1
        return answer({})

    count = 9
    features: dict[str, Any] = {
        "mm_hashes": {"image": [f"h{i}" for i in range(count)]},
        "mm_placeholders": {"image": [{"offset": i, "length": 1} for i in range(count)]},
        "kwargs_data": {"image": ["AAAA"] * count},
    }
    deployment = Deployment(render=rendered(**features), max_parallel=limit, encode=slow)
    await deployment.run(chat(*(image(f"AAA{i}") for i in range(count))))
    assert most == expected
    assert deployment.record.encode_requests == count


@FORMS
async def test_text_needs_no_encoder(settings: dict[str, Any]) -> None:
    """No media, no calls, no descriptors."""
    deployment = Deployment(**{**settings, "render": rendered_text()})
    await deployment.run(chat(TEXT))
    assert deployment.encodes == []
    assert (deployment.record.encode_form, deployment.record.encode_requests) == ("skipped", 0)


# --- answers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        None,
        ...,
        {},
        [],
        "x",
        7,
        True,
        {HASHES[0]: None},
        {HASHES[0]: {}},
        {HASHES[0]: []},
        {HASHES[0]: "x"},
        {HASHES[0]: [{"metadata": {}}]},
    ],
)
@FORMS
async def test_what_is_no_descriptor_is_none(settings: dict[str, Any], params: Any) -> None:
    """Missing, null and malformed parameters are no descriptor: the request goes on in the safe form."""
    deployment = Deployment(
        **settings,
        encode=lambda _call: answer({} if params is ... else {"ec_transfer_params": params}),
    )
    await deployment.run(two_images())
    assert "ec_transfer_params" not in deployment.prefill_body
    assert deployment.record.prefill_form in {"kwargs_data", "content_parts", "openai"}
    if not settings.get("openai"):
        assert deployment.record.fallback_reason == "image[0]: no descriptor"


@pytest.mark.parametrize(
    ("members", "covers"),
    [
        ({}, True),
        ({"peer_host": ""}, False),
        ({"peer_host": None}, False),
        ({"peer_host": 7}, False),
        ({"peer_host": ["10.0.0.1"]}, False),
        ({"peer_port": None}, False),
        ({"peer_port": "5610"}, False),
        ({"peer_port": 5610.0}, False),
        ({"peer_port": True}, False),
        ({"metadata": None}, False),
        ({"metadata": [1, 4, 4]}, False),
        ({"metadata": "x"}, False),
        ({"future": {"deep": [1]}}, True),
    ],
)
async def test_a_descriptor_covers_when_it_is_complete(members: dict[str, Any], *, covers: bool) -> None:
    """With ec-nixl a descriptor needs a host name, a port and its metadata; garbage is no coverage."""
    found = {HASHES[i]: descriptor(GRIDS[i]) for i in range(2)}
    found[HASHES[1]] |= members
    deployment = Deployment(**OMITTED, descriptors=found)
    await deployment.run(two_images())
    assert (deployment.record.prefill_form == "mm_metadata") is covers


async def test_descriptors_travel_as_the_encoder_wrote_them() -> None:
    """Prefill gets the descriptor's own text: spelling of numbers, unknown members, order."""
    text = (
        '{"peer_port":5610,"peer_host":"h\\u0031","size":1.50E+2,"metadata":{"image_grid_thw":[1,4,4]},'
        '"big":123456789012345678901234567890}'
    )
    deployment = Deployment(
        encode=lambda call: answer(
            f'{{"ec_transfer_params":{{"{item_of(call)}": {text}}}}}'.encode()
            if item_of(call) == HASHES[0]
            else {}
        )
    )
    await deployment.run(two_images())
    (prefill,) = deployment.prefills
    assert f'"ec_transfer_params":{{"{HASHES[0]}":{text}}}'.encode() in body_of(prefill)


async def test_an_encoder_that_uses_its_own_keys() -> None:
    """A descriptor under another key is no coverage, but an OpenAI-format prefill gets it as it came."""

    def encode(call: Call) -> Answer:
        return answer({"ec_transfer_params": {"own-" + item_of(call)[:1]: descriptor(GRIDS[0])}})

    render = rendered(mm_placeholders={"image": [{"offset": 2, "length": 4}, {"offset": 6, "length": 4}]})
    generate = Deployment(encode=encode, render=render | {"token_ids": [1, 1] + [7] * 4 + [8] * 4})
    await generate.run(two_images())
    assert generate.record.prefill_form == "kwargs_data"
    assert generate.record.fallback_reason == "image[0]: no descriptor"
    assert "ec_transfer_params" not in generate.prefill_body
    openai = Deployment(encode=encode, openai=True, render=render)
    await openai.run(two_images())
    assert set(openai.prefill_body["ec_transfer_params"]) == {"own-a", "own-b"}


@FORMS
async def test_the_first_entrys_answer_gives_the_forwarded_header(settings: dict[str, Any]) -> None:
    """Of several answers the first entry's header counts, whichever call ends first."""
    order = itertools.count()

    async def encode(call: Call) -> Answer:
        if item_of(call) == HASHES[0]:
            for _ in range(20):
                await asyncio.sleep(0)
        return answer({}, headers={FORWARDED: f"{item_of(call)[0]}-{next(order)}"})

    deployment = Deployment(**settings, encode=encode)
    rewrite = await deployment.run(two_images())
    assert dict(deployment.prefills[0].headers)[FORWARDED] == "a-1"
    assert dict(rewrite.set_headers)[FORWARDED] == "a-1"


# --- failures -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [400, 401, 404, 408, 413, 422, 429])
@FORMS
async def test_a_4xx_of_an_encoder_is_the_clients(settings: dict[str, Any], status: int) -> None:
    """A corrupt image is refused by the encoder with 400: the client sees that status, not its body."""
    deployment = Deployment(**settings, encode=lambda _call: answer(b"inner cause", status))
    with pytest.raises(StepRejected) as failed:
        await deployment.run(two_images())
    assert (failed.value.status, failed.value.code) == (status, "epd_encode_rejected")
    assert failed.value.message == f"encode rejected the request: HTTP {status}"
    assert "inner cause" in failed.value.detail
    assert deployment.prefills == []


@pytest.mark.parametrize("status", [500, 503, 302, 204, 201])
async def test_any_other_status_is_502(status: int) -> None:
    """Failures, redirects and unexpected successes of an encoder are the deployment's."""
    deployment = Deployment(encode=lambda _call: answer({}, status))
    with pytest.raises(StepFailed) as failed:
        await deployment.run(two_images())
    assert (failed.value.status, failed.value.code) == (502, "epd_encode_failed")
    assert str(status) in failed.value.message


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b"not json", b'{"a":1}x', b'{"a":"\xff"'])
async def test_an_answer_that_is_no_object_is_502(body: bytes) -> None:
    """A 200 with anything but a JSON object is a failed encode."""
    deployment = Deployment(encode=lambda _call: answer(body))
    with pytest.raises(StepFailed) as failed:
        await deployment.run(two_images())
    assert (failed.value.status, failed.value.code) == (502, "epd_encode_failed")
    assert deployment.prefills == []


FAILURES: dict[str, tuple[Any, type[SidecarError], int]] = {
    "raised": (StepFailed("encode", "gone"), StepFailed, 502),
    "5xx": (answer({}, 500), StepFailed, 502),
    "4xx": (answer({}, 400), StepRejected, 400),
    "malformed": (answer(b"[]"), StepFailed, 502),
}


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("failing", [0, 1], ids=["first-entry", "second-entry"])
async def test_the_first_failure_cancels_the_other_calls(failure: str, failing: int) -> None:
    """A failed encode of any kind ends the step at once; the call still in flight is cancelled."""
    outcome, kind, status = FAILURES[failure]
    cancelled: list[str] = []

    async def encode(call: Call) -> Answer:
        if item_of(call) == HASHES[failing]:
            # The other call is under way by then.
            for _ in range(5):
                await asyncio.sleep(0)
            if isinstance(outcome, Exception):
                raise outcome
            assert isinstance(outcome, Answer)
            return outcome
        try:
            await asyncio.sleep(3)
        except asyncio.CancelledError:
            cancelled.append(item_of(call))
            raise
        return answer({})

    deployment = Deployment(encode=encode)
    with pytest.raises(kind) as failed:
        await deployment.run(two_images())
    assert failed.value.status == status
    assert cancelled == [HASHES[1 - failing]]
    assert deployment.prefills == []


async def test_no_further_call_leaves_after_a_refusal() -> None:
    """With one call at a time, a refused item keeps the items after it from being sent."""
    deployment = Deployment(max_parallel=1, encode=lambda _call: answer({}, 400))
    with pytest.raises(StepRejected):
        await deployment.run(two_images())
    assert len(deployment.encodes) == 1


# --- does the encoding fit ------------------------------------------------------------------------------


@pytest.mark.parametrize("ec", ["ec-nixl", "ec-shared-storage"])
@pytest.mark.parametrize("openai", [True, False])
@pytest.mark.parametrize("key", ["hash", "own"])
async def test_a_grid_unlike_the_renderers_is_a_mismatch(ec: str, key: str, *, openai: bool) -> None:
    """With metadata from render the grids must be equal, in every format, connector and key."""
    wrong = [1, 2, 8]

    def encode(call: Call) -> Answer:
        index = HASHES.index(item_of(call))
        found = descriptor(wrong if index == 1 else GRIDS[index], peer=False)
        return answer({"ec_transfer_params": {item_of(call) if key == "hash" else "own": found}})

    deployment = Deployment(
        ec=ec, openai=openai, encode=encode, render=rendered(mm_metadata={"image": list(METADATA)})
    )
    with pytest.raises(EncodeMismatch) as failed:
        await deployment.run(two_images())
    assert (failed.value.status, failed.value.code) == (502, "epd_encode_mismatch")
    for named in ("image[1]", str(GRIDS[1]), str(wrong)):
        assert named in failed.value.message
    assert deployment.prefills == []


@pytest.mark.parametrize("ec", ["ec-nixl", "ec-shared-storage"])
@pytest.mark.parametrize("openai", [True, False])
@pytest.mark.parametrize("wrong", [[1, 3, 3], [1, 4, 4], [1, 1, 1]])
async def test_without_tensors_the_patches_must_be_a_common_multiple(
    ec: str, wrong: list[int], *, openai: bool
) -> None:
    """Two placeholder tokens and 9, 16 or 1 patches, next to an image with 4 patches per token."""
    deployment = Deployment(
        **OMITTED,
        ec=ec,
        openai=openai,
        descriptors={HASHES[0]: descriptor(GRIDS[0]), HASHES[1]: descriptor(wrong)},
    )
    with pytest.raises(EncodeMismatch) as failed:
        await deployment.run(two_images())
    assert "image[1]" in failed.value.message
    assert "2 placeholder tokens" in failed.value.message
    assert deployment.prefills == []


async def test_a_fitting_encoding_passes_in_every_form() -> None:
    """Four patches per token for both images."""
    forms: list[dict[str, Any]] = [{}, OMITTED, {"openai": True}, {**OMITTED, "openai": True}]
    for settings in forms:
        deployment = Deployment(
            **settings,
            descriptors={HASHES[i]: descriptor(GRIDS[i]) for i in range(2)},
        )
        await deployment.run(two_images())
        assert len(deployment.prefills) == 1


async def test_parts_of_an_unknown_modality_are_encoded_in_the_openai_format() -> None:
    """A renderer that merges modalities pairs with no part; each is still encoded as the client sent it."""
    features: dict[str, Any] = {
        "mm_hashes": {"vision_chunk": ["a", "b"]},
        "mm_placeholders": {"vision_chunk": [{"offset": 2, "length": 4}, {"offset": 7, "length": 2}]},
        "kwargs_data": {"vision_chunk": ["AAAA", "BBBB"]},
    }
    deployment = Deployment(openai=True, render=rendered(**features))
    await deployment.run(two_images())
    assert len(deployment.encodes) == 2
    assert deployment.record.encode_form == "openai"
    assert deployment.record.media == "vision_chunk:2"


async def test_an_answer_that_is_not_utf8_is_502() -> None:
    """Values are copied into later bodies unseen, so the whole answer has to be text."""
    deployment = Deployment(encode=lambda _call: answer(b'{"ec_transfer_params":{"a":"\xff"}}'))
    with pytest.raises(StepFailed):
        await deployment.run(two_images())


@pytest.mark.parametrize("status", [500, 503])
async def test_a_failed_encode_can_be_left_to_prefill(status: int) -> None:
    """With `on_failure: local` the item counts as not covered, and prefill gets what it encodes it from."""
    deployment = Deployment(on_failure="local", encode=lambda _call: answer({}, status))
    await deployment.run(two_images())
    record = deployment.record
    assert record.prefill_form == "kwargs_data"
    assert record.fallback_reason == "image[0]: encode failed (on_failure: local)"
    assert "ec_transfer_params" not in deployment.prefill_body


async def test_a_refused_item_is_never_left_to_prefill() -> None:
    """A 4xx is the client's: another worker would refuse the item too."""
    deployment = Deployment(on_failure="local", encode=lambda _call: answer({}, 400))
    with pytest.raises(StepRejected):
        await deployment.run(two_images())
    assert deployment.prefills == []


@pytest.mark.parametrize("policy", ["fail", "local"])
async def test_an_encoder_that_never_answers_has_failed(policy: str) -> None:
    """The time of the step ends each call: the request fails with it, or the item is left to prefill."""

    async def hang(_call: Call) -> Answer:
        await asyncio.Event().wait()
        raise AssertionError("waits for ever")

    deployment = Deployment(on_failure=policy, encode=hang, encode_timeout="20ms")
    if policy == "fail":
        with pytest.raises(StepTimeout):
            await deployment.run(two_images())
    else:
        await deployment.run(two_images())
        assert deployment.record.fallback_reason == "image[0]: encode failed (on_failure: local)"
