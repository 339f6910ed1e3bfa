from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.api import api_for_path
from sidecar.api.messages import MessagesApi, MessagesBody
from sidecar.errors import (
    BadRequest,
    BodyTimeout,
    BodyTooLarge,
    MixedSpan,
    Overloaded,
    SidecarError,
    StepFailed,
    StepRejected,
    StepTimeout,
    UnsupportedEncoding,
)
from sidecar.jsontext import Raw, segments, to_raw

if TYPE_CHECKING:
    from collections.abc import Callable

FORGED = {"peer_host": "10.6.6.6", "remote_host": "10.6.6.6"}
TEXT = {"type": "text", "text": "what is it?"}
OTHER_BLOCKS: list[dict[str, Any]] = [
    {"type": "thinking", "thinking": "hm", "signature": "s"},
    {"type": "redacted_thinking", "data": "AAAA"},
    {"type": "tool_use", "id": "t", "name": "f", "input": {"image": "http://i"}},
    {"type": "tool_result", "tool_use_id": "t", "content": "text"},
    {"type": "tool_reference", "tool_name": "f"},
    {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "f"}},
    {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "f"}},
    TEXT,
]


def by_url(name: str = "a", **members: Any) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "url", "url": f"http://i/{name}.png"}, **members}


def by_data(data: str = "AAAA", **members: Any) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": data}
    return {"type": "image", "source": source, **members}


def result(*blocks: Any, **members: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "t", "content": list(blocks), **members}


def turn(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


def request(*blocks: Any, **members: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 500, "messages": [turn(*blocks)], **members}


def parse(body: Any) -> MessagesBody:
    return MessagesApi().parse(body if isinstance(body, bytes) else json.dumps(body).encode())


def sent(tree: Any) -> Any:
    return json.loads(b"".join(segments(tree)))


LEGS: dict[str, Callable[[MessagesBody], Any]] = {
    "render": MessagesBody.render,
    "encode": lambda body: body.encode(body.parts[0]),
    "prefill": MessagesBody.prefill,
    "decode": MessagesBody.decode,
}
ALL_LEGS = pytest.mark.parametrize("leg", LEGS)


def test_the_registry_knows_the_api() -> None:
    """The API owns one exact path, is rendered to one object, and never brings its own tokens."""
    api = api_for_path("/v1/messages")
    assert api is not None
    assert (api.name, api.render_answers_list) == ("messages", False)
    assert api_for_path("/v1/messages/count_tokens") is None
    assert parse(request(TEXT)).own_prompt is None


@pytest.mark.parametrize("written", [MessagesBody.render, MessagesBody.decode])
def test_an_ordinary_body_comes_out_as_it_went_in(written: Any) -> None:
    """Fields nobody knows, spellings of numbers, escapes and the order of members survive."""
    text = (
        b'{"zeta":1.50E+2,"model":"m","stream":true,"unknown":{"b":[1,2.0],"a":"\\u00e9\\/"},"messages":['
        b'{"x":1,"role":"user","content":[{"type":"text","text":"a\\u0021","cache_control":{"ttl":"5m"}},'
        b'{"extra":[1e0],"type":"image","source":{"media_type":"image/png","type":"base64","data":"AAAA"}},'
        b'{"is_error":false,"type":"tool_result","content":[{"type":"image","source":{"url":"http:\\/\\/i",'
        b'"type":"url"}},{"type":"text","text":""}],"tool_use_id":"t"}]},'
        b'{"role":"assistant","content":"yes"},{"role":"assistant","content":null},{"role":"user"}],'
        b'"system":[{"type":"text","text":"be \\u0062rief"}],"max_tokens":9,"metadata":{"user_id":"u"}}'
    )
    assert b"".join(segments(written(parse(text)))) == text


@pytest.mark.parametrize("block", [by_data("A" * (1 << 20)), result(by_data("A" * (1 << 20)))])
def test_large_values_are_not_copied(block: dict[str, Any]) -> None:
    """A megabyte of base64 in a block travels as one slice on every leg that carries the block."""
    body = parse(request(block))
    for written in LEGS.values():
        assert any(isinstance(s, memoryview) and len(s) > 1 << 20 for s in segments(written(body)))


def test_images_are_found_in_the_order_engines_place_them() -> None:
    """Of a user turn the images of all tool results come first, then the turn's own; turn by turn."""
    body = parse(
        {
            "messages": [
                turn(by_url("1"), result(TEXT, by_data()), TEXT, by_data(), result(by_url("2"), by_url("3"))),
                {"role": "assistant", "content": "no blocks"},
                turn(TEXT, by_url("4"), role="assistant"),
                turn(by_url("5"), role="user"),
            ]
        }
    )
    assert [part.location for part in body.parts] == [
        "messages[0].content[1].content[1]",
        "messages[0].content[4].content[0]",
        "messages[0].content[4].content[1]",
        "messages[0].content[0]",
        "messages[0].content[3]",
        "messages[2].content[1]",
        "messages[3].content[0]",
    ]
    assert {part.modality for part in body.parts} == {"image"}
    assert [part.inline_format for part in body.parts] == [
        "image/png",
        None,
        None,
        None,
        "image/png",
        None,
        None,
    ]


@given(st.lists(st.one_of(st.just(None), st.integers(0, 3)), max_size=6))
def test_the_walk_order_holds_for_any_mix(mix: list[int | None]) -> None:
    """Whatever a user turn mixes, nested images in order come before its own in order."""
    names = map(str, itertools.count())
    blocks = [
        by_url(next(names)) if count is None else result(*(by_url(next(names)) for _ in range(count)))
        for count in mix
    ]
    nested = [inner for block in blocks if block["type"] == "tool_result" for inner in block["content"]]
    own = [block for block in blocks if block["type"] == "image"]
    urls = [json.loads(bytes(part.url)) for part in parse(request(TEXT, *blocks)).parts]
    assert urls == [block["source"]["url"] for block in (*nested, *own)]


@pytest.mark.parametrize(
    "message",
    [
        turn(by_url("x"), role="system"),
        turn(result(by_url("x")), role="assistant"),
        turn(result(result(by_url("x")))),
        turn({"type": "tool_use", "id": "t", "name": "f", "input": by_url("x")}),
    ],
)
def test_images_no_engine_places_are_no_parts(message: dict[str, Any]) -> None:
    """What an engine reads as text, or not at all, is not media, and stays as it is."""
    body = parse({"messages": [message, turn(by_url("y"))]})
    assert [json.loads(bytes(part.url)) for part in body.parts] == ["http://i/y.png"]
    assert body.unknown_part_types == []
    assert sent(body.decode())["messages"][0] == message


@pytest.mark.parametrize("nest", [lambda block: block, result])
def test_a_url_source_takes_the_data_in_place(nest: Any) -> None:
    """The data URI takes the place of the URL; source type, neighbours and the text of the URI stay."""
    body = parse(request(nest(by_url(cache_control={"type": "ephemeral"})), TEXT))
    (part,) = body.parts
    uri = to_raw("data:image/png;base64,BBBB")
    part.set_url(uri)
    assert part.data_url() is uri
    expected = {
        **by_url(cache_control={"type": "ephemeral"}),
        "source": {"type": "url", "url": "data:image/png;base64,BBBB"},
    }
    for written in (body.render, body.prefill, body.decode):
        assert sent(written())["messages"] == [turn(nest(expected), TEXT)]


def test_equal_downloads_share_one_text() -> None:
    """A download that many images show is held once, however often it is sent."""
    body = parse(request(*(by_url() for _ in range(20))))
    uri = to_raw("data:image/png;base64," + "A" * (1 << 20))
    for part in body.parts:
        part.set_url(uri)
    slices = [s for s in segments(body.decode()) if len(s) >= 1 << 20]
    assert len(slices) == 20
    assert {id(s.obj) for s in slices if isinstance(s, memoryview)} == {id(memoryview(uri).obj)}


def test_a_base64_source_takes_checked_data_in_place() -> None:
    """The checked text takes the place of the client's; the source stays base64 of its media type."""
    body = parse(request(by_data("AA\\/A")))
    body.parts[0].set_url(to_raw("AA/A"))
    assert sent(body.decode())["messages"][0]["content"] == [by_data("AA/A")]


@pytest.mark.parametrize("data", ['"AA=="', '"AA\\u003d\\u003d"'])
@pytest.mark.parametrize("media_type", ["image/png", "image/webp"])
def test_base64_data_becomes_one_data_url(data: str, media_type: str) -> None:
    """A base64 source travels as one data URL of its media type and payload."""
    source = f'{{"type":"base64","media_type":"{media_type}","data":{data}}}'
    body = parse(
        f'{{"messages":[{{"role":"user","content":[{{"type":"image","source":{source}}}]}}]}}'.encode()
    )
    assert json.loads(bytes(body.parts[0].data_url())) == f"data:{media_type};base64,AA=="


@ALL_LEGS
@pytest.mark.parametrize("image", [by_url, by_data])
@pytest.mark.parametrize("nest", [lambda block: block, result])
def test_no_image_ever_carries_a_uuid(leg: str, image: Any, nest: Any) -> None:
    """Neither the client's own nor the render hash: engines hash the images of this API themselves."""
    body = parse(request(nest(image(uuid="../escape"))))
    body.parts[0].set_uuid("a" * 64)
    text = b"".join(segments(LEGS[leg](body)))
    assert b"uuid" not in text
    assert b"a" * 64 not in text


def test_an_unknown_block_loses_its_uuid_too() -> None:
    """A block that an engine may know one day gets no key from the client."""
    document = {"type": "document", "source": {"type": "url", "url": "http://d"}}
    body = parse(request({**document, "uuid": "u"}, by_url()))
    assert sent(body.decode())["messages"] == [turn(document, by_url())]


@pytest.mark.parametrize(
    "block",
    [
        {"type": "document", "source": {"type": "text", "data": "x"}},
        {"type": "search_result", "content": []},
    ],
)
def test_blocks_that_only_results_may_have(block: Any) -> None:
    """Engines take documents and search results in tool results, unread; elsewhere they do not."""
    body = parse(request(result(block), by_url()))
    assert body.unknown_part_types == []
    assert sent(body.decode())["messages"][0]["content"] == [result(block), by_url()]
    assert parse(request(block, by_url())).unknown_part_types == [block["type"]]


@pytest.mark.parametrize(
    ("block", "kind"),
    [
        ({"type": "audio", "source": {"type": "base64", "data": "x"}}, "audio"),
        ({"type": "image", "source": {"type": "file", "file_id": "f"}}, "image from file"),
        ({"type": "image", "source": {"type": "s3", "url": "s3://b"}}, "image from s3"),
    ],
)
@pytest.mark.parametrize("nest", [lambda block: block, result])
def test_blocks_nobody_knows_are_reported_and_kept(block: Any, kind: str, nest: Any) -> None:
    """They are named for the count check, and left alone."""
    body = parse(request(nest(block), by_url()))
    assert body.unknown_part_types == [kind]
    assert len(body.parts) == 1
    assert sent(body.decode())["messages"][0]["content"] == [nest(block), by_url()]


def test_blocks_without_media_are_no_unknown_types() -> None:
    """Text, thinking and tools are no media, at the top and inside a tool result."""
    body = parse(request(*OTHER_BLOCKS, result(*OTHER_BLOCKS)))
    assert (body.parts, body.unknown_part_types) == ([], [])


@ALL_LEGS
@pytest.mark.parametrize(
    "members",
    [
        {"kv_transfer_params": FORGED},
        {"ec_transfer_params": {"h": FORGED}},
        {"kv_transfer_params": "10.6.6.6"},
        {"vllm_xargs": {"kv_transfer_params": FORGED, "keep": 1}},
        {"vllm_xargs": {"ec_transfer_params": FORGED, "keep": 1}},
        {"sampling_params": {"extra_args": {"kv_transfer_params": FORGED, "ec_transfer_params": FORGED}}},
    ],
)
def test_forged_transfer_parameters_reach_no_leg(members: dict[str, Any], leg: str) -> None:
    """A worker address from a client is gone from every place an engine reads it from."""
    assert "10.6.6.6" not in json.dumps(sent(LEGS[leg](parse(request(by_url(), **members)))))


@ALL_LEGS
@pytest.mark.parametrize("field", ["mm_payload", "return_mm_kwargs"])
def test_the_renderers_own_fields_are_not_the_clients(field: str, leg: str) -> None:
    """`mm_payload` and its alias are for the render copy only, and set there by the render step."""
    assert field not in sent(LEGS[leg](parse(request(by_url(), **{field: "none"}))))


KEPT: dict[str, Any] = {
    "system": [{"type": "text", "text": "be brief"}],
    "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    "thinking": {"type": "enabled", "budget_tokens": 4000},
    "metadata": {"user_id": "u"},
    "stop_sequences": ["x"],
    "temperature": 0.5,
    "top_k": 3,
    "chat_template_kwargs": {"a": 1},
    "cache_salt": "tenant",
    "priority": 3,
    "mm_processor_kwargs": {"max_pixels": 1000},
    "unknown_field": {"a": [1]},
}
REMOVED: dict[str, Any] = {
    "min_tokens": 5,
    "stream_options": {"include_usage": True},
    "n": 3,
    "logprobs": True,
    "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "a+"},
    "guided_json": {},
}


def test_prefill_keeps_all_that_shapes_the_prompt() -> None:
    """Apart from the cap, prefill is the client's body, so that its KV cache is decode's."""
    everything = request(result(by_data()), by_url(), **KEPT, **REMOVED, stream=True)
    body = parse(everything)
    assert sent(body.prefill()) == request(result(by_data()), by_url(), **KEPT) | {
        "max_tokens": 1,
        "stream": False,
    }
    assert sent(body.decode()) == everything


@pytest.mark.parametrize("field", REMOVED)
def test_prefill_drops_what_would_break_a_one_token_leg(field: str) -> None:
    """Fields that need more than one plain token are gone on prefill and untouched on decode."""
    body = parse(request(by_url(), **{field: REMOVED[field]}))
    assert field not in sent(body.prefill())
    assert sent(body.decode())[field] == REMOVED[field]


@pytest.mark.parametrize("stream", [True, False, None])
def test_prefill_is_never_streamed(stream: bool | None) -> None:
    """Streamed answers carry no transfer parameters; decode keeps the client's choice."""
    body = parse(request(TEXT, stream=stream))
    assert sent(body.prefill())["stream"] is False
    assert sent(body.decode())["stream"] is stream
    assert body.stream is bool(stream)


@pytest.mark.parametrize(
    ("choice", "on_prefill"),
    [
        ({"type": "any"}, {"type": "auto"}),
        ({"type": "tool", "name": "f"}, {"type": "auto"}),
        (
            {"name": "f", "disable_parallel_tool_use": True, "type": "tool"},
            {"disable_parallel_tool_use": True, "type": "auto"},
        ),
        ({"type": "auto"}, {"type": "auto"}),
        ({"type": "none"}, {"type": "none"}),
        (None, None),
    ],
)
def test_prefill_does_not_force_a_tool(choice: Any, on_prefill: Any) -> None:
    """A forced tool constrains the grammar of the one token: prefill lets the model choose."""
    body = parse(request(TEXT, tools=KEPT["tools"], tool_choice=choice))
    assert sent(body.prefill())["tool_choice"] == on_prefill
    assert sent(body.decode())["tool_choice"] == choice


@pytest.mark.parametrize(
    ("config", "on_prefill"),
    [
        ({"format": {"type": "json_schema", "schema": {}}, "effort": "low"}, {"effort": "low"}),
        ({"effort": "max"}, {"effort": "max"}),
        ({}, {}),
        (None, None),
    ],
)
def test_prefill_asks_for_no_output_format(config: Any, on_prefill: Any) -> None:
    """The effort shapes the prompt and stays; a schema constrains the output and is for decode."""
    body = parse(request(TEXT, output_config=config))
    assert sent(body.prefill())["output_config"] == on_prefill
    assert sent(body.decode())["output_config"] == config


@pytest.mark.parametrize("nest", [lambda block: block, result])
def test_encode_holds_just_the_image(nest: Any) -> None:
    """One user turn with one block, the model, the processor kwargs, one token, not streamed."""
    body = parse(request(TEXT, nest(by_data(cache_control={})), by_url(), **KEPT, **REMOVED, stream=True))
    assert sent(body.encode(body.parts[0])) == {
        "model": "m",
        "mm_processor_kwargs": KEPT["mm_processor_kwargs"],
        "messages": [turn(by_data(cache_control={}))],
        "max_tokens": 1,
        "stream": False,
    }


def test_encode_of_a_bare_body_adds_nothing() -> None:
    """Members the client left out or set to null are not invented."""
    body = parse({"messages": [turn(by_url())], "model": None, "media_io_kwargs": None})
    assert set(sent(body.encode(body.parts[0]))) == {"messages", "max_tokens", "stream"}
    assert body.model is None


@pytest.mark.parametrize(("value", "is_set"), [(None, False), ({}, True), ({"max_pixels": 1}, True)])
def test_processor_kwargs_count_as_set_unless_null(value: Any, *, is_set: bool) -> None:
    """JSON null is unset, an empty object is set."""
    assert parse(request(TEXT, mm_processor_kwargs=value)).sets_processor_kwargs is is_set
    assert parse(request(TEXT)).sets_processor_kwargs is False


def test_tenancy_is_what_isolates_prefix_caches() -> None:
    """`cache_salt` and `priority` travel as the client spelt them; unset ones do not."""
    assert sent(parse(request(TEXT, cache_salt="s", priority=-2)).tenancy) == {
        "cache_salt": "s",
        "priority": -2,
    }
    assert sent(parse(request(TEXT, cache_salt=None)).tenancy) == {}


FIRST = "messages[0].content[0]"


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"", "JSON object"),
        (b"[]", "JSON object"),
        (b'\xef\xbb\xbf{"messages":[]}', "byte order mark"),
        (b'{"messages":[],"x":"\xff"}', "UTF-8"),
        ({}, "messages is missing"),
        ({"messages": None}, "messages is missing"),
        ({"messages": "hi"}, "messages"),
        ({"messages": {}}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": 1, "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": {"type": "text"}}]}, "messages[0].content"),
        (request("a string"), FIRST),
        (request(None), FIRST),
        (request({}), f"{FIRST}.type"),
        (request({"type": 1}), f"{FIRST}.type"),
        (request({"type": None}), f"{FIRST}.type"),
        (request({"type": "image"}), f"{FIRST}.source is missing"),
        (request({"type": "image", "source": None}), f"{FIRST}.source is missing"),
        (request({"type": "image", "source": "http://i"}), f"{FIRST}.source"),
        (request({"type": "image", "source": {}}), f"{FIRST}.source.type is missing"),
        (request({"type": "image", "source": {"type": 1}}), f"{FIRST}.source.type"),
        (request({"type": "image", "source": {"type": "url"}}), "has no url"),
        (request({"type": "image", "source": {"type": "url", "url": None}}), "has no url"),
        (request({"type": "image", "source": {"type": "url", "url": ""}}), "source.url is empty"),
        (request({"type": "image", "source": {"type": "url", "url": 0}}), "source.url must be a string"),
        (request({"type": "image", "source": {"type": "url", "url": {"url": "x"}}}), "must be a string"),
        (request({"type": "image", "source": {"type": "base64", "media_type": "image/png"}}), "has no data"),
        (request(by_data("")), "source.data is empty"),
        (request({"type": "image", "source": {"type": "base64", "data": "AAAA"}}), "media_type is missing"),
        (
            request({"type": "image", "source": {"type": "base64", "data": "AAAA", "media_type": 1}}),
            f"{FIRST}.source.media_type",
        ),
        (request({"type": "tool_result", "content": 1}), f"{FIRST}.content"),
        (request({"type": "tool_result", "content": {"type": "image"}}), f"{FIRST}.content"),
        (request(result("x")), f"{FIRST}.content[0]"),
        (request(result({"type": []})), f"{FIRST}.content[0].type"),
        (request(result(TEXT, {"type": "image"})), f"{FIRST}.content[1].source"),
        (request(TEXT, model=1), "model"),
        (request(TEXT, stream="true"), "stream"),
        (request(TEXT, stream=1), "stream"),
        (request(TEXT, tool_choice="auto"), "tool_choice"),
        (request(TEXT, tool_choice=["any"]), "tool_choice"),
        (request(TEXT, tool_choice={}), "tool_choice.type is missing"),
        (request(TEXT, tool_choice={"type": True}), "tool_choice.type"),
        (request(TEXT, output_config="low"), "output_config"),
    ],
)
def test_malformed_bodies_are_refused_by_name(body: Any, named: str) -> None:
    """A body of the wrong shape is a 400 that names the place."""
    with pytest.raises(BadRequest) as refused:
        parse(body)
    assert refused.value.status == 400
    assert named in refused.value.message


def test_a_refusal_names_the_parameter() -> None:
    """The place is a value of its own, beside the message."""
    with pytest.raises(BadRequest) as refused:
        parse(request(TEXT, result(TEXT, {"type": "image", "source": {"type": "url", "url": 1}})))
    assert refused.value.param == "messages[0].content[1].content[1].source.url"
    with pytest.raises(BadRequest) as refused:
        parse(request(TEXT, tool_choice=1))
    assert refused.value.param == "tool_choice"


def test_the_message_does_not_quote_the_clients_values() -> None:
    """Secrets in a malformed body do not come back in the message."""
    for body in (request({"type": "image", "source": "hunter2"}), request(TEXT, tool_choice="hunter2")):
        with pytest.raises(BadRequest) as refused:
            parse(body)
        assert "hunter2" not in refused.value.message


def test_deep_nesting_is_refused() -> None:
    """Depth is bounded wherever it is hidden."""
    deep = b"[" * 50_000 + b"]" * 50_000
    for body in (
        b'{"messages":[],"x":%b}' % deep,
        b'{"messages":[{"role":"user","content":[{"type":"text","x":%b}]}]}' % deep,
        b'{"messages":[{"role":"user","content":[{"type":"tool_result","content":[{"x":%b}]}]}]}' % deep,
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
    body = request(TEXT, by_url(), result(by_data()), **members)
    assert sent(parse(body).decode()) == body


def test_legs_do_not_disturb_each_other() -> None:
    """Writing one leg, or adding members to it, changes no other leg."""
    body = parse(request(result(by_data()), by_url(), tool_choice={"type": "any"}))
    before = sent(body.decode())
    for written in LEGS.values():
        tree = written(body)
        tree["kv_transfer_params"] = Raw(b"{}")
        tree.pop("messages")
    assert sent(body.decode()) == before


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (BadRequest("no"), "invalid_request_error"),
        (StepRejected("render", 401, "no"), "authentication_error"),
        (StepRejected("render", 402, "no"), "billing_error"),
        (StepRejected("render", 403, "no"), "permission_error"),
        (StepRejected("render", 404, "no"), "not_found_error"),
        (BodyTimeout("no"), "timeout_error"),
        (StepRejected("prefill", 409, "no"), "conflict_error"),
        (BodyTooLarge("no"), "request_too_large"),
        (UnsupportedEncoding("no"), "invalid_request_error"),
        (MixedSpan("no"), "invalid_request_error"),
        (StepRejected("media", 418, "no"), "invalid_request_error"),
        (StepRejected("prefill", 429, "no"), "rate_limit_error"),
        (StepRejected("media", 451, "no"), "invalid_request_error"),
        (StepRejected("media", 499, "no"), "invalid_request_error"),
        (SidecarError("no"), "api_error"),
        (StepFailed("prefill", "no"), "api_error"),
        (Overloaded("no"), "overloaded_error"),
        (StepTimeout("encode", "no"), "timeout_error"),
    ],
)
def test_errors_have_the_anthropic_shape(error: SidecarError, kind: str) -> None:
    """Type by status, message with the request id, and the id as a member of its own."""
    body = json.loads(MessagesApi().error_body(error, "req-1", expose_upstream=False))
    assert body == {
        "type": "error",
        "error": {"type": kind, "message": "no (request id: req-1)"},
        "request_id": "req-1",
    }


def test_an_upstreams_body_reaches_the_client_only_on_request() -> None:
    """`errors.expose_upstream` decides; the log's detail never leaves."""
    error = StepFailed("render", "render failed", detail="secret-detail", upstream_body="secret-body")
    assert b"secret" not in MessagesApi().error_body(error, "r", expose_upstream=False)
    exposed = MessagesApi().error_body(error, "r", expose_upstream=True)
    assert b"secret-body" in exposed
    assert b"secret-detail" not in exposed
