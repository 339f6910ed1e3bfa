from __future__ import annotations

import logging
import re
from dataclasses import replace

import pytest

from sidecar.api import api_for_path
from sidecar.errors import BadRequest, BodyTooLarge, LoopDetected, SidecarError, UnsupportedBodyMode
from sidecar.errors import UnsupportedEncoding as Encoding
from sidecar.extproc import identity
from sidecar.extproc.admission import AdmissionRules, Coordinate, Decision, PassThrough, decide
from sidecar.extproc.protocol import BodyMode, HeaderChange, RequestHeaders
from tests.unit.extproc.extproc_harness import ADMISSION, CHAT, head_event

API = api_for_path(CHAT)
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def admit(event: RequestHeaders, rules: AdmissionRules = ADMISSION) -> Decision:
    return decide(event, api_for_path(event.head.path) if event.head.method == "POST" else None, rules)


def test_a_post_on_our_path_is_coordinated() -> None:
    """The path alone decides, for POST."""
    assert API is not None
    assert admit(head_event(("content-type", "application/json"))) == Coordinate(API)


@pytest.mark.parametrize(("method", "path"), [("GET", CHAT), ("POST", CHAT + "/"), ("POST", "/v1/models")])
def test_what_is_not_ours_passes(method: str, path: str) -> None:
    """Other methods and paths pass, without limits, encodings or body modes applied."""
    event = head_event(
        ("content-encoding", "gzip"),
        ("content-length", "99999999999"),
        method=method,
        path=path,
        mode=BodyMode.STREAMED,
    )
    assert admit(event) == PassThrough(HeaderChange())


CONTROL_FIELDS = [
    "epp-profile",
    "x-epd-phase-token",
    "prefer",
    "x-gateway-destination-endpoint",
    "x-gateway-destination-endpoint-subset",
    "x-prefiller-host-port",
    "x-prefiller-url",
    "x-encoder-hosts-ports",
    "x-data-parallel-rank",
    "x-tenant-secret",
]


@pytest.mark.parametrize("name", CONTROL_FIELDS)
def test_control_headers_are_removed_from_passthrough(name: str) -> None:
    """A forged control header goes, once, and the route it may have chosen is chosen again."""
    event = head_event(("x-kept", "1"), (name, "a"), (name, "b"), path="/v1/models")
    assert admit(event) == PassThrough(HeaderChange((), (name,), clear_route_cache=True))
    kept = replace(ADMISSION, clear_route_cache=False)
    assert admit(event, kept) == PassThrough(HeaderChange((), (name,), clear_route_cache=False))


def test_our_own_sub_request_passes_untouched() -> None:
    """With the phase token only the token goes: epp-profile and hop guard choose the route."""
    event = head_event(
        ("epp-profile", "prefill"),
        ("x-epd-hop", "1"),
        ("x-epd-phase-token", "s3cret"),
        ("prefer", "if-available"),
        mode=BodyMode.NONE,
    )
    assert admit(event) == PassThrough(HeaderChange(remove_headers=("x-epd-phase-token",)))


@pytest.mark.parametrize(("configured", "offered"), [("s3cret", "wrong"), ("", ""), ("s3cret", "s3cr\xe9t")])
def test_an_invalid_token_counts_as_absent(configured: str, offered: str) -> None:
    """A forged token opens nothing, also where no token is configured."""
    rules = replace(ADMISSION, phase_token=configured)
    event = head_event(("x-epd-phase-token", offered), ("x-epd-hop", "1"))
    with pytest.raises(LoopDetected):
        admit(event, rules)
    assert isinstance(admit(head_event(("x-epd-phase-token", offered)), rules), Coordinate)


@pytest.mark.parametrize("path", [CHAT, "/v1/models"])
def test_the_hop_guard_means_a_loop(path: str) -> None:
    """A sub-request that reaches the filter is refused on every path, and told which key is wired wrong."""
    with pytest.raises(LoopDetected, match=r"gateway\.address"):
        admit(head_event(("x-epd-hop", "1"), path=path))


@pytest.mark.parametrize("mode", [BodyMode.NONE, BodyMode.STREAMED, BodyMode.BUFFERED_PARTIAL, BodyMode.GRPC])
def test_our_paths_need_a_mode_that_carries_a_rewrite(mode: BodyMode) -> None:
    """The refusal names the mode found."""
    with pytest.raises(UnsupportedBodyMode, match=mode.name):
        admit(head_event(mode=mode))


@pytest.mark.parametrize(
    ("event", "error"),
    [
        (head_event(end=True), BadRequest),
        (head_event(("content-encoding", "gzip")), Encoding),
        (head_event(("content-encoding", "identity, br")), Encoding),
        (head_event(("content-encoding", "identity"), ("content-encoding", "zstd")), Encoding),
        (head_event(("content-length", str((1 << 20) + 1))), BodyTooLarge),
        (head_event(("content-length", "9" * 5000)), BodyTooLarge),
    ],
    ids=["no body", "gzip", "second coding", "second header", "length", "long length"],
)
def test_requests_refused_by_their_head(event: RequestHeaders, error: type[SidecarError]) -> None:
    """What the head already rules out is refused before a body byte is read."""
    with pytest.raises(error):
        admit(event)


@pytest.mark.parametrize(
    "field",
    [
        ("content-encoding", "Identity"),
        ("content-encoding", ""),
        ("content-length", str(1 << 20)),
        ("content-length", "0" * 5000 + "7"),
        ("content-length", "\xb2"),
    ],
)
def test_heads_that_rule_nothing_out(field: tuple[str, str]) -> None:
    """Identity, a length within the limit, and a length that is no number are accepted."""
    assert isinstance(admit(head_event(field)), Coordinate)


@pytest.mark.parametrize("good", ["a", "A-9", "x" * 128])
def test_a_valid_request_id_is_kept(good: str) -> None:
    """Letters, digits and hyphens, up to 128."""
    assert identity.request_id(head_event(("x-request-id", good)).head) == good


@pytest.mark.parametrize("bad", ["", "x" * 129, "a b", "a\n", "\xe4", "id;drop"])
def test_an_invalid_request_id_is_replaced(bad: str, caplog: pytest.LogCaptureFixture) -> None:
    """A new UUID4 takes its place; the log learns the length, never the value."""
    with caplog.at_level(logging.INFO):
        made = identity.request_id(head_event(("x-request-id", bad)).head)
    assert re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", made)
    (entry,) = caplog.records
    assert vars(entry)["rejected_length"] == len(bad)
    assert not bad or bad not in str(vars(entry))


def test_traceparent_of_the_client_comes_first() -> None:
    """Header, then call metadata, then a new one."""
    other = TRACE.replace("4bf9", "aaaa")
    assert identity.traceparent(head_event(("traceparent", TRACE)).head, other) == TRACE
    assert identity.traceparent(head_event().head, other) == other


@pytest.mark.parametrize(
    "bad",
    [
        "",
        TRACE.upper(),
        TRACE + "-00",
        "ff" + TRACE[2:],
        "00-" + "0" * 32 + TRACE[35:],
        TRACE[:36] + "0" * 16 + "-01",
        TRACE + "\n",
    ],
)
def test_a_malformed_traceparent_is_replaced(bad: str) -> None:
    """The new one is well-formed, unsampled and different each time."""
    head = head_event(("traceparent", bad)).head
    made = identity.traceparent(head, None)
    assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-00", made)
    assert made != identity.traceparent(head, "junk")
    assert identity.traceparent(head, TRACE) == TRACE


def test_two_traceparents_count_as_none() -> None:
    """W3C: which of several is meant cannot be known."""
    head = head_event(("traceparent", TRACE), ("traceparent", TRACE)).head
    assert identity.traceparent(head, None) != TRACE


def test_a_later_traceparent_version_is_kept() -> None:
    """Versions after 00 may append fields."""
    later = "01" + TRACE[2:] + "-more"
    assert identity.traceparent(head_event(("traceparent", later)).head, None) == later
