"""A stand-in for render, encode, prefill and decode that holds its callers to vLLM's contract.

It needs no GPU: tokens are made up, images are measured but not looked at, and the answer to a request says
what decode saw of it. Whatever would break a real engine is recorded as a violation. The KV connector
`sglang` pairs prefill and decode as SGLang does; their APIs stay vLLM's.
"""

from sidecar.simulator.command import add_arguments, run
from sidecar.simulator.config import ConfigError, SimulatorConfig
from sidecar.simulator.recorder import Exchange, Violation
from sidecar.simulator.server import Simulator

__all__ = [
    "ConfigError",
    "Exchange",
    "Simulator",
    "SimulatorConfig",
    "Violation",
    "add_arguments",
    "run",
]
