"""What the simulated deployment was asked, and every way in which that broke vLLM's contract.

Bodies are kept without their bulk: a long string or list leaves its SHA-256 and its length.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from sidecar.simulator.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sidecar.simulator.config import Role

_log = logging.getLogger(__name__)

_MAX_EXCHANGES = 8192
_MAX_VIOLATIONS = 1024
_MAX_STRING = 256
_MAX_LIST = 4096
_SECRET_HEADERS = frozenset(
    {"authorization", "proxy-authorization", "cookie", "x-api-key", "api-key", "x-epd-phase-token"}
)
REDACTED = "<redacted>"


@dataclass(frozen=True, slots=True)
class Violation:
    """One breach of the contract by whoever sent the request.

    Attributes:
        role: role that noticed.
        request_id: `x-request-id` of the request, "" when it had none.
        message: what is wrong.
        fatal: a real engine process would have died.
    """

    role: Role
    request_id: str
    message: str
    fatal: bool


@dataclass(slots=True)
class Exchange:
    """One request and its fate.

    Attributes:
        role: role that got it.
        method: HTTP method.
        path: path with query.
        headers: lower-case names; secret values are replaced by `<redacted>`.
        body: JSON body without its bulk, None when it is not JSON.
        body_bytes: size of the body as sent.
        status: status of the answer, None while there is none (hanging, dropped, abandoned).
        cancelled: the caller left before the answer was complete.
        violations: messages of the violations this request caused.
    """

    role: Role
    method: str
    path: str
    headers: dict[str, str]
    body: Any
    body_bytes: int
    status: int | None = None
    cancelled: bool = False
    violations: list[str] = field(default_factory=list)

    @property
    def request_id(self) -> str:
        """The `x-request-id` header, "" when absent."""
        return self.headers.get("x-request-id", "")


class Recorder:
    """The exchanges and violations since the last reset; the oldest are dropped beyond a few thousand."""

    def __init__(self) -> None:
        self.exchanges: deque[Exchange] = deque(maxlen=_MAX_EXCHANGES)
        self.violations: deque[Violation] = deque(maxlen=_MAX_VIOLATIONS)

    def begin(
        self,
        role: Role,
        method: str,
        path: str,
        headers: Mapping[str, str],
        *,
        body: object,
        body_bytes: int,
    ) -> Exchange:
        """Record a request as it arrives."""
        kept = {
            name.lower(): REDACTED if name.lower() in _SECRET_HEADERS else value
            for name, value in headers.items()
        }
        exchange = Exchange(role, method, path, kept, without_bulk(body), body_bytes)
        self.exchanges.append(exchange)
        return exchange

    def of(self, role: Role) -> list[Exchange]:
        """The exchanges of one role, oldest first."""
        return [exchange for exchange in self.exchanges if exchange.role == role]

    def violate(self, exchange: Exchange, message: str) -> None:
        """Record a breach that the engine survives."""
        self._add(exchange, message, fatal=False)
        _log.warning("contract violation at %s: %s", exchange.role, message)

    def crash(self, exchange: Exchange, message: str) -> ApiError:
        """Record what kills a real engine, and return the answer its last client would get."""
        self._add(exchange, message, fatal=True)
        _log.error("WOULD CRASH THE ENGINE: %s: %s", exchange.role, message)
        return ApiError(
            500,
            "EngineCore encountered an issue. See stack trace (above) for the root cause.",
            kind="InternalServerError",
        )

    def clear(self) -> None:
        """Forget everything."""
        self.exchanges.clear()
        self.violations.clear()

    def _add(self, exchange: Exchange, message: str, *, fatal: bool) -> None:
        exchange.violations.append(message)
        self.violations.append(Violation(exchange.role, exchange.request_id, message, fatal))


def without_bulk(value: object) -> object:
    """The same JSON value with long strings and long lists replaced by `<sha256 HEX length N>`."""
    match value:
        case str() if len(value) > _MAX_STRING:
            return _marker(value.encode("utf-8", "surrogatepass"), len(value))
        case list() if len(value) > _MAX_LIST:
            return _marker(msgspec.json.encode(value), len(value))
        case list():
            return [without_bulk(item) for item in value]
        case dict():
            return {name: without_bulk(item) for name, item in value.items()}
        case _:
            return value


def _marker(data: bytes, length: int) -> str:
    return f"<sha256 {hashlib.sha256(data).hexdigest()} length {length}>"
