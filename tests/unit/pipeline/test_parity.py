"""Prompt token parity: one line and one count per mismatch, and nothing else."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from sidecar.observability.record import AccessRecord
from sidecar.pipeline.parity import PromptTokenParity, RenderedPrompt
from tests.unit.pipeline.pipeline_support import (
    GRIDS,
    HASHES,
    REQUEST_ID,
    TOKEN_IDS,
    Deployment,
    answer,
    chat,
    descriptor,
    rendered,
    rendered_text,
    two_images,
)

LOGGER = "sidecar.pipeline.parity"
FORMS: dict[str, dict[str, Any]] = {
    "openai": {"openai": True},
    "kwargs_data": {},
    "mm_metadata": {"descriptors": {HASHES[i]: descriptor(GRIDS[i]) for i in range(2)}},
    "content_parts": {"mm_payload": "none", "render": rendered(kwargs_data=None)},
}


class Counted:
    """What a parity object said and counted."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog
        self.phases: list[str] = []
        self.compared: list[str] = []
        self.parity = PromptTokenParity(self.compared.append, self.phases.append)

    @property
    def lines(self) -> list[logging.LogRecord]:
        return [entry for entry in self._caplog.records if entry.name == LOGGER]


@pytest.fixture
def counted(caplog: pytest.LogCaptureFixture) -> Counted:
    return Counted(caplog)


def prefill_answer(tokens: Any) -> dict[str, Any]:
    return {"usage": {"prompt_tokens": tokens}, "kv_transfer_params": {"remote_host": "10.0.0.2"}}


@pytest.mark.parametrize("form", FORMS)
async def test_equal_counts_say_nothing(form: str, counted: Counted) -> None:
    """Whatever form prefill gets, the engine counts the expanded prompt: nothing to say."""
    deployment = Deployment(**FORMS[form], parity=counted.parity, prefill=prefill_answer(len(TOKEN_IDS)))
    await deployment.run(two_images())
    assert deployment.record.prefill_form == form
    assert (counted.lines, counted.phases, counted.compared) == ([], [], ["prefill"])


@pytest.mark.parametrize("form", FORMS)
async def test_a_mismatch_is_one_line_and_one_count(form: str, counted: Counted) -> None:
    """The line names the request and both counts; the decode request and the record are what they were."""
    before, after = (
        Deployment(
            **FORMS[form],
            record=AccessRecord(request_id=REQUEST_ID),
            parity=parity,
            prefill=prefill_answer(9),
        )
        for parity in (None, counted.parity)
    )
    bodies = [b"".join((await deployment.run(two_images())).body) for deployment in (before, after)]
    (line,) = counted.lines
    assert line.levelno == logging.WARNING
    fields = ("request_id", "phase", "api", "model", "rendered", "reported")
    assert tuple(vars(line)[name] for name in fields) == (
        *(REQUEST_ID, "prefill", "chat", "m"),
        *(len(TOKEN_IDS), 9),
    )
    assert counted.phases == ["prefill"]
    assert bodies[0] == bodies[1]
    untimed = [
        {key: value for key, value in deployment.record.strings().items() if not key.endswith("_ms")}
        for deployment in (before, after)
    ]
    assert untimed[0] == untimed[1]


async def test_text_prompts_are_compared_too(counted: Counted) -> None:
    """A prompt without media is rendered as well."""
    deployment = Deployment(render=rendered_text(), parity=counted.parity, prefill=prefill_answer(4))
    await deployment.run(chat({"type": "text", "text": "hi"}))
    assert counted.phases == ["prefill"]


@pytest.mark.parametrize("render", [True, False])
async def test_without_a_render_step_nothing_is_compared(*, render: bool, counted: Counted) -> None:
    """There is no count to compare with."""
    steps = ("render", "prefill", "decode") if render else ("prefill", "decode")
    deployment = Deployment(openai=True, steps=steps, parity=counted.parity, prefill=prefill_answer(9))
    await deployment.run(two_images())
    assert len(counted.phases) == render


@pytest.mark.parametrize(
    "usage",
    [None, [], "x", {}, {"prompt_tokens": None}, {"prompt_tokens": "9"}, {"prompt_tokens": 0}],
    ids=str,
)
async def test_an_answer_without_a_count_is_no_mismatch(usage: Any, counted: Counted) -> None:
    """Usage that is missing or malformed is as if it were not reported, and the request goes on."""
    deployment = Deployment(parity=counted.parity, prefill={"usage": usage, "kv_transfer_params": {"a": 1}})
    body = await deployment.decode(two_images())
    assert body["kv_transfer_params"]["a"] == 1
    assert (counted.lines, counted.phases) == ([], [])


async def test_off_parses_no_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the object the step does not look at the count."""

    def read(*_: object) -> None:
        raise AssertionError("read")

    monkeypatch.setattr("sidecar.pipeline.parity.reported_prompt_tokens", read)
    await Deployment(prefill=prefill_answer(9)).run(two_images())


@pytest.mark.parametrize(
    ("path", "usage"),
    [
        ("/v1/chat/completions", {"prompt_tokens": 9}),
        ("/v1/completions", {"prompt_tokens": 9}),
        ("/inference/v1/generate", {"prompt_tokens": 9}),
        ("/v1/responses", {"input_tokens": 9}),
        ("/v1/messages", {"input_tokens": 4, "cache_read_input_tokens": 5}),
    ],
)
def test_the_path_of_the_call_tells_the_format_of_its_answer(
    path: str, usage: dict[str, int], counted: Counted
) -> None:
    """An OpenAI-format prefill answers in the client's API, the generate format in its own."""
    record = AccessRecord(
        request_id=REQUEST_ID, api="messages", model="m", prompt_tokens=8, render_form="text"
    )
    counted.parity.prefill_answered(record, path, json.dumps({"usage": usage}).encode())
    (line,) = counted.lines
    assert vars(line).items() >= {"request_id": REQUEST_ID, "api": "messages", "reported": 9}.items()


@pytest.mark.parametrize("body", [b"", b"[]", b"not json", b"\xff", b"[" * 100_000])
def test_a_body_that_is_no_answer(body: bytes, counted: Counted) -> None:
    """Whatever the engine sent, there is no error."""
    record = AccessRecord(prompt_tokens=8, render_form="text")
    counted.parity.prefill_answered(record, "/v1/chat/completions", body)
    counted.parity.prefill_answered(record, "/nowhere", b'{"usage":{"prompt_tokens":9}}')
    assert counted.lines == []


def test_a_clients_own_token_ids_are_its_own() -> None:
    """A generate client's prompt has a length in the record, but nobody rendered it."""
    record = AccessRecord(api="generate", prompt_tokens=8)
    assert RenderedPrompt.of(record.strings()) is None


def test_the_model_is_as_long_as_in_the_record(counted: Counted) -> None:
    """The line repeats no more of what the client sent than the access log does."""
    record = AccessRecord(api="chat", model="m" * 256, prompt_tokens=8, render_form="text")
    counted.parity.prefill_answered(record, "/v1/chat/completions", b'{"usage":{"prompt_tokens":9}}')
    assert vars(counted.lines[0])["model"] == "m" * 256


async def test_a_failed_prefill_is_not_compared(counted: Counted) -> None:
    """Only a 200 answer has usage of the prompt."""
    failed = answer({"usage": {"prompt_tokens": 9}}, 500)
    with pytest.raises(Exception, match="prefill failed"):
        await Deployment(parity=counted.parity, prefill=failed).run(two_images())
    assert counted.phases == []
