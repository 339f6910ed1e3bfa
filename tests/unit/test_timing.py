from __future__ import annotations

from types import SimpleNamespace

import pytest

from sidecar.observability.timing import Stopwatch


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("sidecar.observability.timing.time", SimpleNamespace(perf_counter=clock.perf_counter))
    return clock


def test_overhead_is_the_time_nobody_else_took(clock: Clock) -> None:
    """Waiting for an upstream is part of the total, not of the overhead."""
    watch = Stopwatch()
    clock.now += 0.25
    with watch.waiting():
        clock.now += 3
    clock.now += 0.5
    assert watch.total_ms() == pytest.approx(3750)
    assert watch.overhead_ms() == pytest.approx(750)


def test_parallel_waits_count_once(clock: Clock) -> None:
    """Overlapping calls count as the union of their intervals."""
    watch = Stopwatch()
    first, second = watch.waiting(), watch.waiting()
    with first:
        clock.now += 1
        second.__enter__()
        clock.now += 1
    clock.now += 1
    second.__exit__(None, None, None)
    clock.now += 0.125
    with watch.waiting():
        clock.now += 1
    assert watch.total_ms() == pytest.approx(4125)
    assert watch.overhead_ms() == pytest.approx(125)


def test_a_wait_still_running_is_no_overhead(clock: Clock) -> None:
    """A record written while a call is outstanding does not call the wait overhead."""
    watch = Stopwatch()
    clock.now += 0.5
    with watch.waiting():
        clock.now += 2
        assert watch.overhead_ms() == pytest.approx(500)


def test_a_wait_that_fails_ends(clock: Clock) -> None:
    """An exception inside a wait ends it; what follows is overhead again."""
    watch = Stopwatch()

    def fail() -> None:
        with watch.waiting():
            clock.now += 2
            raise LookupError

    with pytest.raises(LookupError):
        fail()
    clock.now += 1
    assert watch.overhead_ms() == pytest.approx(1000)


def test_overhead_is_never_negative(clock: Clock) -> None:
    """Rounding of the clock cannot make the overhead negative."""
    watch = Stopwatch()
    with watch.waiting():
        clock.now += 0.1
        clock.now += 0.2
    assert watch.overhead_ms() >= 0
