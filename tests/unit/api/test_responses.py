from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.api import api_for_path
from sidecar.api.responses import ResponsesApi, ResponsesBody
from sidecar.errors import BadRequest
from sidecar.jsontext import Raw, segments, to_raw

if TYPE_CHECKING:
    from collections.abc import Callable

IMAGE = {"type": "input_image", "image_url": "http://i/1.png", "detail": "low"}
PLAIN_IMAGE = {"type": "input_image", "image_url": "http://i/2.png"}
TEXT = {"type": "input_text", "text": "what is it?"}
FORGED = {"peer_host": "10.6.6.6", "peer_port": 1, "remote_host": "10.6.6.6"}


def parse(body: Any) -> ResponsesBody:
    return ResponsesApi().parse(body if isinstance(body, bytes) else json.dumps(body).encode())


def asking(value: Any = "hello", **members: Any) -> dict[str, Any]:
    return {"model": "m", "input": value, **members}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def output(*parts: Any, kind: str = "function_call_output") -> dict[str, Any]:
    return {"type": kind, "call_id": "c1", "output": list(parts)}


def with_parts(*parts: Any, **members: Any) -> dict[str, Any]:
    return asking([user(*parts)], **members)


def sent(tree: Any) -> Any:
    return json.loads(b"".join(segments(tree)))


LEGS: dict[str, Callable[[ResponsesBody], Any]] = {
    "render": ResponsesBody.render,
    "encode": lambda body: body.encode(body.parts[0]),
    "prefill": ResponsesBody.prefill,
    "decode": ResponsesBody.decode,
}
ALL_LEGS = pytest.mark.parametrize("leg", LEGS)
WHOLE_LEGS = pytest.mark.parametrize("leg", ["render", "prefill", "decode"])


def test_the_registry_knows_the_api_by_its_path() -> None:
    """The API owns one exact path, and its render answer is one object."""
    api = api_for_path("/v1/responses")
    assert isinstance(api, ResponsesApi)
    assert (api.name, api.render_answers_list) == ("responses", False)
    assert api_for_path("/v1/responses/resp_1") is None


@pytest.mark.parametrize("written", [ResponsesBody.render, ResponsesBody.decode])
def test_an_ordinary_body_comes_out_as_it_went_in(written: Any) -> None:
    """Fields nobody knows, spellings of numbers, escapes and the order of members survive."""
    text = (
        b'{"zeta":1.50E+2,"model":"m","stream":true,"unknown":{"b":[1, 2.0],"a":"\\u00e9\\/"},"input":['
        b'{"role":"system","content":"be \\u0062rief","x":null},'
        b'{"content":[{"type":"input_text","text":"a\\u0021","x_1":12345678901234567890},'
        b'{"extra":[1e0],"type":"input_image","detail":"low","image_url":"http:\\/\\/i"}],"role":"user"},'
        b'{"type":"function_call","call_id":"1","name":"f","arguments":"{ }"},'
        b'{"type":"function_call_output","call_id":"1","output":"plain"},'
        b'{"type":"reasoning","summary":[],"content":null},'
        b'{"role":"assistant","content":[{"type":"output_text","text":"t"},"bare"]}],'
        b'"max_output_tokens":null,"store":true,"text":{"format":{"type": "text"}},"seed":-0}'
    )
    assert b"".join(segments(written(parse(text)))) == text


@pytest.mark.parametrize("text", ["", "hello", 'h\u00e9 "quoted"'])
def test_a_string_is_an_input_without_parts(text: str) -> None:
    """A plain string travels on every leg as it is."""
    body = parse(asking(text))
    assert list(body.parts) == []
    for written in (body.render, body.prefill, body.decode):
        assert sent(written())["input"] == text


def test_parts_are_found_in_walk_order() -> None:
    """Every input_image of every item, in messages and in tool outputs, in the order of the body."""
    body = parse(
        asking(
            [
                {"role": "system", "content": [TEXT, IMAGE]},
                {"role": "user", "content": "no parts"},
                {"type": "message", "role": "user", "content": [PLAIN_IMAGE, TEXT, IMAGE]},
                {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
                output(TEXT, IMAGE),
                output(PLAIN_IMAGE, kind="custom_tool_call_output"),
                {"type": "function_call_output", "call_id": "c2", "output": "text"},
                user(IMAGE),
            ]
        )
    )
    assert [part.location for part in body.parts] == [
        "input[0].content[1]",
        "input[2].content[0]",
        "input[2].content[2]",
        "input[4].output[1]",
        "input[5].output[0]",
        "input[7].content[0]",
    ]
    assert {(part.modality, part.inline_format) for part in body.parts} == {("image", None)}
    assert list(body.unknown_part_types) == []


@given(st.lists(st.lists(st.sampled_from(["text", "image", "string"]), max_size=4), max_size=5), st.data())
def test_every_image_is_an_entry_at_its_place(kinds: list[list[str]], data: st.DataObject) -> None:
    """Whatever the mix of items and parts, the n-th entry is the n-th image, replaced in its place."""
    items: list[dict[str, Any]] = []
    urls: list[str] = []
    for row in kinds:
        parts: list[Any] = []
        for kind in row:
            if kind == "image":
                urls.append(f"http://i/{len(urls)}")
                parts.append({"type": "input_image", "image_url": urls[-1]})
            else:
                parts.append(TEXT if kind == "text" else "bare")
        items.append(data.draw(st.sampled_from([user, output]))(*parts))
    body = parse(asking(items))
    assert [json.loads(bytes(part.url)) for part in body.parts] == urls
    for index, part in enumerate(body.parts):
        part.set_url(to_raw(f"data:{index}"))
    expected = json.dumps(items)
    for index, url in reversed(list(enumerate(urls))):
        expected = expected.replace(json.dumps(url), json.dumps(f"data:{index}"))
    assert sent(body.decode())["input"] == json.loads(expected)


@pytest.mark.parametrize("place", [user, output])
def test_urls_are_read_and_replaced_in_place(place: Any) -> None:
    """A new URL takes the old one's place on all legs and changes nothing else; it is the data URL."""
    body = parse(asking([place(TEXT, IMAGE)]))
    assert json.loads(bytes(body.parts[0].url)) == "http://i/1.png"
    body.parts[0].set_url(to_raw("data:new"))
    assert json.loads(bytes(body.parts[0].data_url())) == "data:new"
    for written in (body.render, body.prefill, body.decode):
        assert sent(written())["input"] == [place(TEXT, IMAGE | {"image_url": "data:new"})]
    assert body.parts[0].tree()["image_url"] == to_raw("data:new")


@ALL_LEGS
@pytest.mark.parametrize("place", [user, output])
def test_a_clients_uuid_reaches_no_leg(place: Any, leg: str) -> None:
    """A `uuid` on an image would be taken as hash by the renderer and as file name by a worker."""
    body = parse(asking([place(IMAGE | {"uuid": "../../evil"})]))
    assert "evil" not in json.dumps(sent(LEGS[leg](body)))


@WHOLE_LEGS
@pytest.mark.parametrize(
    "part", [TEXT | {"image_url": "http://i"}, {"type": "image_embeds", "image_embeds": "x"}]
)
def test_a_uuid_on_any_other_part_reaches_no_leg(part: dict[str, Any], leg: str) -> None:
    """With a uuid, an engine takes even a text part for the media among its members."""
    body = parse(with_parts(IMAGE, part | {"uuid": "../../evil"}))
    assert sent(LEGS[leg](body))["input"] == [user(IMAGE, part)]


@pytest.mark.parametrize("place", [user, output])
def test_the_render_hash_is_the_uuid_on_every_leg_after_render(place: Any) -> None:
    """Encode, prefill and decode name the item by the same uuid, next to the part's own members."""
    body = parse(asking([place(IMAGE | {"uuid": "mine"})]))
    body.parts[0].set_uuid("0" * 64)
    stamped = IMAGE | {"uuid": "0" * 64}
    assert sent(body.encode(body.parts[0]))["input"] == [user(stamped)]
    for written in (body.prefill, body.decode):
        assert sent(written())["input"] == [place(stamped)]


@ALL_LEGS
@pytest.mark.parametrize(
    "members",
    [
        {"kv_transfer_params": FORGED},
        {"ec_transfer_params": {"h": FORGED}},
        {"kv_transfer_params": {"prompt_token_ids": [1], "h": "10.6.6.6"}},
        {"vllm_xargs": {"kv_transfer_params": FORGED, "keep": 1}},
        {"vllm_xargs": {"ec_transfer_params": FORGED}},
        {"sampling_params": {"extra_args": {"ec_transfer_params": FORGED, "keep": 1}}},
    ],
)
def test_forged_transfer_parameters_reach_no_leg(members: dict[str, Any], leg: str) -> None:
    """A worker address from a client is gone from every place an engine reads it from."""
    written = json.dumps(sent(LEGS[leg](parse(with_parts(IMAGE, **members)))))
    assert "10.6.6.6" not in written
    assert "prompt_token_ids" not in written


@ALL_LEGS
@pytest.mark.parametrize("field", ["mm_payload", "return_mm_kwargs"])
def test_the_renderers_own_fields_are_not_the_clients(field: str, leg: str) -> None:
    """`mm_payload` and its alias are for the render copy only, and set there by the render step."""
    assert field not in sent(LEGS[leg](parse(with_parts(IMAGE, **{field: "none"}))))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("previous_response_id", "resp_1"),
        ("previous_response_id", ""),
        ("previous_response_id", 1),
        ("conversation", "conv_1"),
        ("conversation", {"id": "conv_1"}),
        ("background", True),
        ("background", "true"),
        ("background", 1),
        ("background", {}),
    ],
)
def test_what_needs_the_servers_state_is_refused(field: str, value: Any) -> None:
    """The renderer cannot see that state, so decode would get another prompt than prefill."""
    with pytest.raises(BadRequest) as refused:
        parse(asking(**{field: value}))
    assert (refused.value.status, refused.value.param) == (400, field)
    assert refused.value.message.startswith(field)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("previous_response_id", None),
        ("conversation", None),
        ("background", None),
        ("background", False),
    ],
)
def test_state_fields_may_be_unset(field: str, value: Any) -> None:
    """Clients spell out defaults: null is no state, false is no background; decode keeps both."""
    assert sent(parse(asking(**{field: value})).decode()) == asking(**{field: value})


CAPPED: dict[str, Any] = {"max_output_tokens": 500}
REMOVED: dict[str, Any] = {
    "min_tokens": 5,
    "stream_options": {"include_obfuscation": False},
    "n": 3,
    "logprobs": True,
    "top_logprobs": 5,
    "prompt_logprobs": 1,
    "include": ["message.output_text.logprobs"],
    "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "a+"},
    "guided_json": {"type": "object"},
}
KEPT: dict[str, Any] = {
    "instructions": "be brief",
    "tools": [{"type": "function", "name": "f", "parameters": {}}],
    "reasoning": {"effort": "low"},
    "include_reasoning": False,
    "truncation": "auto",
    "chat_template_kwargs": {"enable_thinking": False},
    "cache_salt": "tenant",
    "priority": 3,
    "mm_processor_kwargs": {"max_pixels": 1000},
    "media_io_kwargs": {"image": {}},
    "temperature": 0.7,
    "metadata": {"a": "b"},
    "parallel_tool_calls": False,
    "unknown_field": {"a": 1},
}


@pytest.mark.parametrize("field", REMOVED)
def test_prefill_drops_what_would_break_a_one_token_leg(field: str) -> None:
    """Fields that need more than one plain token are gone on prefill and untouched on decode."""
    body = parse(with_parts(IMAGE, **{field: REMOVED[field]}))
    assert field not in sent(body.prefill())
    assert sent(body.decode())[field] == REMOVED[field]


@pytest.mark.parametrize("value", [500, None, 1, "absent"])
def test_prefill_makes_one_token(value: Any) -> None:
    """The limit of this API is one on prefill, also where the client set none; its own on decode."""
    members = {} if value == "absent" else {"max_output_tokens": value}
    body = parse(asking(**members))
    assert sent(body.prefill())["max_output_tokens"] == 1
    assert "max_tokens" not in sent(body.prefill())
    assert sent(body.decode()) == asking(**members)


@pytest.mark.parametrize("store", [True, False, None, "absent"])
def test_only_decode_may_store_the_response(store: Any) -> None:
    """No worker keeps a response that no client ever sees; decode does as the client asked."""
    members = {} if store == "absent" else {"store": store}
    body = parse(with_parts(IMAGE, **members))
    assert sent(body.prefill())["store"] is False
    assert sent(body.encode(body.parts[0]))["store"] is False
    assert sent(body.decode()) == with_parts(IMAGE, **members)


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
        ("auto", "auto"),
        ("none", "none"),
        (None, None),
        ("required", "auto"),
        ({"type": "function", "name": "f"}, "auto"),
        ({"type": "allowed_tools", "mode": "required", "tools": []}, "auto"),
    ],
)
def test_a_forced_tool_choice_is_the_models_own_on_prefill(choice: Any, on_prefill: Any) -> None:
    """A forced choice constrains the first token; decode keeps it."""
    body = parse(asking(tool_choice=choice))
    assert sent(body.prefill())["tool_choice"] == on_prefill
    assert sent(body.decode())["tool_choice"] == choice


@pytest.mark.parametrize(
    ("text", "on_prefill"),
    [
        ({"format": {"type": "json_schema", "name": "s", "schema": {"type": "object"}}}, {}),
        (
            {"verbosity": "low", "format": {"type": "json_object"}, "x": 1.5},
            {"verbosity": "low", "x": 1.5},
        ),
        ({"verbosity": "low"}, {"verbosity": "low"}),
        (None, None),
        ("no object", "no object"),
    ],
)
def test_the_output_format_constrains_decode_only(text: Any, on_prefill: Any) -> None:
    """`text.format` needs more than one token; its neighbours stay."""
    body = parse(asking(text=text))
    assert sent(body.prefill())["text"] == on_prefill
    assert sent(body.decode())["text"] == text


def test_prefill_keeps_all_that_shapes_the_prompt() -> None:
    """Apart from the cap, prefill is the client's body, so that its KV cache is decode's."""
    everything = with_parts(TEXT, IMAGE, **KEPT, **CAPPED, **REMOVED)
    body = parse(everything)
    assert sent(body.prefill()) == with_parts(TEXT, IMAGE, **KEPT) | {
        "max_output_tokens": 1,
        "stream": False,
        "store": False,
    }
    assert sent(body.decode()) == everything


@pytest.mark.parametrize("place", [user, output])
def test_encode_holds_just_the_part(place: Any) -> None:
    """One user item with one part, the model, the processor kwargs, one token, nothing stored or streamed."""
    body = parse(asking([place(TEXT, PLAIN_IMAGE, IMAGE)], **KEPT, **CAPPED, **REMOVED, stream=True))
    assert sent(body.encode(body.parts[1])) == {
        "model": "m",
        "mm_processor_kwargs": KEPT["mm_processor_kwargs"],
        "media_io_kwargs": KEPT["media_io_kwargs"],
        "input": [user(IMAGE)],
        "max_output_tokens": 1,
        "stream": False,
        "store": False,
    }


def test_encode_of_a_bare_body_adds_nothing() -> None:
    """Members the client left out or set to null are not invented."""
    body = parse({"input": [user(IMAGE)], "model": None, "media_io_kwargs": None})
    assert set(sent(body.encode(body.parts[0]))) == {"input", "max_output_tokens", "stream", "store"}
    assert body.model is None


@pytest.mark.parametrize("field", ["mm_processor_kwargs", "media_io_kwargs"])
@pytest.mark.parametrize(
    ("value", "is_set"), [(None, False), ({}, True), ({"max_pixels": 1}, True), ("x", True), (False, True)]
)
def test_processor_kwargs_count_as_set_unless_null(field: str, value: Any, *, is_set: bool) -> None:
    """JSON null is unset, an empty object is set."""
    assert parse(asking(**{field: value})).sets_processor_kwargs is is_set
    assert parse(asking()).sets_processor_kwargs is False


def test_tenancy_is_what_isolates_prefix_caches() -> None:
    """`cache_salt` and `priority` travel as the client spelt them; unset ones do not."""
    assert sent(parse(asking(cache_salt="s", priority=-2)).tenancy) == {"cache_salt": "s", "priority": -2}
    assert sent(parse(asking(cache_salt=None)).tenancy) == {}


def test_unknown_part_types_are_reported_and_kept() -> None:
    """Parts that are neither text nor known media are named for the count check and left alone."""
    document = {"type": "input_file", "filename": "a.pdf", "file_data": "data:application/pdf;base64,AAAA"}
    body = parse(with_parts(TEXT, document, {"type": "hologram"}, IMAGE))
    assert list(body.unknown_part_types) == ["input_file", "hologram"]
    assert len(body.parts) == 1
    assert sent(body.decode()) == with_parts(TEXT, document, {"type": "hologram"}, IMAGE)


@pytest.mark.parametrize(
    "kind", ["input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"]
)
def test_text_parts_are_no_unknown_types(kind: str) -> None:
    """Text in any of its names is not media."""
    body = parse(with_parts({"type": kind, "text": "x"}))
    assert (list(body.parts), list(body.unknown_part_types)) == ([], [])


@pytest.mark.parametrize("place", [user, output])
@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_image", "file_id": "file-1"},
        {"type": "input_image", "file_id": "file-1", "image_url": "http://i"},
        {"type": "input_image", "file_id": 1},
        {"type": "input_file", "file_id": "file-1"},
    ],
)
def test_uploaded_files_are_refused(part: dict[str, Any], place: Any) -> None:
    """No phase has the file: the message names the field, not its value."""
    body = asking([user(TEXT), place(TEXT, part)])
    location = f"input[1].{'content' if place is user else 'output'}[1].file_id"
    with pytest.raises(BadRequest) as refused:
        parse(body)
    assert (refused.value.status, refused.value.param) == (400, location)
    assert refused.value.message.startswith(location)
    assert "file-1" not in refused.value.message


def test_a_null_file_id_is_unset() -> None:
    """Clients spell out defaults; decode keeps them."""
    body = parse(with_parts(IMAGE | {"file_id": None}))
    assert len(body.parts) == 1
    assert sent(body.decode()) == with_parts(IMAGE | {"file_id": None})


@pytest.mark.parametrize("identity", [{}, {"id": "x"}])
@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}},
        {"type": "audio_url", "audio_url": {"url": "http://169.254.169.254/"}},
        {"type": "video_url", "video_url": {"url": "http://169.254.169.254/"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"image_url": "http://169.254.169.254/"},
        {"type": None, "image_url": "http://169.254.169.254/"},
        {"type": "", "image_url": "http://169.254.169.254/"},
    ],
)
def test_media_of_other_apis_are_refused(part: dict[str, Any], identity: dict[str, str]) -> None:
    """An engine would load them, from an address nobody has checked, where an item has an id."""
    with pytest.raises(BadRequest) as refused:
        parse(asking([user(TEXT, part) | identity]))
    assert refused.value.param is not None
    assert refused.value.param.startswith("input[0].content[1]")


@pytest.mark.parametrize(
    ("body", "param", "named"),
    [
        (b"", None, "JSON object"),
        (b"[]", None, "JSON object"),
        (b'\xef\xbb\xbf{"input":"a"}', None, "byte order mark"),
        (b'{"input":"a","x":"\xff"}', None, "UTF-8"),
        ({}, "input", "missing"),
        ({"input": None}, "input", "missing"),
        ({"input": 1}, "input", "string or an array"),
        ({"input": {}}, "input", "string or an array"),
        ({"input": ["hi"]}, "input[0]", "object"),
        ({"input": [None]}, "input[0]", "object"),
        ({"input": [user(), [1]]}, "input[1]", "object"),
        ({"input": [{"content": 1}]}, "input[0].content", "array of parts"),
        ({"input": [{"content": {"type": "input_image"}}]}, "input[0].content", "array of parts"),
        ({"input": [{"output": {"type": "input_image"}}]}, "input[0].output", "array of parts"),
        ({"input": [{"output": False}]}, "input[0].output", "array of parts"),
        ({"input": [user(1)]}, "input[0].content[0]", "object"),
        ({"input": [user(None)]}, "input[0].content[0]", "object"),
        ({"input": [output(TEXT, [])]}, "input[0].output[1]", "object"),
        ({"input": [user({"type": 1})]}, "input[0].content[0].type", "string"),
        ({"input": "a", "model": 1}, "model", "model"),
        ({"input": "a", "stream": "true"}, "stream", "stream"),
        ({"input": "a", "stream": 1}, "stream", "stream"),
        (with_parts(TEXT, {"type": "input_image"}), "input[0].content[1]", "input_image has no URL"),
        (with_parts({"type": "input_image", "image_url": None}), "input[0].content[0]", "no URL"),
        (with_parts({"type": "input_image", "image_url": ""}), "input[0].content[0]", "no URL"),
        (with_parts({"type": "input_image", "image_url": 123}), "input[0].content[0]", "must be a string"),
        (
            with_parts({"type": "input_image", "image_url": {"url": "http://i"}}),
            "input[0].content[0]",
            "must be a string",
        ),
    ],
)
def test_malformed_bodies_are_refused_by_name(body: Any, param: str | None, named: str) -> None:
    """A body of the wrong shape is a 400 that names the place."""
    with pytest.raises(BadRequest) as refused:
        parse(body)
    assert refused.value.status == 400
    assert refused.value.param == param
    assert named in refused.value.message
    assert (param or "") in refused.value.message


def test_the_message_does_not_quote_the_clients_values() -> None:
    """Secrets in a malformed body do not come back in the message."""
    for value in ("hunter2", [{"type": "input_image", "image_url": {"url": "hunter2"}}]):
        with pytest.raises(BadRequest) as refused:
            parse(asking([value if isinstance(value, str) else user(*value)]))
        assert "hunter2" not in refused.value.message


def test_deep_nesting_is_refused() -> None:
    """Depth is bounded wherever it is hidden."""
    deep = b"[" * 50_000 + b"]" * 50_000
    for body in (
        b'{"input":"a","x":%b}' % deep,
        b'{"input":[{"role":"user","content":[{"type":"input_text","x":%b}]}]}' % deep,
    ):
        with pytest.raises(BadRequest, match="nested too deeply"):
            parse(body)


def test_large_values_are_not_copied() -> None:
    """A megabyte of base64 in a part travels as one slice on every leg that carries the part."""
    url = "data:image/png;base64," + "A" * (1 << 20)
    body = parse(with_parts({"type": "input_image", "image_url": url}))
    for written in LEGS.values():
        assert any(isinstance(s, memoryview) and len(s) > 1 << 20 for s in segments(written(body)))


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=6).filter(lambda key: key not in {"input", "stream", "model"}),
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
    body = parse(with_parts(TEXT, IMAGE, max_output_tokens=9))
    before = sent(body.decode())
    for written in LEGS.values():
        tree = written(body)
        tree["kv_transfer_params"] = Raw(b"{}")
        tree["max_output_tokens"] = Raw(b"77")
    assert sent(body.decode()) == before


def test_errors_have_the_openai_shape() -> None:
    """Message with the request id, type, param and code."""
    with pytest.raises(BadRequest) as refused:
        parse(asking(conversation="c"))
    error = json.loads(ResponsesApi().error_body(refused.value, "req-1", expose_upstream=False))["error"]
    assert (error["type"], error["param"], error["code"]) == (
        "invalid_request_error",
        "conversation",
        "epd_bad_request",
    )
    assert "req-1" in error["message"]


@pytest.mark.parametrize("member", ["image_pil", "video_embeds", "audio_url"])
def test_an_image_part_holds_one_item(member: str) -> None:
    """With the uuid a part gets after render, an engine takes the first media member it finds in it."""
    part = {
        "type": "input_image",
        "image_url": "data:image/png;base64,AAAA",
        member: "http://169.254.169.254/",
    }
    body = json.dumps({"input": [{"role": "user", "content": [part]}]}).encode()
    with pytest.raises(BadRequest, match=member):
        ResponsesApi().parse(body)


def test_an_image_in_a_turn_of_the_assistant_is_refused() -> None:
    """Engines keep only the text of such an item: the image would be counted here and placed nowhere."""
    part = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    body = json.dumps({"input": [{"id": "m", "role": "assistant", "content": [part]}]}).encode()
    with pytest.raises(BadRequest, match="assistant"):
        ResponsesApi().parse(body)
