"""Every failure a client can see: status, JSON, details in Envoy's log, and the record."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from sidecar.report import read_log
from tests.e2e.e2e_client import CAT, CHAT, DOG, Answer, Upload, as_body, chat, new_id
from tests.e2e.e2e_stack import RECORD_KEYS, Variant, wait_for
from tests.e2e.e2e_variants import NONE_NIXL, TENSORS_NIXL

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.e2e.e2e_stack import SimulatedWorkers, Stack

MIB = 1 << 20

STRICT = replace(
    NONE_NIXL,
    steps={
        "replace-media-urls": {"max_multimodal_entries": 3},
        "render": {"mm_payload": "none", "timeout": "1500ms", "max_total_tokens": 2000},
        "encode": {"timeout": "1500ms"},
        "prefill": {"timeout": "1500ms"},
    },
    sections={
        "ext_proc": {"max_request_body_size": 1, "read_timeout": "1s", "request_deadline": "2500ms"},
        "limits": {"max_in_flight_requests": 1},
    },
)
"""Limits low enough to be reached, timeouts short enough to wait for."""


@pytest.fixture
def strict(workers: SimulatedWorkers, shared_stacks: Callable[[str, Variant], Stack]) -> Stack:
    assert workers.violations == []
    return shared_stacks("strict", STRICT)


@pytest.fixture
def tensors(workers: SimulatedWorkers, shared_stacks: Callable[[str, Variant], Stack]) -> Stack:
    assert workers.violations == []
    return shared_stacks("tensors-nixl", TENSORS_NIXL)


def check_error(
    answer: Answer, line: dict[str, Any], status: int, code: str, *, outcome: str, stage: str
) -> str:
    """The client, Envoy's log and the record agree; returns the message the client reads."""
    assert answer.status == status, answer.body
    assert answer.headers["content-type"] == "application/json"
    error = answer.json["error"]
    assert set(answer.json) == {"error"}
    assert {"message", "type", "param", "code"} <= set(error)
    assert error["code"] == code
    assert line["request_id"] in error["message"]
    assert (line["code"], line["details"]) == (status, code)
    assert (line["error"], line["outcome"], line["stage"]) == (code, outcome, stage)
    assert all(isinstance(line[key], str) for key in RECORD_KEYS), line
    assert line["total_ms"]
    return str(error["message"])


REFUSED_BODIES = {
    "not-json": b'{"model": ',
    "not-an-object": b'["a"]',
    "empty-object": b"{}",
    "byte-order-mark": b"\xef\xbb\xbf{}",
    "not-utf-8": b'{"model": "\xff"}',
    "messages-is-a-string": {"model": "simulated-vl", "messages": "hello"},
    "content-is-a-number": {"model": "simulated-vl", "messages": [{"role": "user", "content": 7}]},
    "nested-too-deep": b"[" * 100_000,
}


@pytest.mark.parametrize("name", REFUSED_BODIES)
def test_a_malformed_body_is_a_400(name: str, strict: Stack, workers: SimulatedWorkers) -> None:
    """What is no chat request is refused before anything is sent."""
    answer, line = strict.coordinate(REFUSED_BODIES[name])
    if name == "empty-object":
        # Well-formed, but without what the render service requires: its refusal is the client's.
        assert answer.status == 400, answer.body
        return
    check_error(answer, line, 400, "epd_bad_request", outcome="client_error", stage="request")
    assert workers.exchanges("render") == []


def test_a_post_without_a_body_is_a_400(strict: Stack) -> None:
    """An empty body on our path is refused."""
    answer, line = strict.coordinate(b"")
    check_error(answer, line, 400, "epd_bad_request", outcome="client_error", stage="request")


MEDIA_FAULTS = {
    "loopback": "http://127.0.0.1:1/cat.jpg",
    "metadata-service": "http://169.254.169.254/latest",
    "mapped-address": "http://[::ffff:127.0.0.1]/cat.jpg",
    "bad-base64": "data:image/jpeg;base64,@@@@",
    "type-not-allowed": "data:text/html;base64,PGh0bWw+",
    "scheme": "file:///etc/passwd",
}


@pytest.mark.parametrize("name", MEDIA_FAULTS)
def test_a_media_fault_is_a_400(name: str, strict: Stack, workers: SimulatedWorkers) -> None:
    """Media that may not or cannot be read is the client's fault; the render service sees nothing."""
    body = chat("Look", CAT)
    body["messages"][0]["content"][0]["image_url"]["url"] = MEDIA_FAULTS[name]
    answer, line = strict.coordinate(body)
    check_error(answer, line, 400, "epd_bad_request", outcome="client_error", stage="media")
    assert workers.exchanges("render") == []


def test_too_many_media_items_are_a_400(strict: Stack) -> None:
    """The number of items is limited by `max_multimodal_entries`."""
    answer, line = strict.coordinate(chat("Look", CAT, CAT, DOG, DOG))
    message = check_error(answer, line, 400, "epd_bad_request", outcome="client_error", stage="media")
    assert "max_multimodal_entries" in message


def test_too_many_tokens_are_a_400(strict: Stack, workers: SimulatedWorkers) -> None:
    """A prompt over `max_total_tokens` is refused after render, before encode."""
    answer, line = strict.coordinate(chat("word " * 3000, CAT))
    message = check_error(answer, line, 400, "epd_bad_request", outcome="client_error", stage="render")
    assert "max_total_tokens" in message
    assert workers.exchanges("encode") == []


def test_a_body_over_the_cap_is_a_413(strict: Stack, workers: SimulatedWorkers) -> None:
    """A length announced over `max_request_body_size` is refused, and a chunked body that grows over it."""
    body = as_body(chat("Look", padding="x" * MIB))
    answer, line = strict.coordinate(body)
    message = check_error(answer, line, 413, "epd_body_too_large", outcome="client_error", stage="request")
    assert "max_request_body_size" in message
    request_id = new_id()
    upload = Upload(strict.base, CHAT, {"x-request-id": request_id})
    upload.send(body[: MIB + 1])
    answer = upload.answer()
    check_error(
        answer,
        strict.log_line(request_id),
        413,
        "epd_body_too_large",
        outcome="client_error",
        stage="request",
    )
    assert workers.exchanges("render") == []


def test_a_body_at_the_cap_is_served(strict: Stack) -> None:
    """The cap itself is allowed."""
    room = MIB - len(as_body(chat("Look", CAT, padding="")))
    body = as_body(chat("Look", CAT, padding="x" * room))
    assert len(body) == MIB
    answer, _ = strict.coordinate(body)
    assert answer.status == 200, answer.body


def test_a_slow_upload_is_a_408(strict: Stack, workers: SimulatedWorkers) -> None:
    """An upload that does not end within `read_timeout` is answered, not awaited."""
    request_id = new_id()
    upload = Upload(strict.base, CHAT, {"x-request-id": request_id})
    upload.send(b'{"model": ')
    answer = upload.answer()
    line = strict.log_line(request_id)
    message = check_error(answer, line, 408, "epd_body_timeout", outcome="timeout", stage="request")
    assert "read_timeout" in message
    assert workers.exchanges("render") == []


def test_a_compressed_body_is_a_415(strict: Stack) -> None:
    """Any content-encoding but identity is refused."""
    answer, line = strict.coordinate(chat("Look"), headers={"content-encoding": "gzip"})
    check_error(answer, line, 415, "epd_unsupported_encoding", outcome="client_error", stage="request")


def test_a_mixed_span_without_tensors_is_a_422(strict: Stack, workers: SimulatedWorkers) -> None:
    """A mixed-token span under `mm_payload: none` is refused by name, before the first sub-request."""
    workers.configure(sparse_spans=True)
    answer, line = strict.coordinate(chat("Look", CAT))
    message = check_error(answer, line, 422, "epd_mixed_span", outcome="client_error", stage="encode")
    assert "mm_payload: none" in message
    assert "image[0]" in message
    assert workers.exchanges("encode") == []


@pytest.mark.parametrize("step", ["render", "encode", "prefill"])
@pytest.mark.parametrize("status", [400, 429])
def test_a_step_that_refuses_is_the_clients_status(
    step: str, status: int, strict: Stack, workers: SimulatedWorkers
) -> None:
    """A 4xx of an upstream reaches the client as that status, without the upstream's words."""
    workers.configure(faults={step: f"status:{status}"})
    answer, line = strict.coordinate(chat("Look", CAT))
    message = check_error(answer, line, status, f"epd_{step}_rejected", outcome="client_error", stage=step)
    assert f"{step} rejected the request: HTTP {status}" in message
    assert "simulator was told" not in message
    assert workers.exchanges("decode") == []


@pytest.mark.parametrize("step", ["render", "encode", "prefill"])
@pytest.mark.parametrize(
    "fault", ["status:500", "status:503", "garbage", "drop-before-headers", "drop-after-headers"]
)
def test_a_step_that_fails_is_a_502(step: str, fault: str, strict: Stack, workers: SimulatedWorkers) -> None:
    """A 5xx, a broken connection or a broken answer of an upstream is a 502 that names the step."""
    workers.configure(faults={step: fault})
    answer, line = strict.coordinate(chat("Look", CAT))
    check_error(answer, line, 502, f"epd_{step}_failed", outcome="upstream_error", stage=step)
    assert workers.exchanges("decode") == []


@pytest.mark.parametrize("fault", ["wrong-counts", "overlapping-spans", "span-out-of-range"])
def test_an_inconsistent_render_answer_is_a_502(fault: str, strict: Stack, workers: SimulatedWorkers) -> None:
    """A render answer that contradicts itself is the renderer's fault and goes no further."""
    workers.configure(faults={"render": fault})
    answer, line = strict.coordinate(chat("Look", CAT, DOG))
    check_error(answer, line, 502, "epd_render_failed", outcome="upstream_error", stage="render")
    assert workers.exchanges("encode") == []


def test_missing_tensors_are_a_502(tensors: Stack, workers: SimulatedWorkers) -> None:
    """Tensors that were asked for and did not come are the renderer's fault."""
    workers.configure(faults={"render": "null-kwargs"})
    answer, line = tensors.coordinate(chat("Look", CAT))
    check_error(answer, line, 502, "epd_render_failed", outcome="upstream_error", stage="render")
    assert workers.exchanges("encode") == []


@pytest.mark.parametrize("fault", ["scale-out-403", "not-found"])
def test_a_wrong_render_deployment_is_a_502(fault: str, strict: Stack, workers: SimulatedWorkers) -> None:
    """A renderer without the endpoint is the deployment's fault; the message says what to start."""
    workers.configure(faults={"render": fault})
    answer, line = strict.coordinate(chat("Look", CAT))
    message = check_error(
        answer, line, 502, "epd_render_unavailable", outcome="upstream_error", stage="render"
    )
    assert "--enable-scale-out" in message or "vllm launch render" in message


def test_an_unknown_model_stays_a_404(strict: Stack) -> None:
    """The renderer's 404 for a model is the client's 404."""
    answer, line = strict.coordinate(chat("Look", CAT, model="nobody-serves-this"))
    check_error(answer, line, 404, "epd_render_rejected", outcome="client_error", stage="render")


def test_an_encoding_that_does_not_fit_is_a_502(strict: Stack, workers: SimulatedWorkers) -> None:
    """An encoder with other processor settings would crash prefill: refused, naming the entry."""
    workers.configure(encode_max_pixels=50_000)
    answer, line = strict.coordinate(chat("Look", CAT, DOG))
    message = check_error(answer, line, 502, "epd_encode_mismatch", outcome="upstream_error", stage="encode")
    assert "image[0]" in message
    assert workers.exchanges("prefill") == []


@pytest.mark.parametrize("step", ["render", "encode", "prefill"])
def test_a_step_that_hangs_is_a_504(step: str, strict: Stack, workers: SimulatedWorkers) -> None:
    """A step that exceeds its timeout is a 504 that names it, and its sub-request is cancelled."""
    workers.configure(faults={step: "hang"})
    answer, line = strict.coordinate(chat("Look", CAT))
    check_error(answer, line, 504, f"epd_{step}_timeout", outcome="timeout", stage=step)
    (hung,) = workers.exchanges(step)  # type: ignore[arg-type]  # a role by its name
    wait_for(lambda: hung.cancelled, "the cancelled sub-request")
    assert workers.exchanges("decode") == []


def test_a_request_over_its_deadline_is_a_504(strict: Stack, workers: SimulatedWorkers) -> None:
    """Steps that each keep their timeout may exceed `request_deadline` together."""
    workers.configure(latency={"render": 1.0, "encode": 1.0, "prefill": 1.0})
    answer, line = strict.coordinate(chat("Look", CAT))
    assert line["stage"] in {"encode", "prefill"}
    message = check_error(answer, line, 504, "epd_deadline", outcome="timeout", stage=line["stage"])
    assert "request_deadline" in message
    assert workers.exchanges("decode") == []


def test_a_full_sidecar_answers_503(strict: Stack, workers: SimulatedWorkers) -> None:
    """Beyond `max_in_flight_requests` the client gets 503 and a retry-after; a free place serves again."""
    workers.configure(latency={"encode": 1.0})
    first = Upload(strict.base, CHAT)
    first.send(as_body(chat("Look", CAT)))
    first.finish()
    wait_for(lambda: workers.exchanges("encode"), "the first request at encode")
    answer, line = strict.coordinate(chat("Look", CAT))
    check_error(answer, line, 503, "epd_overloaded", outcome="overloaded", stage="request")
    assert answer.headers["retry-after"] == "1"
    assert first.answer().status == 200
    again, _ = strict.coordinate(chat("Look", CAT))
    assert again.status == 200


def test_a_render_answer_over_the_byte_budget_is_a_503(
    own_stack: Callable[[Variant], Stack], workers: SimulatedWorkers
) -> None:
    """Render answers count against `max_in_flight_bytes`: what does not fit is refused before encode."""
    limits = {"ext_proc": {"max_request_body_size": 1}, "limits": {"max_in_flight_bytes": 1}}
    stack = own_stack(replace(TENSORS_NIXL, sections=limits))
    workers.configure(tensor_bytes=2 * MIB)
    answer, line = stack.coordinate(chat("Look", CAT))
    message = check_error(answer, line, 503, "epd_overloaded", outcome="overloaded", stage="render")
    assert "max_in_flight_bytes" in message
    assert workers.exchanges("encode") == []
    workers.configure(tensor_bytes=1000)
    again, _ = stack.coordinate(chat("Look", CAT))
    assert again.status == 200, again.body


def test_an_invalid_request_id_is_replaced(strict: Stack) -> None:
    """An id outside `[a-zA-Z0-9-]{1,128}` never reaches the log or the client's message."""
    answer = strict.post(b"[]", headers={"x-request-id": 'forged" id'})
    assert answer.status == 400
    assert "forged" not in answer.json["error"]["message"]
    line = wait_for(
        lambda: next(
            (entry for entry in strict.log_lines() if entry["request_id"] in answer.json["error"]["message"]),
            None,
        ),
        "the log line under the new id",
    )
    assert line["error"] == "epd_bad_request"


def test_the_report_reads_what_envoy_wrote(strict: Stack, workers: SimulatedWorkers) -> None:
    """Every line of a real access log is readable by the report."""
    workers.configure(faults={"encode": "status:500"})
    _, line = strict.coordinate(chat("Look", CAT))
    report = read_log(json.dumps(item) for item in strict.log_lines())
    assert (report.unreadable, report.foreign) == (0, 0)
    assert line in report.rows
