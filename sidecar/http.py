"""The HTTP request as the filter sees it: a head of decoded headers, without any transport type."""

from __future__ import annotations

from dataclasses import dataclass

HeaderPairs = tuple[tuple[str, str], ...]
"""Header fields in arrival order: lower-case name, value decoded as latin-1 (byte for byte)."""


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
        for field, value in self.headers:
            if field == name:
                return value
        return None
