"""Which addresses the sidecar connects to when a client names the host, and the connector that holds to it.

The rule is default-deny: only what the IANA special-purpose registries list as globally reachable unicast may
be reached, plus RFC 1918 networks when the operator allows them. IPv6 forms that carry an IPv4 address to a
translator or relay (NAT64, 6to4, Teredo) are judged by the address they carry.
"""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import TYPE_CHECKING, Protocol

from aiohttp import TCPConnector
from aiohttp.abc import AbstractResolver, ResolveResult

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from aiohttp import AddrInfoType

    LookUp = Callable[[str], Awaitable[Iterable[str]]]

IPAddress = IPv4Address | IPv6Address


class AddressCheck(Protocol):
    """Judges one address right before a connection to it is opened."""

    def check(self, ip: IPAddress) -> str | None:
        """The kind of address that is refused (`"a loopback address"`), or None when it may be reached."""


class AddressBlocked(OSError):
    """An address was refused by the policy; an OSError so that it travels through the connector unchanged.

    Attributes:
        reason: what kind of address it is; never the address itself, which would map the internal DNS.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


_PRIVATE_NETWORKS = tuple(map(IPv4Network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")))

_BLOCKED_V4 = tuple(
    (IPv4Network(network), reason)
    for network, reason in (
        ("0.0.0.0/8", "an unspecified address"),
        ("100.64.0.0/10", "a shared (carrier-grade NAT) address"),
        ("127.0.0.0/8", "a loopback address"),
        (
            "168.63.129.16/32",
            "a cloud platform address",
        ),  # Azure's host agent, on an otherwise public network
        ("169.254.0.0/16", "a link-local address"),
        ("192.0.0.0/24", "a reserved address"),
        ("192.0.2.0/24", "a documentation address"),
        ("192.88.99.0/24", "a reserved address"),
        ("198.18.0.0/15", "a benchmarking address"),
        ("198.51.100.0/24", "a documentation address"),
        ("203.0.113.0/24", "a documentation address"),
        ("224.0.0.0/4", "a multicast address"),
        ("255.255.255.255/32", "a broadcast address"),
        ("240.0.0.0/4", "a reserved address"),
    )
)

_GLOBAL_UNICAST_V6 = IPv6Network("2000::/3")
_NAT64 = IPv6Network("64:ff9b::/96")
_BLOCKED_V6 = tuple(
    (IPv6Network(network), reason)
    for network, reason in (
        ("::/128", "an unspecified address"),
        ("::1/128", "a loopback address"),
        ("::ffff:0:0/96", "an IPv4-mapped address"),
        ("::/96", "an IPv4-compatible address"),
        ("2001::/23", "a reserved address"),
        ("2001:db8::/32", "a documentation address"),
        ("3fff::/20", "a documentation address"),
        ("fc00::/7", "a unique local address"),
        ("fe80::/10", "a link-local address"),
        ("fec0::/10", "a site-local address"),
        ("ff00::/8", "a multicast address"),
    )
)


class AddressPolicy:
    """The address rule of the media fetcher.

    Args:
        allow_private_networks: let RFC 1918 networks through; nothing opens the other blocked ranges.
    """

    def __init__(self, allow_private_networks: bool = False) -> None:
        self._allow_private_networks = allow_private_networks

    def check(self, ip: IPAddress) -> str | None:
        """The kind of address that is refused (`"a loopback address"`), or None when it may be reached."""
        if isinstance(ip, IPv6Address):
            return self._check_v6(ip)
        if not self._allow_private_networks and any(ip in network for network in _PRIVATE_NETWORKS):
            return "a private network address (allow_private_networks is off)"
        return next((reason for network, reason in _BLOCKED_V4 if ip in network), None)

    def _check_v6(self, ip: IPv6Address) -> str | None:
        embedded = _embedded_v4(ip)
        if embedded is not None:
            return self.check(embedded)
        for network, reason in _BLOCKED_V6:
            if ip in network:
                return reason
        return None if ip in _GLOBAL_UNICAST_V6 else "a reserved address"


def _embedded_v4(ip: IPv6Address) -> IPv4Address | None:
    """The IPv4 host behind a NAT64, 6to4 or Teredo address.

    Mapped and compatible forms are not among them: no name resolves to one, they only serve to dress up an
    IPv4 address, so they are blocked as such.
    """
    if ip in _NAT64:
        return IPv4Address(int(ip) & 0xFFFFFFFF)
    if ip.teredo is not None:
        return ip.teredo[1]
    return ip.sixtofour


class SystemLookUp:
    """Name look-ups by the system's resolver, on threads of their own.

    A client chooses these names; one that answers slowly must not hold up the look-ups of the gateway, which
    share the event loop's default threads.
    """

    _THREADS = 16

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(self._THREADS, thread_name_prefix="media-dns")

    async def __call__(self, host: str) -> list[str]:
        """All addresses of a host; also reads the numeric forms of IPv4 (`0x7f.1`).

        Raises:
            OSError: the name does not resolve.
        """
        ask = partial(socket.getaddrinfo, host, None, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
        try:
            answers = await asyncio.get_running_loop().run_in_executor(self._threads, ask)
        except UnicodeError:
            # An empty label or one over 63 characters fails in the codec, before any query.
            raise socket.gaierror(socket.EAI_NONAME, "not a valid host name") from None
        return [str(address[0]) for *_, address in answers]

    def close(self) -> None:
        """Drop the look-ups that wait; those that run end by the resolver's own timeout."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def guarded_connector(policy: AddressCheck, look_up: LookUp, *, max_connections: int) -> TCPConnector:
    """A connector that reaches only addresses the policy lets through.

    The address is judged when its socket is opened: the very address that is connected to, whatever a name
    resolves to at another time, and also a literal in the URL, which never sees a resolver. A pooled
    connection was judged when it was opened and stays with that peer. Requests fail with a
    `ClientConnectorError` whose `os_error` is the AddressBlocked.

    Args:
        policy: judges each address.
        look_up: all addresses of a host name; raises OSError.
        max_connections: open at a time; further requests wait.
    """

    def open_socket(target: AddrInfoType) -> socket.socket:
        family, kind, protocol, _, address = target
        reason = _judge(policy, str(address[0]))
        if reason is not None:
            raise AddressBlocked(reason)
        return socket.socket(family, kind, protocol)

    return TCPConnector(
        resolver=_GuardedResolver(policy, look_up),
        socket_factory=open_socket,
        use_dns_cache=False,
        limit=max_connections,
    )


class _GuardedResolver(AbstractResolver):
    """Leaves out the blocked addresses of a name.

    One blocked address does not condemn the name: hosts of a dual-stack network publish a unique local
    address next to the public one, and an address that is left out is never connected to.
    """

    def __init__(self, policy: AddressCheck, look_up: LookUp) -> None:
        self._policy = policy
        self._look_up = look_up

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        verdicts = {address: _judge(self._policy, address) for address in await self._look_up(host)}
        if not verdicts:
            raise socket.gaierror(socket.EAI_NONAME, "no addresses")
        allowed = [address for address, reason in verdicts.items() if reason is None]
        if not allowed:
            raise AddressBlocked(next(filter(None, verdicts.values())))
        return [
            ResolveResult(hostname=host, host=address, port=port, family=family, proto=0, flags=0)
            for address in allowed
        ]

    async def close(self) -> None:
        """Nothing to release: whoever made the look-up closes it."""


def _judge(policy: AddressCheck, address: str) -> str | None:
    try:
        ip = ip_address(address)
    except ValueError:
        return "not a canonical IP address"
    return policy.check(ip)
