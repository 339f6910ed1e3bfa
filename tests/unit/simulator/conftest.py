"""A simulator on free ports, and a caller for it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import pytest

from sidecar.simulator import Simulator

sys.path.insert(0, str(Path(__file__).resolve().parent))

from simulator_caller import Caller  # found through the path set above

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
