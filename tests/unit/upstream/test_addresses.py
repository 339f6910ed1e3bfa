from __future__ import annotations

import socket
from ipaddress import IPv4Address, IPv4Network, IPv6Address, ip_address
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.upstream.addresses import AddressPolicy, SystemLookUp

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PRIVATE = [IPv4Network(network) for network in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")]

v4_addresses = st.integers(0, 2**32 - 1).map(IPv4Address)


@pytest.mark.parametrize("allow_private_networks", [False, True])
@pytest.mark.parametrize(
    ("address", "kind"),
    [
        ("0.0.0.0", "unspecified"),
        ("0.1.2.3", "unspecified"),
        ("::", "unspecified"),
        ("127.0.0.1", "loopback"),
        ("127.255.255.254", "loopback"),
        ("::1", "loopback"),
        ("169.254.169.254", "link-local"),
        ("169.254.0.1", "link-local"),
        ("fe80::1", "link-local"),
        ("fe80::1%eth0", "link-local"),
        ("febf:ffff::1", "link-local"),
        ("100.64.0.1", "shared"),
        ("100.100.100.200", "shared"),
        ("100.127.255.255", "shared"),
        ("168.63.129.16", "cloud platform"),
        ("192.0.0.192", "reserved"),
        ("192.0.2.1", "documentation"),
        ("198.18.0.1", "benchmarking"),
        ("198.19.255.255", "benchmarking"),
        ("224.0.0.1", "multicast"),
        ("239.255.255.255", "multicast"),
        ("240.0.0.1", "reserved"),
        ("255.255.255.255", "broadcast"),
        ("fc00::1", "unique local"),
        ("fd00:ec2::254", "unique local"),
        ("fec0::1", "site-local"),
        ("ff02::1", "multicast"),
        ("2001:db8::1", "documentation"),
        ("2001:2::1", "reserved"),
        ("100::1", "reserved"),
        ("4000::1", "reserved"),
        ("64:ff9b:1::a00:1", "reserved"),
        ("::ffff:127.0.0.1", "IPv4-mapped"),
        ("::ffff:8.8.8.8", "IPv4-mapped"),
        ("::ffff:10.0.0.1", "IPv4-mapped"),
        ("::127.0.0.1", "IPv4-compatible"),
        ("64:ff9b::127.0.0.1", "loopback"),
        ("64:ff9b::169.254.169.254", "link-local"),
        ("2002:7f00:1::", "loopback"),
        ("2002:a9fe:a9fe::1", "link-local"),
        ("2001:0:808:808::80ff:fffe", "loopback"),
    ],
)
def test_always_blocked(address: str, kind: str, allow_private_networks: bool) -> None:
    """Everything that is not globally reachable is blocked, whatever the configuration, and is named."""
    reason = AddressPolicy(allow_private_networks).check(ip_address(address))
    assert reason is not None
    assert kind in reason


@pytest.mark.parametrize(
    "address",
    [
        "1.1.1.1",
        "8.8.8.8",
        "11.0.0.1",
        "100.63.255.255",
        "100.128.0.0",
        "126.255.255.255",
        "128.0.0.0",
        "169.253.255.255",
        "169.255.0.0",
        "172.15.255.255",
        "172.32.0.0",
        "192.167.255.255",
        "223.255.255.255",
        "2606:4700:4700::1111",
        "2a00:1450:4001::1",
        "64:ff9b::8.8.8.8",
        "2002:808:808::1",
    ],
)
def test_public_is_allowed(address: str) -> None:
    """Globally reachable unicast passes, up to the very edges of the blocked ranges."""
    assert AddressPolicy().check(ip_address(address)) is None


@pytest.mark.parametrize(
    "address",
    [
        "10.0.0.1",
        "10.255.255.255",
        "172.16.0.1",
        "172.31.255.255",
        "192.168.0.1",
        "64:ff9b::10.0.0.1",
        "2002:a00:1::",
    ],
)
def test_private_networks_are_a_choice(address: str) -> None:
    """RFC 1918 networks, also behind NAT64 and 6to4, are blocked unless the operator allows them."""
    reason = AddressPolicy().check(ip_address(address))
    assert reason is not None
    assert "allow_private_networks" in reason
    assert AddressPolicy(allow_private_networks=True).check(ip_address(address)) is None


@given(v4_addresses)
def test_never_laxer_than_the_standard_library(ip: IPv4Address) -> None:
    """What Python's own registry does not call global is blocked, RFC 1918 apart when allowed."""
    allowed = AddressPolicy(allow_private_networks=True).check(ip) is None
    assert not allowed or ip.is_global or any(ip in network for network in PRIVATE)
    assert AddressPolicy().check(ip) is not None or (ip.is_global and not ip.is_multicast)


@given(st.integers(0, 2**128 - 1).map(IPv6Address) | st.integers(2**125, 2**126 - 1).map(IPv6Address))
def test_v6_never_laxer_than_the_standard_library(ip: IPv6Address) -> None:
    """What Python's own registry does not call global is blocked among IPv6 addresses too."""
    assert AddressPolicy(allow_private_networks=True).check(ip) is not None or ip.is_global


@given(v4_addresses)
def test_mapped_forms_never_help(ip: IPv4Address) -> None:
    """No IPv4 address becomes reachable by mapping it into IPv6, translators reach what IPv4 reaches."""
    policy = AddressPolicy()
    assert policy.check(IPv6Address((0xFFFF << 32) | int(ip))) is not None
    assert policy.check(IPv6Address(int(ip))) is not None
    nat64 = IPv6Address((0x64FF9B << 96) | int(ip))
    six_to_four = IPv6Address((0x2002 << 112) | (int(ip) << 80) | 1)
    teredo = IPv6Address((0x20010000 << 96) | (int(ip) ^ 0xFFFFFFFF))
    assert [policy.check(form) for form in (nat64, six_to_four, teredo)] == [policy.check(ip)] * 3


@pytest.fixture
async def look_up() -> AsyncIterator[SystemLookUp]:
    look_up = SystemLookUp()
    yield look_up
    look_up.close()


@pytest.mark.parametrize("host", ["0x7f.1", "0x7f000001", "localhost"])
async def test_system_look_up(look_up: SystemLookUp, host: str) -> None:
    """Names and the system's own number formats come out as addresses that can be judged."""
    addresses = await look_up(host)
    assert addresses
    assert all(ip_address(address).is_loopback for address in addresses)


@pytest.mark.parametrize("host", ["a..b", "a" * 64 + ".example", "." * 3])
async def test_malformed_names_do_not_resolve(look_up: SystemLookUp, host: str) -> None:
    """A name that no query can carry counts as one that does not resolve."""
    with pytest.raises(socket.gaierror):
        await look_up(host)
