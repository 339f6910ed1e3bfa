from __future__ import annotations

import pytest

from sidecar.errors import Overloaded
from sidecar.limits import InFlightBudget


def test_requests_over_the_limit_are_refused_until_one_ends() -> None:
    """The request after the last free slot gets 503 with retry-after; a slot comes back with its request."""
    budget = InFlightBudget(max_requests=2, max_bytes=100)
    with budget.admit():
        with budget.admit():
            with pytest.raises(Overloaded, match=r"limits\.max_in_flight_requests: 2") as refused:
                budget.admit()
            assert (refused.value.status, refused.value.code) == (503, "epd_overloaded")
            assert refused.value.retry_after
        with budget.admit():
            assert budget.requests == 2
    assert budget.requests == 0


def test_bytes_over_the_limit_are_refused_and_not_charged() -> None:
    """The budget can be used to its last byte; a charge that does not fit leaves it as it was."""
    budget = InFlightBudget(max_requests=2, max_bytes=3 << 20)
    with budget.admit() as first, budget.admit() as second:
        first.reserve(2 << 20)
        second.reserve(1 << 20)
        with pytest.raises(Overloaded, match=r"limits\.max_in_flight_bytes: 3 MB"):
            second.reserve(1)
        assert budget.bytes == 3 << 20
        first.release(1)
        second.reserve(1)
        assert budget.bytes == 3 << 20


def test_a_request_gives_back_all_it_holds_however_it_ends() -> None:
    """After a failure the budget is as if the request had never been there."""
    budget = InFlightBudget(max_requests=1, max_bytes=10)

    def fail() -> None:
        with budget.admit() as ticket:
            ticket.reserve(7)
            ticket.reserve(3)
            ticket.release(4)
            raise LookupError

    with pytest.raises(LookupError):
        fail()
    assert (budget.requests, budget.bytes) == (0, 0)


def test_a_refused_charge_is_not_given_back_later() -> None:
    """What was never charged is not credited when the request ends."""
    budget = InFlightBudget(max_requests=2, max_bytes=10)
    with budget.admit() as other:
        other.reserve(6)
        with budget.admit() as ticket, pytest.raises(Overloaded):
            ticket.reserve(5)
        assert budget.bytes == 6
