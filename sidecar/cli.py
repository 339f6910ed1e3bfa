"""The `epd-sidecar` command."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from sidecar import report
from sidecar.config import ConfigError, describe, load_settings
from sidecar.config.environment import PREFIX
from sidecar.config.values import parse_duration
from sidecar.envoy_config import options as envoy_options
from sidecar.observability.logging import configure_logging
from sidecar.simulator import command as simulator

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from sidecar.config import Settings

_USAGE_ERROR = 2
_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code: 0, 1 for a failure, 2 for a wrong configuration or usage."""
    parser = argparse.ArgumentParser(
        prog="epd-sidecar",
        description="Envoy external-processing sidecar for disaggregated multimodal inference.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {version('epd-sidecar')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("serve", help="run the sidecar until SIGTERM")
    _add_config(command)
    command.set_defaults(run=_serve)

    command = commands.add_parser("check-config", help="check a configuration and print what it amounts to")
    _add_config(command)
    command.set_defaults(run=_check_config)

    command = commands.add_parser("health", help="ask a sidecar whether it is ready")
    _add_config(command)
    _add_health_options(command)
    command.set_defaults(run=_health)

    command = commands.add_parser("envoy-config", help="print Envoy's configuration for this sidecar")
    _add_config(command)
    envoy_options.add_arguments(command)
    command.set_defaults(run=_envoy_config)

    command = commands.add_parser("simulate", help="stand in for render, encode, prefill and decode")
    simulator.add_arguments(command)
    command.set_defaults(run=simulator.run)

    command = commands.add_parser("report", help="print Envoy's access log as a table")
    report.add_arguments(command)
    command.set_defaults(run=report.run)

    options = parser.parse_args(arguments)
    try:
        code: int = options.run(options)
    except KeyboardInterrupt:
        return _INTERRUPTED
    return code


def _add_config(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="YAML file; SIDECAR__SECTION__KEY variables override it and may replace it",
    )


def _add_health_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--address",
        metavar="ADDRESS",
        help="host:port, [v6]:port or unix:/path of its gRPC listener; default: ext_proc.listen",
    )
    command.add_argument("--live", action="store_true", help="ask whether it runs, not whether it is ready")
    command.add_argument(
        "--ca",
        type=Path,
        metavar="FILE",
        help="certificates to trust, over TLS; default: the certificate of ext_proc.tls, if there is one",
    )
    command.add_argument("--name", help="name in its certificate, if that is not the host of the address")
    command.add_argument(
        "--timeout", type=_positive_seconds, default=3.0, metavar="DURATION", help="default: 3s"
    )


def _positive_seconds(text: str) -> float:
    try:
        seconds = parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if seconds == 0:
        raise argparse.ArgumentTypeError("0 is not a time limit")
    return seconds


def _settings(options: argparse.Namespace, *, warn: bool = True) -> Settings | None:
    """The effective settings, or None after all problems have been printed."""
    try:
        settings, warnings = load_settings(options.config, os.environ)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return None
    for warning in warnings if warn else ():
        sys.stderr.write(f"warning: {warning}\n")
    return settings


def _check_config(options: argparse.Namespace) -> int:
    settings = _settings(options)
    if settings is None:
        return _USAGE_ERROR
    sys.stdout.write(f"{describe(settings).rstrip()}\n")
    return 0


def _health(options: argparse.Namespace) -> int:
    """Exit code 0 when the sidecar is serving, 1 when it is not, 2 when it could not be asked."""
    # gRPC's own lines about a failed handshake would stand beside the one that says it.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # Imported here: gRPC takes longer to load than the other commands to run.
    from sidecar import health  # noqa: PLC0415

    if (
        options.config is None
        and options.address is None
        and not any(name.startswith(PREFIX) for name in os.environ)
    ):
        sys.stderr.write("epd-sidecar health: give --address, or --config of the sidecar to ask\n")
        return _USAGE_ERROR
    settings = None
    if options.config is not None or options.address is None:
        settings = _settings(options, warn=False)
        if settings is None:
            return _USAGE_ERROR
    listener = settings.ext_proc if settings else None
    try:
        target = health.target(listener, options.address, ca=options.ca, name=options.name)
    except health.CannotAsk as error:
        sys.stderr.write(f"epd-sidecar health: {error}\n")
        return _USAGE_ERROR
    asked = f"{'liveness' if options.live else 'readiness'} of {target.address}"
    try:
        health.check(target, live=options.live, timeout=options.timeout)
    except health.Unhealthy as error:
        sys.stderr.write(f"{asked}: {error}\n")
        return 1
    sys.stdout.write(f"{asked}: SERVING\n")
    return 0


def _envoy_config(options: argparse.Namespace) -> int:
    # Imported here: Envoy's types are an extra, and slow to load.
    from sidecar.envoy_config import command  # noqa: PLC0415

    return command.run(options)


def _serve(options: argparse.Namespace) -> int:
    settings = _settings(options)
    if settings is None:
        return _USAGE_ERROR
    # Imported here: the other commands need neither gRPC nor an event loop.
    from sidecar import app  # noqa: PLC0415
    from sidecar.extproc.listener import ListenError  # noqa: PLC0415

    configure_logging(settings.log_level, settings.log_format)
    try:
        _run(app.serve(settings))
    except ListenError as error:
        sys.stderr.write(f"epd-sidecar: {error}\n")
        return 1
    return 0


def _run(main_coroutine: Coroutine[None, None, None]) -> None:
    try:
        import uvloop  # noqa: PLC0415 - not available everywhere
    except ImportError:
        asyncio.run(main_coroutine)
    else:
        uvloop.run(main_coroutine)
