"""Addresses as the options write them: `host:port`, `[v6]:port`, `unix:/path`."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from sidecar.config.values import quoted, split_listen_address

_UNIX = "unix:"
_LONGEST_SOCKET_PATH = 107
"""Octets of a unix socket path on Linux, without the closing zero."""


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A TCP endpoint.

    Attributes:
        host: IP address (IPv6 without brackets) or name.
        port: 1..65535.
    """

    host: str
    port: int

    @property
    def is_name(self) -> bool:
        """Whether the host has to be resolved."""
        return ip_of(self.host) is None

    @property
    def is_loopback(self) -> bool:
        """Whether only this host reaches it."""
        address = ip_of(self.host)
        return address is not None and address.is_loopback

    @property
    def is_wildcard(self) -> bool:
        """Whether it stands for every address of the host."""
        address = ip_of(self.host)
        return address is not None and address.is_unspecified

    @property
    def is_multicast(self) -> bool:
        """Whether nobody can be connected to, or listen, there."""
        address = ip_of(self.host)
        return address is not None and address.is_multicast

    def collides(self, other: TcpAddress) -> bool:
        """Whether the two cannot be listened on at the same time."""
        return self.port == other.port and (self.host == other.host or self.is_wildcard or other.is_wildcard)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class SocketPath:
    """A unix socket.

    Attributes:
        path: absolute path.
    """

    path: str

    def __str__(self) -> str:
        return f"{_UNIX}{self.path}"


Address = TcpAddress | SocketPath


def ip_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address a host is, or None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def parse_address(text: str) -> Address:
    """What Envoy connects to; raises ValueError with the form to write instead."""
    if text.startswith(_UNIX):
        path = text.removeprefix(_UNIX)
        if path.startswith("/") and path.isprintable() and len(path.encode()) <= _LONGEST_SOCKET_PATH:
            return SocketPath(path)
        raise ValueError(
            f'{quoted(text)} is not a socket path; write "unix:" and an absolute path of up to '
            f"{_LONGEST_SOCKET_PATH} bytes"
        )
    address = _tcp(text)
    if address is None or address.is_wildcard:
        raise ValueError(f"{quoted(text)} is not an address; write host:port, [v6]:port or unix:/path")
    return address


def parse_listen(text: str) -> TcpAddress:
    """What Envoy binds; raises ValueError with the form to write instead."""
    address = _tcp(text)
    if address is None or address.is_name:
        raise ValueError(
            f"{quoted(text)} is not an address that Envoy can bind; write an IP address and a port, such as "
            "127.0.0.1:10000 or 0.0.0.0:10000"
        )
    return address


def is_host(text: str) -> bool:
    """Whether a text is an IP address or a host name."""
    return _tcp(f"[{text}]:1" if ":" in text else f"{text}:1") is not None


def _tcp(text: str) -> TcpAddress | None:
    try:
        host, port = split_listen_address(text)
    except ValueError:
        return None
    address = TcpAddress(host, port)
    return address if port and not address.is_multicast else None
