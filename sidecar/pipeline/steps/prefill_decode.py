"""prefill-decode: both legs at the same time, for engines whose prefill answers only while decode runs.

The endpoint picker is asked for a prefill worker first (a reservation, which it answers itself). Both bodies
name that worker and a room of their own; prefill is pinned to the worker, and runs while decode does.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING

from sidecar.connectors.sglang import (
    PREFILL_PIN,
    RESERVE,
    RESERVED_ENDPOINT,
    bootstrap_fields,
    reserved_host,
)
from sidecar.errors import StepFailed, StepTimeout
from sidecar.jsontext import segments
from sidecar.pipeline.calls import post, refusal
from sidecar.pipeline.request import DecodeRewrite

if TYPE_CHECKING:
    from sidecar.api.interface import JsonTree
    from sidecar.errors import StepName
    from sidecar.http import HeaderPairs
    from sidecar.jsontext import Segments
    from sidecar.pipeline.parity import PromptTokenParity
    from sidecar.pipeline.prefill_request import PrefillRequests
    from sidecar.pipeline.state import RequestState
    from sidecar.upstream.client import Answer, Upstream

_STEP: StepName = "prefill_decode"
# Endpoint pickers keep state per request id: each call of one client request needs its own.
_RESERVE_SUFFIX = "-reserve"
_PREFILL_SUFFIX = "-prefill"


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
        fields = bootstrap_fields(host, self._bootstrap_port)
        prefill = _PinnedPrefill(
            state,
            self._gateway,
            path,
            (*state.legs.phase("prefill", _PREFILL_SUFFIX), (PREFILL_PIN, endpoint)),
            segments(body | fields),
            self._timeout,
            self._parity,
        )
        decode = state.body.decode(None if state.prompt is None else state.prompt.text) | fields
        state.rewrite = DecodeRewrite(
            state.legs.decode(), state.legs.removed_from_decode(), segments(decode), alongside=prefill.run
        )

    async def _reserve(self, state: RequestState, path: str, body: JsonTree) -> tuple[str, str]:
        """The reserved endpoint, and the address in it."""
        answer = await post(
            state,
            self._gateway,
            step=self.name,
            path=path,
            headers=(*state.legs.phase("prefill", _RESERVE_SUFFIX), RESERVE),
            body=segments(body),
        )
        if answer.status != HTTPStatus.OK:
            raise refusal(self.name, answer)
        state.legs.carry(answer.headers)
        endpoint = answer.headers.get(RESERVED_ENDPOINT, "")
        try:
            return endpoint, reserved_host(endpoint)
        except ValueError as error:
            raise _no_worker(answer, str(error)) from None


def _no_worker(answer: Answer, reason: str) -> StepFailed:
    if RESERVED_ENDPOINT not in answer.headers:
        text = f"the answer to the reservation has no {RESERVED_ENDPOINT} header"
        return StepFailed(
            _STEP, f"{_STEP}: {text}; configure the endpoint picker of prefill for `Prefer: reserve-endpoint`"
        )
    return StepFailed(
        _STEP,
        f"{_STEP}: the answer to the reservation names no worker in {RESERVED_ENDPOINT}",
        detail=f"{reason}: {answer.headers[RESERVED_ENDPOINT][:64]!a}",
    )


@dataclass(frozen=True, slots=True)
class _PinnedPrefill:
    """The prefill call of one request, on its way to the reserved worker."""

    state: RequestState
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
        record = self.state.inbound.record
        started = time.perf_counter()
        try:
            async with asyncio.timeout(self.timeout) as scope:
                answer = await post(
                    self.state, self.gateway, step=_STEP, path=self.path, headers=self.headers, body=self.body
                )
        except TimeoutError:
            if not scope.expired():
                raise
            raise StepTimeout(
                _STEP, f"prefill took longer than {self.timeout:g} s (timeout of the prefill-decode step)"
            ) from None
        finally:
            record.prefill_ms = (record.prefill_ms or 0.0) + (time.perf_counter() - started) * 1000
        if answer.status != HTTPStatus.OK:
            raise refusal(_STEP, answer)
        if self.parity is not None:
            self.parity.prefill_answered(record, self.path, answer.body)
