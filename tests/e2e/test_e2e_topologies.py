"""The three topologies, each with an endpoint picker behind the sidecar."""

from __future__ import annotations

import copy
import json
import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from deploy.envoy.local_stack import HERE, envoy_binary, free_ports, load_bootstrap
from sidecar import control_headers
from tests.e2e.e2e_client import CAT, CHAT, DOG, Upload, as_body, chat, new_id, request, request_h2
from tests.e2e.e2e_stack import RECORD_KEYS, Variant, add_picker, ext_proc, manager, named
from tests.e2e.e2e_upstream import PICKER_HEADER
from tests.e2e.e2e_variants import NONE_NIXL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from sidecar.simulator.config import Role
    from tests.e2e.e2e_stack import SimulatedWorkers, Stack
    from tests.e2e.e2e_upstream import EndpointPicker

BOOTSTRAPS = ("bootstrap.yaml", "reroute.yaml", "shared-listener.yaml")
TOKEN = "a-token-for-the-tests-0123456789"  # guards nothing

LISTENERS = {
    "bootstrap.yaml": ("internal",),
    "reroute.yaml": ("external", "internal"),
    "shared-listener.yaml": ("shared",),
}
"""Where the comments of each bootstrap put the endpoint picker."""

DECODE_ROUTE = {"bootstrap.yaml": "reentry", "reroute.yaml": "decode", "shared-listener.yaml": "decode"}

STRANGER = "10.0.0.1:8000"
CONTROL_HEADERS = {
    "epp-profile": ("encode", "prefill", "decode", "train", ""),
    "x-epd-phase-token": ("", "a-token-the-client-guessed-000000", TOKEN[:-1], f"{TOKEN}0"),
    "prefer": ("if-available", "reserve-endpoint"),
    "x-gateway-destination-endpoint": (STRANGER,),
    "x-gateway-destination-endpoint-subset": (STRANGER,),
    "x-gateway-destination-endpoint-anything": (STRANGER,),
    "x-prefiller-host-port": (STRANGER,),
    "x-prefiller-url": (f"http://{STRANGER}",),
    "x-prefill-host-port": (STRANGER,),
    "x-prefill-pin": (STRANGER,),
    "x-encoder-hosts-ports": (STRANGER,),
    "x-data-parallel-rank": ("3",),
}
"""Every control header but the hop guard, with what a client could forge (see docs/control-headers.md)."""

FORGERIES = [(header, value) for header, values in CONTROL_HEADERS.items() for value in values]
HOP_GUARDS = ("1", "0", "")
ROLES: tuple[Role, ...] = ("render", "encode", "prefill", "decode")

FORGED = {
    "epp-profile": "prefill",
    "x-epd-phase-token": "a-token-the-client-guessed-000000",
    "prefer": "if-available",
    "x-gateway-destination-endpoint": "10.0.0.1:8000",
    "x-gateway-destination-endpoint-subset": "10.0.0.1:8000",
    "x-prefiller-host-port": "10.0.0.1:8000",
    "x-prefiller-url": "http://10.0.0.1:8000",
    "x-encoder-hosts-ports": "10.0.0.1:8000",
    "x-data-parallel-rank": "3",
}


@pytest.fixture(params=BOOTSTRAPS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def stack(
    name: str,
    picker: EndpointPicker,
    workers: SimulatedWorkers,
    shared_stacks: Callable[[str, Variant], Stack],
) -> Iterator[Stack]:
    """One topology with the picker; no request of a test may break vLLM's contract."""

    def edit(bootstrap: dict[str, Any]) -> None:
        for listener in LISTENERS[name]:
            add_picker(bootstrap, listener, picker.port)

    variant = replace(NONE_NIXL, bootstrap=name, edit=edit)
    if name == "shared-listener.yaml":
        variant.sections = {"gateway": {"address": "http://127.0.0.1:10000", "phase_token": TOKEN}}
    yield shared_stacks(f"picker-{name}", variant)
    assert workers.violations == []


def test_a_bootstrap_is_accepted_by_envoy(name: str, tmp_path: Path) -> None:
    """`envoy --mode validate` accepts the file as it is shipped."""
    command = [str(envoy_binary()), "--mode", "validate", "-c", str(HERE / name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_bootstrap_logs_every_key_of_the_record(name: str) -> None:
    """The access log reads each key of the record from the sidecar's metadata."""
    format_ = access_log_format(name)
    for key in RECORD_KEYS:
        assert format_[key] == f"%DYNAMIC_METADATA(epd.sidecar:{key})%"


def test_a_bootstrap_names_existing_clusters(name: str) -> None:
    """The sidecar's cluster exists, which Envoy's own validation does not check."""
    bootstrap = load_bootstrap(name, {}, HERE / "unused")
    clusters = bootstrap["static_resources"]["clusters"]
    filter_ = ext_proc(bootstrap, bootstrap["static_resources"]["listeners"][0]["name"])
    assert named(clusters, filter_["grpc_service"]["envoy_grpc"]["cluster_name"])
    assert filter_["failure_mode_allow"] is False


def test_the_picker_sees_the_rewritten_request(
    name: str, stack: Stack, picker: EndpointPicker, workers: SimulatedWorkers
) -> None:
    """The picker behind the sidecar reads the whole rewritten decode body and its choice reaches decode."""
    answer, line = stack.coordinate(chat("Look", CAT, DOG, max_tokens=200))
    assert "KV from prefill: hit" in answer.text
    (seen,) = [item for item in picker.picked if item.headers.get("epp-profile") == "decode"]
    body = json.loads(seen.body)
    assert [part["type"] for part in body["messages"][0]["content"]] == ["image_url", "image_url", "text"]
    assert body["messages"][0]["content"][1]["image_url"]["url"] == DOG.url
    assert body["kv_transfer_params"]["do_remote_prefill"] is True
    (decode,) = workers.exchanges("decode")
    assert decode.headers[PICKER_HEADER] == "stand-in"
    assert decode.body_bytes == len(seen.body)
    assert line["route"] == DECODE_ROUTE[name]


def test_the_picker_sees_every_sub_request(
    stack: Stack, picker: EndpointPicker, workers: SimulatedWorkers
) -> None:
    """Encode and prefill pass the picker, too."""
    answer, _ = stack.coordinate(chat("Look", CAT, DOG, max_tokens=200))
    assert answer.status == 200
    phases = sorted(item.headers.get("epp-profile", "") for item in picker.picked)
    assert phases == ["decode", "encode", "encode", "prefill"]
    for role in ("encode", "prefill"):
        assert all(item.headers[PICKER_HEADER] == "stand-in" for item in workers.exchanges(role))


@pytest.mark.parametrize("size", [100, 32_769, 200_000, 3 << 20])
def test_request_trailers_survive_the_chain(
    size: int, stack: Stack, picker: EndpointPicker, workers: SimulatedWorkers
) -> None:
    """A chunked request with trailers, of any size, passes both filters whole."""
    request_id = new_id()
    body = as_body(chat("Look", CAT, max_tokens=200, padding="x" * size))
    upload = Upload(stack.base, CHAT, {"x-request-id": request_id, "te": "trailers"})
    for start in range(0, len(body), 40_000):
        upload.send(body[start : start + 40_000])
    upload.finish([("x-checksum", "abc"), ("epp-profile", "prefill")])
    assert "KV from prefill: hit" in upload.answer().text
    (seen,) = [item for item in picker.picked if item.headers.get("epp-profile") == "decode"]
    assert json.loads(seen.body)["padding"] == "x" * size
    assert seen.trailers == ("x-checksum",)
    (decode,) = workers.exchanges("decode")
    assert decode.body_bytes == len(seen.body)


@pytest.mark.parametrize("trailers", [(), (("x-checksum", "abc"),)], ids=["plain", "trailers"])
def test_http2_requests_survive_the_chain(
    trailers: tuple[tuple[str, str], ...], stack: Stack, picker: EndpointPicker
) -> None:
    """An HTTP/2 request, which ends on its last data or on its trailers, passes both filters whole."""
    body = as_body(chat("Look", CAT, max_tokens=200, padding="x" * 200_000))
    answer = request_h2(stack.base, CHAT, body, {"content-type": "application/json"}, trailers)
    assert "KV from prefill: hit" in answer.text
    (seen,) = [item for item in picker.picked if item.headers.get("epp-profile") == "decode"]
    assert json.loads(seen.body)["padding"] == "x" * 200_000
    assert seen.trailers == (("x-checksum",) if trailers else None)


def test_forged_control_headers_reach_nobody(stack: Stack, workers: SimulatedWorkers) -> None:
    """A client that forges phase, token and addresses gets the whole pipeline and no header through."""
    answer, line = stack.coordinate(chat("Look", CAT, max_tokens=200), headers=FORGED)
    assert "KV from prefill: hit" in answer.text
    assert line["outcome"] == "ok"
    for role in ("render", "encode", "prefill", "decode"):
        (exchange,) = workers.exchanges(role)
        own = {"epp-profile": role} if role != "render" else {}
        forged = {key: value for key, value in exchange.headers.items() if key in FORGED}
        assert forged == own


def test_forged_control_headers_choose_no_route_for_other_paths(
    stack: Stack, workers: SimulatedWorkers
) -> None:
    """A request that passes through untouched goes where it always goes, and loses its control headers."""
    request_id = new_id()
    answer = request(stack.base, "GET", "/v1/models", None, {**FORGED, "x-request-id": request_id})
    assert answer.status == 200
    assert workers.exchanges("prefill") == []
    assert stack.log_line(request_id, passthrough=True)["route"] in {"other", "reentry"}


@pytest.mark.parametrize("path", ["/invocations", "/%69nvocations", "//invocations?x=1"])
def test_a_workers_alias_of_the_coordinated_paths_is_closed(
    path: str, stack: Stack, workers: SimulatedWorkers
) -> None:
    """Workers take chat and completions bodies there as well: no client gets past the pipeline that way."""
    body = as_body({**chat("Hello"), "kv_transfer_params": {"remote_host": "6.6.6.6"}})
    assert request(stack.base, "POST", path, body).status == 404
    assert all(workers.exchanges(role) == [] for role in ("render", "encode", "prefill", "decode"))


def test_the_table_has_every_control_header() -> None:
    """A control header that is new to the sidecar has to be forged here as well."""
    assert CONTROL_HEADERS.keys() >= control_headers._NAMES
    assert any(header.startswith(control_headers._PREFIX) for header in CONTROL_HEADERS)


@pytest.mark.parametrize("forged", FORGERIES, ids=": ".join)
def test_a_forged_header_changes_nothing_of_a_coordinated_request(
    forged: tuple[str, str], name: str, stack: Stack, picker: EndpointPicker, workers: SimulatedWorkers
) -> None:
    """The pipeline runs as without it, on the same routes, and neither picker nor workers see it."""
    header, value = forged
    answer, line = stack.coordinate(chat("Look", CAT, max_tokens=200), headers={header: value})
    assert "KV from prefill: hit" in answer.text
    assert (line["outcome"], line["route"]) == ("ok", DECODE_ROUTE[name])
    for role in ROLES:
        (exchange,) = workers.exchanges(role)
        own = role if header == "epp-profile" and role != "render" else None
        assert exchange.headers.get(header) == own
    assert sorted(seen.headers["epp-profile"] for seen in picker.picked) == ["decode", "encode", "prefill"]
    if header != "epp-profile":
        assert not any(header in seen.headers for seen in picker.picked)


@pytest.mark.parametrize("forged", FORGERIES, ids=": ".join)
def test_a_forged_header_changes_nothing_of_another_request(
    forged: tuple[str, str], stack: Stack, picker: EndpointPicker, workers: SimulatedWorkers
) -> None:
    """What passes through untouched goes where it always goes, without the header."""
    header, value = forged
    request_id = new_id()
    headers = {header: value, "x-request-id": request_id}
    assert request(stack.base, "POST", "/tokenize", {"prompt": "x"}, headers).status == 404
    assert stack.log_line(request_id, passthrough=True)["route"] in {"other", "reentry"}
    (decode,) = workers.exchanges("decode")
    assert (decode.path, decode.request_id) == ("/tokenize", request_id)
    assert header not in decode.headers
    assert all(workers.exchanges(role) == [] for role in ROLES[:-1])
    assert not any(header in seen.headers for seen in picker.picked)


@pytest.mark.parametrize("value", HOP_GUARDS)
def test_the_hop_guard_of_a_client_stops_its_request(
    value: str, stack: Stack, workers: SimulatedWorkers
) -> None:
    """Whatever it says, on whatever path: 508, and no worker is asked."""
    for path in (CHAT, "/tokenize"):
        assert stack.post(chat("Look", CAT), path=path, headers={"x-epd-hop": value}).status == 508
    assert all(workers.exchanges(role) == [] for role in ROLES)


def test_a_forged_hop_guard_is_refused(stack: Stack, workers: SimulatedWorkers) -> None:
    """The hop guard on a client's request means a loop: 508 on any path, and nothing is sent on."""
    answer, line = stack.coordinate(chat("Look", CAT), headers={"x-epd-hop": "1"})
    assert answer.status == 508
    assert answer.json["error"]["code"] == "epd_loop"
    assert (line["error"], line["outcome"]) == ("epd_loop", "internal_error")
    assert request(stack.base, "GET", "/v1/models", None, {"x-epd-hop": "1"}).status == 508
    assert all(workers.exchanges(role) == [] for role in ("render", "encode", "prefill", "decode"))


@pytest.mark.parametrize(
    "path",
    [
        "/v1//chat/completions",
        "/v1/./chat/completions",
        "/v1/x/../chat/completions",
        "/v1/chat/complet%69ons",
    ],
)
def test_a_disguised_path_cannot_skip_the_pipeline(
    path: str, stack: Stack, workers: SimulatedWorkers
) -> None:
    """A path that a worker would read as ours is ours: forged transfer parameters never reach decode."""
    forged = {"remote_host": "10.0.0.1", "do_remote_prefill": True}
    answer, line = stack.coordinate(chat("Look", CAT, kv_transfer_params=forged, max_tokens=200), path=path)
    assert "KV from prefill: hit" in answer.text
    assert line["outcome"] == "ok"
    (decode,) = workers.exchanges("decode")
    assert decode.body["kv_transfer_params"]["remote_host"] != "10.0.0.1"


def test_a_path_with_an_escaped_slash_is_refused(stack: Stack, workers: SimulatedWorkers) -> None:
    """An escaped slash is a 400 of Envoy: filter and worker could read it differently."""
    assert request(stack.base, "POST", "/v1/chat%2Fcompletions", chat()).status == 400
    assert workers.exchanges("decode") == []


def test_an_unknown_phase_is_a_404_on_the_internal_listener(
    workers: SimulatedWorkers, shared_stacks: Callable[[str, Variant], Stack]
) -> None:
    """The internal listener answers a phase it has no route for with a JSON 404."""
    stack = shared_stacks("none-nixl", NONE_NIXL)
    answer = request(stack.local.url(10001), "POST", CHAT, chat(), {"epp-profile": "train"})
    assert (answer.status, answer.headers["content-type"]) == (404, "application/json")
    assert "encode, prefill, decode" in answer.json["error"]["message"]
    assert all(workers.exchanges(role) == [] for role in ("encode", "prefill", "decode"))


def test_a_gateway_that_leads_back_is_a_508(
    own_stack: Callable[[Variant], Stack], workers: SimulatedWorkers
) -> None:
    """`gateway.address` wired to the external listener: the client learns of the loop after one round."""
    stack = own_stack(replace(NONE_NIXL, sections={"gateway": {"address": "http://127.0.0.1:10000"}}))
    answer, line = stack.coordinate(chat("Look", CAT))
    assert answer.status == 508, answer.body
    assert answer.json["error"]["code"] == "epd_loop"
    assert line["outcome"] == "internal_error"
    assert len(workers.exchanges("render")) == 1
    assert all(workers.exchanges(role) == [] for role in ("encode", "prefill", "decode"))


def access_log_format(name: str) -> dict[str, Any]:
    bootstrap = load_bootstrap(name, free_ports(), HERE / "unused")
    listener = bootstrap["static_resources"]["listeners"][0]["name"]
    (log,) = copy.deepcopy(manager(bootstrap, listener)["access_log"])
    format_: dict[str, Any] = log["typed_config"]["log_format"]["json_format"]
    return format_
