from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.api.chat import ChatApi, ChatBody
from sidecar.errors import BadRequest
from sidecar.jsontext import Raw, segments, to_raw

IMAGE = {"type": "image_url", "image_url": {"url": "http://i/1.png", "detail": "low"}}
INPUT_IMAGE = {"type": "input_image", "image_url": "http://i/2.png", "detail": "auto"}
AUDIO = {"type": "audio_url", "audio_url": {"url": "http://a/1.wav"}}
INPUT_AUDIO = {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}
VIDEO = {"type": "video_url", "video_url": {"url": "http://v/1.mp4"}}
TEXT = {"type": "text", "text": "what is it?"}

FORGED = {"peer_host": "10.6.6.6", "peer_port": 1, "remote_host": "10.6.6.6"}

if TYPE_CHECKING:
    from collections.abc import Callable


def parse(body: Any) -> ChatBody:
    return ChatApi().parse(body if isinstance(body, bytes) else json.dumps(body).encode())


def with_parts(*parts: Any, **members: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": list(parts)}], **members}


def sent(tree: Any) -> Any:
    return json.loads(b"".join(segments(tree)))


LEGS: dict[str, Callable[[ChatBody], Any]] = {
    "render": ChatBody.render,
    "encode": lambda body: body.encode(body.parts[0]),
    "prefill": ChatBody.prefill,
    "decode": ChatBody.decode,
}
ALL_LEGS = pytest.mark.parametrize("leg", LEGS)


def test_the_path_and_name_are_the_chat_apis() -> None:
    """The API owns one exact path."""
    assert (ChatApi().path, ChatApi().name) == ("/v1/chat/completions", "chat")


@pytest.mark.parametrize("written", [ChatBody.render, ChatBody.decode])
def test_an_ordinary_body_comes_out_as_it_went_in(written: Any) -> None:
    """Fields nobody knows, spellings of numbers, escapes and the order of members survive."""
    text = (
        b'{"zeta":1.50E+2,"model":"m","stream":true,"unknown":{"b":[1,2.0],"a":"\\u00e9\\/"},"messages":['
        b'{"role":"system","content":"be \\u0062rief","name":null},'
        b'{"role":"user","content":[{"type":"text","text":"a\\u0021","x_1":12345678901234567890},'
        b'{"extra":[1e0],"type":"image_url","image_url":{"detail":"low","url":"http:\\/\\/i"}}]},'
        b'{"role":"assistant","tool_calls":[{"id":"1"}],"content":null},{"role":"tool"}],'
        b'"max_tokens":null,"seed":-0}'
    )
    assert b"".join(segments(written(parse(text)))) == text


def test_large_values_are_not_copied() -> None:
    """A megabyte of base64 in a part travels as one slice on every leg that carries the part."""
    url = "data:image/png;base64," + "A" * (1 << 20)
    body = parse(with_parts({"type": "image_url", "image_url": {"url": url}}))
    for written in LEGS.values():
        assert any(isinstance(s, memoryview) and len(s) > 1 << 20 for s in segments(written(body)))


def test_parts_are_found_in_walk_order() -> None:
    """Every media part of every message and role, in the order of the body, with its place."""
    body = parse(
        {
            "messages": [
                {"role": "system", "content": [TEXT, IMAGE]},
                {"role": "user", "content": "no parts"},
                {"role": "user", "content": [INPUT_AUDIO, TEXT, INPUT_IMAGE, VIDEO]},
                {"role": "tool", "content": [AUDIO]},
            ]
        }
    )
    assert [(part.modality, part.location) for part in body.parts] == [
        ("image", "messages[0].content[1]"),
        ("audio", "messages[2].content[0]"),
        ("image", "messages[2].content[2]"),
        ("video", "messages[2].content[3]"),
        ("audio", "messages[3].content[0]"),
    ]
    assert [part.inline_format for part in body.parts] == [None, "wav", None, None, None]


@pytest.mark.parametrize(
    ("part", "url"),
    [
        (IMAGE, "http://i/1.png"),
        (INPUT_IMAGE, "http://i/2.png"),
        (AUDIO, "http://a/1.wav"),
        (VIDEO, "http://v/1.mp4"),
        (INPUT_AUDIO, "UklGRg=="),
    ],
)
def test_urls_are_read_and_replaced_in_place(part: dict[str, Any], url: str) -> None:
    """The URL of each part type is found, and a new one takes its place and changes nothing else."""
    body = parse(with_parts(TEXT, part))
    assert json.loads(bytes(body.parts[0].url)) == url
    body.parts[0].set_url(to_raw("data:new"))
    expected = json.loads(json.dumps(with_parts(TEXT, part)).replace(url, "data:new"))
    assert sent(body.decode()) == expected
    assert sent(body.render()) == expected


@pytest.mark.parametrize("part", [IMAGE, INPUT_IMAGE, AUDIO, VIDEO])
def test_the_data_url_of_a_part_is_its_url(part: dict[str, Any]) -> None:
    """A part that is named by a URL travels under the very same text."""
    found = parse(with_parts(part)).parts[0]
    assert found.data_url() == found.url


@pytest.mark.parametrize("data", ['"UklGRg=="', '"UklGRg\\u003d\\u003d"'])
def test_inline_audio_becomes_a_data_url(data: str) -> None:
    """`input_audio` travels as one data URL of its format and payload."""
    part = f'{{"type":"input_audio","input_audio":{{"data":{data},"format":"mp3"}}}}'
    body = parse(f'{{"messages":[{{"role":"user","content":[{part}]}}]}}'.encode())
    url = json.loads(bytes(body.parts[0].data_url()))
    media_type, _, payload = url.partition(";base64,")
    assert payload == "UklGRg=="
    assert media_type in {"data:audio/mp3", "data:audio/mpeg"}


@ALL_LEGS
@pytest.mark.parametrize("part", [IMAGE, INPUT_IMAGE, AUDIO, INPUT_AUDIO, VIDEO])
def test_a_clients_uuid_reaches_no_leg(part: dict[str, Any], leg: str) -> None:
    """A `uuid` on a media part would be taken as hash by the renderer and as file name by a worker."""
    body = parse(with_parts(part | {"uuid": "../../evil"}))
    assert "evil" not in json.dumps(sent(LEGS[leg](body)))


@pytest.mark.parametrize("part", [{"image_url": "http://169.254.169.254/"}, {"type": None, "image_url": "x"}])
def test_a_part_without_a_type_is_refused(part: dict[str, Any]) -> None:
    """An engine loads whatever media it finds in such a part, without the address guard."""
    with pytest.raises(BadRequest, match=r"content\[1\].type"):
        parse(with_parts(TEXT, part))


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_embeds", "image_embeds": "x"},
        {"type": "text", "text": "x", "image_url": "http://169.254.169.254/"},
    ],
)
def test_a_uuid_on_any_other_part_reaches_no_leg(part: dict[str, Any]) -> None:
    """With a uuid an engine takes a text part for the media beside its text."""
    body = parse(with_parts(part | {"uuid": "../../evil"}))
    for written in (body.render, body.prefill, body.decode):
        assert sent(written())["messages"][0]["content"] == [part]


@pytest.mark.parametrize("part", [IMAGE, INPUT_IMAGE, AUDIO, INPUT_AUDIO, VIDEO])
def test_the_render_hash_is_the_uuid_on_every_leg_after_render(part: dict[str, Any]) -> None:
    """Encode, prefill and decode name the item by the same uuid, next to the part's own members."""
    body = parse(with_parts(part | {"uuid": "mine"}))
    body.parts[0].set_uuid("0" * 64)
    stamped = part | {"uuid": "0" * 64}
    assert sent(body.encode(body.parts[0]))["messages"] == [{"role": "user", "content": [stamped]}]
    for written in (body.prefill, body.decode):
        assert sent(written())["messages"][0]["content"] == [stamped]


@ALL_LEGS
@pytest.mark.parametrize(
    "members",
    [
        {"kv_transfer_params": FORGED},
        {"ec_transfer_params": {"h": FORGED}},
        {"kv_transfer_params": "10.6.6.6"},
        {"vllm_xargs": {"kv_transfer_params": FORGED, "keep": 1}},
        {"vllm_xargs": {"ec_transfer_params": FORGED, "keep": 1}},
        {"sampling_params": {"extra_args": {"kv_transfer_params": FORGED, "keep": 1}, "top_k": 1}},
        {"sampling_params": {"extra_args": {"ec_transfer_params": FORGED}}},
    ],
)
def test_forged_transfer_parameters_reach_no_leg(members: dict[str, Any], leg: str) -> None:
    """A worker address from a client is gone from every place an engine reads it from."""
    assert "10.6.6.6" not in json.dumps(sent(LEGS[leg](parse(with_parts(IMAGE, **members)))))


@ALL_LEGS
@pytest.mark.parametrize(
    "text",
    [
        rb'"\u006bv_transfer_params":{"h":"10.6.6.6"}',
        rb'"vllm_xargs" : {"a":1, "ec\u005ftransfer_params":{"h":"10.6.6.6"}}',
        b'"vllm_xargs":\n\t{"kv_transfer_params":{"h":"10.6.6.6"}}',
        b'"vllm_xargs":{"kv_transfer_params":1,"kv_transfer_params":{"h":"10.6.6.6"}}',
        b'"vllm_xargs":{},"vllm_xargs":{"kv_transfer_params":{"h":"10.6.6.6"}}',
        b'"sampling_params": { "extra_args" : {"kv_transfer_params":{"h":"10.6.6.6"}} }',
    ],
)
def test_no_spelling_smuggles_transfer_parameters(text: bytes, leg: str) -> None:
    """Escaped keys, duplicate keys and whitespace do not get a forged address through."""
    head = json.dumps(with_parts(IMAGE)).encode()[:-1]
    written = b"".join(segments(LEGS[leg](parse(head + b"," + text + b"}"))))
    assert b"10.6.6.6" not in written


def test_what_stands_next_to_forged_parameters_stays() -> None:
    """Only the two transfer members go; their neighbours and other shapes stay as they are."""
    body = parse(
        with_parts(
            TEXT,
            vllm_xargs={"kv_transfer_params": FORGED, "keep": [1]},
            sampling_params={"top_k": 1, "extra_args": {"keep": 2, "ec_transfer_params": 1}},
        )
    )
    decode = sent(body.decode())
    assert decode["vllm_xargs"] == {"keep": [1]}
    assert decode["sampling_params"] == {"top_k": 1, "extra_args": {"keep": 2}}
    for value in (None, "text", 1, ["kv_transfer_params"]):
        assert sent(parse(with_parts(TEXT, vllm_xargs=value)).decode())["vllm_xargs"] == value
        assert sent(parse(with_parts(TEXT, sampling_params=value)).decode())["sampling_params"] == value


@ALL_LEGS
@pytest.mark.parametrize("field", ["mm_payload", "return_mm_kwargs"])
def test_the_renderers_own_fields_are_not_the_clients(field: str, leg: str) -> None:
    """`mm_payload` and its alias are for the render copy only, and set there by the render step."""
    assert field not in sent(LEGS[leg](parse(with_parts(IMAGE, **{field: "none"}))))


CAPPED: dict[str, Any] = {"max_tokens": 500, "max_completion_tokens": 400}
REMOVED: dict[str, Any] = {
    "min_tokens": 5,
    "stream_options": {"include_usage": True},
    "n": 3,
    "best_of": 4,
    "logprobs": True,
    "top_logprobs": 5,
    "prompt_logprobs": 1,
    "echo": True,
    "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "a+"},
    "guided_json": {"type": "object"},
    "guided_regex": "a+",
    "guided_choice": ["a"],
    "guided_grammar": "root",
    "guided_decoding_backend": "x",
    "guided_whitespace_pattern": " ",
}
KEPT: dict[str, Any] = {
    "model": "m",
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "chat_template": "{{ x }}",
    "chat_template_kwargs": {"enable_thinking": False},
    "add_generation_prompt": False,
    "continue_final_message": True,
    "reasoning_effort": "low",
    "include_reasoning": False,
    "documents": [{"text": "d"}],
    "cache_salt": "tenant",
    "priority": 3,
    "mm_processor_kwargs": {"max_pixels": 1000},
    "media_io_kwargs": {"video": {"num_frames": 4}},
    "temperature": 0.7,
    "stop": ["x"],
    "unknown_field": {"a": 1},
}


@pytest.mark.parametrize("field", REMOVED)
def test_prefill_drops_what_would_break_a_one_token_leg(field: str) -> None:
    """Fields that need more than one plain token are gone on prefill and untouched on decode."""
    body = parse(with_parts(IMAGE, **{field: REMOVED[field]}))
    assert field not in sent(body.prefill())
    assert sent(body.decode())[field] == REMOVED[field]


@pytest.mark.parametrize("field", CAPPED)
@pytest.mark.parametrize("value", [500, None, 1])
def test_prefill_caps_the_token_limits(field: str, value: int | None) -> None:
    """Every token limit the client set is one on prefill, its own on decode."""
    body = parse(with_parts(IMAGE, **{field: value}))
    prefill = sent(body.prefill())
    assert prefill["max_tokens"] == 1
    assert prefill.get("max_completion_tokens") in ({1} if field == "max_completion_tokens" else {None})
    assert sent(body.decode())[field] == value


@pytest.mark.parametrize("stream", [True, False, None])
def test_prefill_is_never_streamed(stream: bool | None) -> None:
    """Streamed answers carry no transfer parameters; decode keeps the client's choice."""
    body = parse(with_parts(IMAGE, stream=stream))
    assert sent(body.prefill())["stream"] is False
    assert sent(body.decode())["stream"] is stream
    assert body.stream is bool(stream)


@pytest.mark.parametrize(
    ("choice", "on_prefill"),
    [
        ("required", "auto"),
        ({"type": "function", "function": {"name": "f"}}, "auto"),
        ("auto", "auto"),
        ("none", "none"),
        (None, None),
    ],
)
def test_prefill_does_not_force_a_tool(choice: Any, on_prefill: str | None) -> None:
    """A forced tool constrains the grammar of the one token: prefill lets the model choose."""
    body = parse(with_parts(IMAGE, tools=KEPT["tools"], tool_choice=choice))
    assert sent(body.prefill())["tool_choice"] == on_prefill
    assert sent(body.decode())["tool_choice"] == choice


def test_prefill_keeps_all_that_shapes_the_prompt() -> None:
    """Apart from the cap, prefill is the client's body, so that its KV cache is decode's."""
    everything = with_parts(TEXT, IMAGE, **KEPT, **CAPPED, **REMOVED)
    prefill = sent(parse(everything).prefill())
    assert prefill == with_parts(TEXT, IMAGE, **KEPT) | {
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "stream": False,
    }
    assert sent(parse(everything).decode()) == everything


def test_encode_holds_just_the_part() -> None:
    """One user turn with one part, the model, the processor kwargs, one token, not streamed."""
    body = parse(with_parts(TEXT, IMAGE, AUDIO, **KEPT, **CAPPED, **REMOVED, stream=True))
    assert sent(body.encode(body.parts[1])) == {
        "model": "m",
        "mm_processor_kwargs": KEPT["mm_processor_kwargs"],
        "media_io_kwargs": KEPT["media_io_kwargs"],
        "messages": [{"role": "user", "content": [AUDIO]}],
        "max_tokens": 1,
        "stream": False,
    }


def test_encode_of_a_bare_body_adds_nothing() -> None:
    """Members the client left out or set to null are not invented."""
    body = parse({"messages": [{"role": "user", "content": [IMAGE]}], "model": None, "media_io_kwargs": None})
    assert set(sent(body.encode(body.parts[0]))) == {"messages", "max_tokens", "stream"}
    assert body.model is None


@pytest.mark.parametrize("field", ["mm_processor_kwargs", "media_io_kwargs"])
@pytest.mark.parametrize(
    ("value", "is_set"), [(None, False), ({}, True), ({"max_pixels": 1}, True), ("x", True), (False, True)]
)
def test_processor_kwargs_count_as_set_unless_null(field: str, value: Any, *, is_set: bool) -> None:
    """JSON null is unset, an empty object is set."""
    assert parse(with_parts(TEXT, **{field: value})).sets_processor_kwargs is is_set
    assert parse(with_parts(TEXT)).sets_processor_kwargs is False


def test_tenancy_is_what_isolates_prefix_caches() -> None:
    """`cache_salt` and `priority` travel as the client spelt them; unset ones do not."""
    assert sent(parse(with_parts(TEXT, cache_salt="s", priority=-2)).tenancy) == {
        "cache_salt": "s",
        "priority": -2,
    }
    assert sent(parse(with_parts(TEXT, cache_salt=None)).tenancy) == {}


def test_unknown_part_types_are_reported_and_kept() -> None:
    """Parts that are neither text nor known media are named for the count check and left alone."""
    embeds = {"type": "image_embeds", "image_embeds": {"a": 1}}
    body = parse(with_parts(TEXT, embeds, "a string", IMAGE))
    assert list(body.unknown_part_types) == ["image_embeds"]
    assert len(body.parts) == 1
    assert sent(body.decode())["messages"][0]["content"] == [
        TEXT,
        embeds,
        "a string",
        IMAGE,
    ]


@pytest.mark.parametrize("kind", ["text", "input_text", "output_text", "refusal", "thinking"])
def test_text_parts_are_no_unknown_types(kind: str) -> None:
    """Text in any of its names is not media."""
    body = parse(with_parts({"type": kind, "text": "x"}))
    assert (list(body.parts), list(body.unknown_part_types)) == ([], [])


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"", "JSON object"),
        (b"not json", "JSON object"),
        (b"[]", "JSON object"),
        (b'\xef\xbb\xbf{"messages":[]}', "byte order mark"),
        (b'{"messages":[],"x":"\xff"}', "UTF-8"),
        ({}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": {}}, "messages"),
        ({"messages": ["hi"]}, "messages"),
        ({"messages": [None]}, "messages"),
        ({"messages": [{"content": 1}]}, "messages[0].content"),
        ({"messages": [{"content": {"type": "text"}}]}, "messages[0].content"),
        ({"messages": [{"content": [1]}]}, "messages[0].content"),
        ({"messages": [{"content": [None]}]}, "messages[0].content"),
        ({"messages": [{"content": [{"type": 1}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"content": [{"type": None}]}]}, "messages[0].content[0].type"),
        ({"messages": [], "model": 1}, "model"),
        ({"messages": [], "model": ["m"]}, "model"),
        ({"messages": [], "stream": "true"}, "stream"),
        ({"messages": [], "stream": 1}, "stream"),
        ({"messages": [], "stream": {}}, "stream"),
        (with_parts({"type": "image_url"}), "messages[0].content[0]: image_url has no URL"),
        (with_parts({"type": "image_url", "image_url": None}), "no URL"),
        (with_parts({"type": "image_url", "image_url": {}}), "no URL"),
        (with_parts({"type": "image_url", "image_url": {"url": None}}), "no URL"),
        (with_parts({"type": "image_url", "image_url": {"url": ""}}), "no URL"),
        (with_parts({"type": "image_url", "image_url": {"url": 123}}), "must be a string"),
        (with_parts({"type": "image_url", "image_url": {"url": ["http://i"]}}), "must be a string"),
        (with_parts({"type": "image_url", "image_url": "http://i"}), "image_url must be an object"),
        (with_parts({"type": "image_url", "image_url": [1]}), "image_url must be an object"),
        (with_parts(TEXT, {"type": "input_image"}), "messages[0].content[1]: input_image has no URL"),
        (with_parts({"type": "input_image", "file_id": "f"}), "no URL"),
        (with_parts({"type": "input_image", "image_url": {"url": "http://i"}}), "must be a string"),
        (with_parts({"type": "audio_url"}), "audio_url has no URL"),
        (with_parts({"type": "video_url", "video_url": {"url": 0}}), "no URL"),
        (with_parts({"type": "input_audio"}), "input_audio has no data"),
        (with_parts({"type": "input_audio", "input_audio": {"format": "wav"}}), "no data"),
        (with_parts({"type": "input_audio", "input_audio": {"data": "AAAA"}}), "format"),
        (with_parts({"type": "input_audio", "input_audio": {"data": "AAAA", "format": 1}}), "format"),
        (
            with_parts({"type": "input_audio", "input_audio": {"data": [111], "format": "wav"}}),
            "must be a string",
        ),
    ],
)
def test_malformed_bodies_are_refused_by_name(body: Any, named: str) -> None:
    """A body of the wrong shape is a 400 that names the place."""
    with pytest.raises(BadRequest) as refused:
        parse(body)
    assert refused.value.status == 400
    assert named in refused.value.message


def test_the_message_does_not_quote_the_clients_values() -> None:
    """Secrets in a malformed body do not come back in the message."""
    for body in (with_parts({"type": "image_url", "image_url": "hunter2"}), {"messages": ["hunter2"]}):
        with pytest.raises(BadRequest) as refused:
            parse(body)
        assert "hunter2" not in refused.value.message


def test_deep_nesting_is_refused() -> None:
    """Depth is bounded wherever it is hidden."""
    deep = b"[" * 50_000 + b"]" * 50_000
    for body in (
        b'{"messages":[],"x":%b}' % deep,
        b'{"messages":[{"content":[{"type":"text","x":%b}]}]}' % deep,
    ):
        with pytest.raises(BadRequest, match="nested too deeply"):
            parse(body)


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=6).filter(lambda key: key not in {"messages", "stream", "model"}),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
            ),
            max_leaves=6,
        ),
        max_size=5,
    )
)
def test_members_nobody_knows_survive_on_decode(members: dict[str, Any]) -> None:
    """Decode is the client's body whatever it holds."""
    body = with_parts(TEXT, IMAGE, **members)
    assert sent(parse(body).decode()) == body


def test_legs_do_not_disturb_each_other() -> None:
    """Writing one leg, or adding members to it, changes no other leg."""
    body = parse(with_parts(TEXT, IMAGE, max_tokens=9))
    before = sent(body.decode())
    for written in (body.render, body.prefill, body.decode, lambda: body.encode(body.parts[0])):
        tree = written()
        tree["kv_transfer_params"] = Raw(b"{}")
        tree["max_tokens"] = Raw(b"77")
    assert sent(body.decode()) == before


@pytest.mark.parametrize(
    ("part", "member"),
    [
        (INPUT_AUDIO, "audio_url"),
        (INPUT_AUDIO, "image_url"),
        (AUDIO, "image_url"),
        (VIDEO, "image_url"),
        (IMAGE, "video_url"),
        (INPUT_IMAGE, "input_audio"),
        (IMAGE, "image_embeds"),
        (VIDEO, "video_embeds"),
        (INPUT_AUDIO, "audio_embeds"),
        (AUDIO, "image_pil"),
    ],
)
def test_a_part_holds_one_item(part: dict[str, Any], member: str) -> None:
    """With the uuid a part gets after render, an engine takes the first media member it finds in it."""
    with pytest.raises(BadRequest, match=member):
        parse(with_parts(part | {member: {"url": "http://169.254.169.254/"}}))
