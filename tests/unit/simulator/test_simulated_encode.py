"""The encode role."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.simulator.simulator_caller import (
    CHAT,
    GENERATE,
    IMAGE_PAD,
    Caller,
    audio_url,
    chat,
    encode_body,
    image_url,
    video_url,
)

if TYPE_CHECKING:
    from sidecar.simulator import Simulator


async def test_content_parts_give_a_nixl_descriptor_under_the_uuid(caller: Caller) -> None:
    """The answer generates nothing and says where the encoder output is."""
    status, answer = await caller.post("encode", GENERATE, encode_body(image_url(640, 480), "hash-1"))
    assert status == 200
    assert [(choice["finish_reason"], choice["token_ids"]) for choice in answer["choices"]] == [("stop", [])]
    assert answer["usage"]["completion_tokens"] == 0
    descriptor = answer["ec_transfer_params"]["hash-1"]
    assert descriptor["metadata"] == {"image_grid_thw": [1, 34, 46]}
    assert descriptor["shape"][0] == 34 * 46 // 4
    assert {"peer_host", "peer_port", "size_bytes", "item_indices"} < set(descriptor)
    assert caller.violations == []


async def test_features_give_the_same_descriptor(caller: Caller) -> None:
    """The tensors form and the content_parts form announce the same output."""
    url = image_url()
    rendered = await caller.render(chat(url))
    features = rendered["features"]
    (span,) = features["mm_placeholders"]["image"]
    tokens = rendered["token_ids"][span["offset"] : span["offset"] + span["length"]]
    body = {
        "sampling_params": {"max_tokens": 1},
        "token_ids": [rendered["token_ids"][0], *tokens],
        "features": {
            "mm_hashes": features["mm_hashes"],
            "mm_placeholders": {"image": [{"offset": 1, "length": len(tokens)}]},
            "kwargs_data": features["kwargs_data"],
        },
    }
    status, answer = await caller.post("encode", GENERATE, body)
    (key,) = features["mm_hashes"]["image"]
    assert status == 200
    assert answer["ec_transfer_params"] == await caller.encode(url, key)
    assert caller.violations == []


@pytest.mark.parametrize(
    ("url", "modality", "field"),
    [(video_url(), "video", "video_grid_thw"), (audio_url(), "audio", "audio_feature_lengths")],
)
async def test_other_modalities(caller: Caller, url: str, modality: str, field: str) -> None:
    """Video announces its grid, audio only a length that no metadata can be rebuilt from."""
    descriptors = await caller.encode(url, "k", modality)
    assert list(descriptors["k"]["metadata"]) == [field]


@pytest.mark.parametrize(("version", "named"), [("0.32", False), ("0.33", True)])
async def test_the_modality_is_named_from_0_33(
    simulator: Simulator, caller: Caller, version: str, named: bool
) -> None:
    """VLLM 0.32 leaves it out of descriptors."""
    simulator.configure({"vllm_version": version})
    (descriptor,) = (await caller.encode(image_url(), "k")).values()
    assert (descriptor.get("modality") == "image") is named


@pytest.mark.parametrize(
    ("kind", "metadata", "peer"),
    [("nixl", True, True), ("plain", True, False), ("no-metadata", False, True), ("evicted", False, False)],
)
async def test_kinds_of_descriptors(
    simulator: Simulator, caller: Caller, kind: str, metadata: bool, peer: bool
) -> None:
    """Each kind has its own mix of metadata and peer address."""
    simulator.configure({"descriptors": kind})
    (descriptor,) = (await caller.encode(image_url(), "k")).values()
    assert bool(descriptor["metadata"]) is metadata
    assert ("peer_host" in descriptor) is peer


async def test_engine_without_descriptors(simulator: Simulator, caller: Caller) -> None:
    """The answer holds a null instead of a map."""
    simulator.configure({"descriptors": "none"})
    _, answer = await caller.post("encode", GENERATE, encode_body(image_url(), "k"))
    assert answer["ec_transfer_params"] is None


async def test_text_has_no_descriptors(caller: Caller) -> None:
    """Nothing encoded is announced as null."""
    _, answer = await caller.post("encode", CHAT, chat(max_tokens=1))
    assert answer["ec_transfer_params"] is None


async def test_streamed_answer_has_no_descriptor(caller: Caller) -> None:
    """The stream of an encoder ends after the role."""
    body = chat(image_url(), uuids=["k"], max_tokens=1, stream=True)
    async with caller.send("encode", CHAT, body) as response:
        assert response.content_type == "text/event-stream"
        text = await response.text()
    assert text.count("data: ") == 2
    assert text.endswith("data: [DONE]\n\n")
    assert "ec_transfer_params" not in text


async def test_openai_format(caller: Caller) -> None:
    """A chat turn with one image is encoded under its uuid; the message stays empty."""
    body = chat(image_url(), uuids=["k"], max_tokens=1)
    status, answer = await caller.post("encode", CHAT, body)
    assert status == 200
    assert list(answer["ec_transfer_params"]) == ["k"]
    assert answer["choices"][0]["message"]["content"] == ""
    assert answer["choices"][0]["finish_reason"] == "stop"


async def test_equal_items_share_a_descriptor(caller: Caller) -> None:
    """The same image twice in one request is one entry with two positions."""
    body = chat(image_url(), image_url(), uuids=["k", "k"], max_tokens=1)
    _, answer = await caller.post("encode", CHAT, body)
    assert answer["ec_transfer_params"]["k"]["item_indices"] == [0, 1]


async def test_encoder_without_caches_numbers_its_requests(simulator: Simulator, caller: Caller) -> None:
    """Without uuid the key says which request of this encoder it was, and that is noticed."""
    simulator.config.encoder_caches = False
    keys: list[str] = []
    for url in (image_url(100, 100), image_url(200, 100)):
        _, answer = await caller.post("encode", GENERATE, encode_body(url, None))
        keys += answer["ec_transfer_params"]
    assert keys == ["renderer0-mm-1-image-0", "renderer0-mm-2-image-0"]
    assert len(caller.violations) == 2
    assert list(await caller.encode(image_url(), "k")) == ["k"]


async def test_processor_mismatch_shows_in_the_grid(simulator: Simulator, caller: Caller) -> None:
    """With another `max_pixels` the encoder announces another grid than render has."""
    simulator.config.encode_max_pixels = 50176
    (descriptor,) = (await caller.encode(image_url(), "k")).values()
    assert descriptor["metadata"]["image_grid_thw"] != [1, 34, 46]


def _with(**fields: Any) -> dict[str, Any]:
    return encode_body(image_url(), "k") | fields


FEATURES = {
    "mm_hashes": {"image": ["k"]},
    "mm_placeholders": {"image": [{"offset": 1, "length": 1}]},
    "kwargs_data": {"image": [None]},
}


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (_with(features=FEATURES), 400, "mutually exclusive"),
        (_with(token_ids=[]), 400, "at least 1 item"),
        (_with(token_ids=[1, -1]), 400, "greater than or equal to 0"),
        (_with(token_ids=[1, 10**30]), 400, "out of vocabulary"),
        (_with(token_ids=None), 400, "Field required"),
        (_with(sampling_params=None), 400, "Field required"),
        (_with(sampling_params={"min_tokens": 5, "max_tokens": 1}), 400, "min_tokens must be less"),
        (_with(model="other"), 404, "does not exist"),
        (_with(token_ids=[151644]), 500, "prompt replacement"),
        (_with(content_parts=[5]), 400, "list of dictionaries"),
        (_with(content_parts=[{"type": "image_url", "url": 5}]), 400, "valid string"),
        (
            _with(content_parts=[{"type": "image_url", "image_url": {"url": image_url()}}]),
            400,
            "multi_modal_uuids['image'][0] is missing",
        ),
        (_with(content_parts=[{"type": "image_url", "uuid": "k"}]), 400, "Cache miss"),
        (_with(content_parts=[{"type": "image_url", "url": "data:image/png;base64,AAAA"}]), 400, "identify"),
        (_with(content_parts=[], features=FEATURES), 500, "Internal server error"),
    ],
)
async def test_wrong_bodies_are_refused(
    caller: Caller, body: dict[str, Any], status: int, message: str
) -> None:
    """Each fault is refused the way vLLM does."""
    answered, answer = await caller.post("encode", GENERATE, body)
    assert answered == status
    assert message in answer["error"]["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (_with(token_ids=[151644, IMAGE_PAD, IMAGE_PAD]), "silently grow"),
        (_with(stream=True), "stream: true"),
        (_with(sampling_params={"max_tokens": 2}), "one token is enough"),
        (_with(sampling_params={}), "one token is enough"),
        (_with(kv_transfer_params={"do_remote_decode": True}), "kv_transfer_params in an encode body"),
        (_with(mm_payload="none"), "mm_payload belongs"),
        (
            _with(
                content_parts=[
                    *encode_body(image_url(), "k")["content_parts"],
                    {"type": "input_image", "url": image_url()},
                ]
            ),
            "vLLM skips silently",
        ),
        (_with(content_parts=None), "without media"),
    ],
)
async def test_mistakes_vllm_does_not_refuse_are_violations(
    caller: Caller, body: dict[str, Any], message: str
) -> None:
    """What vLLM accepts without a word is recorded."""
    async with caller.send("encode", GENERATE, body) as response:
        assert response.status == 200
    assert len(caller.violations) == 1
    assert message in caller.violations[0]
    assert caller.fatal == []


async def test_phase_and_routing_headers_are_checked(caller: Caller) -> None:
    """The phase must be the role's own, and a header that names a worker may not arrive."""
    headers = {"EPP-Profile": "prefill", "x-prefiller-host-port": "10.0.0.1:1"}
    await caller.post("encode", GENERATE, encode_body(image_url(), "k"), **headers)
    assert ["EPP-Profile" in caller.violations[0], "x-prefiller-host-port" in caller.violations[1]] == [
        True
    ] * 2


async def test_completions_cannot_be_encoded(caller: Caller) -> None:
    """There is nothing to encode in a completions body."""
    assert (await caller.post("encode", "/v1/completions", {"prompt": "x"}))[0] == 404
