"""`epd-sidecar simulate`: the simulator as a program."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import signal
import sys
from typing import TYPE_CHECKING, Any, get_args

import msgspec

from sidecar.simulator.config import (
    LISTENERS,
    TARGETS,
    ConfigError,
    Descriptors,
    KvConnector,
    SimulatorConfig,
    VllmVersion,
)
from sidecar.simulator.server import Simulator

if TYPE_CHECKING:
    import argparse


_HIGHEST_PORT = 65535
_PORTS = {"render": 8000, "encode": 8001, "prefill": 8002, "decode": 8003, "admin": 0}
"""Where the shipped Envoy configurations expect the workers."""
_DESCRIPTORS = (
    "what encode answers: plain (metadata only), nixl (with the worker's address), none, evicted (empty "
    "metadata), no-metadata, stale (the encoding itself is gone)"
)
_LATENCY = "repeatable; the role reserve is that of sglang's reservations, which prefill's leaves alone"
_FAULT = "repeatable; also with the role reserve, which can fail with no-header and header:VALUE too"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument("--host", default="127.0.0.1", help="address to bind (default %(default)s)")
    for listener in LISTENERS:
        parser.add_argument(
            f"--{listener}-port",
            type=int,
            default=_PORTS[listener],
            metavar="PORT",
            help="default %(default)s; 0 takes a free port",
        )
    parser.add_argument("--model", action="append", metavar="NAME", help="served model; repeatable")
    parser.add_argument("--vllm-version", choices=get_args(VllmVersion), default="0.32")
    parser.add_argument("--descriptors", choices=get_args(Descriptors), default="plain", help=_DESCRIPTORS)
    parser.add_argument(
        "--kv-connector",
        choices=get_args(KvConnector),
        default="shared",
        help="as kv_connector of the sidecar; sglang pairs prefill and decode by bootstrap_room, and prefill "
        "answers reservations (default %(default)s)",
    )
    parser.add_argument(
        "--bootstrap-port",
        type=int,
        default=8998,
        metavar="PORT",
        help="bootstrap_port that sglang bodies must name; nothing listens there (default %(default)s)",
    )
    parser.add_argument(
        "--bootstrap-timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="how long prefill and decode of sglang wait for each other (default %(default)s)",
    )
    parser.add_argument("--no-mm-payload", action="store_true", help="render ignores mm_payload")
    parser.add_argument("--no-render-metadata", action="store_true", help="render answers no mm_metadata")
    parser.add_argument("--no-encoder-caches", action="store_true", help="encode invents keys without uuid")
    parser.add_argument("--no-tool-parser", action="store_true", help="tool choices are refused")
    parser.add_argument("--enable-prompt-tokens-details", action="store_true", help="usage tells KV hits")
    parser.add_argument("--trust-request-mm-kwargs", action="store_true", help="bodies may set them")
    parser.add_argument("--sparse-spans", action="store_true", help="spans mix tokens, as for Gemma3")
    parser.add_argument("--tensor-bytes", default="real", metavar="N", help="bytes per tensor, or 'real'")
    parser.add_argument("--encode-max-pixels", type=int, metavar="N", help="processor mismatch")
    parser.add_argument("--max-images", type=int, default=0, metavar="N", help="per prompt; 0 for any number")
    parser.add_argument("--latency", action="append", default=[], metavar="ROLE=SECONDS", help=_LATENCY)
    parser.add_argument("--fault", action="append", default=[], metavar="ROLE=FAULT", help=_FAULT)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM; prints the base URL of each listener as one JSON line.

    Returns:
        Exit status: 0 after a signal, 1 when a port cannot be bound, 2 for an impossible option or without
        Pillow.
    """
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(name)s %(message)s")
    if importlib.util.find_spec("PIL") is None:
        sys.stderr.write("epd-sidecar simulate: needs Pillow: install epd-sidecar[simulator]\n")
        return 2
    try:
        config = _config(args)
    except ConfigError as error:
        sys.stderr.write(f"epd-sidecar simulate: {error}\n")
        return 2
    try:
        asyncio.run(_serve(Simulator(config)))
    except OSError as error:
        sys.stderr.write(f"epd-sidecar simulate: {error}\n")
        return 1
    return 0


def _config(args: argparse.Namespace) -> SimulatorConfig:
    tensor_bytes = args.tensor_bytes
    for listener in LISTENERS:
        port = getattr(args, f"{listener}_port")
        if not 0 <= port <= _HIGHEST_PORT:
            raise ConfigError(f"--{listener}-port: {port} is not a port from 0 to {_HIGHEST_PORT}")
    if tensor_bytes != "real" and not tensor_bytes.isdecimal():
        raise ConfigError(f"--tensor-bytes: {tensor_bytes!r} is neither a number of bytes nor 'real'")
    changes: dict[str, Any] = {
        "host": args.host,
        "ports": {listener: getattr(args, f"{listener}_port") for listener in LISTENERS},
        "vllm_version": args.vllm_version,
        "descriptors": args.descriptors,
        "kv_connector": args.kv_connector,
        "bootstrap_port": args.bootstrap_port,
        "bootstrap_timeout": args.bootstrap_timeout,
        "mm_payload_supported": not args.no_mm_payload,
        "render_metadata": not args.no_render_metadata,
        "encoder_caches": not args.no_encoder_caches,
        "tool_parser": not args.no_tool_parser,
        "prompt_tokens_details": args.enable_prompt_tokens_details,
        "trust_mm_kwargs": args.trust_request_mm_kwargs,
        "sparse_spans": args.sparse_spans,
        "tensor_bytes": int(tensor_bytes) if tensor_bytes.isdecimal() else tensor_bytes,
        "encode_max_pixels": args.encode_max_pixels,
        "max_images": args.max_images,
        "latency": {role: _seconds(text) for role, text in _pairs("--latency", args.latency)},
        "faults": dict(_pairs("--fault", args.fault)),
    }
    if args.model:
        changes["models"] = args.model
    return SimulatorConfig().patched(changes)


def _pairs(option: str, values: list[str]) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for value in values:
        role, separator, setting = value.partition("=")
        if not separator or role not in TARGETS:
            raise ConfigError(f"{option} {value!r}: write ROLE=VALUE with a role of {', '.join(TARGETS)}")
        pairs.append((role, setting))
    return pairs


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise ConfigError(f"--latency: {text!r} is not a number of seconds") from None
    if not 0 <= seconds < float("inf"):
        raise ConfigError(f"--latency: {text!r} is not a number of seconds from 0")
    return seconds


async def _serve(simulator: Simulator) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    async with simulator:
        sys.stdout.write(
            msgspec.json.encode({name: simulator.url(name) for name in LISTENERS}).decode() + "\n"
        )
        sys.stdout.flush()
        await stopping.wait()
