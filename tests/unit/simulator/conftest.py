"""A simulator on free ports, and a caller for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import aiohttp
import pytest

from sidecar.simulator import Simulator
from tests.unit.simulator.simulator_caller import Caller

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def simulator() -> AsyncIterator[Simulator]:
    async with Simulator() as running:
        yield running


@pytest.fixture
async def caller(simulator: Simulator) -> AsyncIterator[Caller]:
    async with aiohttp.ClientSession() as session:
        yield Caller(simulator, session)
