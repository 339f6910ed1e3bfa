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
from sidecar.observability.logging import configure_logging
from sidecar.simulator import command as simulator

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from sidecar.config import Settings

_USAGE_ERROR = 2


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

    command = commands.add_parser("simulate", help="stand in for render, encode, prefill and decode")
    simulator.add_arguments(command)
    command.set_defaults(run=simulator.run)

    command = commands.add_parser("report", help="print Envoy's access log as a table")
    report.add_arguments(command)
    command.set_defaults(run=report.run)

    options = parser.parse_args(arguments)
    code: int = options.run(options)
    return code


def _add_config(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="YAML file; SIDECAR__SECTION__KEY variables override it and may replace it",
    )


def _settings(options: argparse.Namespace) -> Settings | None:
    """The effective settings, or None after all problems have been printed."""
    try:
        settings, warnings = load_settings(options.config, os.environ)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return None
    for warning in warnings:
        sys.stderr.write(f"warning: {warning}\n")
    return settings


def _check_config(options: argparse.Namespace) -> int:
    settings = _settings(options)
    if settings is None:
        return _USAGE_ERROR
    sys.stdout.write(f"{describe(settings).rstrip()}\n")
    return 0


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
