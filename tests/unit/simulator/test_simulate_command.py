"""The simulator as a program."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
from typing import TYPE_CHECKING

import aiohttp
import pytest

from sidecar.simulator import SimulatorConfig, add_arguments, run
from sidecar.simulator.command import _config

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

FREE_PORTS = [f"--{role}-port=0" for role in ("render", "encode", "prefill", "decode")]
PROGRAM = (
    "import argparse, sys; from sidecar.simulator import add_arguments, run; "
    "parser = argparse.ArgumentParser(); add_arguments(parser); sys.exit(run(parser.parse_args()))"
)


@contextlib.asynccontextmanager
async def _started(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, *FREE_PORTS, *arguments, stdout=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def _parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(arguments)


async def test_program_prints_its_addresses_and_stops_on_sigterm() -> None:
    """One JSON line names every listener, the options take effect, and SIGTERM ends it with 0."""
    async with _started("--model", "m", "--fault", "decode=status:503*1", "--tensor-bytes", "100") as process:
        assert process.stdout is not None
        urls = json.loads(await process.stdout.readline())
        assert set(urls) == {"render", "encode", "prefill", "decode", "admin"}
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{urls['render']}/v1/models") as response:
                assert [model["id"] for model in (await response.json())["data"]] == ["m"]
            async with session.post(f"{urls['decode']}/v1/completions", json={"prompt": "x"}) as response:
                assert response.status == 503
            async with session.get(f"{urls['admin']}/simulator/exchanges") as response:
                assert len((await response.json())["decode"]) == 1
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0


def test_options_of_the_sglang_pair() -> None:
    """They set the knobs of the same names, and `reserve` stands beside the roles."""
    options = ["--kv-connector=sglang", "--bootstrap-port=9", "--bootstrap-timeout=1.5"]
    config = _config(_parse(*options, "--fault", "reserve=header:x:1*2", "--latency", "reserve=2"))
    assert (config.kv_connector, config.bootstrap_port, config.bootstrap_timeout) == ("sglang", 9, 1.5)
    assert (config.faults, config.latency) == ({"reserve": "header:x:1*2"}, {"reserve": 2})
    assert _config(_parse()).bootstrap_timeout == SimulatorConfig().bootstrap_timeout
    assert _config(_parse()).bootstrap_port == SimulatorConfig().bootstrap_port


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fault", "decode"], "ROLE=VALUE"),
        (["--fault", "router=hang"], "ROLE=VALUE"),
        (["--fault", "decode=bang"], "'bang'"),
        (["--latency", "decode=slow"], "'slow'"),
        (["--latency", "decode=-1"], "'-1'"),
        (["--tensor-bytes", "x"], "'x'"),
        (["--render-port", "99999"], "--render-port"),
        (["--tensor-bytes", "3"], "tensor_bytes: 3"),
        (["--bootstrap-port", "0"], "bootstrap_port: 0"),
        (["--bootstrap-timeout", "0"], "bootstrap_timeout: 0"),
        (["--fault", "prefill=no-header"], "'no-header'"),
    ],
)
def test_impossible_options_are_explained(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 2 and one line that names the value."""
    assert run(_parse(*arguments)) == 2
    assert message in capsys.readouterr().err
