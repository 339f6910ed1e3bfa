from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.connectors.sglang import bootstrap_fields, reserved_host

if TYPE_CHECKING:
    import ipaddress


@given(st.ip_addresses(v=4).filter(lambda a: not (a.is_unspecified or a.is_multicast)), st.integers(1, 65535))
def test_an_ipv4_endpoint_gives_its_address(address: ipaddress.IPv4Address, port: int) -> None:
    """`ip:port` names the worker; the port is that of its HTTP server, not of its bootstrap server."""
    assert reserved_host(f"{address}:{port}") == str(address)


@given(st.ip_addresses(v=6).filter(lambda a: not (a.is_unspecified or a.is_multicast)), st.integers(1, 65535))
def test_an_ipv6_endpoint_gives_its_address_in_brackets(address: ipaddress.IPv6Address, port: int) -> None:
    """Older SGLang puts host and port together as they are, newer takes the brackets off again."""
    assert reserved_host(f"[{address}]:{port}") == f"[{address}]"


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "10.0.0.1",
        "10.0.0.1:",
        ":8000",
        "10.0.0.1:0",
        "10.0.0.1:65536",
        "10.0.0.1:80000000000000000000",
        "10.0.0.1:8000,10.0.0.2:8000",
        " 10.0.0.1:8000",
        "10.0.0.1:8000 ",
        "10.0.0.1:8000\n",
        "10.0.0.01:8000",
        "10.0.0.256:8000",
        "10.0.1:8000",
        "[10.0.0.1]:8000",
        "::1:8000",
        "[::1]",
        "[fe80::1%eth0]:8000",
        "0.0.0.0:8000",
        "[::]:8000",
        "224.0.0.1:8000",
        "prefill-0.prefill:8000",
        "http://10.0.0.1:8000",
        "10.0.0.1:\u0661\u0662",
        "[]:1",
    ],
)
def test_anything_else_names_no_worker(endpoint: str) -> None:
    """What is written into an engine's request is one address, never a name, a list or a wildcard."""
    with pytest.raises(ValueError, match="not"):
        reserved_host(endpoint)


def test_each_request_meets_in_a_room_of_its_own() -> None:
    """Rooms are random, and leave numbers above them for further samples; host and port are as given."""
    fields = [bootstrap_fields("10.0.0.1", 8998) for _ in range(200)]
    rooms = {field["bootstrap_room"] for field in fields}
    assert len(rooms) == 200
    assert all(0 <= room < 1 << 62 for room in rooms)
    assert max(rooms) > 1 << 59
    assert {(field["bootstrap_host"], field["bootstrap_port"]) for field in fields} == {("10.0.0.1", 8998)}
