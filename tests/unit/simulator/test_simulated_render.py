"""The render role."""

from __future__ import annotations

import base64
import hashlib
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgpack
import pytest

from sidecar.simulator.serialization import metadata_item
from tests.unit.simulator.simulator_caller import (
    CHAT,
    IMAGE_PAD,
    VISION_END,
    VISION_START,
    Caller,
    audio_url,
    chat,
    image_url,
    video_url,
)

if TYPE_CHECKING:
    from sidecar.simulator import Simulator

RENDER = f"{CHAT}/render"


def _sha256(url: str) -> str:
    return hashlib.sha256(base64.b64decode(url.partition(",")[2])).hexdigest()


async def test_image_prompt_has_expanded_tokens_and_features(caller: Caller) -> None:
    """Hash, span, tensors and metadata of an image agree with its bytes and its size."""
    url = image_url(640, 480)
    answer = await caller.render(chat(url))
    features = answer["features"]
    (span,) = features["mm_placeholders"]["image"]
    offset, length = span["offset"], span["length"]
    tokens = answer["token_ids"]
    assert length == 34 * 46 // 4
    assert tokens[offset : offset + length] == [IMAGE_PAD] * length
    assert (tokens[offset - 1], tokens[offset + length]) == (VISION_START, VISION_END)
    assert features["mm_hashes"] == {"image": [_sha256(url)]}
    assert features["mm_metadata"] == {"image": [metadata_item("image", (1, 34, 46), length)]}
    (item,) = features["kwargs_data"]["image"]
    assert len(msgpack.unpackb(base64.b64decode(item))["pixel_values"]["data"][2].data) == 34 * 46 * 1176
    assert caller.violations == []


async def test_answer_has_all_keys_of_vllm(caller: Caller) -> None:
    """Keys are present also when they are null."""
    answer = await caller.render(chat())
    assert set(answer) == {
        "request_id", "token_ids", "token_offsets", "features", "content_parts", "sampling_params", "model",
        "reasoning_ended", "reasoning_parser_kwargs", "return_token_ids", "output_mode", "stream",
        "stream_options", "cache_salt", "priority", "kv_transfer_params", "ec_transfer_params",
    }  # fmt: skip
    assert answer["features"] is None
    assert answer["token_ids"][0] == 151644


@pytest.mark.parametrize("fields", [{"mm_payload": "none"}, {"return_mm_kwargs": False}])
async def test_tensors_are_left_out_on_request(caller: Caller, fields: dict[str, Any]) -> None:
    """Both spellings leave out tensors and metadata, and change nothing else."""
    url = image_url()
    full, light = await caller.render(chat(url)), await caller.render(chat(url, **fields))
    assert light["features"]["kwargs_data"] is None
    assert light["features"]["mm_metadata"] is None
    assert light["token_ids"] == full["token_ids"]
    assert light["features"]["mm_placeholders"] == full["features"]["mm_placeholders"]


async def test_explicit_payload_beats_the_alias(caller: Caller) -> None:
    """`return_mm_kwargs` counts only where `mm_payload` is absent."""
    answer = await caller.render(chat(image_url(), mm_payload="tensors", return_mm_kwargs=False))
    assert answer["features"]["kwargs_data"] is not None


async def test_old_renderer_ignores_the_payload_field(simulator: Simulator, caller: Caller) -> None:
    """Without support even an unknown value passes and tensors come."""
    simulator.configure({"mm_payload_supported": False})
    answer = await caller.render(chat(image_url(), mm_payload="sideways"))
    assert answer["features"]["kwargs_data"] is not None


async def test_metadata_can_be_missing(simulator: Simulator, caller: Caller) -> None:
    """A model without metadata fields answers tensors only."""
    simulator.configure({"render_metadata": False})
    features = (await caller.render(chat(image_url())))["features"]
    assert features["mm_metadata"] is None
    assert features["kwargs_data"] is not None


async def test_modalities_keep_their_own_order(caller: Caller) -> None:
    """Lists are per modality in prompt order; spans of all modalities are disjoint."""
    small, large = image_url(56, 56), image_url(640, 480)
    features = (await caller.render(chat(large, audio_url(), small, video_url())))["features"]
    assert features["mm_hashes"]["image"] == [_sha256(large), _sha256(small)]
    spans = [span for group in features["mm_placeholders"].values() for span in group]
    spans.sort(key=lambda span: span["offset"])
    assert len(spans) == 4
    assert all(a["offset"] + a["length"] < b["offset"] for a, b in pairwise(spans))
    assert set(features["kwargs_data"]) == set(features["mm_metadata"]) == {"image", "audio", "video"}


async def test_uuid_is_taken_as_the_hash(caller: Caller) -> None:
    """A part's uuid becomes its hash, verbatim."""
    answer = await caller.render(chat(image_url(), uuids=["../mine"]))
    assert answer["features"]["mm_hashes"] == {"image": ["../mine"]}


async def test_one_uuid_for_two_pictures_is_a_violation(caller: Caller) -> None:
    """Two pictures under one key would answer for each other."""
    await caller.render(chat(image_url(100, 100), uuids=["same"]))
    await caller.render(chat(image_url(200, 100), uuids=["same"]))
    assert len(caller.violations) == 1
    assert "'same'" in caller.violations[0]


async def test_the_first_item_under_a_uuid_answers_for_later_ones(caller: Caller) -> None:
    """A part without data is a hit in the processor's cache or a 400; another picture is not looked at."""
    spans = []
    for url in (image_url(100, 100), None, image_url(200, 100)):
        part = {"type": "image_url", "image_url": url and {"url": url}, "uuid": "u"}
        spans.append((await caller.render(_one_part(part)))["features"]["mm_placeholders"])
    assert spans[0] == spans[1] == spans[2]
    for uuid, message in (("never-seen", "Cache miss for image at index 0"), (None, "is missing")):
        part = {"type": "image_url", "image_url": None, "uuid": uuid}
        status, answer = await caller.post("render", RENDER, _one_part(part))
        assert status == 400
        assert message in answer["error"]["message"]


@pytest.mark.parametrize("size", [64, 1 << 20])
async def test_tensor_size_is_configurable(simulator: Simulator, caller: Caller, size: int) -> None:
    """`tensor_bytes` replaces the size that follows from the image."""
    simulator.config.tensor_bytes = size
    (item,) = (await caller.render(chat(image_url())))["features"]["kwargs_data"]["image"]
    assert len(msgpack.unpackb(base64.b64decode(item))["pixel_values"]["data"][2].data) == size


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({}, None), ({"max_tokens": 16}, None), ({"max_tokens": 17}, 17), ({"max_completion_tokens": 5}, 5)],
)
async def test_sixteen_tokens_disappear(
    caller: Caller, simulator: Simulator, fields: dict[str, Any], expected: int | None
) -> None:
    """`max_tokens: 16` is an engine default, so it is not rendered; unset means all that fits."""
    answer = await caller.render(chat(**fields))
    if not fields:
        expected = simulator.config.max_model_len - len(answer["token_ids"])
    assert answer["sampling_params"].get("max_tokens") == expected


async def test_completions_render_to_an_array(caller: Caller) -> None:
    """Completions answer one rendering per prompt, and their default of 16 tokens disappears."""
    for prompt in ("hello there", [5, 6, 7]):
        status, answer = await caller.post("render", "/v1/completions/render", {"prompt": prompt})
        assert status == 200
        assert len(answer) == 1
        assert answer[0]["request_id"].startswith("cmpl-")
        assert "max_tokens" not in answer[0]["sampling_params"]
    assert answer[0]["token_ids"] == [5, 6, 7]


async def test_transfer_params_of_the_client_end_up_in_extra_args(caller: Caller) -> None:
    """As in vLLM 0.32, they move below `sampling_params`."""
    answer = await caller.render(chat(kv_transfer_params={"a": 1}))
    assert answer["sampling_params"]["extra_args"] == {"kv_transfer_params": {"a": 1}}
    assert answer["kv_transfer_params"] is None


async def test_transfer_params_stay_at_the_top_level_in_0_33(simulator: Simulator, caller: Caller) -> None:
    """VLLM 0.33 does not move them."""
    simulator.configure({"vllm_version": "0.33"})
    answer = await caller.render(chat(kv_transfer_params={"a": 1}))
    assert answer["kv_transfer_params"] == {"a": 1}
    assert "extra_args" not in answer["sampling_params"]


async def test_request_id_header_wins(caller: Caller) -> None:
    """`x-request-id` beats the body's `request_id`."""
    _, answer = await caller.post("render", RENDER, chat(request_id="body"), **{"x-request-id": "head"})
    assert answer["request_id"] == "chatcmpl-head"
    _, answer = await caller.post(
        "render", "/v1/responses/render", {"input": "x"}, **{"x-request-id": "head"}
    )
    assert answer["request_id"].startswith("resp_")
    assert "head" not in answer["request_id"]


async def test_everything_that_shapes_the_prompt_changes_the_tokens(caller: Caller) -> None:
    """Tools, template options and roles are part of the prompt."""
    bodies = [
        chat(),
        chat(tools=[{"type": "function", "function": {"name": "f"}}]),
        chat(chat_template_kwargs={"enable_thinking": False}),
    ]
    rendered = [tuple((await caller.render(body))["token_ids"]) for body in bodies]
    assert len(set(rendered)) == 3


def _one_part(part: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [part]}]}


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        (chat(mm_payload="metadata"), "body.mm_payload", "'tensors' or 'none'"),
        (chat(mm_payload=3), "body.mm_payload", "valid string"),
        (chat(return_mm_kwargs="no"), "body.return_mm_kwargs", "valid boolean"),
        (chat(mm_processor_kwargs={"max_pixels": 9}), "mm_processor_kwargs", "trust-request-mm-kwargs"),
        (chat(media_io_kwargs={"image": {}}), "media_io_kwargs", "trust-request-mm-kwargs"),
        (chat(max_tokens="many"), "body.max_tokens", "valid integer"),
        (chat(max_tokens=0), "body.max_tokens", "at least 1"),
        (chat(temperature="hot"), "body.temperature", "valid number"),
        (chat(stream="yes"), "body.stream", "valid boolean"),
        (chat(kv_transfer_params=[1]), "body.kv_transfer_params", "valid dictionary"),
        (chat(min_tokens=5, max_tokens=1), None, "got 5"),
        (chat(stream_options={"include_usage": True}), "stream_options", "stream=True"),
        ({"messages": []}, "body.messages", "at least 1 item"),
        ({"messages": "hi"}, "body.messages", "valid list"),
        ({}, "body.messages", "Field required"),
        ({"messages": [{"content": "x"}]}, "body.messages", "role"),
        ({"messages": [{"role": "user", "content": 5}]}, "body.messages", "string or list"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "body.messages", "string"),
        (_one_part({"type": "image_embeds"}), "image_embeds", "--enable-mm-embeds"),
        (_one_part({"type": "hologram"}), "type", "Unsupported chat content part type: 'hologram'"),
        (_one_part({"type": "input_image", "image_url": image_url()}), None, "detail: Field required"),
        (chat(max_tokens=1 << 24), "max_tokens", "cannot be greater than max_model_len=8388608"),
        (chat(max_completion_tokens=1 << 24), "max_completion_tokens", "cannot be greater than"),
        (chat(cache_salt="a/b"), "cache_salt", "must not contain '@', '/', '\\', or NUL"),
        (chat(cache_salt="s" * 129), "cache_salt", "at most 128 characters"),
        (chat(cache_salt=""), "cache_salt", "non-empty string"),
    ],
)
async def test_wrong_bodies_are_refused(
    caller: Caller, body: dict[str, Any], param: str | None, message: str
) -> None:
    """A refusal has vLLM's shape and names the field."""
    status, answer = await caller.post("render", RENDER, body)
    assert status == 400
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["param"] == param
    assert answer["error"]["code"] == 400
    assert message in answer["error"]["message"]


@pytest.mark.parametrize("value", [None, {}])
async def test_empty_processor_kwargs_pass(caller: Caller, value: object) -> None:
    """Null and an empty object are no processor settings."""
    url = image_url()
    answer = await caller.render(chat(url, mm_processor_kwargs=value))
    assert answer["features"]["mm_hashes"] == {"image": [_sha256(url)]}


async def test_trusted_processor_kwargs_change_hash_and_grid(simulator: Simulator, caller: Caller) -> None:
    """Where they are trusted, they enter the hash, also of a uuid, and `max_pixels` works."""
    simulator.config.trust_mm_kwargs = True
    plain = (await caller.render(chat(image_url(), uuids=["u"])))["features"]
    body = chat(image_url(), uuids=["u"], mm_processor_kwargs={"max_pixels": 50176})
    shrunk = (await caller.render(body))["features"]
    assert plain["mm_hashes"] == {"image": ["u"]}
    assert shrunk["mm_hashes"]["image"][0] != "u"
    assert len(shrunk["mm_hashes"]["image"][0]) == 64
    assert shrunk["mm_placeholders"]["image"][0]["length"] < plain["mm_placeholders"]["image"][0]["length"]


async def test_unknown_model_is_a_404(caller: Caller) -> None:
    """The error says the model is unknown."""
    status, answer = await caller.post("render", RENDER, chat() | {"model": "other"})
    assert (status, answer["error"]["type"]) == (404, "NotFoundError")
    assert "`other`" in answer["error"]["message"]


async def test_image_limit(simulator: Simulator, caller: Caller) -> None:
    """One image more than allowed is a 400."""
    simulator.config.max_images = 1
    status, answer = await caller.post("render", RENDER, chat(image_url(), image_url()))
    assert status == 400
    assert "At most 1 image(s)" in answer["error"]["message"]


async def test_prompt_over_the_context_length(simulator: Simulator, caller: Caller) -> None:
    """A prompt that leaves no room is a 400."""
    simulator.config.max_model_len = 19
    status, answer = await caller.post("render", RENDER, chat())
    assert status == 400
    assert "maximum context length is 19" in answer["error"]["message"]


async def test_sparse_spans_mix_tokens(simulator: Simulator, caller: Caller) -> None:
    """The span of a sparse model covers the frame around its placeholders."""
    simulator.config.sparse_spans = True
    answer = await caller.render(chat(image_url(56, 56)))
    (span,) = answer["features"]["mm_placeholders"]["image"]
    covered = answer["token_ids"][span["offset"] : span["offset"] + span["length"]]
    assert covered == [VISION_START, *[IMAGE_PAD] * 4, VISION_END]


@pytest.mark.parametrize(
    ("api", "body"),
    [
        (
            "responses",
            {
                "instructions": "be brief",
                "input": [
                    {"role": "user", "content": [{"type": "input_image", "image_url": image_url()}]},
                    {"type": "function_call", "name": "f", "arguments": "{}"},
                    {
                        "type": "function_call_output",
                        "output": [{"type": "input_image", "image_url": image_url(56, 56)}],
                    },
                ],
            },
        ),
        (
            "messages",
            {
                "max_tokens": 9,
                "system": "be brief",
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "image", "source": {"type": "url", "url": image_url(56, 56)}},
                            {
                                "type": "tool_result",
                                "content": [{"type": "image", "source": {"type": "url", "url": image_url()}}],
                            },
                        ],
                    }
                ],
            },
        ),
    ],
)
async def test_other_apis_render_their_images_in_prompt_order(
    caller: Caller, api: str, body: dict[str, Any]
) -> None:
    """Responses and messages find images in tool outputs too; a tool result comes before its turn."""
    status, answer = await caller.post("render", f"/v1/{api}/render", body)
    assert status == 200
    assert answer["features"]["mm_hashes"]["image"] == [_sha256(image_url()), _sha256(image_url(56, 56))]


async def test_stateful_responses_are_refused(caller: Caller) -> None:
    """A renderer cannot see a previous response."""
    body = {"input": "hi", "previous_response_id": "resp_1"}
    status, answer = await caller.post("render", "/v1/responses/render", body)
    assert (status, answer["error"]["param"]) == (400, "previous_response_id")


async def test_only_render_paths_exist(caller: Caller) -> None:
    """The renderer serves neither generation nor a render of it; FastAPI's 404 has no error object."""
    for path in (CHAT, "/inference/v1/generate", "/inference/v1/generate/render", "/v1/embeddings/render"):
        assert await caller.post("render", path, chat()) == (404, {"detail": "Not Found"})


async def test_phase_header_at_the_renderer_is_a_violation(caller: Caller) -> None:
    """Render belongs to no phase."""
    await caller.post("render", RENDER, chat(), **{"EPP-Profile": "encode"})
    assert len(caller.violations) == 1
    assert "EPP-Profile" in caller.violations[0]


async def test_a_role_of_the_wrong_type_is_refused(caller: Caller) -> None:
    """Any JSON value in place of a role is a 400, not a crash of the simulator."""
    body = {"max_tokens": 1, "messages": [{"role": {"a": 1}, "content": "x"}]}
    assert (await caller.post("render", "/v1/messages/render", body))[0] == 400
