"""Bodies of every size and framing, streamed answers, and what passes through untouched."""

from __future__ import annotations

import hashlib
import http.client
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from deploy.envoy.local_stack import DECODE
from tests.e2e.e2e_client import CAT, CHAT, DOG, Upload, as_body, chat, new_id, read_answer, request
from tests.e2e.e2e_stack import Variant, ext_proc, manager, wait_for
from tests.e2e.e2e_variants import NIXL, NONE_NIXL

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.e2e.e2e_stack import SimulatedWorkers, Stack
    from tests.e2e.e2e_upstream import RecordingWorker

MIB = 1 << 20


@pytest.fixture
def stack(
    recorder: RecordingWorker, workers: SimulatedWorkers, shared_stacks: Callable[[str, Variant], Stack]
) -> Stack:
    """Decode is the recording worker; render and prefill are simulated, in the OpenAI format."""
    assert workers.violations == []
    return shared_stacks("recorder", Variant(pipeline=NIXL, ports={DECODE: recorder.port}))


@pytest.mark.parametrize("size", [1, 32_769, 65_537, MIB + 1, 30 * MIB])
def test_a_body_of_any_size_is_rewritten_whole(size: int, stack: Stack, recorder: RecordingWorker) -> None:
    """Everything the client sent reaches decode; only the transfer parameters of prefill are new."""
    sent = chat("Hello", padding="x" * size)
    answer, line = stack.coordinate(sent)
    assert answer.status == 200
    (received,) = recorder.received
    body = json.loads(received.body)
    assert body.pop("kv_transfer_params")["do_remote_prefill"] is True
    assert body == sent
    assert "content-length" not in received.headers
    assert line["request_bytes"] == str(len(as_body(sent)))


def test_what_a_client_may_not_set_is_removed(stack: Stack, recorder: RecordingWorker) -> None:
    """Render switches, transfer parameters and uuids of the client do not reach decode."""
    sent = chat("Hello", CAT, mm_payload="none", return_mm_kwargs=False, ec_transfer_params={"a": {}})
    sent["messages"][0]["content"][0]["uuid"] = "../escape"
    answer, _ = stack.coordinate(sent)
    assert answer.status == 200
    body = json.loads(recorder.received[0].body)
    assert {"mm_payload", "return_mm_kwargs", "ec_transfer_params"}.isdisjoint(body)
    assert body["messages"][0]["content"][0]["uuid"] != "../escape"


def test_the_query_string_stays_on_decode(
    stack: Stack, recorder: RecordingWorker, workers: SimulatedWorkers
) -> None:
    """A query string does not hide the path from the sidecar, and reaches decode only."""
    answer, line = stack.coordinate(chat("Hello"), path=f"{CHAT}?api-version=7")
    assert answer.status == 200
    assert recorder.received[0].path == f"{CHAT}?api-version=7"
    assert workers.exchanges("prefill")[0].path == CHAT
    assert line["path"] == CHAT


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v1/models"), ("GET", CHAT), ("POST", "/tokenize"), ("PUT", CHAT), ("POST", f"{CHAT}/render")],
)
def test_other_methods_and_paths_pass_through(
    method: str, path: str, stack: Stack, recorder: RecordingWorker, workers: SimulatedWorkers
) -> None:
    """What is not ours reaches decode unchanged, and the log says so."""
    body = None if method == "GET" else b'{"not": "parsed", '
    request_id = new_id()
    answer = request(stack.base, method, path, body, {"x-request-id": request_id})
    assert answer.status == 200
    (received,) = recorder.received
    assert (received.method, received.path, received.body) == (method, path, body or b"")
    line = stack.log_line(request_id, passthrough=True)
    assert (line["api"], line["error"]) == ("", "")
    assert workers.exchanges("render") == []


def test_thirty_megabytes_pass_through_while_they_arrive(stack: Stack, recorder: RecordingWorker) -> None:
    """A foreign upload is streamed: decode reads its start before its end is sent, and gets every byte."""
    piece = bytes(range(256)) * 4096
    upload = Upload(stack.base, "/v1/files", {"content-type": "application/octet-stream"})
    digest = hashlib.sha256()
    for _ in range(15):
        upload.send(piece)
        digest.update(piece)
    wait_for(lambda: recorder.received and recorder.received[0].size > 0, "the first bytes at decode")
    assert not recorder.received[0].complete
    for _ in range(15):
        upload.send(piece)
        digest.update(piece)
    upload.finish()
    assert upload.answer().json == {"size": 30 * MIB, "sha256": digest.hexdigest()}


def test_a_foreign_body_may_exceed_the_cap(stack: Stack) -> None:
    """The body cap (64 MB) is for coordinated requests; 65 MB pass through whole."""
    body = b"z" * (65 * MIB)
    answer = request(stack.base, "POST", "/v1/files", body)
    assert answer.json == {"size": len(body), "sha256": hashlib.sha256(body).hexdigest()}


def test_events_arrive_one_by_one(stack: Stack, recorder: RecordingWorker) -> None:
    """Each event reaches the client before the worker is allowed to send the next one."""
    host, port = stack.base.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    connection.request(
        "POST", CHAT, as_body(chat("Hello", stream=True)), {"content-type": "application/json"}
    )
    response = None
    for number in range(5):
        recorder.release_event()
        response = response or connection.getresponse()
        assert response.readline() == b"data: event %d\n" % number
        assert response.readline() == b"\n"
    assert response is not None
    assert response.read() == b""
    connection.close()


def test_a_retry_policy_does_not_duplicate_the_body(
    own_stack: Callable[[Variant], Stack], workers: SimulatedWorkers
) -> None:
    """A route that retries sends the same rewritten body again, once."""

    def retry(bootstrap: dict[str, Any]) -> None:
        route = manager(bootstrap, "external")["route_config"]["virtual_hosts"][0]["routes"][-1]["route"]
        route["retry_policy"] = {"retry_on": "5xx", "num_retries": 2}

    stack = own_stack(replace(NONE_NIXL, edit=retry))
    workers.configure(faults={"decode": "status:503*1"})
    answer, line = stack.coordinate(chat("Look", CAT, max_tokens=200))
    assert "1 image: 320x240" in answer.text
    first, second = workers.exchanges("decode")
    assert (first.status, second.status) == (503, 200)
    assert first.body == second.body
    assert first.body_bytes == second.body_bytes
    assert line["outcome"] == "ok"


def test_buffered_mode_rewrites_bodies_up_to_envoys_limit(
    own_stack: Callable[[Variant], Stack], workers: SimulatedWorkers
) -> None:
    """BUFFERED mode rewrites in one piece; beyond the listener's buffer Envoy answers 413."""

    def buffered(bootstrap: dict[str, Any]) -> None:
        ext_proc(bootstrap)["processing_mode"]["request_body_mode"] = "BUFFERED"

    stack = own_stack(replace(NONE_NIXL, edit=buffered))
    for size in (1, 32_769, 900_000):
        workers.reset()
        answer, line = stack.coordinate(chat("Look", CAT, DOG, max_tokens=200, padding="x" * size))
        assert "2 images: 320x240" in answer.text
        assert "KV from prefill: hit" in answer.text
        assert (line["outcome"], line["prefill_form"]) == ("ok", "mm_metadata")
        assert workers.violations == []
    upload = Upload(stack.base, CHAT, {"x-request-id": new_id()})
    body = as_body(chat("Look", CAT, max_tokens=200, padding="x" * 50_000))
    upload.send(body[:30_000])
    upload.send(body[30_000:])
    upload.finish([("x-checksum", "abc")])
    assert "KV from prefill: hit" in upload.answer().text
    too_large = stack.post(chat("Look", padding="x" * (MIB + 1)))
    assert too_large.status == 413
    wait_for(lambda: stack.find_line("details", "request_payload_too_large"), "Envoy's own 413")
    refused = request(stack.base, "POST", CHAT, b"not json")
    assert (refused.status, refused.json["error"]["code"]) == (400, "epd_bad_request")


def test_a_body_mode_that_cannot_carry_a_rewrite_is_refused(
    own_stack: Callable[[Variant], Stack], workers: SimulatedWorkers
) -> None:
    """STREAMED gets a 500 that says what to set; foreign paths still pass."""

    def streamed(bootstrap: dict[str, Any]) -> None:
        ext_proc(bootstrap)["processing_mode"]["request_body_mode"] = "STREAMED"

    stack = own_stack(replace(NONE_NIXL, edit=streamed))
    answer, line = stack.coordinate(chat("Look", CAT))
    assert (answer.status, answer.json["error"]["code"]) == (500, "epd_unsupported_body_mode")
    assert "FULL_DUPLEX_STREAMED" in answer.json["error"]["message"]
    assert (line["details"], line["outcome"]) == ("epd_unsupported_body_mode", "internal_error")
    assert workers.exchanges("render") == []
    assert request(stack.base, "GET", "/v1/models").status == 200


def test_connections_are_reused_after_errors_and_large_bodies(stack: Stack) -> None:
    """One keep-alive connection serves a large body, a refused one and a small one in turn."""
    host, port = stack.base.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    statuses = []
    for body in (chat("Hello", padding="x" * MIB), b"[]", chat("Hello")):
        connection.request("POST", CHAT, as_body(body), {"content-type": "application/json"})
        statuses.append(read_answer(connection).status)
    connection.close()
    assert statuses == [200, 400, 200]
