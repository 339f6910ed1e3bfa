from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.api import api_for_path
from sidecar.api.generate import GenerateApi, GenerateBody
from sidecar.errors import BadRequest, StepRejected
from sidecar.jsontext import segments, to_raw
from sidecar.multimodal.spans import Span

FORGED = {"kv_transfer_params": {"remote_host": "10.6.6.6"}, "ec_transfer_params": {"peer_host": "10.6.6.6"}}
URI = "data:image/png;base64,AAAA"
A, B, C = "a" * 64, "b" * 64, "c" * 64
IDS = [1, 7, 7, 7, 2, 8, 8, 9, 9, 9, 3]


def request(**members: Any) -> dict[str, Any]:
    return {"token_ids": IDS, "sampling_params": {"max_tokens": 50}, **members}


def features(**members: Any) -> dict[str, Any]:
    """Two images and one sound; a member given as `...` is left out."""
    value: dict[str, Any] = {
        "mm_hashes": {"image": [A, B], "audio": [C]},
        "mm_placeholders": {
            "image": [{"offset": 1, "length": 3}, {"offset": 5, "length": 2}],
            "audio": [{"offset": 7, "length": 3}],
        },
        "kwargs_data": {"image": ["dDA=", "dDE="], "audio": ["dDI="]},
        "mm_metadata": {"image": ["bTA=", None], "audio": [None]},
        **members,
    }
    return {key: item for key, item in value.items() if item is not ...}


def image_features(*spans: tuple[Any, Any], hashes: Any = None, **members: Any) -> dict[str, Any]:
    return {
        "mm_hashes": {"image": hashes or [f"{index:064x}" for index in range(len(spans))]},
        "mm_placeholders": {"image": [{"offset": offset, "length": length} for offset, length in spans]},
        **members,
    }


def part(kind: str = "image_url", url: Any = URI, **members: Any) -> dict[str, Any]:
    return {"type": kind, "url": url, **members}


def parse(body: Any) -> GenerateBody:
    return GenerateApi().parse(body if isinstance(body, bytes) else json.dumps(body).encode())


def sent(tree: Any) -> Any:
    return json.loads(b"".join(segments(tree)))


LEGS = {"prefill": GenerateBody.prefill, "decode": GenerateBody.decode}
ALL_LEGS = pytest.mark.parametrize("leg", LEGS)


def test_the_registry_knows_the_api() -> None:
    """The API owns one exact path."""
    api = api_for_path("/inference/v1/generate")
    assert api is not None
    assert api.name == "generate"
    assert api_for_path("/inference/v1/generate/render") is None


def test_an_ordinary_body_comes_out_as_it_went_in() -> None:
    """Decode gets the client's text: spellings of numbers, escapes, unknown fields, the order of members."""
    text = (
        b'{"zeta":1.50E+2,"stream":true,"token_ids":[ 1,2 ,3],"request_id":"mine","features":{"x":{"y":1e0},'
        b'"mm_placeholders":{"image":[{"is_embed":[true],"offset":1,"length":1}]},"mm_hashes":{"image":["h"]},'
        b'"kwargs_data":{"image":["AA\\/A"]}},"content_parts":[],"sampling_params":{"seed":-0,"max_tokens":9},'
        b'"return_token_ids":true,"output_mode":"text","cache_salt":"s","priority":-1,"model":null}'
    )
    assert b"".join(segments(parse(text).decode())) == text


def test_large_values_are_not_copied() -> None:
    """A megabyte of tensors, or of a data URI, travels as one slice on both legs."""
    for body in (
        request(features=image_features((1, 3), kwargs_data={"image": ["A" * (1 << 20)]})),
        request(content_parts=[part(url="data:image/png;base64," + "A" * (1 << 20))]),
    ):
        parsed = parse(body)
        for written in LEGS.values():
            assert any(isinstance(s, memoryview) and len(s) >= 1 << 20 for s in segments(written(parsed)))


def test_prefill_is_the_clients_body_for_one_token() -> None:
    """Capped, not streamed, without minimum and constraints; features, ids, salt and priority stay."""
    sampling = {
        "temperature": 0.5,
        "max_tokens": 900,
        "min_tokens": 5,
        "n": 2,
        "best_of": 2,
        "logprobs": 3,
        "logprob_token_ids": [1],
        "prompt_logprobs": 1,
        "prompt_logprob_token_ids": [[1]],
        "prompt_logprob_start": 1,
        "structured_outputs": {"regex": "a"},
        "guided_decoding": {"regex": "a"},
        "stop_token_ids": [4],
        "extra_args": {**FORGED, "keep": 1},
    }
    kept = {
        "model": "m",
        "request_id": "mine",
        "features": features(),
        "return_token_ids": True,
        "cache_salt": "tenant",
        "priority": 3,
        "unknown": {"a": 1},
    }
    everything = request(**kept, stream=True, stream_options={"include_usage": True})
    body = parse(everything | {"sampling_params": sampling})
    assert sent(body.prefill()) == request(**kept) | {
        "stream": False,
        "sampling_params": {
            "temperature": 0.5,
            "max_tokens": 1,
            "stop_token_ids": [4],
            "extra_args": {"keep": 1},
        },
    }
    assert sent(body.decode()) == everything | {"sampling_params": sampling | {"extra_args": {"keep": 1}}}
    assert (body.model, body.stream) == ("m", True)


def test_bare_sampling_params_are_capped() -> None:
    """An engine would otherwise generate until the context is full."""
    body = parse({"token_ids": [1], "sampling_params": {}})
    assert sent(body.prefill()) == {"token_ids": [1], "sampling_params": {"max_tokens": 1}, "stream": False}
    assert sent(body.decode()) == {"token_ids": [1], "sampling_params": {}}


@ALL_LEGS
@pytest.mark.parametrize(
    "members",
    [
        FORGED,
        {"kv_transfer_params": "10.6.6.6"},
        {"vllm_xargs": FORGED},
        {"sampling_params": {"extra_args": FORGED}},
        {"sampling_params": {"extra_args": {"ec_transfer_params": {"peer_host": "10.6.6.6"}, "keep": 1}}},
    ],
)
def test_forged_transfer_parameters_reach_no_leg(members: dict[str, Any], leg: str) -> None:
    """A worker address from a client is gone from every place an engine reads it from."""
    assert "10.6.6.6" not in json.dumps(sent(LEGS[leg](parse(request(**members)))))


@ALL_LEGS
@pytest.mark.parametrize(
    "text",
    [
        rb'"\u006bv_transfer_params":{"h":"10.6.6.6"}',
        b'"sampling_params": { "extra_args" : {"kv_transfer_params":{"h":"10.6.6.6"}} }',
        rb'"sampling_params":{"extra\u005fargs":{"ec\u005ftransfer_params":{"h":"10.6.6.6"}}}',
        b'"sampling_params":{"extra_args":{},"extra_args":{"kv_transfer_params":{"h":"10.6.6.6"}}}',
    ],
)
def test_no_spelling_smuggles_transfer_parameters(text: bytes, leg: str) -> None:
    """Escaped keys, duplicate keys and whitespace do not get a forged address through."""
    head = json.dumps(request()).encode()[:-1]
    assert b"10.6.6.6" not in b"".join(segments(LEGS[leg](parse(head + b"," + text + b"}"))))


def test_the_prompt_is_the_clients() -> None:
    """Ids and spans are read for the checks of prefill; the form says what carries the media."""
    own = parse(request(features=features())).own_prompt
    assert list(own.token_ids) == IDS
    assert own.spans == {"image": [Span(1, 3), Span(5, 2)], "audio": [Span(7, 3)]}
    assert own.form == "kwargs_data"


@pytest.mark.parametrize(
    ("members", "form"),
    [
        ({}, "tokens"),
        ({"features": None, "content_parts": None}, "tokens"),
        ({"content_parts": []}, "tokens"),
        ({"features": {"mm_hashes": {}, "mm_placeholders": {}}}, "tokens"),
        ({"features": {"mm_hashes": {"image": []}, "mm_placeholders": {"image": []}}}, "tokens"),
        ({"features": image_features((1, 3)), "content_parts": []}, "kwargs_data"),
        ({"content_parts": [part()]}, "content_parts"),
        ({"content_parts": [part()], "features": None}, "content_parts"),
    ],
)
def test_the_form_follows_the_media(members: dict[str, Any], form: str) -> None:
    """Features with items, content parts, or neither; empty and null fields are no media."""
    body = parse(request(**members))
    assert body.own_prompt.form == form
    assert all(body.own_prompt.spans.values())
    assert sent(body.decode())["token_ids"] == IDS


@pytest.mark.parametrize(
    "members",
    [
        {},
        {"kwargs_data": None, "mm_metadata": None},
        {"kwargs_data": ..., "mm_metadata": ...},
        {"kwargs_data": {"image": [None, None], "audio": [None]}, "mm_metadata": None},
        {"kwargs_data": {"image": [None, "dDE="], "audio": [None]}, "mm_metadata": ...},
        {"mm_metadata": {"image": [None, "bTE="], "audio": ["bTI="]}},
        {"mm_hashes": {"image": [A, B], "audio": ["uuid-1.x_Y"]}},
        {"extra": 1},
    ],
)
def test_features_an_engine_can_use_pass(members: dict[str, Any]) -> None:
    """Tensors, tensors with metadata, and items that name a worker's cache by hash; kept as sent."""
    body = request(features=features(**members))
    assert sent(parse(body).decode()) == body
    assert sent(parse(body).prefill())["features"] == body["features"]


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("x", "features"),
        ([], "features"),
        ({}, "features.mm_hashes is missing"),
        (features(mm_hashes=...), "features.mm_hashes is missing"),
        (features(mm_hashes=None), "features.mm_hashes is missing"),
        (features(mm_hashes=["h"]), "features.mm_hashes"),
        (features(mm_hashes={"image": None}), "features.mm_hashes"),
        (features(mm_hashes={"image": A}), "features.mm_hashes"),
        (features(mm_hashes={"image": [1, B], "audio": [C]}), "features.mm_hashes"),
        (features(mm_hashes={"image": [None, B], "audio": [C]}), "features.mm_hashes"),
        (features(mm_hashes={"image": [A], "audio": [C]}), "features.mm_placeholders['image']: has 2 items"),
        (features(mm_hashes={"image": [A, B]}), "features.mm_placeholders: must have the same modalities"),
        (features(mm_placeholders=...), "features.mm_placeholders is missing"),
        (features(mm_placeholders={"image": [[1, 3]]}), "features.mm_placeholders"),
        (features(mm_placeholders={"image": []}), "features.mm_placeholders: must have the same modalities"),
        (features(kwargs_data=[]), "features.kwargs_data"),
        (features(kwargs_data={}), "features.kwargs_data: must have the same modalities"),
        (features(kwargs_data={"image": ["x", "y"]}), "features.kwargs_data: must have the same modalities"),
        (features(kwargs_data={"image": None, "audio": ["x"]}), "features.kwargs_data"),
        (
            features(kwargs_data={"image": ["x"], "audio": ["x"]}),
            "features.kwargs_data['image']: has 1 items",
        ),
        (features(kwargs_data={"image": ["x", 1], "audio": ["x"]}), "features.kwargs_data['image'][1]: must"),
        (
            features(kwargs_data={"image": ["x", {}], "audio": ["x"]}),
            "features.kwargs_data['image'][1]: must",
        ),
        (
            features(mm_metadata={"image": [None, None]}),
            "features.mm_metadata: must have the same modalities",
        ),
        (features(mm_metadata={"image": [], "audio": []}), "features.mm_metadata['image']: has 0 items"),
        (
            features(mm_metadata={"image": [None, 1], "audio": [None]}),
            "features.mm_metadata['image'][1]: must",
        ),
        (features(kwargs_data=None), "features.kwargs_data['image'][0]: is missing next to mm_metadata"),
        (
            features(kwargs_data={"image": [None, "x"], "audio": ["x"]}),
            "features.kwargs_data['image'][0]: is missing next to mm_metadata",
        ),
        (image_features((1, 3), (3, 2)), "overlaps"),
        (image_features((5, 2), (1, 5)), "overlaps"),
        (image_features((9, 3)), "outside the 11 token ids"),
        (image_features((11, 1)), "outside the 11 token ids"),
        (image_features((2**63, 1)), "outside"),
        (image_features((-1, 2)), "features.mm_placeholders"),
        (image_features((1, 0)), "features.mm_placeholders"),
        (image_features((1, -1)), "features.mm_placeholders"),
        (image_features((1.0, 3)), "features.mm_placeholders"),
        (image_features((1, 3.5)), "features.mm_placeholders"),
        (image_features(("1", 3)), "features.mm_placeholders"),
        (image_features((True, 3)), "features.mm_placeholders"),
        (image_features((None, 3)), "features.mm_placeholders"),
        ({"mm_hashes": {"image": [A]}, "mm_placeholders": {"image": [{"offset": 1}]}}, "mm_placeholders"),
        ({"mm_hashes": {"tactile": [A]}, "mm_placeholders": {"tactile": []}}, "mm_placeholders['tactile']"),
        ({"mm_hashes": {"tactile": []}, "mm_placeholders": {"tactile": []}}, "'tactile' is not supported"),
    ],
)
def test_features_an_engine_would_choke_on_are_refused(value: Any, named: str) -> None:
    """Whatever an engine refuses, or does not survive, is a 400 that names the field."""
    with pytest.raises(BadRequest) as refused:
        parse(request(features=value))
    assert refused.value.status == 400
    assert named in refused.value.message
    assert str(refused.value.param).startswith("features")


@pytest.mark.parametrize(
    "name",
    ["", "..", "../x", "a/b", "a\\b", ".hidden", "a b", "a\n", "a\x00", "ä", "a" * 257, "{h}", "lora:h"],
)
def test_a_hash_is_a_plain_name(name: str) -> None:
    """A worker uses the hash as a file name: nothing that leads elsewhere."""
    with pytest.raises(BadRequest, match="plain name") as refused:
        parse(request(features=image_features((1, 3), (5, 2), hashes=[A, name])))
    assert refused.value.param == "features.mm_hashes['image'][1]"


def test_equal_items_may_repeat() -> None:
    """One hash stands for one item, at as many places of one length as the prompt has."""
    body = parse(request(features=image_features((1, 2), (5, 2), (8, 2), hashes=[A, B, A])))
    assert len(body.own_prompt.spans["image"]) == 3


@pytest.mark.parametrize(
    "value",
    [
        image_features((1, 3), (5, 2), hashes=[A, A]),
        {
            "mm_hashes": {"image": [A], "audio": [A]},
            "mm_placeholders": {
                "image": [{"offset": 1, "length": 2}],
                "audio": [{"offset": 5, "length": 2}],
            },
        },
    ],
)
def test_one_hash_is_never_two_items(value: Any) -> None:
    """An encoder cache would hand one item's encoding to the span of another, and the engine would die."""
    with pytest.raises(BadRequest, match="hash of another item"):
        parse(request(features=value))


@given(st.lists(st.tuples(st.integers(-1, 12), st.integers(-1, 5)), max_size=5))
def test_spans_pass_exactly_when_they_are_disjoint_and_inside(spans: list[tuple[int, int]]) -> None:
    """Of any spans, those pass that cover every position of the ids at most once."""
    covered = [position for offset, length in spans for position in range(offset, offset + length)]
    valid = (
        all(offset >= 0 and length >= 1 for offset, length in spans)
        and len(set(covered)) == len(covered)
        and all(position < len(IDS) for position in covered)
    )
    body = request(features=image_features(*spans))
    if valid:
        assert [(span.offset, span.length) for span in parse(body).own_prompt.spans.get("image", [])] == spans
    else:
        with pytest.raises(BadRequest):
            parse(body)


@pytest.mark.parametrize("value", [features(), {"mm_hashes": {}, "mm_placeholders": {}}, {}])
def test_features_and_content_parts_exclude_each_other(value: Any) -> None:
    """Both together are refused, also when the features have no items: engines do the same."""
    with pytest.raises(BadRequest, match="exclude each other"):
        parse(request(features=value, content_parts=[part()]))


def test_content_parts_are_found_in_order() -> None:
    """Modality by type, in the order of the list, with their places."""
    body = parse(
        request(
            content_parts=[
                part("video_url", "https://v/1.mp4"),
                part(),
                part("audio_url", "HTTP://a/1.wav"),
                part(url="http://i/2.png"),
            ]
        )
    )
    assert [(p.modality, p.location) for p in body.parts] == [
        ("video", "content_parts[0]"),
        ("image", "content_parts[1]"),
        ("audio", "content_parts[2]"),
        ("image", "content_parts[3]"),
    ]
    assert {p.inline_format for p in body.parts} == {None}
    assert body.own_prompt.spans == {}


@ALL_LEGS
def test_a_url_is_replaced_in_place(leg: str) -> None:
    """The data URI takes the place of the URL; unknown members of the item stay."""
    body = parse(request(content_parts=[part(url="http://i/1.png", detail="low")]))
    body.parts[0].set_url(to_raw(URI))
    assert body.parts[0].data_url() == to_raw(URI)
    (item,) = sent(LEGS[leg](body))["content_parts"]
    assert item.pop("uuid")
    assert item == part(detail="low")


def _names(body: GenerateBody, leg: str) -> list[str | None]:
    return [item.get("uuid") for item in sent(LEGS[leg](body))["content_parts"]]


@ALL_LEGS
def test_the_name_of_an_item_is_ours(leg: str) -> None:
    """A client's uuid is replaced by a SHA-256 over modality and data URI, the same on both legs."""
    expected = hashlib.sha256(f'image"{URI}"'.encode()).hexdigest()
    for uuid in ("../escape", "", None, 7, {"a": 1}):
        assert _names(parse(request(content_parts=[part(uuid=uuid)])), leg) == [expected]
    body = parse(request(content_parts=[part()]))
    assert _names(body, "prefill") == _names(body, "decode") == [expected]


@ALL_LEGS
def test_equal_items_have_one_name_and_different_ones_have_several(leg: str) -> None:
    """Other data, another media type, another modality: another name."""
    items = [
        part(uuid="same"),
        part(uuid="same"),
        part(url="data:image/png;base64,BBBB", uuid="same"),
        part(url="data:image/webp;base64,AAAA", uuid="same"),
        part("audio_url", uuid="same"),
        part("video_url", uuid="same"),
    ]
    names = _names(parse(request(content_parts=items)), leg)
    assert names[0] == names[1]
    assert len(set(names)) == 5


def test_a_name_follows_its_data() -> None:
    """A part whose data are replaced after a leg was written is named anew."""
    body = parse(request(content_parts=[part()]))
    (before,) = _names(body, "decode")
    body.parts[0].set_url(to_raw("data:image/png;base64,BBBB"))
    (after,) = _names(body, "decode")
    assert before != after


@ALL_LEGS
def test_an_item_that_is_still_remote_has_no_name(leg: str) -> None:
    """Without replace-media-urls nobody knows what the URL will show: the engine hashes it itself."""
    body = parse(request(content_parts=[part(url="http://i/1.png", uuid="mine"), part()]))
    remote, inline = _names(body, leg)
    assert remote is None
    assert inline is not None


def test_equal_downloads_are_named_in_one_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """A download that many parts show is hashed once."""
    body = parse(request(content_parts=[part(url="http://i/1.png") for _ in range(30)]))
    for item in body.parts:
        item.set_url(URI_TEXT)
    made: list[bytes] = []
    original = hashlib.sha256

    def counting(data: bytes) -> Any:
        made.append(data)
        return original(data)

    monkeypatch.setattr(hashlib, "sha256", counting)
    assert len(set(_names(body, "prefill"))) == 1
    assert len(set(_names(body, "decode"))) == 1
    assert made == [b"image"]


URI_TEXT = to_raw(URI)


@pytest.mark.parametrize(
    ("item", "named"),
    [
        ("x", "content_parts[0]"),
        (None, "content_parts[0]"),
        ([], "content_parts[0]"),
        ({}, "content_parts[0].type is missing"),
        ({"url": URI}, "content_parts[0].type is missing"),
        (part(kind=None), "content_parts[0].type is missing"),  # type: ignore[arg-type]  # the wrong type is the point
        (part(kind=1), "content_parts[0].type"),  # type: ignore[arg-type]  # the wrong type is the point
        (part("text"), "content_parts[0].type is 'text'"),
        (part("input_audio"), "'input_audio'"),
        (part("image_embeds"), "'image_embeds'"),
        (part("hologram"), "image_url, audio_url, video_url"),
        ({"type": "image_url"}, "url is missing"),
        (part(url=None, uuid="cached"), "url is missing"),
        (part(url=""), "url is missing"),
        (part(url=123), "url must be a string"),
        (part(url={"url": URI}), "url must be a string"),
        ({"type": "image_url", "image_url": {"url": URI}}, "url is missing"),
        (part(url="file:///etc/passwd"), "data:, http: or https:"),
        (part(url="FILE:///etc/passwd"), "data:, http: or https:"),
        (part(url="ftp://h/x"), "data:, http: or https:"),
        (part(url="s3://b/x"), "data:, http: or https:"),
        (part(url="/etc/passwd"), "data:, http: or https:"),
        (part(url=" file:///etc/passwd"), "data:, http: or https:"),
        (part(url=" data:image/png;base64,AAAA"), "data:, http: or https:"),
        (part(url="httpx://h"), "data:, http: or https:"),
        (part(url="ht\ntp://h"), "data:, http: or https:"),
    ],
)
def test_content_parts_an_engine_would_misread_are_refused(item: Any, named: str) -> None:
    """Unknown types, items without data and foreign schemes are a 400 that names the place."""
    with pytest.raises(BadRequest) as refused:
        parse(request(content_parts=[item]))
    assert named in refused.value.message
    assert str(refused.value.param).startswith("content_parts")


def test_an_escaped_scheme_is_read_as_the_engine_reads_it() -> None:
    """Escapes in the JSON text do not hide a scheme."""
    head = b'{"token_ids":[1],"sampling_params":{},"content_parts":[{"type":"image_url","url":"'
    with pytest.raises(BadRequest, match="data:, http: or https:"):
        parse(head + rb'\u0066ile:///etc/passwd"}]}')
    assert parse(head + rb'\u0064ata:image/png;base64,AAAA"}]}').parts[0].modality == "image"
    assert parse(head + rb'htt\u0070:\/\/h"}]}').parts[0].modality == "image"


@pytest.mark.parametrize(
    ("members", "named"),
    [
        ({"token_ids": ...}, "token_ids is missing"),
        ({"token_ids": None}, "token_ids is missing"),
        ({"token_ids": []}, "token_ids is empty"),
        ({"token_ids": "1"}, "token_ids"),
        ({"token_ids": {"0": 1}}, "token_ids"),
        ({"token_ids": ["1"]}, "token_ids"),
        ({"token_ids": [1, -1]}, "token_ids"),
        ({"token_ids": [1, 1.5]}, "token_ids"),
        ({"token_ids": [True]}, "token_ids"),
        ({"token_ids": [None]}, "token_ids"),
        ({"token_ids": [[1]]}, "token_ids"),
        ({"sampling_params": ...}, "sampling_params is missing"),
        ({"sampling_params": None}, "sampling_params is missing"),
        ({"sampling_params": []}, "sampling_params"),
        ({"sampling_params": "x"}, "sampling_params"),
        ({"content_parts": {}}, "content_parts"),
        ({"content_parts": "x"}, "content_parts"),
        ({"content_parts": False}, "content_parts"),
        ({"model": 1}, "model"),
        ({"stream": 1}, "stream"),
        ({"stream": "true"}, "stream"),
    ],
)
def test_wrong_types_are_refused_by_name(members: dict[str, Any], named: str) -> None:
    """A field of the wrong type is a 400 that names it."""
    body = {key: value for key, value in request(**members).items() if value is not ...}
    with pytest.raises(BadRequest) as refused:
        parse(body)
    assert refused.value.status == 400
    assert named in refused.value.message
    assert refused.value.param == named.split(maxsplit=1)[0]


@pytest.mark.parametrize("body", [b"", b"[]", b"x", b'\xef\xbb\xbf{"token_ids":[1]}', b'{"a":"\xff"}'])
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    """Strict UTF-8, no byte order mark, one object."""
    with pytest.raises(BadRequest, match="JSON object"):
        parse(body)


def test_the_message_does_not_quote_the_clients_values() -> None:
    """Long or secret values do not come back in the message."""
    bodies: tuple[dict[str, Any], ...] = (
        {"features": {"mm_hashes": {"image": ["hunter2/"]}, "mm_placeholders": {"image": [{}]}}},
        {"features": image_features((1, 3), hashes=["hunter2/"])},
        {"content_parts": [part(url="file:///hunter2")]},
        {"features": {"mm_hashes": {"x" * 100: []}, "mm_placeholders": {"x" * 100: []}}},
        {"content_parts": [part("x" * 100)]},
    )
    for members in bodies:
        with pytest.raises(BadRequest) as refused:
            parse(request(**members))
        assert "hunter2" not in refused.value.message
        assert "x" * 33 not in refused.value.message


def test_deep_nesting_is_refused() -> None:
    """Depth is bounded wherever it is hidden."""
    deep = b"[" * 50_000 + b"]" * 50_000
    head = b'{"token_ids":[1],"sampling_params":{},'
    for text in (
        b'"x":%b}' % deep,
        b'"features":{"x":%b}}' % deep,
        b'"features":{"mm_hashes":{},"mm_placeholders":{},"kwargs_data":{"image":[%b]}}}' % deep,
        b'"content_parts":[{"x":%b}]}' % deep,
        b'"token_ids":%b}' % deep,
    ):
        with pytest.raises(BadRequest):
            parse(head + text)


def test_processor_kwargs_mean_nothing_here() -> None:
    """Engines ignore them on this path."""
    assert parse(request(mm_processor_kwargs={"max_pixels": 1})).sets_processor_kwargs is False


def test_tenancy_is_what_isolates_prefix_caches() -> None:
    """`cache_salt` and `priority` travel as the client spelt them."""
    assert sent(parse(request(cache_salt="s", priority=-2)).tenancy) == {"cache_salt": "s", "priority": -2}


def test_there_is_nothing_to_render_or_encode() -> None:
    """A step that asks for either is at fault."""
    body = parse(request(content_parts=[part()]))
    with pytest.raises(RuntimeError):
        body.render()
    with pytest.raises(RuntimeError):
        body.encode(body.parts[0])


def test_legs_do_not_disturb_each_other() -> None:
    """Writing one leg, or adding members to it, changes no other leg."""
    body = parse(request(content_parts=[part()], stream=True))
    before = sent(body.decode())
    for written in LEGS.values():
        tree = written(body)
        tree["kv_transfer_params"] = {}
        tree.pop("content_parts")
    assert sent(body.decode()) == before


def test_errors_have_the_openai_shape() -> None:
    """Message with the request id, type, param and code."""
    error = StepRejected("prefill", 404, "no such model")
    body = json.loads(GenerateApi().error_body(error, "req-1", expose_upstream=False))
    assert body["error"]["code"] == "epd_prefill_rejected"
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["message"] == "no such model (request id: req-1)"
