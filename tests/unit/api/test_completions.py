from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.api import api_for_path
from sidecar.api.completions import CompletionsApi, CompletionsBody
from sidecar.errors import BadRequest
from sidecar.jsontext import Raw, segments, to_raw

if TYPE_CHECKING:
    from collections.abc import Callable

FORGED = {"peer_host": "10.6.6.6", "peer_port": 1, "remote_host": "10.6.6.6"}
TOKENS = Raw(b"[5, 6,7]")


def parse(body: Any) -> CompletionsBody:
    return CompletionsApi().parse(body if isinstance(body, bytes) else json.dumps(body).encode())


def asking(prompt: Any = "Once upon", **members: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": prompt, **members}


def sent(tree: Any) -> Any:
    return json.loads(b"".join(segments(tree)))


LEGS: dict[str, Callable[[CompletionsBody], Any]] = {
    "render": CompletionsBody.render,
    "prefill": CompletionsBody.prefill,
    "prefill with tokens": lambda body: body.prefill(TOKENS),
    "decode": CompletionsBody.decode,
    "decode with tokens": lambda body: body.decode(TOKENS),
}
ALL_LEGS = pytest.mark.parametrize("leg", LEGS)


def test_the_registry_knows_the_api_by_its_path() -> None:
    """The API owns one exact path, and its render answer is a list."""
    api = api_for_path("/v1/completions")
    assert isinstance(api, CompletionsApi)
    assert (api.name, api.render_answers_list) == ("completions", True)
    assert api_for_path("/v1/completions/render") is None


@pytest.mark.parametrize("written", [CompletionsBody.render, CompletionsBody.decode])
def test_an_ordinary_body_comes_out_as_it_went_in(written: Any) -> None:
    """Fields nobody knows, spellings of numbers, escapes and the order of members survive."""
    text = (
        b'{"zeta":1.50E+2,"prompt":"\\u0062e \\/ \\u00e9","model":"m","stream":true,"suffix":"s",'
        b'"unknown":{"b":[1, 2.0],"a":null},"echo":true,"max_tokens":null,"seed":-0}'
    )
    assert b"".join(segments(written(parse(text)))) == text


@pytest.mark.parametrize("prompt", ["", "Once upon", [0], [1, 2, 248_000], list(range(500))])
def test_a_string_or_one_token_array_is_a_prompt(prompt: Any) -> None:
    """Both reach the renderer as sent; there is nothing to encode, and no prompt skips render."""
    body = parse(asking(prompt))
    assert sent(body.render())["prompt"] == prompt
    assert (list(body.parts), list(body.unknown_part_types), body.own_prompt) == ([], [], None)
    assert body.sets_processor_kwargs is False


@pytest.mark.parametrize(
    ("body", "param", "named"),
    [
        ({}, "prompt", "missing"),
        ({"prompt": None}, "prompt", "missing"),
        ({"prompt_embeds": "AAAA"}, "prompt", "missing"),
        ({"prompt": []}, "prompt", "empty array"),
        ({"prompt": ["a"]}, "prompt", "batch"),
        ({"prompt": ["a", "b"]}, "prompt", "batch"),
        ({"prompt": [[1, 2]]}, "prompt", "batch"),
        ({"prompt": [[1], [2]]}, "prompt", "batch"),
        ({"prompt": [[]]}, "prompt", "batch"),
        ({"prompt": [1, "a"]}, "prompt", "token ids"),
        ({"prompt": [1, [2]]}, "prompt", "token ids"),
        ({"prompt": [1, None]}, "prompt", "token ids"),
        ({"prompt": [1.5]}, "prompt", "token ids"),
        ({"prompt": [True]}, "prompt", "token ids"),
        ({"prompt": [-1]}, "prompt", "token ids"),
        ({"prompt": {"text": "a"}}, "prompt", "one string or one array"),
        ({"prompt": 7}, "prompt", "one string or one array"),
        ({"prompt": True}, "prompt", "one string or one array"),
        ({"prompt": "a", "prompt_embeds": "AAAA"}, "prompt_embeds", "prompt_embeds"),
        ({"prompt": "a", "prompt_embeds": ["AAAA"]}, "prompt_embeds", "prompt_embeds"),
        ({"prompt": "a", "model": 1}, "model", "model"),
        ({"prompt": "a", "model": ["m"]}, "model", "model"),
        ({"prompt": "a", "stream": "true"}, "stream", "stream"),
        ({"prompt": "a", "stream": 1}, "stream", "stream"),
        (b"", None, "JSON object"),
        (b"[]", None, "JSON object"),
        (b'\xef\xbb\xbf{"prompt":"a"}', None, "byte order mark"),
        (b'{"prompt":"\xff"}', None, "UTF-8"),
        (b'{"prompt":%b}' % (b"[" * 50_000 + b"]" * 50_000), None, "nested too deeply"),
    ],
)
def test_malformed_bodies_are_refused_by_name(body: Any, param: str | None, named: str) -> None:
    """A body of the wrong shape is a 400 that names the field."""
    with pytest.raises(BadRequest) as refused:
        parse(body)
    assert refused.value.status == 400
    assert refused.value.param == param
    assert named in refused.value.message


def test_the_message_does_not_quote_the_prompt() -> None:
    """What a client wrote does not come back in a message."""
    with pytest.raises(BadRequest) as refused:
        parse(asking(["hunter2"]))
    assert "hunter2" not in refused.value.message


@pytest.mark.parametrize("field", ["prompt_embeds", "suffix", "echo", "stream", "model", "cache_salt"])
def test_null_is_unset(field: str) -> None:
    """Optional fields may be null, and stay so on decode."""
    body = parse(asking(**{field: None}))
    assert sent(body.decode(TOKENS))[field] is None
    assert body.stream is False


@ALL_LEGS
@pytest.mark.parametrize(
    "members",
    [
        {"kv_transfer_params": FORGED},
        {"ec_transfer_params": {"h": FORGED}},
        {"kv_transfer_params": {"prompt_token_ids": [1], "h": "10.6.6.6"}},
        {"vllm_xargs": {"kv_transfer_params": FORGED, "keep": 1}},
        {"sampling_params": {"extra_args": {"ec_transfer_params": FORGED, "keep": 1}}},
    ],
)
def test_forged_transfer_parameters_reach_no_leg(members: dict[str, Any], leg: str) -> None:
    """A worker address from a client is gone from every place an engine reads it from."""
    written = json.dumps(sent(LEGS[leg](parse(asking(**members)))))
    assert "10.6.6.6" not in written
    assert "prompt_token_ids" not in written


@ALL_LEGS
@pytest.mark.parametrize("field", ["mm_payload", "return_mm_kwargs"])
def test_the_renderers_own_fields_are_not_the_clients(field: str, leg: str) -> None:
    """`mm_payload` and its alias are for the render copy only, and set there by the render step."""
    assert field not in sent(LEGS[leg](parse(asking(**{field: "none"}))))


REMOVED: dict[str, Any] = {
    "min_tokens": 5,
    "stream_options": {"include_usage": True},
    "n": 3,
    "best_of": 4,
    "logprobs": 2,
    "logprob_token_ids": [1, 2],
    "prompt_logprobs": 1,
    "echo": True,
    "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "a+"},
    "guided_json": {"type": "object"},
    "guided_regex": "a+",
}
KEPT: dict[str, Any] = {
    "cache_salt": "tenant",
    "priority": 3,
    "add_special_tokens": False,
    "truncate_prompt_tokens": 100,
    "truncation_side": "left",
    "temperature": 0.7,
    "stop": ["x"],
    "request_id": "mine",
    "vllm_xargs": {"a": 1},
    "unknown_field": {"a": 1},
}


@pytest.mark.parametrize("field", REMOVED)
def test_prefill_drops_what_would_break_a_one_token_leg(field: str) -> None:
    """Fields that need more than one plain token are gone on prefill and untouched on decode."""
    body = parse(asking([1], **{field: REMOVED[field]}))
    for tokens in (None, TOKENS):
        assert field not in sent(body.prefill(tokens))
        assert sent(body.decode(tokens))[field] == REMOVED[field]


@pytest.mark.parametrize("value", [500, None, 1, 0, "absent"])
def test_prefill_makes_one_token(value: Any) -> None:
    """The limit is one on prefill, also where the client set none; its own on decode."""
    members = {} if value == "absent" else {"max_tokens": value}
    body = parse(asking(**members))
    assert sent(body.prefill(TOKENS))["max_tokens"] == 1
    assert {k: v for k, v in sent(body.decode(TOKENS)).items() if k == "max_tokens"} == members


@pytest.mark.parametrize("stream", [True, False, None])
def test_prefill_is_never_streamed(stream: bool | None) -> None:
    """Streamed answers carry no transfer parameters; decode keeps the client's choice."""
    body = parse(asking(stream=stream))
    assert sent(body.prefill(TOKENS))["stream"] is False
    assert sent(body.decode(TOKENS))["stream"] is stream
    assert body.stream is bool(stream)


@pytest.mark.parametrize("prompt", ["Once upon", [5, 6, 7]])
def test_the_rendered_tokens_are_the_prompt(prompt: Any) -> None:
    """Prefill and decode get the renderer's token ids as it wrote them, whatever the client sent."""
    body = parse(asking(prompt))
    for tree in (body.prefill(TOKENS), body.decode(TOKENS)):
        assert b'"prompt":[5, 6,7]' in b"".join(segments(tree))


@pytest.mark.parametrize("prompt", ["Once upon", [5, 6, 7]])
def test_without_a_render_step_the_prompt_is_the_clients(prompt: Any) -> None:
    """No token ids, no change."""
    body = parse(asking(prompt, suffix="the end"))
    assert sent(body.decode()) == asking(prompt, suffix="the end")
    assert sent(body.prefill()) == asking(prompt, suffix="the end", max_tokens=1, stream=False)


def test_prefill_is_the_clients_body_with_tokens_and_the_cap() -> None:
    """Everything else stays, also what isolates tenants; decode has all of it."""
    body = parse(asking([1], **KEPT, **REMOVED, max_tokens=9))
    assert sent(body.prefill(TOKENS)) == asking([5, 6, 7], **KEPT, max_tokens=1, stream=False)
    assert sent(body.decode(TOKENS)) == asking([5, 6, 7], **KEPT, **REMOVED, max_tokens=9)


def test_a_suffix_is_in_the_tokens_already() -> None:
    """The renderer has put the suffix into the token ids; engines refuse it next to them."""
    body = parse(asking(suffix="the end"))
    assert sent(body.render())["suffix"] == "the end"
    assert sent(body.decode(TOKENS)) == asking([5, 6, 7])
    assert sent(body.prefill(TOKENS)) == asking([5, 6, 7], max_tokens=1, stream=False)


@pytest.mark.parametrize("echo", [True, "true", 1, "yes"])
def test_an_echoed_text_stays_text_on_decode(echo: Any) -> None:
    """What an engine echoes of token ids is not always the client's text; prefill echoes nothing."""
    body = parse(asking("<b>  Once upon", echo=echo))
    assert sent(body.decode(TOKENS)) == asking("<b>  Once upon", echo=echo)
    assert sent(body.prefill(TOKENS))["prompt"] == [5, 6, 7]


@pytest.mark.parametrize(("prompt", "echo"), [([5, 6, 7], True), ("Once", False), ("Once", None)])
def test_any_other_prompt_is_decoded_from_tokens(prompt: Any, echo: bool | None) -> None:
    """A client that sent tokens gets an echo of tokens, and no echo needs no text."""
    assert sent(parse(asking(prompt, echo=echo)).decode(TOKENS)) == asking([5, 6, 7], echo=echo)


def test_tenancy_is_what_isolates_prefix_caches() -> None:
    """`cache_salt` and `priority` travel as the client spelt them; unset ones do not."""
    assert sent(parse(asking(cache_salt="s", priority=-2)).tenancy) == {"cache_salt": "s", "priority": -2}
    assert sent(parse(asking(cache_salt=None)).tenancy) == {}


def test_a_long_prompt_is_not_copied() -> None:
    """A megabyte of prompt travels as one slice on every leg that carries the text."""
    body = parse(asking("A" * (1 << 20)))
    for leg in ("render", "prefill", "decode"):
        assert any(isinstance(s, memoryview) and len(s) > 1 << 20 for s in segments(LEGS[leg](body)))
    ids = to_raw(list(range(100_000)))
    for tree in (body.prefill(ids), body.decode(ids)):
        assert any(isinstance(s, memoryview) and len(s) > 100_000 for s in segments(tree))


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=6).filter(
            lambda key: key not in {"prompt", "stream", "model", "suffix", "echo"}
        ),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
            ),
            max_leaves=6,
        ),
        max_size=5,
    ),
    st.text(max_size=20) | st.lists(st.integers(0, 1 << 40), min_size=1, max_size=20),
)
def test_members_nobody_knows_survive_on_decode(members: dict[str, Any], prompt: Any) -> None:
    """Decode is the client's body whatever it holds, but for the prompt."""
    body = parse(asking(prompt, **members))
    assert sent(body.render()) == sent(body.decode()) == asking(prompt, **members)
    assert sent(body.decode(TOKENS)) == asking([5, 6, 7], **members)


def test_legs_do_not_disturb_each_other() -> None:
    """Adding members to one leg changes no other leg."""
    body = parse(asking(max_tokens=9))
    before = sent(body.decode())
    for written in LEGS.values():
        tree = written(body)
        tree["kv_transfer_params"] = Raw(b"{}")
        tree["max_tokens"] = Raw(b"77")
    assert sent(body.decode()) == before


def test_errors_have_the_openai_shape() -> None:
    """Message with the request id, type, param and code."""
    with pytest.raises(BadRequest) as refused:
        parse(asking(["a"]))
    error = json.loads(CompletionsApi().error_body(refused.value, "req-1", expose_upstream=False))["error"]
    assert (error["type"], error["param"], error["code"]) == (
        "invalid_request_error",
        "prompt",
        "epd_bad_request",
    )
    assert "req-1" in error["message"]
