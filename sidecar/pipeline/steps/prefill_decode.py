"""prefill-decode: both legs at the same time, for engines whose prefill answers only while decode runs.

The endpoint picker is asked for a prefill worker first (a reservation, which it answers itself). Both bodies
name that worker and a room of their own; prefill is pinned to the worker, and runs while decode does.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from sidecar.connectors.sglang import (
    PREFILL_PIN,
    RESERVE,
    RESERVED_ENDPOINT,
    bootstrap_fields,
    reserved_host,
)
from sidecar.errors import StepFailed, StepTimeout
from sidecar.jsontext import segments
from sidecar.pipeline.calls import refusal
from sidecar.pipeline.request import DecodeRewrite
from sidecar.upstream.client import Call

if TYPE_CHECKING:
    from sidecar.api.interface import JsonTree
    from sidecar.errors import StepName
    from sidecar.http import HeaderPairs
    from sidecar.jsontext import Segments
    from sidecar.pipeline.parity import PromptTokenParity
    from sidecar.pipeline.prefill_request import PrefillRequests
    from sidecar.pipeline.request import InboundRequest
    from sidecar.pipeline.state import RequestState
    from sidecar.upstream.client import Answer, Upstream

_STEP: StepName = "prefill_decode"
# Endpoint pickers keep state per request id: each call of one client request needs its own.
_RESERVE_SUFFIX = "-reserve"
_PREFILL_SUFFIX = "-prefill"
_MOST_READ = 1 << 20
"""Bytes read of an answer of which little counts."""


class PrefillDecodeStep:
    """Reserves a prefill worker and sets a rewrite that has the prefill call alongside.

    Args:
        requests: builds the prefill request.
        gateway: where reservation and prefill go.
        bootstrap_port: port of the bootstrap server of every prefill worker.
        timeout: seconds for the prefill call.
        parity: compares prompt token counts; None to compare none.
    """

    name: StepName = _STEP

    def __init__(
        self,
        requests: PrefillRequests,
        gateway: Upstream,
        *,
        bootstrap_port: int,
        timeout: float,
        parity: PromptTokenParity | None = None,
    ) -> None:
        self._requests = requests
        self._gateway = gateway
        self._bootstrap_port = bootstrap_port
        self._timeout = timeout
        self._parity = parity

    async def run(self, state: RequestState) -> None:
        """Reserve, and set the rewrite.

        Raises:
            StepRejected: the reservation was refused with 4xx.
            StepFailed: it failed otherwise, or named no worker.
        """
        path, body = self._requests.build(state, None)
        endpoint, host = await self._reserve(state, path, body)
        decode = state.body.decode(state.token_ids)
        pairing = bootstrap_fields(host, self._bootstrap_port) | _samples(decode)
        prefill = _PinnedPrefill(
            state.inbound,
            self._gateway,
            path,
            (*state.legs.phase("prefill", _PREFILL_SUFFIX), (PREFILL_PIN, endpoint)),
            segments(body | pairing),
            self._timeout,
            self._parity,
        )
        state.rewrite = DecodeRewrite(
            state.legs.decode(),
            state.legs.removed_from_decode(),
            segments(decode | pairing),
            alongside=prefill.run,
        )

    async def _reserve(self, state: RequestState, path: str, body: JsonTree) -> tuple[str, str]:
        """The reserved endpoint, and the address in it."""
        headers = (*state.legs.phase("prefill", _RESERVE_SUFFIX), RESERVE)
        call = Call(_STEP, path, headers, segments(body), state.inbound.ticket.reserve)
        answer, fields = await _ask(state.inbound, self._gateway, call)
        if answer.status != HTTPStatus.OK:
            raise refusal(_STEP, answer, "reservation")
        state.legs.carry(answer.headers)
        named = [value for name, value in fields if name == RESERVED_ENDPOINT]
        if not named:
            raise StepFailed(
                _STEP,
                f"{_STEP}: the answer to the reservation has no {RESERVED_ENDPOINT} header; configure the "
                "endpoint picker of prefill for `Prefer: reserve-endpoint`",
            )
        try:
            return named[0], reserved_host(",".join(named))
        except ValueError as error:
            raise StepFailed(
                _STEP,
                f"{_STEP}: the answer to the reservation names no worker in {RESERVED_ENDPOINT}",
                detail=f"{error}: {','.join(named)[:64]!a}",
            ) from None


def _samples(decode: JsonTree) -> dict[str, Any]:
    """The number of samples, where set: each has a room of its own, which prefill has to open."""
    return {"n": decode["n"]} if "n" in decode else {}


async def _ask(inbound: InboundRequest, gateway: Upstream, call: Call) -> tuple[Answer, HeaderPairs]:
    """The answer, cut off where it is long, and all its header fields."""
    with inbound.stopwatch.waiting():
        answer = await gateway.open(call)
        try:
            return await answer.read_up_to(_MOST_READ), answer.headers
        finally:
            answer.close()


@dataclass(frozen=True, slots=True)
class _PinnedPrefill:
    """The prefill call of one request, on its way to the reserved worker."""

    inbound: InboundRequest
    gateway: Upstream
    path: str
    headers: HeaderPairs
    body: Segments
    timeout: float
    parity: PromptTokenParity | None

    async def run(self) -> None:
        """Send it and wait for its end.

        Raises:
            StepRejected: refused with 4xx.
            StepFailed: it failed otherwise.
            StepTimeout: no answer in time.
        """
        record = self.inbound.record
        # A second one in the same room would meet nobody.
        call = Call(_STEP, self.path, self.headers, self.body, self.inbound.ticket.reserve, alone=True)
        started = time.perf_counter()
        try:
            async with asyncio.timeout(self.timeout) as scope:
                answer, _ = await _ask(self.inbound, self.gateway, call)
        except TimeoutError:
            if not scope.expired():
                raise
            raise StepTimeout(
                _STEP, f"prefill took longer than {self.timeout:g} s (timeout of the prefill-decode step)"
            ) from None
        finally:
            record.prefill_ms = (record.prefill_ms or 0.0) + (time.perf_counter() - started) * 1000
        if answer.status != HTTPStatus.OK:
            raise refusal(_STEP, answer, "prefill")
        if self.parity is not None:
            self.parity.prefill_answered(record, self.path, answer.body)
