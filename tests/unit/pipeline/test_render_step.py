from __future__ import annotations

from typing import Any

import pytest

from sidecar.errors import BadRequest, RenderUnavailable, SidecarError, StepFailed, StepRejected
from tests.unit.pipeline.pipeline_support import (
    HASHES,
    PHASE_TOKEN,
    TENSORS,
    TOKEN_IDS,
    Deployment,
    answer,
    chat,
    image,
    rendered,
    rendered_text,
    sent,
    two_images,
)

RENDER_ONLY = ("render", "decode")
AUDIO = {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}
VIDEO = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}


async def failure(render: Any, body: Any = None, **settings: Any) -> SidecarError:
    """The error of a request that must not reach the gateway."""
    deployment = Deployment(render=render, **settings)
    with pytest.raises(SidecarError) as failed:
        await deployment.run(two_images() if body is None else body)
    assert deployment.gateway.calls == []
    assert failed.value.stage in {None, "render"}
    assert deployment.record.stage == "render"
    return failed.value


# --- the call -------------------------------------------------------------------------------------------


async def test_the_call_is_the_clients_body_to_the_clients_path() -> None:
    """The renderer gets the client's body, uncapped, at the client's path with /render."""
    body = two_images(stream=True, max_tokens=50, tools=[], unknown={"a": 1.0})
    deployment = Deployment(headers=(("authorization", "Bearer k"),), phase_token=PHASE_TOKEN)
    await deployment.run(body)
    (call,) = deployment.renderer.calls
    assert (call.step, call.path) == ("render", "/v1/chat/completions/render")
    assert sent(call) == body
    headers = dict(call.headers)
    assert headers["authorization"] == "Bearer k"
    assert "epp-profile" not in headers
    assert PHASE_TOKEN not in str(call.headers)


@pytest.mark.parametrize(
    ("asked", "members", "expected"),
    [
        ("tensors", {}, {}),
        ("tensors", {"mm_payload": "none", "return_mm_kwargs": False}, {}),
        ("none", {}, {"mm_payload": "none", "return_mm_kwargs": False}),
        ("none", {"mm_payload": "tensors"}, {"mm_payload": "none", "return_mm_kwargs": False}),
        ("none", {"mm_processor_kwargs": None}, {"mm_payload": "none", "return_mm_kwargs": False}),
        ("none", {"mm_processor_kwargs": {}}, {}),
        ("none", {"media_io_kwargs": {"image": {}}}, {}),
    ],
)
async def test_the_payload_fields_are_on_the_render_copy_only(
    asked: str, members: dict[str, Any], expected: dict[str, Any]
) -> None:
    """`mm_payload: none` and its alias go to the renderer, unless processor kwargs need tensors."""
    deployment = Deployment(mm_payload=asked, openai=True)
    decode = await deployment.decode(two_images(**members))
    (call,) = deployment.renderer.calls
    fields = {"mm_payload", "return_mm_kwargs"}
    assert {key: value for key, value in sent(call).items() if key in fields} == expected
    assert deployment.record.mm_payload == ("none" if expected else "tensors")
    for body in (decode, *map(sent, deployment.gateway.calls)):
        assert not fields & set(body)


async def test_the_renderer_never_sees_a_uuid() -> None:
    """Not the client's, and none of ours: the hashes are the renderer's to compute."""
    body = chat(image("AAAA") | {"uuid": "../x"}, image("BBBB"))
    deployment = Deployment()
    await deployment.run(body)
    assert b"uuid" not in b"".join(deployment.renderer.calls[0].body)


# --- what is read from the answer -----------------------------------------------------------------------


async def test_the_record_tells_what_was_rendered() -> None:
    """Tokens, placeholder tokens, media and the size of the answer are in the access log."""
    deployment = Deployment()
    await deployment.run(two_images())
    record = deployment.record
    assert (record.prompt_tokens, record.placeholder_tokens, record.media) == (10, 6, "image:2")
    assert record.render_form == "tensors"
    assert record.render_bytes == len(answer(rendered()).body)


async def test_modalities_pair_by_position_each_on_its_own() -> None:
    """Entries keep the order of the request; each part gets the hash of its place in its modality."""
    features: dict[str, Any] = {
        "mm_hashes": {"audio": [HASHES[0]], "image": [HASHES[1], HASHES[2]], "video": []},
        "mm_placeholders": {
            "image": [{"offset": 0, "length": 1}, {"offset": 7, "length": 2}],
            "audio": [{"offset": 2, "length": 4}],
        },
        "kwargs_data": {"image": list(TENSORS[1:]), "audio": [TENSORS[0]]},
    }
    deployment = Deployment(render=rendered(**features), openai=True)
    decode = await deployment.decode(chat(image("AAAA"), AUDIO, image("BBBB")))
    content = decode["messages"][0]["content"]
    assert [part["uuid"] for part in content] == [HASHES[1], HASHES[0], HASHES[2]]
    assert deployment.record.media == "image:2,audio:1"


async def test_unknown_members_of_the_answer_are_tolerated() -> None:
    """A later renderer may say more: an embedding mask, new members of features, a parse context."""
    newer = rendered(
        mm_placeholders={
            "image": [
                {"offset": 2, "length": 4, "is_embed": [True] * 4},
                {"length": 2, "offset": 7, "is_embed": None},
            ]
        },
        mm_future={"image": [1]},
    ) | {"parse_context": {"tools": []}}
    deployment = Deployment(render=newer)
    await deployment.run(two_images())
    assert deployment.record.prefill_form == "kwargs_data"


@pytest.mark.parametrize(
    "features",
    [None, {}, {"mm_hashes": {}, "mm_placeholders": {}}, {"mm_hashes": {"image": []}, "mm_placeholders": {}}],
)
async def test_empty_features_are_text(features: Any) -> None:
    """Null and empty features mean a prompt without media."""
    deployment = Deployment(render=rendered_text() | {"features": features}, mm_payload="none")
    await deployment.run(chat({"type": "text", "text": "hi"}))
    assert deployment.record.render_form == "text"


# --- inconsistent answers -------------------------------------------------------------------------------

P = {"offset": 2, "length": 4}
Q = {"offset": 7, "length": 2}


@pytest.mark.parametrize(
    ("features", "named"),
    [
        ({"mm_hashes": {"image": [HASHES[0]]}}, "image"),
        ({"mm_hashes": {"image": list(HASHES)}}, "image"),
        ({"mm_placeholders": {"image": [P]}}, "image: 2 hashes, 1 placeholders"),
        ({"mm_placeholders": {"image": [P, Q, {"offset": 0, "length": 1}]}}, "2 hashes, 3 placeholders"),
        ({"mm_placeholders": {"video": [P, Q]}}, "different modalities"),
        ({"mm_placeholders": {"image": [P], "video": [Q]}}, "different modalities"),
        ({"mm_placeholders": {"image": [P, {"offset": 6, "length": 0}]}}, "empty"),
        ({"mm_placeholders": {"image": [P, {"offset": 9, "length": 2}]}}, "outside the 10 token ids"),
        ({"mm_placeholders": {"image": [P, {"offset": -1, "length": 1}]}}, "outside"),
        ({"mm_placeholders": {"image": [P, {"offset": 5, "length": 2}]}}, "overlaps"),
        ({"mm_placeholders": {"image": [P, P]}}, "overlaps"),
        ({"mm_placeholders": {"image": [P, {"offset": 1 << 70, "length": 1}]}}, ""),
        ({"mm_placeholders": {"image": [P, {"offset": "7", "length": 2}]}}, "mm_placeholders"),
        ({"mm_placeholders": {"image": [P, {"length": 2}]}}, "mm_placeholders"),
        ({"mm_placeholders": {"image": [P, None]}}, "mm_placeholders"),
        ({"mm_placeholders": ...}, "modalities"),
        ({"mm_hashes": ...}, "modalities"),
        ({"kwargs_data": {"image": [TENSORS[0]]}}, "2 hashes, 1 items in kwargs_data"),
        ({"kwargs_data": {"image": list(TENSORS)}}, "2 hashes, 3 items in kwargs_data"),
        ({"kwargs_data": {"image": [TENSORS[0], 7]}}, "kwargs_data"),
        ({"kwargs_data": {"image": [TENSORS[0], {}]}}, "kwargs_data"),
        ({"kwargs_data": {"image": "x"}}, "kwargs_data"),
        ({"kwargs_data": []}, "kwargs_data"),
        ({"mm_metadata": {"image": [None]}}, "2 hashes, 1 items in mm_metadata"),
        ({"mm_metadata": {"image": [None, 1]}}, "mm_metadata"),
        ({"mm_hashes": {"image": [HASHES[0], ""]}}, "hash of image[1]"),
        ({"mm_hashes": {"image": [HASHES[0], "../../x"]}}, "hash of image[1]"),
        ({"mm_hashes": {"image": [HASHES[0], "a/b"]}}, "hash of image[1]"),
        ({"mm_hashes": {"image": [".", HASHES[0]]}}, "hash of image[0]"),
        ({"mm_hashes": {"image": [HASHES[0], "x" * 300]}}, "hash of image[1]"),
        ({"mm_hashes": {"image": [HASHES[0], "a\u0000"]}}, "hash of image[1]"),
        ({"mm_hashes": {"image": [HASHES[0], "a\n"]}}, "hash of image[1]"),
        ({"mm_hashes": {"image": [HASHES[0], None]}}, "mm_hashes"),
        ({"mm_hashes": {"image": {"0": HASHES[0]}}}, "mm_hashes"),
    ],
)
@pytest.mark.parametrize("openai", [True, False])
async def test_inconsistent_features_are_the_renderers_fault(
    features: dict[str, Any], named: str, *, openai: bool
) -> None:
    """Counts, spans and types that do not fit together are a 502 that says what, and nothing is sent on."""
    error = await failure(rendered(**features), openai=openai)
    assert isinstance(error, StepFailed)
    assert (error.status, error.code) == (502, "epd_render_failed")
    assert named in error.message


@pytest.mark.parametrize(
    ("members", "named"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": None}, "token_ids"),
        ({"token_ids": "1,2"}, "token_ids"),
        ({"token_ids": [1, -1] + [7] * 8}, "token_ids"),
        ({"token_ids": [1, 1.5] + [7] * 8}, "token_ids"),
        ({"token_ids": [1, "7"] + [7] * 8}, "token_ids"),
        ({"token_ids": [1, True] + [7] * 8}, "token_ids"),
        ({"token_ids": [[1]]}, "token_ids"),
        ({"features": []}, "features"),
        ({"features": "x"}, "features"),
        ({"sampling_params": []}, "sampling_params"),
        ({"sampling_params": "x"}, "sampling_params"),
    ],
)
async def test_malformed_members_are_the_renderers_fault(members: dict[str, Any], named: str) -> None:
    """A member of the wrong type is a 502 that names it."""
    error = await failure(rendered() | members)
    assert (error.status, error.code) == (502, "epd_render_failed")
    assert named in error.message


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json",
        b"[]",
        b"[{}]",
        b"null",
        b"{}",
        b'{"token_ids":[1,2',
        b'{"token_ids":[1,2]}x',
        b'{"token_ids":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b'{"token_ids":[1],"sampling_params":{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}}",
        b'{"token_ids":[1],"x":"\xff\xfe","model":"\xff"}x',
    ],
)
async def test_an_answer_that_is_no_render_response_is_502(body: bytes) -> None:
    """Anything but a render response is a 502, whatever it is made of."""
    error = await failure(answer(body))
    assert (error.status, error.code) == (502, "epd_render_failed")


@pytest.mark.parametrize(
    ("parts", "hashes"),
    [
        ([image(), image()], {"image": 1}),
        ([image()], {"image": 2}),
        ([image(), image()], {}),
        ([], {"image": 1}),
        ([image()], {"video": 1}),
        ([image(), VIDEO], {"image": 2}),
        ([image(), image(), AUDIO], {"image": 1, "audio": 2}),
        ([image(), image(), AUDIO], {"image": 1, "audio": 1, "video": 1}),
        ([image(), image()], {"image": 1, "vision_chunk": 1}),
        ([image(), VIDEO], {"image": 1, "vision_chunk": 2}),
        ([image(), AUDIO], {"vision_chunk": 2, "audio": 2}),
    ],
)
async def test_counts_must_be_equal_in_every_modality(parts: list[Any], hashes: dict[str, int]) -> None:
    """Too few, too many, or the right total in the wrong modalities: never a guess, a 502."""
    position = iter(range(10))
    features: dict[str, Any] = {
        "mm_hashes": {name: [f"{name}{i}" for i in range(count)] for name, count in hashes.items()},
        "mm_placeholders": {
            name: [{"offset": next(position), "length": 1} for _ in range(count)]
            for name, count in hashes.items()
        },
        "kwargs_data": {name: ["AAAA"] * count for name, count in hashes.items()},
    }
    error = await failure(rendered(**features), chat({"type": "text", "text": "x"}, *parts))
    assert (error.status, error.code) == (502, "epd_render_failed")


# --- modalities this sidecar does not know --------------------------------------------------------------

CHUNKS: dict[str, Any] = {
    "mm_hashes": {"vision_chunk": list(HASHES[:2])},
    "mm_placeholders": {"vision_chunk": [P, Q]},
}


async def test_a_foreign_modality_travels_as_features_under_its_own_name() -> None:
    """`vision_chunk` is not forced into `image`: its tensors travel as the renderer named them."""
    deployment = Deployment(render=rendered(**CHUNKS, kwargs_data={"vision_chunk": list(TENSORS[:2])}))
    await deployment.run(two_images())
    assert deployment.record.media == "vision_chunk:2"
    features = deployment.prefill_body["features"]
    assert features["mm_hashes"] == {"vision_chunk": list(HASHES[:2])}
    assert features["kwargs_data"] == {"vision_chunk": list(TENSORS[:2])}
    assert [list(sent(call)["features"]["mm_hashes"]) for call in deployment.encodes] == [
        ["vision_chunk"]
    ] * 2


async def test_a_foreign_modality_without_tensors_fails_before_anything_is_sent() -> None:
    """Engines skip content parts of unknown type without a word: the request fails here instead."""
    deployment = Deployment(render=rendered(**CHUNKS, kwargs_data=None), mm_payload="none")
    with pytest.raises(SidecarError) as failed:
        await deployment.run(two_images())
    assert "vision_chunk[0]" in failed.value.message
    assert 400 <= failed.value.status < 600
    assert deployment.gateway.calls == []


# --- limits ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"max_total_tokens": 9}, ("10", "9", "max_total_tokens")),
        ({"max_total_placeholder_tokens": 5}, ("6", "5", "max_total_placeholder_tokens")),
    ],
)
@pytest.mark.parametrize("openai", [True, False])
async def test_a_prompt_over_a_token_limit_is_the_clients_fault(
    settings: dict[str, int], named: tuple[str, ...], *, openai: bool
) -> None:
    """Over a limit: 400 with the count, the limit and its key; the record still has the counts."""
    deployment = Deployment(openai=openai, **settings)  # type: ignore[arg-type]  # limits by name
    with pytest.raises(BadRequest) as failed:
        await deployment.run(two_images())
    assert failed.value.status == 400
    for text in named:
        assert text in failed.value.message
    assert (deployment.record.prompt_tokens, deployment.record.placeholder_tokens) == (10, 6)
    assert deployment.gateway.calls == []


async def test_a_prompt_at_the_limits_passes() -> None:
    """The limits are inclusive."""
    deployment = Deployment(max_total_tokens=len(TOKEN_IDS), max_total_placeholder_tokens=6)
    await deployment.run(two_images())
    assert len(deployment.prefills) == 1


# --- refusals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "body", "named"),
    [
        (
            403,
            {"error": {"type": "PermissionDeniedError", "message": "x", "code": 403}},
            "--enable-scale-out",
        ),
        (404, {"detail": "Not Found"}, "vllm launch render"),
        (404, b"<html>not found</html>", "vllm launch render"),
        (404, b"", "vllm launch render"),
        (404, {"error": None}, "vllm launch render"),
    ],
)
async def test_a_wrong_deployment_is_not_the_clients_fault(status: int, body: Any, named: str) -> None:
    """No render endpoint, or one that is switched off: 502 that says what to start."""
    error = await failure(answer(body, status))
    assert isinstance(error, RenderUnavailable)
    assert (error.status, error.code, error.outcome) == (502, "epd_render_unavailable", "upstream_error")
    assert named in error.message
    assert str(status) in error.detail


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (404, {"error": {"type": "NotFoundError", "message": "The model `x` does not exist.", "code": 404}}),
        (401, {"error": {"type": "Unauthorized"}}),
        (401, {"detail": "Not Found"}),
        (403, {"error": {"type": "Forbidden", "message": "no access to this model"}}),
        (403, b"denied"),
        (400, {"error": {"type": "BadRequestError", "message": "max_tokens too large"}}),
        (400, {"error": {"type": "PermissionDeniedError"}}),
        (422, b""),
        (429, {}),
        (499, {}),
    ],
)
async def test_other_refusals_keep_their_status(status: int, body: Any) -> None:
    """An unknown model stays a 404, a wrong key a 401, any other 4xx itself; the body stays in the log."""
    error = await failure(answer(body, status))
    assert isinstance(error, StepRejected)
    assert (error.status, error.code, error.outcome) == (status, "epd_render_rejected", "client_error")
    assert error.message == f"render rejected the request: HTTP {status}"


@pytest.mark.parametrize("status", [500, 501, 503, 599, 301, 302, 204, 201, 206])
async def test_anything_else_is_502(status: int) -> None:
    """A 5xx, a redirect and a success that is not 200 are the renderer's failure."""
    error = await failure(answer(rendered(), status))
    assert (error.status, error.code, error.outcome) == (502, "epd_render_failed", "upstream_error")
    assert str(status) in error.message


async def test_equal_items_need_spans_of_equal_length() -> None:
    """One encoding cannot fit two spans of different lengths: 502, before anything leaves for an encoder."""
    error = await failure(rendered(mm_hashes={"image": ["same", "same"]}))
    assert (error.status, error.code) == (502, "epd_render_failed")
    assert "image[1]" in error.message
