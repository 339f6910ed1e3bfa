"""`epd-sidecar envoy-config`: prints the configuration."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from sidecar.envoy_config.options import origin
from sidecar.envoy_config.reading import OptionsError, read

if TYPE_CHECKING:
    import argparse

_USAGE_ERROR = 2
_LIBRARIES = ("envoy_data_plane", "betterproto2")


def run(options: argparse.Namespace) -> int:
    """Print to standard output; returns 0, or 2 with the reasons on standard error."""
    try:
        from sidecar.envoy_config.bootstrap import write  # noqa: PLC0415  # the extra may not be installed
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _LIBRARIES:
            raise
        sys.stderr.write("epd-sidecar envoy-config: needs Envoy's types: install epd-sidecar[envoy-config]\n")
        return _USAGE_ERROR
    try:
        deployment, warnings = read(options, os.environ)
    except OptionsError as error:
        sys.stderr.write(f"epd-sidecar envoy-config: {error}\n")
        return _USAGE_ERROR
    for warning in warnings:
        sys.stderr.write(f"warning: {warning}\n")
    sys.stdout.write(write(options.part, deployment, origin(options, os.environ)))
    return 0
