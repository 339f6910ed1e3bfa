"""How long a request took, and how much of that was spent waiting for somebody else."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class Stopwatch:
    """Runs from the arrival of the request's headers.

    Waiting is the union of all intervals in which at least one upstream call, or the client's own upload, is
    outstanding; parallel calls count once.
    """

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._outstanding = 0
        self._wait_started = 0.0
        self._waited = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark a wait for an upstream or for the client."""
        if self._outstanding == 0:
            self._wait_started = time.perf_counter()
        self._outstanding += 1
        try:
            yield
        finally:
            self._outstanding -= 1
            if self._outstanding == 0:
                self._waited += time.perf_counter() - self._wait_started

    def total_ms(self) -> float:
        """Milliseconds since the headers arrived."""
        return (time.perf_counter() - self._started) * 1000

    def overhead_ms(self) -> float:
        """Milliseconds of the total that the sidecar spent itself."""
        waited = self._waited
        if self._outstanding:
            waited += time.perf_counter() - self._wait_started
        return max(0.0, self.total_ms() - waited * 1000)
