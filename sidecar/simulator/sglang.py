"""Prefill and decode as SGLang pairs them: each answers only once it met the other under their room."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidecar.simulator.bootstrap import Party, read_bootstrap
from sidecar.simulator.decode import admit_decode, generate_text
from sidecar.simulator.deployment import Address
from sidecar.simulator.engine import compute_prompt
from sidecar.simulator.picker import refuse_foreign_pin

if TYPE_CHECKING:
    from sidecar.simulator.deployment import Call, Deployment
    from sidecar.simulator.generation import Answer
    from sidecar.simulator.prompt import Api


async def prefill(deployment: Deployment, call: Call, api: Api, request_id: str) -> Answer:
    """Compute the KV blocks of a prompt and answer when decode has fetched them.

    Raises:
        ApiError: what the engine answers to a body it refuses; 503 for a request pinned elsewhere; 500 when
            no decode came in time.
    """
    refuse_foreign_pin(call)
    bootstrap = read_bootstrap(deployment, call)
    work = compute_prompt(deployment, call, api, request_id)
    named = Address(bootstrap.host, bootstrap.port)
    server = Address(call.address.host, deployment.config.bootstrap_port)
    if named != server:
        deployment.violate(call, f"the body names the bootstrap server {named}, this prefill has {server}")
    party = Party(call, server, work.prompt.key())
    await deployment.rooms.meet(bootstrap.room, party, deployment.config.bootstrap_timeout)
    return work.answer(("I",), "length")


async def decode(deployment: Deployment, call: Call, api: Api, request_id: str) -> Answer:
    """Generate the answer to a client's request from the KV blocks of the prefill in its room.

    Raises:
        ApiError: what the engine answers to a body it refuses; 500 when no prefill came in time.
    """
    bootstrap = read_bootstrap(deployment, call)
    work = admit_decode(deployment, call, api, request_id)
    party = Party(call, Address(bootstrap.host, bootstrap.port), work.prompt.key())
    met = await deployment.rooms.meet(bootstrap.room, party, deployment.config.bootstrap_timeout)
    hit = met.prompt_key == party.prompt_key
    if not hit:
        deployment.violate(call, "the KV blocks belong to another prompt than the one to be decoded")
    return generate_text(work, hit=hit)
