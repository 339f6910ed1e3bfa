"""The prompt tokens that engines report, read from what real vLLM answered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.api import api_for_path
from sidecar.api.usage import reported_prompt_tokens
from sidecar.jsontext import read_object

RECORDED = Path(__file__).parents[2] / "recorded"
WHOLE = {
    "decode_chat": 166,
    "decode_completions": 64,
    "decode_generate": 166,
    "decode_messages": 41,
    "decode_responses": 41,
    "prefill_openai": 166,
    "prefill_completions": 64,
    "prefill_messages": 41,
    "prefill_responses": 41,
    "prefill_kwargs_data": 166,
    "prefill_metadata": 166,
    "prefill_content_parts": 166,
    "prefill_generate_text": 64,
}
"""Prompt tokens of recorded answers; every generate form reports the expanded prompt, 166 as in chat."""

MESSAGES_USAGE = {
    "no-details": {"input_tokens": 41, "output_tokens": 4},
    "read": {
        "input_tokens": 9,
        "output_tokens": 4,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 32,
    },
    "created": {
        "input_tokens": 9,
        "output_tokens": 4,
        "cache_creation_input_tokens": 32,
        "cache_read_input_tokens": 0,
    },
}
"""What the converter of vLLM 0.32 makes of 41 prompt tokens, without and with prompt token details."""


def count(api: str, answer: Any) -> int | None:
    return reported_prompt_tokens(api, read_object(json.dumps(answer).encode()))


def recorded(name: str) -> tuple[str, dict[str, Any]]:
    exchange = json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))
    api = api_for_path(exchange["request"]["path"])
    assert api is not None
    return api.name, exchange["response"]


@pytest.mark.parametrize("name", WHOLE)
def test_whole_answers_of_real_vllm(name: str) -> None:
    """Each API and each prefill form has its count where it is looked for."""
    api, response = recorded(name)
    assert count(api, response["body"]) == WHOLE[name]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("decode_chat_stream", [166]),
        ("decode_generate_stream", [166]),
        ("decode_messages_stream", [41, 41]),
        ("decode_responses_stream", [26]),
        ("decode_completions_stream", []),
    ],
)
def test_events_of_real_vllm(name: str, expected: list[int]) -> None:
    """The events that have usage have the count; all others have none."""
    api, response = recorded(name)
    events = [event["data"] for event in response["events"] if event["data"] != "[DONE]"]
    assert [found for event in events if (found := count(api, event)) is not None] == expected


@pytest.mark.parametrize("kind", MESSAGES_USAGE)
def test_anthropic_input_tokens_and_the_cache_add_up(kind: str) -> None:
    """What came from a cache, or went into one, is part of the prompt."""
    assert count("messages", {"usage": MESSAGES_USAGE[kind]}) == 41
    assert count("messages", {"type": "message_start", "message": {"usage": MESSAGES_USAGE[kind]}}) == 41


def test_a_prompt_that_came_from_the_cache_as_a_whole() -> None:
    """No input token is left over: the cache alone is the prompt."""
    usage = {"input_tokens": 0, "cache_read_input_tokens": 41, "cache_creation_input_tokens": 0}
    assert count("messages", {"usage": usage}) == 41


def test_overlapping_cache_counts_say_nothing() -> None:
    """The difference is cut off at 0, after which the parts do not add up to the prompt any more."""
    usage = {"input_tokens": 0, "cache_read_input_tokens": 40, "cache_creation_input_tokens": 32}
    assert count("messages", {"usage": usage}) is None


def test_turns_with_tools_of_the_engine_are_not_part_of_the_prompt() -> None:
    """An engine that calls tools itself sums all its prompts; the first one is the request's."""
    details = {"input_tokens_per_turn": [41, 97]}
    usage = {"input_tokens": 138, "input_tokens_details": details}
    assert count("responses", {"usage": usage}) == 41


@pytest.mark.parametrize(
    "value",
    [None, True, "41", 41.0, -41, 0, [41], {"n": 41}, 10**18, 10**4000],
    ids=lambda value: str(value)[:8],
)
@pytest.mark.parametrize(
    ("api", "member"),
    [
        ("chat", "prompt_tokens"),
        ("completions", "prompt_tokens"),
        ("generate", "prompt_tokens"),
        ("responses", "input_tokens"),
        ("messages", "input_tokens"),
    ],
)
def test_what_is_no_count_is_not_reported(api: str, member: str, value: Any) -> None:
    """Another type, nothing, a negative number or an endless one: as if it were not there."""
    text = f'{{"usage":{{"{member}":{"1" + "0" * 4000 if value == 10**4000 else json.dumps(value)}}}}}'
    assert reported_prompt_tokens(api, read_object(text.encode())) is None


@pytest.mark.parametrize("usage", [None, [], "x", 7, {}, {"prompt_tokens_details": None}])
def test_other_usage_is_not_reported(usage: Any) -> None:
    """`usage` of any other type or content is no error."""
    for api in ("chat", "completions", "generate", "responses", "messages", "", "unknown"):
        assert count(api, {"usage": usage}) is None
        assert count(api, {"response": usage, "message": usage}) is None


def test_an_unknown_api_reports_nothing() -> None:
    """Only the formats of known APIs are read."""
    assert count("", {"usage": {"prompt_tokens": 3, "input_tokens": 3}}) is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
usages = st.fixed_dictionaries(
    {},
    optional={
        "prompt_tokens": json_values,
        "input_tokens": json_values,
        "input_tokens_details": st.fixed_dictionaries({}, optional={"input_tokens_per_turn": json_values}),
        "cache_read_input_tokens": json_values,
        "cache_creation_input_tokens": json_values,
    },
)


@given(st.sampled_from(["chat", "generate", "responses", "messages"]), usages)
def test_no_usage_is_an_error(api: str, usage: dict[str, Any]) -> None:
    """Whatever an engine writes, the result is a positive count or none."""
    found = count(api, {"usage": usage})
    assert found is None or found > 0
