"""`kv-sglang`: prefill and decode meet in a room on the bootstrap server of the prefill worker.

Decode starts the transfer, so it has to know the worker before prefill runs. SGLang reads three members at
the top level of both bodies, `bootstrap_host`, `bootstrap_port` and `bootstrap_room`, and no
`kv_transfer_params`.
"""

from __future__ import annotations

import ipaddress
import re
import secrets
from typing import Any

RESERVED_ENDPOINT = "x-prefill-host-port"
"""Header of a reservation's answer: the worker the endpoint picker chose, as `ip:port`."""
PREFILL_PIN = "x-prefill-pin"
"""Header of the prefill call: the worker it has to go to."""
RESERVE = ("prefer", "reserve-endpoint")
"""Header that asks the endpoint picker for a worker; it answers itself and forwards nothing."""

_ENDPOINT = re.compile(r"(?:\[(?P<v6>[0-9a-fA-F:.]{2,45})\]|(?P<v4>[0-9.]{7,15})):(?P<port>[0-9]{1,5})")
_HIGHEST_PORT = 65535
_ROOM_BITS = 62
"""Room for the rooms after it: SGLang counts one up per further sample, in signed 64-bit integers."""


def reserved_host(endpoint: str) -> str:
    """The address in `ip:port` or `[v6]:port`; an IPv6 address in brackets, which every SGLang can read.

    Raises:
        ValueError: anything else, a list of endpoints and a name included.
    """
    match = _ENDPOINT.fullmatch(endpoint)
    if match is None or not 0 < int(match["port"]) <= _HIGHEST_PORT:
        raise ValueError("not ip:port")
    address = ipaddress.ip_address(match["v6"] or match["v4"])
    if address.version != (6 if match["v6"] else 4):
        raise ValueError("not ip:port")
    if address.is_unspecified or address.is_multicast:
        raise ValueError("not the address of a worker")
    return f"[{address}]" if match["v6"] else str(address)


def bootstrap_fields(host: str, port: int) -> dict[str, Any]:
    """The members both bodies get: where the workers meet, and a room nobody else uses.

    Args:
        host: address of the prefill worker.
        port: port of its bootstrap server.
    """
    return {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": secrets.randbits(_ROOM_BITS)}
