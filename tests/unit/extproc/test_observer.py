"""Which answers are compared, and the count found in whole and streamed ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.api import api_for_path
from sidecar.extproc.observer import (
    MAX_HELD,
    StreamedAnswer,
    UsageReader,
    WholeAnswer,
    expected_prompt,
    usage_reader,
)
from sidecar.extproc.protocol import AnswerHead
from sidecar.observability.record import AccessRecord
from sidecar.pipeline.parity import RenderedPrompt

RECORDED = Path(__file__).parents[2] / "recorded"
RECORD = AccessRecord(
    request_id="r1", api="chat", model="m", outcome="ok", prompt_tokens=166, render_form="text"
).strings()


def head(status: int = 200, *fields: tuple[str, str]) -> AnswerHead:
    return AnswerHead(status, fields, end_of_stream=False, metadata={})


def recorded(name: str) -> tuple[str, bytes]:
    """API and body of a recorded answer, as it was on the wire."""
    exchange = json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))
    api = api_for_path(exchange["request"]["path"])
    assert api is not None
    response = exchange["response"]
    if "body" in response:
        return api.name, json.dumps(response["body"], ensure_ascii=False).encode()
    return api.name, b"".join(wire_event(**event) for event in response["events"])


def wire_event(event: str | None, data: Any) -> bytes:
    name = b"" if event is None else f"event: {event}\n".encode()
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return name + b"data: " + text.encode() + b"\n\n"


def read(reader: UsageReader, body: bytes, size: int) -> int | None:
    for start in range(0, len(body), size):
        assert reader.receive(body[start : start + size])
    return reader.reported()


@pytest.mark.parametrize("size", [1, 13, 1 << 20])
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("decode_chat", 166),
        ("decode_completions", 64),
        ("decode_generate", 166),
        ("decode_messages", 41),
        ("decode_responses", 41),
        ("decode_chat_stream", 166),
        ("decode_generate_stream", 166),
        ("decode_messages_stream", 41),
        ("decode_responses_stream", 26),
        ("decode_completions_stream", None),
    ],
)
def test_answers_of_real_vllm(name: str, expected: int | None, size: int) -> None:
    """Every recorded answer gives its count in pieces of any size; a stream without usage gives none."""
    api, body = recorded(name)
    kind = "text/event-stream; charset=utf-8" if name.endswith("_stream") else "application/json"
    reader = usage_reader(head(200, ("content-type", kind)), api)
    assert reader is not None
    assert read(reader, body, size) == expected


def test_the_last_event_that_has_the_count_counts() -> None:
    """Earlier counts may be estimates; events without one change nothing."""
    reader = StreamedAnswer("chat")
    for usage in ({"prompt_tokens": 1}, {"prompt_tokens": 2}, {"prompt_tokens": 0}, None, {"other": 1}):
        reader.receive(wire_event(None, {"choices": [], "usage": usage}))
    assert reader.reported() == 2


def test_the_word_usage_in_a_text_is_no_usage() -> None:
    """Generated text that looks like an answer is text."""
    reader = StreamedAnswer("chat")
    reader.receive(wire_event(None, {"choices": [{"delta": {"content": '{"usage":{"prompt_tokens":9}}'}}]}))
    assert reader.reported() is None


def test_an_answer_that_broke_off_is_not_compared() -> None:
    """Half a JSON document has no count, half a stream has what it had."""
    api, body = recorded("decode_chat")
    assert read(WholeAnswer(api), body[:-1], 100) is None
    api, body = recorded("decode_messages_stream")
    assert read(StreamedAnswer(api), body[: len(body) // 2], 100) == 41


def test_a_whole_answer_over_the_limit_is_given_up() -> None:
    """Nothing of it is kept, and the rest of it is not asked for."""
    reader = WholeAnswer("chat")
    for _ in range(8):
        assert reader.receive(b" " * (MAX_HELD // 8))
    assert reader.held == MAX_HELD
    assert not reader.receive(b"x")
    assert reader.held == 0


def test_an_event_over_the_limit_is_passed_over() -> None:
    """The stream goes on being read behind it."""
    reader = StreamedAnswer("chat")
    reader.receive(b'data: {"usage":{"prompt_tokens":1},"x":"')
    for _ in range(9):
        assert reader.receive(b"x" * (MAX_HELD // 8))
        assert reader.held <= MAX_HELD
    reader.receive(b'"}\n\n' + wire_event(None, {"usage": {"prompt_tokens": 7}}))
    assert reader.reported() == 7


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"content_type": "application/json"}, WholeAnswer),
        ({"content_type": "Application/JSON ; charset=utf-8"}, WholeAnswer),
        ({"content_type": "text/event-stream"}, StreamedAnswer),
        ({"content_type": "text/event-stream", "content_encoding": "identity"}, StreamedAnswer),
        ({"content_type": "application/json", "content_encoding": "gzip"}, None),
        ({"content_type": "application/json-seq"}, None),
        ({"content_type": "text/plain"}, None),
        ({}, None),
    ],
)
def test_the_form_of_a_body(fields: dict[str, str], kind: type[object] | None) -> None:
    """JSON and server-sent events are read, unless they are compressed."""
    pairs = ((name.replace("_", "-"), value) for name, value in fields.items())
    reader = usage_reader(head(200, *pairs), "chat")
    assert type(reader) is (kind or type(None))


def test_what_is_compared() -> None:
    """The answer to a rendered request that was handed on, by its record."""
    assert expected_prompt(head(), RECORD) == RenderedPrompt("r1", "chat", "m", 166)
    assert expected_prompt(head(), RECORD | {"outcome": "served"}) is not None


@pytest.mark.parametrize(
    "changes",
    [
        {"outcome": "passthrough"},
        {"outcome": "client_error"},
        {"outcome": ""},
        {"render_form": ""},
        {"prompt_tokens": ""},
        {"prompt_tokens": "many"},
        {"prompt_tokens": "²"},
        {"prompt_tokens": "1" * 5000},
    ],
    ids=str,
)
def test_what_is_not_compared(changes: dict[str, str]) -> None:
    """Requests of others, failed ones, a client's own token ids, and records nobody here wrote."""
    assert expected_prompt(head(), RECORD | changes) is None


@pytest.mark.parametrize("status", [0, 201, 204, 206, 400, 404, 500, 503])
def test_other_statuses_are_not_compared(status: int) -> None:
    """Errors and the like have no usage of this prompt."""
    assert expected_prompt(head(status), RECORD) is None


def test_without_the_record_nothing_is_compared() -> None:
    """A filter that forwards no metadata, or those of another namespace."""
    assert expected_prompt(head(), {}) is None


@given(st.binary(max_size=300), st.sampled_from(["chat", "messages", "responses", "generate", "?"]))
def test_garbage(noise: bytes, api: str) -> None:
    """No octets are an error, in either form."""
    for reader in (WholeAnswer(api), StreamedAnswer(api)):
        reader.receive(noise)
        reader.receive(b'data: {"usage": {"prompt_tokens": ' + noise + b"}}\n\n")
        found = reader.reported()
        assert found is None or found > 0


@pytest.mark.parametrize(
    "text", [b"[" * 100_000, b'{"usage":' * 50_000, b'{"usage":{"prompt_tokens":1', b"\xff{}"]
)
def test_hostile_documents(text: bytes) -> None:
    """Deep nesting, unclosed objects and invalid UTF-8 have no count."""
    whole, streamed = WholeAnswer("chat"), StreamedAnswer("chat")
    assert read(whole, text, 1 << 16) is None
    assert read(streamed, b"data: " + text + b"\n\n", 1 << 16) is None
