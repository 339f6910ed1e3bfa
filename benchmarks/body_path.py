"""Measures the request body path: one render answer with megabytes of tensors, one encode call per item.

Each variant runs in a process of its own against the same stand-in upstreams, so its CPU time and its peak
memory are its own. `sidecar` is the real pipeline; `parse` is what a straightforward service does (decode the
JSON, build each body, encode it again) with the same HTTP client. Compare the two as a ratio: the machine may
be shared.

usage: python benchmarks/body_path.py [--entries N] [--megabytes N] [--runs N]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import subprocess
import sys
import time
from contextlib import AsyncExitStack, ExitStack
from multiprocessing import Process, Queue
from typing import TYPE_CHECKING

import aiohttp
from aiohttp import web

from sidecar.api import api_for_path
from sidecar.assembly import build_pipeline
from sidecar.config import load_settings
from sidecar.http import RequestHead
from sidecar.limits import InFlightBudget
from sidecar.observability.record import AccessRecord
from sidecar.observability.timing import Stopwatch
from sidecar.pipeline.request import InboundRequest

if TYPE_CHECKING:
    from sidecar.config import Settings
    from sidecar.pipeline.runner import Pipeline

_SPAN = 64
_IMAGE_PAD = 151655
_PIXEL = "data:image/png;base64,iVBORw0KGgo="


def _render_answer(entries: int, megabytes: int) -> bytes:
    tensors = "A" * (megabytes << 20)
    token_ids = [1]
    placeholders = []
    for _ in range(entries):
        placeholders.append({"offset": len(token_ids), "length": _SPAN})
        token_ids += [_IMAGE_PAD] * _SPAN
    features = {
        "mm_hashes": {"image": [f"{index:064x}" for index in range(entries)]},
        "mm_placeholders": {"image": placeholders},
        "kwargs_data": {"image": [tensors] * entries},
        "mm_metadata": None,
    }
    return json.dumps({"token_ids": token_ids, "features": features, "sampling_params": {}}).encode()


def _client_body(entries: int) -> bytes:
    part = {"type": "image_url", "image_url": {"url": _PIXEL}}
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": [part] * entries}]}).encode()


async def _serve_upstreams(answer: bytes, ports: Queue[int]) -> None:
    async def render(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=answer, content_type="application/json")

    async def phase(request: web.Request) -> web.Response:
        async for _ in request.content.iter_any():
            pass
        return web.json_response({"choices": [], "ec_transfer_params": None, "kv_transfer_params": None})

    app = web.Application(client_max_size=1 << 30)
    app.add_routes(
        [web.post("/v1/chat/completions/render", render), web.post("/inference/v1/generate", phase)]
    )
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    ports.put(runner.addresses[0][1])
    await asyncio.Event().wait()


def _upstreams(entries: int, megabytes: int, ports: Queue[int]) -> None:
    asyncio.run(_serve_upstreams(_render_answer(entries, megabytes), ports))


async def _run_sidecar(base: str, entries: int, runs: int) -> None:
    async with AsyncExitStack() as stack:
        pipeline = await build_pipeline(_settings(base), stack, user_agent="benchmark", parity=None)
        for _ in range(runs):
            await _one_request(pipeline, entries)


def _settings(base: str) -> Settings:
    environ = {
        "SIDECAR__GATEWAY__ADDRESS": base,
        "SIDECAR__PIPELINE__USE_OPENAI_FORMAT": "false",
        "SIDECAR__PIPELINE__STEPS": json.dumps(
            [{"type": "render", "params": {"address": base}}, {"type": "encode"}, {"type": "decode"}]
        ),
    }
    settings, _ = load_settings(None, environ)
    return settings


async def _one_request(pipeline: Pipeline, entries: int) -> None:
    path = "/v1/chat/completions"
    api = api_for_path(path)
    if api is None:
        raise RuntimeError(f"no API owns {path}")
    with InFlightBudget(1, 1 << 40).admit() as ticket, ExitStack() as cleanup:
        await pipeline.run(
            InboundRequest(
                head=RequestHead("POST", path, "", ()),
                api=api,
                body=_client_body(entries),
                request_id="bench",
                traceparent="00-11111111111111111111111111111111-2222222222222222-00",
                record=AccessRecord(),
                ticket=ticket,
                stopwatch=Stopwatch(),
                can_stream_answer=True,
                cleanup=cleanup,
            )
        )


async def _run_parse(base: str, entries: int, runs: int) -> None:
    async with aiohttp.ClientSession(read_bufsize=1 << 20) as session:
        for _ in range(runs):
            url = f"{base}/v1/chat/completions/render"
            async with session.post(url, json=json.loads(_client_body(entries))) as response:
                rendered = json.loads(await response.read())
            await asyncio.gather(*(_encode(session, base, rendered, index) for index in range(entries)))


async def _encode(session: aiohttp.ClientSession, base: str, rendered: dict[str, object], index: int) -> None:
    features = rendered["features"]
    if not isinstance(features, dict):
        raise TypeError("render answered without features")
    body = {
        "model": "m",
        "token_ids": [1, *[_IMAGE_PAD] * _SPAN],
        "sampling_params": {"max_tokens": 1},
        "features": {
            "mm_hashes": {"image": [features["mm_hashes"]["image"][index]]},
            "mm_placeholders": {"image": [{"offset": 1, "length": _SPAN}]},
            "kwargs_data": {"image": [features["kwargs_data"]["image"][index]]},
        },
    }
    async with session.post(f"{base}/inference/v1/generate", json=body) as response:
        await response.read()


_VARIANTS = {"sidecar": _run_sidecar, "parse": _run_parse}


def _measure(variant: str, base: str, entries: int, runs: int) -> None:
    run = _VARIANTS[variant]
    asyncio.run(run(base, entries, 0))
    idle_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cpu, wall = time.process_time(), time.perf_counter()
    asyncio.run(run(base, entries, runs))
    figures = {
        "cpu_ms": (time.process_time() - cpu) / runs * 1000,
        "wall_ms": (time.perf_counter() - wall) / runs * 1000,
        "peak_mib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - idle_kib) / 1024,
    }
    sys.stdout.write(json.dumps(figures))


def main() -> None:
    """Run both variants and print them side by side."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--entries", type=int, default=4, help="media items of the request")
    parser.add_argument("--megabytes", type=int, default=16, help="MiB of base64 tensors per item")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--measure", nargs=2, metavar=("VARIANT", "BASE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        variant, base = options.measure
        _measure(variant, base, options.entries, options.runs)
        return
    ports: Queue[int] = Queue()
    upstreams = Process(target=_upstreams, args=(options.entries, options.megabytes, ports), daemon=True)
    upstreams.start()
    try:
        base = f"http://127.0.0.1:{ports.get(timeout=60)}"
        in_flight = options.entries * options.megabytes
        sys.stdout.write(f"{options.entries} items, render answer of {in_flight} MiB, {options.runs} runs\n")
        for variant in _VARIANTS:
            sizes = ["--entries", str(options.entries), "--runs", str(options.runs)]
            command = [sys.executable, __file__, *sizes, "--measure", variant, base]
            figures = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
            sys.stdout.write(
                f"{variant:8} {figures['cpu_ms']:8.0f} ms CPU {figures['wall_ms']:8.0f} ms wall"
                f" {figures['peak_mib']:6.0f} MiB peak = {figures['peak_mib'] / in_flight:.1f} x in flight\n"
            )
    finally:
        upstreams.terminate()
        upstreams.join()


if __name__ == "__main__":
    main()
