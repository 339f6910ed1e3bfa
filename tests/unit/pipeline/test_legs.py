from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from sidecar.control_headers import ControlHeaders
from sidecar.http import RequestHead
from sidecar.pipeline.legs import LegHeaders
from tests.unit.pipeline.pipeline_support import FORWARDED, PHASE_TOKEN, REQUEST_ID, TRACEPARENT

if TYPE_CHECKING:
    from sidecar.http import HeaderPairs

IDENTITY = {"x-request-id": REQUEST_ID, "traceparent": TRACEPARENT, "x-epd-hop": "1"}


def legs(*headers: tuple[str, str], token: str = "", strip: tuple[str, ...] = ()) -> LegHeaders:
    return LegHeaders(
        RequestHead("POST", "/v1/chat/completions", "", headers),
        REQUEST_ID,
        TRACEPARENT,
        control_headers=ControlHeaders({*strip, FORWARDED}),
        phase_token=token,
        forwarded=(FORWARDED,),
    )


def unique(headers: HeaderPairs) -> dict[str, str]:
    names = [name for name, _ in headers]
    assert len(names) == len(set(names)), f"a header twice: {names}"
    assert all(name == name.lower() for name in names)
    return dict(headers)


def test_a_phase_names_itself_and_the_request() -> None:
    """A call to the gateway says which phase it is, in JSON, under the request's id and trace."""
    headers = unique(legs(("authorization", "Bearer k"), ("x-tenant", "t")).phase("encode"))
    assert headers == {
        "authorization": "Bearer k",
        "x-tenant": "t",
        "content-type": "application/json",
        "epp-profile": "encode",
        **IDENTITY,
    }


def test_render_has_neither_phase_nor_token() -> None:
    """The render service gets the client's headers and the request's identity, nothing of the gateway's."""
    headers = unique(legs(("authorization", "Bearer k"), token=PHASE_TOKEN).render())
    assert headers == {"authorization": "Bearer k", "content-type": "application/json", **IDENTITY}


def test_the_token_goes_to_the_gateway_only() -> None:
    """The phase token is on sub-requests to the gateway, never on render or decode."""
    built = legs(token=PHASE_TOKEN)
    assert unique(built.phase("prefill"))["x-epd-phase-token"] == PHASE_TOKEN
    assert PHASE_TOKEN not in str(built.render())
    assert PHASE_TOKEN not in str(built.decode())
    assert "x-epd-phase-token" not in unique(legs().phase("prefill"))


@pytest.mark.parametrize(
    "name",
    [
        "connection",
        "keep-alive",
        "proxy-connection",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "http2-settings",
        "host",
        "content-length",
        "content-type",
        "content-encoding",
        "accept-encoding",
        "expect",
        "epp-profile",
        "x-epd-phase-token",
        "x-epd-hop",
        "prefer",
        "x-gateway-destination-endpoint",
        "x-gateway-destination-endpoint-subset",
        "x-prefiller-host-port",
        "x-prefiller-url",
        "x-encoder-hosts-ports",
        "x-data-parallel-rank",
        "x-request-id",
        "traceparent",
        FORWARDED,
    ],
)
def test_what_a_client_may_not_send_on(name: str) -> None:
    """Hop-by-hop, framing and control headers of the client are on no sub-request."""
    built = legs((name, "from-client"), ("x-kept", "1"))
    for headers in (built.render(), built.phase("encode"), built.phase("prefill"), built.decode()):
        assert "from-client" not in dict(headers).get(name, "")
    assert unique(built.phase("encode"))["x-kept"] == "1"


@pytest.mark.parametrize("value", ["x-secret", "close, X-Secret", "keep-alive,x-secret ,", " x-secret"])
def test_headers_listed_in_connection_are_hop_by_hop(value: str) -> None:
    """What the client's Connection header names is for the next hop only."""
    built = legs(("connection", "x-other"), ("connection", value), ("x-secret", "s"), ("x-other", "o"))
    for headers in (built.render(), built.phase("encode")):
        assert not {"x-secret", "x-other"} & set(unique(headers))


def test_the_deployment_can_strip_more() -> None:
    """Names of `headers.strip` are on no sub-request, and removed from decode."""
    built = legs(("x-internal", "1"), strip=("x-internal",))
    assert "x-internal" not in unique(built.render())
    assert built.removed_from_decode() == ("x-internal",)


def test_repeated_client_headers_stay_repeated() -> None:
    """Two fields of one name arrive as two, in order."""
    headers = legs(("x-a", "1"), ("x-b", "2"), ("x-a", "3")).phase("encode")
    assert [pair for pair in headers if pair[0] in {"x-a", "x-b"}] == [
        ("x-a", "1"),
        ("x-b", "2"),
        ("x-a", "3"),
    ]


def test_a_forwarded_response_header_is_on_every_later_phase() -> None:
    """What one phase answered goes to the next ones and to decode; a newer answer replaces it."""
    built = legs((FORWARDED, "from-client"))
    assert FORWARDED not in unique(built.phase("encode"))
    built.carry({FORWARDED: "r1", "x-other": "no"})
    assert unique(built.phase("prefill"))[FORWARDED] == "r1"
    assert "x-other" not in unique(built.phase("prefill"))
    built.carry({})
    built.carry({FORWARDED: "r2"})
    assert unique(built.decode())[FORWARDED] == "r2"


def test_decode_sets_identity_and_phase_and_removes_the_clients_control_headers() -> None:
    """Envoy overwrites the identity, adds the phase and drops what the client forged."""
    built = legs(
        ("x-prefiller-url", "http://10.6.6.6"),
        ("authorization", "Bearer k"),
        ("x-gateway-destination-endpoint-x", "10.6.6.6"),
        ("prefer", "if-available"),
        ("prefer", "again"),
    )
    assert unique(built.decode()) == {"epp-profile": "decode", **IDENTITY}
    assert built.removed_from_decode() == (
        "x-prefiller-url",
        "x-gateway-destination-endpoint-x",
        "prefer",
    )


def test_the_state_of_another_trace_is_dropped() -> None:
    """`tracestate` belongs to the client's `traceparent`: with a new one it goes on to no leg."""
    built = legs(("traceparent", "00-nonsense"), ("tracestate", "vendor=1"))
    assert "tracestate" not in unique(built.phase("encode"))
    assert "tracestate" in built.removed_from_decode()


def test_the_state_of_the_clients_own_trace_stays() -> None:
    """With the client's `traceparent` its `tracestate` travels on every leg."""
    built = legs(("traceparent", TRACEPARENT), ("tracestate", "vendor=1"))
    assert unique(built.phase("encode"))["tracestate"] == "vendor=1"
    assert "tracestate" not in built.removed_from_decode()
