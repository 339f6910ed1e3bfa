"""Which headers may reach which role."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidecar.simulator.errors import bad_request
from sidecar.simulator.picker import PIN_HEADER, check_prefill_headers, prefers_reservation

if TYPE_CHECKING:
    from sidecar.simulator.deployment import Address, Deployment
    from sidecar.simulator.recorder import Exchange

_RANK_HEADER = "x-data-parallel-rank"
_ROUTING_HEADERS = (
    "x-prefiller-host-port",
    "x-prefiller-url",
    "x-encoder-hosts-ports",
    _RANK_HEADER,
)
"""Headers by which a client could name a worker: no role may see them."""


def check_headers(deployment: Deployment, exchange: Exchange, address: Address) -> None:
    """Record every header that is missing, wrong, or out of place at the role.

    Args:
        deployment: the deployment.
        exchange: the request.
        address: address it came in at.
    """
    role, headers = exchange.role, exchange.headers
    phase = headers.get("epp-profile")
    expected = None if role == "render" else role
    if phase != expected:
        deployment.recorder.violate(
            exchange, f"EPP-Profile is {phase!r} at {role}, where it should be {expected!r}"
        )
    for name in _ROUTING_HEADERS:
        if name in headers:
            deployment.recorder.violate(exchange, f"the header {name} of a client reached {role}")
    sglang = deployment.config.kv_connector == "sglang"
    if sglang and role == "prefill":
        check_prefill_headers(deployment, exchange, address)
        return
    if PIN_HEADER in headers:
        deployment.recorder.violate(exchange, f"the header {PIN_HEADER} reached {role}")
    # A probe for cached prompts is vLLM's: a decode engine of SGLang answers no request it cannot pair.
    if prefers_reservation(exchange) or (sglang and role == "decode" and "prefer" in headers):
        deployment.recorder.violate(exchange, f"the header prefer: {headers['prefer']} reached {role}")


def check_rank(exchange: Exchange) -> None:
    """Raise ApiError (400) for a data-parallel rank that the engine, which has one, does not have."""
    text = exchange.headers.get(_RANK_HEADER, "")
    try:
        rank = int(text)
    except ValueError:
        # Engines pass over a rank that is no number.
        return
    if rank != 0:
        raise bad_request(f"data_parallel_rank {rank} is out of range [0, 1).")
