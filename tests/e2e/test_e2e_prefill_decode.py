"""prefill-decode through a real Envoy: two engines that only answer together, and one of them failing."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.e2e_client import CAT, CHAT, DOG, Answer, Upload, as_body, chat, new_id
from tests.e2e.e2e_stack import Variant, ext_proc, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.e2e.e2e_stack import SimulatedWorkers, Stack


def send_response_headers(bootstrap: dict[str, Any]) -> None:
    ext_proc(bootstrap)["processing_mode"]["response_header_mode"] = "SEND"


def buffered(bootstrap: dict[str, Any]) -> None:
    send_response_headers(bootstrap)
    ext_proc(bootstrap)["processing_mode"]["request_body_mode"] = "BUFFERED"
    ext_proc(bootstrap)["message_timeout"] = "30s"


def variant(workers: SimulatedWorkers, **more: Any) -> Variant:
    render = {"type": "render", "params": {"address": f"http://127.0.0.1:{workers.ports['render']}"}}
    steps = [render, {"type": "encode"}, {"type": "prefill-decode", "params": {"timeout": "4s"}}]
    options: dict[str, Any] = {"edit": send_response_headers} | more
    return Variant(pipeline={"kv_connector": "kv-sglang", "steps": steps}, **options)


@pytest.fixture
def stack(workers: SimulatedWorkers, shared_stacks: Callable[[str, Variant], Stack]) -> Stack:
    workers.configure(kv_connector="sglang", bootstrap_timeout=60.0)
    return shared_stacks("prefill-decode", variant(workers))


@pytest.fixture
def buffered_stack(workers: SimulatedWorkers, shared_stacks: Callable[[str, Variant], Stack]) -> Stack:
    workers.configure(kv_connector="sglang", bootstrap_timeout=60.0)
    return shared_stacks("prefill-decode-buffered", variant(workers, edit=buffered))


def in_background(stack: Stack, body: object, request_id: str) -> tuple[threading.Thread, list[Answer]]:
    """Send a request while the test goes on."""
    answers: list[Answer] = []

    def send() -> None:
        answers.append(stack.post(as_body(body), headers={"x-request-id": request_id}))

    thread = threading.Thread(target=send)
    thread.start()
    return thread, answers


def pinned(workers: SimulatedWorkers) -> list[Any]:
    return [exchange for exchange in workers.exchanges("prefill") if "x-prefill-pin" in exchange.headers]


def test_both_engines_answer(stack: Stack, workers: SimulatedWorkers) -> None:
    """Prefill answers only after decode came for its cache, and still everything is answered."""
    answer, line = stack.coordinate(chat("both", CAT, DOG))
    assert answer.status == 200
    assert workers.violations == []
    reservation, prefill = workers.exchanges("prefill")
    assert reservation.headers["prefer"] == "reserve-endpoint"
    assert prefill.status == 200
    (decode,) = workers.exchanges("decode")
    rooms = {exchange.body["bootstrap_room"] for exchange in (prefill, decode)}
    assert len(rooms) == 1
    assert (line["outcome"], line["stage"], line["prefill_form"]) == ("ok", "decode", "openai")
    assert float(line["prefill_ms"]) > 0


def test_a_streamed_answer_comes_through(stack: Stack, workers: SimulatedWorkers) -> None:
    """Decode's events reach the client; Envoy ends the ext_proc call at their head."""
    answer, line = stack.coordinate(chat("hi", CAT, stream=True))
    assert answer.status == 200
    assert answer.body.endswith(b"data: [DONE]\n\n")
    assert line["outcome"] == "ok"
    assert workers.violations == []


def test_buffered_mode_works_too(buffered_stack: Stack, workers: SimulatedWorkers) -> None:
    """The same pair behind a filter that sends the body in one piece."""
    answer, line = buffered_stack.coordinate(chat("hi", CAT))
    assert (answer.status, line["outcome"]) == (200, "ok")
    assert workers.violations == []


@pytest.mark.parametrize(("fault", "status"), [("status:500", 502), ("status:400", 400)])
def test_a_failed_prefill_is_the_answer_while_decode_waits(
    stack: Stack, workers: SimulatedWorkers, fault: str, status: int
) -> None:
    """Decode would wait for ever: the client gets prefill's error instead, and decode is cancelled."""
    workers.configure(faults={"prefill": fault})
    answer, line = stack.coordinate(chat("hi", CAT))
    assert answer.status == status
    code = "epd_prefill_decode_failed" if status == 502 else "epd_prefill_decode_rejected"
    assert answer.json["error"]["code"] == code
    assert (line["code"], line["details"], line["stage"]) == (status, code, "prefill_decode")
    assert line["error"] == code
    wait_for(lambda: all(e.cancelled for e in workers.exchanges("decode")), "decode to be cancelled")


def test_a_failed_prefill_is_the_answer_in_buffered_mode(
    buffered_stack: Stack, workers: SimulatedWorkers
) -> None:
    """The same behind a BUFFERED filter."""
    workers.configure(faults={"prefill": "status:500"})
    answer, line = buffered_stack.coordinate(chat("hi", CAT))
    assert answer.status == 502
    assert line["details"] == "epd_prefill_decode_failed"


def test_a_prefill_that_hangs_times_out(stack: Stack, workers: SimulatedWorkers) -> None:
    """Both engines hang: 504 after the step's timeout, and both calls are cancelled."""
    workers.configure(faults={"prefill": "hang"})
    answer, line = stack.coordinate(chat("hi", CAT))
    assert answer.status == 504
    assert line["error"] == "epd_prefill_decode_timeout"
    wait_for(
        lambda: all(e.cancelled for e in (*pinned(workers), *workers.exchanges("decode"))),
        "both calls to be cancelled",
    )


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("no-header", "configure the endpoint picker of prefill"),
        ("header:prefill-0.prefill:8000", "names no worker"),
        ("header:10.0.0.1:8000,10.0.0.2:8000", "names no worker"),
        ("status:503", "prefill_decode (reservation) failed: HTTP 503"),
    ],
)
def test_without_a_reserved_worker_nothing_reaches_an_engine(
    stack: Stack, workers: SimulatedWorkers, fault: str, text: str
) -> None:
    """A reservation that names no worker is a 502, before prefill and decode."""
    workers.configure(faults={"reserve": fault})
    answer, line = stack.coordinate(chat("hi", CAT))
    assert answer.status == 502
    assert text in answer.json["error"]["message"]
    assert line["stage"] == "prefill_decode"
    assert pinned(workers) == []
    assert workers.exchanges("decode") == []


def test_decodes_refusal_is_the_answer_and_ends_prefill(stack: Stack, workers: SimulatedWorkers) -> None:
    """What decode says about the request reaches the client; nobody waits for its prefill."""
    workers.configure(faults={"decode": "status:422"})
    answer, line = stack.coordinate(chat("hi", CAT))
    assert answer.status == 422
    assert (line["outcome"], line["details"]) == ("ok", "via_upstream")
    wait_for(lambda: all(e.cancelled for e in pinned(workers)), "prefill to be cancelled")


def test_a_client_that_leaves_ends_prefill_and_decode(stack: Stack, workers: SimulatedWorkers) -> None:
    """Nothing is computed for a client that has gone."""
    workers.configure(faults={"decode": "hang"})
    upload = Upload(stack.base, CHAT, {"x-request-id": new_id()})
    upload.send(as_body(chat("hi", CAT)))
    upload.finish()
    wait_for(lambda: pinned(workers) and workers.exchanges("decode"), "both engines to be asked")
    upload.leave()
    wait_for(
        lambda: all(e.cancelled for e in (*pinned(workers), *workers.exchanges("decode"))),
        "both calls to be cancelled",
    )


def test_requests_at_the_same_time_keep_to_their_rooms(stack: Stack, workers: SimulatedWorkers) -> None:
    """Eight pairs in flight at once: every decode meets the prefill of its own prompt."""
    workers.configure(latency={"prefill": 0.1})
    bodies = [chat(f"question {number}", CAT) for number in range(8)]
    running = [in_background(stack, body, new_id()) for body in bodies]
    for thread, _ in running:
        thread.join()
    assert [answer.status for _, answers in running for answer in answers] == [200] * 8
    assert workers.violations == []


def test_a_filter_that_skips_response_headers_is_named_in_the_log(
    own_stack: Callable[[Variant], Stack], workers: SimulatedWorkers
) -> None:
    """Envoy ends the call before decode answers: prefill cannot go on, and a warning names the setting."""
    workers.configure(kv_connector="sglang", bootstrap_timeout=0.5, latency={"decode": 0.5})
    stack = own_stack(variant(workers, edit=None))
    assert stack.post(chat("hi", CAT)).status == 500
    (sidecar,) = stack.sidecars
    wait_for(lambda: "response_header_mode to SEND" in sidecar.log.read_text(), "the warning")
