"""The HTTP request as the filter sees it: a head of decoded headers, without any transport type."""

from __future__ import annotations

from dataclasses import dataclass

HeaderPairs = tuple[tuple[str, str], ...]
"""Header fields in arrival order: lower-case name, value decoded as latin-1 (byte for byte)."""


HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
"""Fields about the connection a message came on (RFC 9110, 7.6.1)."""


def first_value(headers: HeaderPairs, name: str) -> str | None:
    """The first value of a field (lower-case name), or None."""
    for field, value in headers:
        if field == name:
            return value
    return None


def connection_options(headers: HeaderPairs) -> frozenset[str]:
    """Further fields about the connection, as its `connection` fields name them."""
    listed = (value for name, value in headers if name == "connection")
    return frozenset(option.strip().lower() for value in listed for option in value.split(","))


@dataclass(frozen=True, slots=True)
class RequestHead:
    """Method, path and headers of one request.

    Attributes:
        method: upper-case HTTP method.
        path: request path without the query string.
        query: query string without the question mark, "" when absent.
        headers: all fields but the pseudo-headers.
    """

    method: str
    path: str
    query: str
    headers: HeaderPairs

    def get(self, name: str) -> str | None:
        """The first value of a header (lower-case name), or None."""
        return first_value(self.headers, name)
