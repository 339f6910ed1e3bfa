"""The options of `epd-sidecar envoy-config`."""

from __future__ import annotations

import shlex
import textwrap
from typing import TYPE_CHECKING, get_args

from sidecar.config.environment import PREFIX
from sidecar.envoy_config.addresses import TcpAddress
from sidecar.envoy_config.deployment import PHASES, BodyMode, Part, Phase, Topology

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

LISTEN = TcpAddress("127.0.0.1", 10000)
ADMIN_LISTEN = TcpAddress("127.0.0.1", 9901)
WORKERS: dict[Phase, TcpAddress] = {
    "encode": TcpAddress("127.0.0.1", 8001),
    "prefill": TcpAddress("127.0.0.1", 8002),
    "decode": TcpAddress("127.0.0.1", 8003),
}
SPECIFIC = ("sidecar", "sidecar_ca", "sidecar_name", "listen", "admin_listen", *PHASES, "picker")
"""Options that not every part uses; None where they are not given."""

_WIDTH = 98
"""Columns of a line that says how the configuration was made."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command, but for `--config`."""
    parser.add_argument(
        "--topology",
        choices=get_args(Topology),
        default="internal-listener",
        help="how decode and the sub-requests find their routes (default %(default)s)",
    )
    parser.add_argument(
        "--body-mode",
        choices=get_args(BodyMode),
        default="full-duplex-streamed",
        help="how the filter sends request bodies (default %(default)s)",
    )
    parser.add_argument(
        "--part",
        choices=get_args(Part),
        default="bootstrap",
        help="the whole configuration, or what to paste into another (default %(default)s)",
    )
    parser.add_argument(
        "--sidecar",
        action="append",
        metavar="ADDRESS",
        help="host:port or unix:/path of a sidecar process; repeatable (default: ext_proc.listen)",
    )
    parser.add_argument(
        "--sidecar-ca", metavar="FILE", help="certificates that Envoy trusts; with ext_proc.tls.cert_path"
    )
    parser.add_argument(
        "--sidecar-name",
        metavar="NAME",
        help="whom the sidecar's certificate is for; with ext_proc.tls.cert_path",
    )
    parser.add_argument("--listen", metavar="IP:PORT", help=f"where clients connect (default {LISTEN})")
    parser.add_argument(
        "--admin-listen", metavar="IP:PORT", help=f"Envoy's admin interface (default {ADMIN_LISTEN})"
    )
    for phase, address in WORKERS.items():
        parser.add_argument(
            f"--{phase}",
            action="append",
            metavar="ADDRESS",
            help=f"host:port or unix:/path of a worker for {phase}; repeatable (default {address})",
        )
    parser.add_argument(
        "--picker",
        metavar="ADDRESS",
        help="endpoint picker (ext_proc, plaintext) that names the worker of every request",
    )


def origin(options: argparse.Namespace, environ: Mapping[str, str]) -> str:
    """How the configuration was made and how to run it; names variables, never their values."""
    config = ["--config", str(options.config)] if options.config else []
    words = ["epd-sidecar envoy-config", *_words(config), f"--topology {options.topology}"]
    if options.body_mode != "full-duplex-streamed":
        words.append(f"--body-mode {options.body_mode}")
    if options.part != "bootstrap":
        words.append(f"--part {options.part}")
    for name in SPECIFIC:
        given = getattr(options, name)
        for value in given if isinstance(given, list) else [given] if given is not None else []:
            words += _words([flag_of(name), value])
    lines = [f"Written by: {_command(words)}"]
    if variables := sorted(name for name in environ if name.startswith(PREFIX)):
        lines += textwrap.wrap(
            f"with {', '.join(variables)} in the environment, as `serve` needs them.", _WIDTH
        )
    if options.part == "bootstrap":
        serve = " ".join(["epd-sidecar serve", *_words(config)])
        lines += [f"Run: {serve} &", "     envoy -c THIS_FILE"]
    return "\n".join(lines)


def _command(words: list[str]) -> str:
    lines = [words[0]]
    for word in words[1:]:
        if len(lines[-1]) + len(word) < _WIDTH:
            lines[-1] += f" {word}"
        else:
            lines[-1] += " \\"
            lines.append(f"  {word}")
    return "\n".join(lines)


def _words(option: list[str]) -> list[str]:
    return [shlex.join(option)] if option else []


def flag_of(name: str) -> str:
    """How an option is written."""
    return f"--{name.replace('_', '-')}"
