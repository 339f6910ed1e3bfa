"""Prompt token parity through a real Envoy: what prefill and decode count against what was rendered."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

import pytest
import yaml

from deploy.envoy.local_stack import DECODE, ENVOY_ADMIN, REPOSITORY, load_bootstrap
from tests.e2e.e2e_client import CAT, CHAT, DOG, MODEL, Answer, Upload, as_body, chat, new_id, request
from tests.e2e.e2e_stack import RECORD_KEYS, Stack, Variant, add_parity_filter, manager, named, wait_for
from tests.e2e.e2e_variants import NONE_NIXL, form_variant

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.e2e.e2e_stack import SimulatedWorkers
    from tests.e2e.e2e_upstream import RecordingWorker

MESSAGES, RESPONSES, COMPLETIONS = "/v1/messages", "/v1/responses", "/v1/completions"
WARN = {"observability": {"prompt_token_parity": "warn"}}
TOKEN = "a-token-for-the-tests-0123456789"  # guards nothing
FIELDS = ("request_id", "phase", "api", "model", "rendered", "reported")
EVENTS = 5
"""Events of a streamed answer of the recording worker."""


def observed(variant: Variant, *, on: bool = True) -> Variant:
    """The variant with the second filter, on the listener that clients use."""
    listener = "shared" if variant.bootstrap == "shared-listener.yaml" else "external"

    def edit(bootstrap: dict[str, Any]) -> None:
        add_parity_filter(bootstrap, listener)

    return replace(variant, edit=edit, sections={**variant.sections, **(WARN if on else {})})


@dataclass
class Case:
    """One kind of request.

    Attributes:
        path: its path.
        body: a body that is not streamed.
        streamed: what the body needs for a stream that tells its usage.
    """

    path: str
    body: dict[str, Any]
    streamed: dict[str, Any]

    def request(self, *, stream: bool) -> dict[str, Any]:
        return self.body | (self.streamed if stream else {})


USER = [{"role": "user", "content": "What do you see?"}]
WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True}}
CASES = {
    "chat": Case(CHAT, chat("Look", CAT, DOG, max_tokens=200), WITH_USAGE),
    "completions": Case(COMPLETIONS, {"model": MODEL, "prompt": "What?", "max_tokens": 50}, WITH_USAGE),
    "messages": Case(MESSAGES, {"model": MODEL, "messages": USER, "max_tokens": 50}, {"stream": True}),
    "responses": Case(RESPONSES, {"model": MODEL, "input": "What do you see?"}, {"stream": True}),
}


class Watched:
    """A running stack, and what its sidecar said and counted."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        config = (stack.local.directory / "sidecar-0.yaml").read_text(encoding="utf-8")
        self._metrics = f"http://{yaml.safe_load(config)['admin']['listen']}/metrics"
        self._lines_before = len(self.lines())
        self._counts_before = self._counts()

    def lines(self) -> list[dict[str, Any]]:
        text = (self.stack.local.directory / "sidecar-0.log").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]

    def warnings(self) -> list[dict[str, Any]]:
        """The warnings since this object was made, their own fields only."""
        new = [line for line in self.lines()[self._lines_before :] if line["level"] != "info"]
        assert all(line["logger"] == "sidecar.pipeline.parity" for line in new), new
        return [{name: line[name] for name in FIELDS} for line in new]

    def counts(self) -> dict[str, float]:
        """By how much the metric has grown since, per phase."""
        return {phase: count - self._counts_before[phase] for phase, count in self._counts().items()}

    def _counts(self) -> dict[str, float]:
        with urlopen(self._metrics, timeout=10) as response:  # noqa: S310 (loopback)
            text = response.read().decode()
        found = re.findall(
            r'^epd_sidecar_prompt_token_mismatches_total\{phase="(\w+)"\} (\S+)$', text, re.MULTILINE
        )
        return {phase: float(count) for phase, count in found}

    def copied(self) -> int:
        """How many answers Envoy has begun to copy."""
        return self._stat("http.external.ext_proc.prompt_token_parity.streams_started")

    def settle(self) -> None:
        """Wait until the sidecar has ended every call of Envoy: all answers have been compared."""
        wait_for(lambda: self._stat("cluster.epd_sidecar.upstream_rq_active") == 0, "the end of all calls")

    def _stat(self, name: str) -> int:
        url = f"{self.stack.local.url(ENVOY_ADMIN)}/stats?filter=^{re.escape(name)}$"
        with urlopen(url, timeout=10) as response:  # noqa: S310 (loopback)
            return int(response.read().decode().partition(": ")[2] or 0)

    def ask(self, case: Case, *, stream: bool) -> tuple[Answer, dict[str, Any]]:
        answer, line = self.stack.coordinate(case.request(stream=stream), path=case.path)
        assert (answer.status, line["outcome"]) == (200, "ok"), answer.body
        return answer, line


@pytest.fixture
def watched(workers: SimulatedWorkers, shared_stacks: Callable[[str, Variant], Stack]) -> Iterator[Watched]:
    """The default topology; no request of a test may break vLLM's contract."""
    yield Watched(shared_stacks("parity", observed(NONE_NIXL)))
    assert workers.violations == []


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("api", CASES)
def test_equal_counts_say_nothing(
    api: str, stream: bool, watched: Watched, workers: SimulatedWorkers
) -> None:
    """Prefill and decode count what was rendered, from their caches as well: no line, no count."""
    for details in (False, True):
        workers.configure(prompt_tokens_details=details)
        watched.ask(CASES[api], stream=stream)
    watched.settle()
    assert watched.warnings() == []
    assert watched.counts() == {"prefill": 0, "decode": 0}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("api", CASES)
def test_each_phase_that_counts_otherwise_is_one_warning(
    api: str, stream: bool, watched: Watched, workers: SimulatedWorkers
) -> None:
    """One line and one count per phase, with both figures; answer and record stay what they are."""
    plain, before = watched.ask(CASES[api], stream=stream)
    workers.configure(prompt_token_skew={"prefill": 3, "decode": 2}, prompt_tokens_details=True)
    answer, line = watched.ask(CASES[api], stream=stream)
    watched.settle()
    rendered = int(line["prompt_tokens"])
    common = {"request_id": line["request_id"], "api": api, "model": MODEL, "rendered": rendered}
    by_phase = {warning["phase"]: warning for warning in watched.warnings()}
    assert by_phase == {
        "prefill": {**common, "phase": "prefill", "reported": rendered + 3},
        "decode": {**common, "phase": "decode", "reported": rendered + 2},
    }
    assert len(watched.warnings()) == 2
    assert watched.counts() == {"prefill": 1, "decode": 1}
    assert answer.headers["content-type"] == plain.headers["content-type"]
    same = [key for key in RECORD_KEYS if key != "request_id" and not key.endswith("_ms")]
    assert {key: line[key] for key in same} == {key: before[key] for key in same}


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_one_phase_alone(phase: str, watched: Watched, workers: SimulatedWorkers) -> None:
    """A phase that agrees is not named."""
    workers.configure(prompt_token_skew={phase: 1})
    watched.ask(CASES["chat"], stream=True)
    watched.settle()
    assert [warning["phase"] for warning in watched.warnings()] == [phase]


def test_a_stream_that_does_not_tell_its_usage(watched: Watched, workers: SimulatedWorkers) -> None:
    """Chat streams have usage only where the client asks for it; without it decode is not compared."""
    workers.configure(prompt_token_skew={"prefill": 1, "decode": 1})
    answer, _ = watched.stack.coordinate(chat("Look", CAT, max_tokens=200, stream=True))
    assert b'"usage"' not in answer.body
    watched.settle()
    assert [warning["phase"] for warning in watched.warnings()] == ["prefill"]


def test_a_generate_clients_own_prompt_is_not_compared(watched: Watched, workers: SimulatedWorkers) -> None:
    """Nobody rendered it, although the record knows its length."""
    workers.configure(prompt_token_skew={"prefill": 1, "decode": 1})
    body = {"model": MODEL, "token_ids": [1, 2, 3, 4], "sampling_params": {"max_tokens": 5}}
    answer, line = watched.stack.coordinate(body, path="/inference/v1/generate")
    assert (answer.json["usage"]["prompt_tokens"], line["prompt_tokens"]) == (5, "4")
    watched.settle()
    assert watched.warnings() == []


def test_errors_and_other_paths_are_not_compared(watched: Watched, workers: SimulatedWorkers) -> None:
    """Answers of the sidecar itself, refusals of decode, and what passes through are copied and let go."""
    workers.configure(prompt_token_skew={"decode": 1}, faults={"decode": "status:503"})
    before = watched.copied()
    assert watched.stack.post(chat("Look", CAT)).status == 503
    assert watched.stack.post(b"nonsense").status == 400
    assert request(watched.stack.base, "GET", "/v1/models").status == 200
    watched.settle()
    assert watched.copied() == before + 3
    assert watched.warnings() == []


@pytest.mark.parametrize(
    ("name", "variant", "form"),
    [
        ("openai", form_variant(openai=True, mm_payload="none", descriptors=True), "openai"),
        ("tensors", form_variant(openai=False, mm_payload="tensors", descriptors=False), "kwargs_data"),
        ("content-parts", form_variant(openai=False, mm_payload="none", descriptors=False), "content_parts"),
        ("metadata", NONE_NIXL, "mm_metadata"),
    ],
)
def test_prefill_counts_the_rendered_prompt_in_every_form(
    name: str,
    variant: Variant,
    form: str,
    workers: SimulatedWorkers,
    shared_stacks: Callable[[str, Variant], Stack],
) -> None:
    """Also where it gets the prompt collapsed and expands it itself; no filter copies decode's answer."""
    stack = shared_stacks(f"parity-{name}", replace(variant, sections=WARN))
    watched = Watched(stack)
    _, line = watched.ask(CASES["chat"], stream=False)
    assert line["prefill_form"] == form
    assert watched.warnings() == []
    workers.configure(prompt_token_skew={"prefill": 1, "decode": 1})
    watched.ask(CASES["chat"], stream=False)
    watched.settle()
    assert [warning["phase"] for warning in watched.warnings()] == ["prefill"]
    assert watched.counts() == {"prefill": 1, "decode": 0}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("bootstrap", ["reroute.yaml", "shared-listener.yaml"])
def test_the_other_topologies(
    bootstrap: str,
    stream: bool,
    workers: SimulatedWorkers,
    shared_stacks: Callable[[str, Variant], Stack],
) -> None:
    """The filter works behind the sidecar's wherever clients connect; sub-requests on the way are let go."""
    variant = replace(NONE_NIXL, bootstrap=bootstrap)
    if bootstrap == "shared-listener.yaml":
        variant.sections = {"gateway": {"address": "http://127.0.0.1:10000", "phase_token": TOKEN}}
    watched = Watched(shared_stacks(f"parity-{bootstrap}", observed(variant)))
    watched.ask(CASES["chat"], stream=stream)
    watched.settle()
    assert watched.warnings() == []
    workers.configure(prompt_token_skew={"prefill": 1, "decode": 1})
    watched.ask(CASES["chat"], stream=stream)
    watched.settle()
    assert sorted(warning["phase"] for warning in watched.warnings()) == ["decode", "prefill"]
    assert workers.violations == []


def test_buffered_mode(workers: SimulatedWorkers, own_stack: Callable[[Variant], Stack]) -> None:
    """The record travels with the copies in BUFFERED mode, too."""
    variant = observed(NONE_NIXL)
    add_filter = variant.edit
    assert add_filter is not None

    def edit(bootstrap: dict[str, Any]) -> None:
        filters = manager(bootstrap, "external")["http_filters"]
        mine = named(filters, "envoy.filters.http.ext_proc")["typed_config"]
        mine["processing_mode"]["request_body_mode"] = "BUFFERED"
        mine["message_timeout"] = "30s"
        add_filter(bootstrap)

    workers.configure(prompt_token_skew={"prefill": 1, "decode": 1})
    watched = Watched(own_stack(replace(variant, edit=edit)))
    watched.ask(CASES["chat"], stream=True)
    watched.settle()
    assert sorted(warning["phase"] for warning in watched.warnings()) == ["decode", "prefill"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_an_answer_that_conditional_decode_served(
    stream: bool, workers: SimulatedWorkers, shared_stacks: Callable[[str, Variant], Stack]
) -> None:
    """It passes the filter as decode's own answer does, and is compared the same."""
    workers.configure(kv_connector="shared")
    render = {"type": "render", "params": {"address": f"http://127.0.0.1:{workers.ports['render']}"}}
    names = ("conditional-decode", "encode", "prefill", "decode")
    variant = Variant(pipeline={"steps": [render, *({"type": name} for name in names)]})
    watched = Watched(shared_stacks("parity-conditional", observed(variant)))
    watched.ask(CASES["chat"], stream=stream)
    workers.configure(prompt_token_skew={"decode": 1})
    answer, line = watched.stack.coordinate(CASES["chat"].request(stream=stream))
    assert (answer.status, line["outcome"]) == (200, "served")
    watched.settle()
    assert [warning["phase"] for warning in watched.warnings()] == ["decode"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_with_parity_off_the_copies_are_swallowed(
    stream: bool, workers: SimulatedWorkers, shared_stacks: Callable[[str, Variant], Stack]
) -> None:
    """A filter that is there for nothing does no harm: no line, no count, the same answers."""
    watched = Watched(shared_stacks("parity-off", observed(NONE_NIXL, on=False)))
    workers.configure(prompt_token_skew={"prefill": 1, "decode": 1})
    before = watched.copied()
    watched.ask(CASES["chat"], stream=stream)
    assert watched.copied() == before + 1
    watched.settle()
    assert watched.warnings() == []
    assert watched.counts() == {"prefill": 0, "decode": 0}


@dataclass
class Held:
    """A streamed answer of which decode has sent the first event."""

    upload: Upload
    recorder: RecordingWorker
    watched: Watched

    def finish(self) -> Answer:
        """Let decode send the rest."""
        for _ in range(EVENTS - 1):
            self.recorder.release_event()
        return self.upload.answer()


@pytest.fixture
def held(
    recorder: RecordingWorker, workers: SimulatedWorkers, own_stack: Callable[[Variant], Stack]
) -> Iterator[Held]:
    """An answer in the middle, copied to the sidecar."""
    watched = Watched(own_stack(replace(observed(NONE_NIXL), ports={DECODE: recorder.port})))
    upload = Upload(watched.stack.base, CHAT, {"x-request-id": new_id()})
    upload.send(as_body(chat("Look", CAT, stream=True)))
    upload.finish()
    recorder.release_event()
    wait_for(watched.copied, "the copied answer")
    yield Held(upload, recorder, watched)
    assert workers.violations == []


def test_a_killed_sidecar_does_not_touch_the_answer(held: Held) -> None:
    """SIGKILL in the middle of a streamed answer: the client gets all of it."""
    (sidecar,) = held.watched.stack.sidecars
    sidecar.kill()
    sidecar.process.wait(10)
    answer = held.finish()
    assert (answer.status, answer.body.count(b"data: ")) == (200, EVENTS)


def test_a_stopped_sidecar_does_not_hold_the_answer_up(held: Held) -> None:
    """A sidecar that reads nothing any more: the client gets all of it all the same."""
    (sidecar,) = held.watched.stack.sidecars
    sidecar.process.send_signal(signal.SIGSTOP)
    try:
        answer = held.finish()
    finally:
        sidecar.process.send_signal(signal.SIGCONT)
    assert (answer.status, answer.body.count(b"data: ")) == (200, EVENTS)


def test_a_draining_sidecar_does_not_wait_for_the_answer(held: Held) -> None:
    """SIGTERM while decode streams: the process ends with 0 while the answer goes on to its end."""
    (sidecar,) = held.watched.stack.sidecars
    sidecar.process.send_signal(signal.SIGTERM)
    assert sidecar.process.wait(20) == 0
    answer = held.finish()
    assert (answer.status, answer.body.count(b"data: ")) == (200, EVENTS)
    assert held.watched.warnings() == []


def test_the_documented_filter_is_the_tested_one() -> None:
    """The YAML of docs/prompt-token-parity.md is what these tests run with."""
    text = (REPOSITORY / "docs" / "prompt-token-parity.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```yaml\n(- name: envoy.*?)```", text, re.DOTALL)
    (documented,) = yaml.safe_load(block)
    bootstrap = load_bootstrap("bootstrap.yaml", {}, REPOSITORY / "unused")
    add_parity_filter(bootstrap)
    filters = manager(bootstrap, "external")["http_filters"]
    assert documented in filters
    assert filters.index(documented) == filters.index(named(filters, "envoy.filters.http.ext_proc")) + 1
