"""What one sidecar process may hold at a time: requests, and the bytes that belong to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from sidecar.errors import Overloaded

if TYPE_CHECKING:
    from types import TracebackType


class InFlightBudget:
    """Admission control of the process.

    Args:
        max_requests: coordinated requests at a time.
        max_bytes: client bodies, render answers and downloaded media held at a time, in bytes.
    """

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self.requests = 0
        self.bytes = 0

    def admit(self) -> Ticket:
        """A ticket for one request; raises Overloaded when there are too many."""
        if self.requests >= self._max_requests:
            raise Overloaded(
                f"too many requests in flight (limits.max_in_flight_requests: {self._max_requests}); "
                "retry later"
            )
        return Ticket(self)

    def reserve(self, count: int) -> None:
        """Take `count` bytes; raises Overloaded when they do not fit."""
        if self.bytes + count > self._max_bytes:
            raise Overloaded(
                f"too many bytes in flight (limits.max_in_flight_bytes: {self._max_bytes >> 20} MB); "
                "retry later"
            )
        self.bytes += count


class Ticket:
    """One request's share of the budget; given back as a whole when its last holder ends."""

    def __init__(self, budget: InFlightBudget) -> None:
        self._budget = budget
        self._bytes = 0
        self._holders = 0

    def reserve(self, count: int) -> None:
        """Charge `count` more bytes to this request; raises Overloaded when the process is full."""
        self._budget.reserve(count)
        self._bytes += count

    def release(self, count: int) -> None:
        """Give back `count` bytes this request no longer holds."""
        self._budget.bytes -= count
        self._bytes -= count

    def __enter__(self) -> Self:
        self._holders += 1
        if self._holders == 1:
            self._budget.requests += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._holders -= 1
        if self._holders == 0:
            self._budget.requests -= 1
            self._budget.bytes -= self._bytes
            self._bytes = 0
