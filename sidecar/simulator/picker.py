"""The gateway's endpoint picker as callers of an SGLang prefill meet it: reservations and pins.

A request with `Prefer: reserve-endpoint` is answered with the endpoint it would go to and reaches no engine;
the request itself follows with that endpoint in `x-prefill-pin`. The simulator has one prefill, so the
endpoint is always the address a request came in at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidecar.simulator.bootstrap import BOOTSTRAP_FIELDS, PREFILL_SUFFIX, RANK_FIELDS, violate_fields
from sidecar.simulator.errors import ApiError

if TYPE_CHECKING:
    from sidecar.simulator.deployment import Address, Call, Deployment
    from sidecar.simulator.recorder import Exchange

PIN_HEADER = "x-prefill-pin"
_RESERVED_HEADER = "x-prefill-host-port"
_RESERVE = "reserve-endpoint"
_RESERVE_SUFFIX = "-reserve"


def prefers_reservation(exchange: Exchange) -> bool:
    """Whether `Prefer` (RFC 7240: a list of preferences with parameters) asks for a reservation."""
    preferences = exchange.headers.get("prefer", "").split(",")
    return any(item.partition(";")[0].strip().lower() == _RESERVE for item in preferences)


def is_reservation(deployment: Deployment, exchange: Exchange) -> bool:
    """Whether the picker answers a request, in place of the prefill engine."""
    sglang = deployment.config.kv_connector == "sglang"
    return sglang and exchange.role == "prefill" and prefers_reservation(exchange)


def check_prefill_headers(deployment: Deployment, exchange: Exchange, address: Address) -> None:
    """Record what is wrong with the headers of a reservation, or of the pinned request after it."""
    if is_reservation(deployment, exchange):
        problems = _reservation_problems(deployment, exchange)
    else:
        problems = _pinned_problems(deployment, exchange, address)
    for problem in problems:
        deployment.recorder.violate(exchange, problem)


def reserve(deployment: Deployment, call: Call, fault: str) -> dict[str, str]:
    """The headers that answer a reservation; `fault` is one of RESERVATION_FAULTS or ""."""
    violate_fields(deployment, call, BOOTSTRAP_FIELDS + RANK_FIELDS, "a reservation")
    if fault == "no-header":
        return {}
    return {_RESERVED_HEADER: fault.removeprefix("header:") if fault else str(call.address)}


def refuse_foreign_pin(call: Call) -> None:
    """Raise ApiError (503) for a pin to another address: no such endpoint can be picked."""
    if call.exchange.headers.get(PIN_HEADER, str(call.address)) != str(call.address):
        raise ApiError(503, "no endpoint under the address of the pin", kind="ServiceUnavailableError")


def _reservation_problems(deployment: Deployment, exchange: Exchange) -> list[str]:
    problems = [f"the header {PIN_HEADER} in a reservation"] if PIN_HEADER in exchange.headers else []
    if exchange.request_id.endswith(_RESERVE_SUFFIX):
        deployment.reservations.put(exchange.request_id.removesuffix(_RESERVE_SUFFIX), None)
    else:
        problems.append(f"x-request-id of a reservation, {exchange.request_id!r}, lacks {_RESERVE_SUFFIX}")
    return problems


def _pinned_problems(deployment: Deployment, exchange: Exchange, address: Address) -> list[str]:
    problems = []
    pin = exchange.headers.get(PIN_HEADER)
    if pin != str(address):
        problems.append(f"{PIN_HEADER} is {pin!r} at prefill, where it should be {str(address)!r}")
    if "prefer" in exchange.headers:
        problems.append(f"the header prefer: {exchange.headers['prefer']} reached prefill")
    if not exchange.request_id.endswith(PREFILL_SUFFIX):
        problems.append(f"x-request-id of prefill, {exchange.request_id!r}, lacks {PREFILL_SUFFIX}")
    elif (base := exchange.request_id.removesuffix(PREFILL_SUFFIX)) not in deployment.reservations:
        problems.append(f"prefill {exchange.request_id!r} without a reservation {base + _RESERVE_SUFFIX!r}")
    return problems
