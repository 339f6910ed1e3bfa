"""The answer and the access-log record of every form media can travel in, through a real Envoy."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.e2e.e2e_client import CAT, DOG, MODEL, Picture, chat, new_id
from tests.e2e.e2e_stack import RECORD_KEYS
from tests.e2e.e2e_variants import NONE_NIXL, form_variant

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.e2e.e2e_stack import SimulatedWorkers, Stack, Variant

_NUMBER = re.compile(r"\d+\.\d")


@dataclass(frozen=True)
class Form:
    """One configuration and what its requests must look like in the access log."""

    name: str
    openai: bool
    mm_payload: str
    descriptors: bool
    record: dict[str, str]


def form(
    name: str,
    *,
    openai: bool,
    mm_payload: str,
    descriptors: bool,
    record: tuple[str, str, str],
    why: str = "",
) -> Form:
    render, encode, prefill = record
    expected = {
        "mm_payload": mm_payload,
        "render_form": render,
        "encode_form": encode,
        "prefill_form": prefill,
        "fallback_reason": why,
    }
    return Form(name, openai, mm_payload, descriptors, expected)


FORMS = [
    form(
        "tensors-nixl",
        openai=False,
        mm_payload="tensors",
        descriptors=True,
        record=("tensors", "features", "mm_metadata"),
    ),
    form(
        "tensors-shared",
        openai=False,
        mm_payload="tensors",
        descriptors=False,
        record=("tensors", "features", "kwargs_data"),
        why="image[0]: no descriptor",
    ),
    form(
        "none-nixl",
        openai=False,
        mm_payload="none",
        descriptors=True,
        record=("omitted", "content_parts", "mm_metadata"),
    ),
    form(
        "none-shared",
        openai=False,
        mm_payload="none",
        descriptors=False,
        record=("omitted", "content_parts", "content_parts"),
        why="image[0]: no descriptor",
    ),
    form(
        "openai-tensors",
        openai=True,
        mm_payload="tensors",
        descriptors=True,
        record=("tensors", "openai", "openai"),
    ),
    form(
        "openai-none",
        openai=True,
        mm_payload="none",
        descriptors=True,
        record=("omitted", "openai", "openai"),
    ),
]


@pytest.fixture(params=FORMS, ids=lambda item: item.name)
def chosen(request: pytest.FixtureRequest) -> Form:
    return request.param  # type: ignore[no-any-return]  # params are untyped


@pytest.fixture
def stack(
    chosen: Form, workers: SimulatedWorkers, shared_stacks: Callable[[str, Variant], Stack]
) -> Iterator[Stack]:
    """The stack of the form; no request of a test may break vLLM's contract."""
    variant = form_variant(openai=chosen.openai, mm_payload=chosen.mm_payload, descriptors=chosen.descriptors)
    yield shared_stacks(chosen.name, variant)
    assert workers.violations == []


def client(stack: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.base}/v1", api_key="sk-test", max_retries=0, timeout=30)


def names_in_order(text: str, *pictures: Picture) -> bool:
    """Whether the answer names exactly these pictures, in this order."""
    seen = re.findall(r"(\d+x\d+) jpeg \(sha256 ([0-9a-f]{8})\)", text)
    return seen == [picture.names for picture in pictures]


def check_record(line: dict[str, Any], expected: dict[str, str]) -> None:
    """All keys are there, all are strings, numbers look like numbers and the rest is as expected."""
    record = {key: line[key] for key in RECORD_KEYS}
    assert all(isinstance(value, str) for value in record.values()), record
    times = [key for key in RECORD_KEYS if key.endswith("_ms")]
    assert all(_NUMBER.fullmatch(record[key]) for key in times), record
    counts = ("prompt_tokens", "placeholder_tokens", "request_bytes", "render_bytes")
    assert all(int(record[key]) > 0 for key in counts), record
    variable = {"request_id", *times, *counts}
    reason = record.pop("fallback_reason")
    assert (
        reason.startswith(expected.pop("fallback_reason")) if reason else not expected.pop("fallback_reason")
    )
    assert {key: value for key, value in record.items() if key not in variable} == expected


def two_pictures() -> list[Any]:
    return list(chat("Which is the cat?", CAT, DOG)["messages"])


def ok_record(chosen: Form, **changes: str) -> dict[str, str]:
    return {
        "api": "chat",
        "model": MODEL,
        "stream": "false",
        "outcome": "ok",
        "stage": "decode",
        "error": "",
        "media": "image:2",
        "encode_requests": "2",
        **chosen.record,
        **changes,
    }


def test_the_openai_client_gets_an_answer(chosen: Form, stack: Stack) -> None:
    """An unmodified OpenAI client gets both pictures named in order, from KV that prefill computed."""
    request_id = new_id()
    completion = client(stack).chat.completions.create(
        model=MODEL, messages=two_pictures(), max_tokens=200, extra_headers={"x-request-id": request_id}
    )
    text = completion.choices[0].message.content or ""
    assert names_in_order(text, CAT, DOG), text
    assert "KV from prefill: hit" in text
    line = stack.log_line(request_id)
    check_record(line, ok_record(chosen))
    assert (line["code"], line["details"], line["upstream_cluster"]) == (200, "via_upstream", "internal")
    assert completion.usage is not None
    assert str(completion.usage.prompt_tokens) == line["prompt_tokens"]


def test_the_openai_client_streams_an_answer(chosen: Form, stack: Stack) -> None:
    """The same streamed: the pieces join to the same text, the usage comes last, the record says streamed."""
    request_id = new_id()
    stream = client(stack).chat.completions.create(
        model=MODEL,
        messages=two_pictures(),
        max_tokens=200,
        stream=True,
        stream_options={"include_usage": True},
        extra_headers={"x-request-id": request_id},
    )
    chunks = list(stream)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert names_in_order(text, CAT, DOG), text
    assert "KV from prefill: hit" in text
    assert len(chunks) > 5
    assert chunks[-1].usage is not None
    check_record(stack.log_line(request_id), ok_record(chosen, stream="true"))


def test_equal_pictures_are_encoded_once(stack: Stack, workers: SimulatedWorkers) -> None:
    """A picture that occurs twice is encoded once and named at both places."""
    answer, line = stack.coordinate(chat("Same?", CAT, DOG, CAT, max_tokens=200))
    assert names_in_order(answer.text, CAT, DOG, CAT), answer.text
    assert "hit" in answer.text
    assert len(workers.exchanges("encode")) == 2
    assert (line["media"], line["encode_requests"]) == ("image:3", "2")


def test_a_text_request_is_not_encoded(chosen: Form, stack: Stack, workers: SimulatedWorkers) -> None:
    """A request without media goes through render and prefill only."""
    answer, line = stack.coordinate(chat("Hello"))
    assert "I see no media" in answer.text
    assert "KV from prefill: hit" in answer.text
    assert workers.exchanges("encode") == []
    assert (line["encode_form"], line["media"], line["fallback_reason"]) == ("skipped", "", "")
    assert line["prefill_form"] == ("openai" if chosen.openai else "tokens")


def test_every_leg_of_one_request_carries_the_same_identity(stack: Stack, workers: SimulatedWorkers) -> None:
    """Request id and trace id reach every worker; phases, hop guard and token are where they belong."""
    trace = "0af7651916cd43dd8448eb211c80319c"
    request_id = new_id()
    answer, _ = stack.coordinate(
        chat("Look", CAT, max_tokens=200),
        headers={"x-request-id": request_id, "traceparent": f"00-{trace}-b7ad6b7169203331-01"},
    )
    assert answer.status == 200
    for role in ("render", "encode", "prefill", "decode"):
        (exchange,) = workers.exchanges(role)
        assert exchange.headers["x-request-id"].startswith(request_id)
        assert exchange.headers["traceparent"].split("-")[1] == trace
        assert exchange.headers.get("epp-profile") == (None if role == "render" else role)
        assert exchange.headers.get("x-epd-hop") == "1"
        assert "x-epd-phase-token" not in exchange.headers


def test_mixed_modalities_keep_their_order(chosen: Form, stack: Stack, workers: SimulatedWorkers) -> None:
    """Pictures, sound and video of one request all reach decode, each modality in its own order."""
    sounds = [b"RIFF-first" * 50, b"RIFF-second" * 80]
    video = b"ftyp-video" * 200
    body = chat("What happens?", DOG, CAT, max_tokens=200)
    content = body["messages"][0]["content"]
    for sound in sounds:
        audio = {"data": base64.b64encode(sound).decode(), "format": "wav"}
        content.insert(1, {"type": "input_audio", "input_audio": audio})
    sounds.reverse()
    url = "data:video/mp4;base64," + base64.b64encode(video).decode()
    content.insert(0, {"type": "video_url", "video_url": {"url": url}})
    answer, line = stack.coordinate(body)
    seen = re.findall(r"sha256 ([0-9a-f]{8})", answer.text)
    digests = {
        name: [hashlib.sha256(data).hexdigest()[:8] for data in group]
        for name, group in {"image": [DOG.data, CAT.data], "audio": sounds, "video": [video]}.items()
    }
    for group in digests.values():
        assert [digest for digest in seen if digest in group] == group
    assert len(seen) == 5
    assert "KV from prefill: hit" in answer.text
    assert sorted(line["media"].split(",")) == ["audio:2", "image:2", "video:1"]
    assert len(workers.exchanges("encode")) == 5
    if chosen.name == "none-nixl":
        # Metadata of video and audio cannot be rebuilt: the whole request sends its media again.
        assert line["prefill_form"] == "content_parts"
        assert line["fallback_reason"].startswith("video[0]: ")


@pytest.mark.parametrize("knobs", [{"descriptors": "evicted"}, {"descriptors": "no-metadata"}])
def test_descriptors_that_cover_nothing_fall_back(
    knobs: dict[str, str], workers: SimulatedWorkers, shared_stacks: Callable[[str, Variant], Stack]
) -> None:
    """An evicted encoding, or a descriptor without metadata, covers nothing: all media are sent again."""
    workers.reset(**knobs)
    stack = shared_stacks("none-nixl", NONE_NIXL)
    answer, line = stack.coordinate(chat("Look", CAT, DOG, max_tokens=200))
    assert names_in_order(answer.text, CAT, DOG), answer.text
    assert (line["encode_form"], line["prefill_form"]) == ("content_parts", "content_parts")
    assert line["fallback_reason"].startswith("image[0]: ")
    assert workers.violations == []


def test_an_old_renderer_puts_the_request_on_the_features_path(
    workers: SimulatedWorkers, shared_stacks: Callable[[str, Variant], Stack]
) -> None:
    """A renderer that ignores `mm_payload: none` is taken by what it answers: tensors."""
    workers.reset(mm_payload_supported=False)
    answer, line = shared_stacks("none-nixl", NONE_NIXL).coordinate(chat("Look", CAT, max_tokens=200))
    assert names_in_order(answer.text, CAT), answer.text
    assert line["mm_payload"] == "none"
    assert (line["render_form"], line["encode_form"], line["prefill_form"]) == (
        "tensors",
        "features",
        "mm_metadata",
    )
    assert workers.violations == []


def test_the_openai_client_raises_what_the_sidecar_means(
    workers: SimulatedWorkers, shared_stacks: Callable[[str, Variant], Stack]
) -> None:
    """An unmodified OpenAI client reads our errors as its own exceptions, with code and message."""
    asking = client(shared_stacks("none-nixl", NONE_NIXL)).chat.completions
    broken: list[Any] = [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,@"}}]}
    ]
    with pytest.raises(openai.BadRequestError) as refused:
        asking.create(model=MODEL, messages=broken)
    assert refused.value.code == "epd_bad_request"
    with pytest.raises(openai.NotFoundError) as unknown:
        asking.create(model="nobody-serves-this", messages=two_pictures())
    assert unknown.value.code == "epd_render_rejected"
    workers.configure(faults={"prefill": "status:500"})
    with pytest.raises(openai.InternalServerError) as failed:
        asking.create(model=MODEL, messages=two_pictures())
    assert failed.value.status_code == 502
