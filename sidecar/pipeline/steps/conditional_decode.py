"""conditional-decode: asks for a decode worker that holds the prompt already, before anything is computed."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import TYPE_CHECKING

from sidecar.control_headers import HOP_GUARD, PHASE_TOKEN
from sidecar.http import HOP_BY_HOP, connection_options
from sidecar.jsontext import segments
from sidecar.pipeline.legs import PHASE_HEADER
from sidecar.pipeline.request import ServedAnswer, ServedStream
from sidecar.upstream.client import Call

if TYPE_CHECKING:
    from sidecar.errors import StepName
    from sidecar.http import HeaderPairs
    from sidecar.pipeline.state import RequestState
    from sidecar.upstream.client import OpenAnswer, Upstream

logger = logging.getLogger(__name__)

_IF_AVAILABLE = ("prefer", "if-available")
_EVENT_STREAM = "text/event-stream"
# Envoy frames the answer itself.
_NOT_FOR_CLIENTS = HOP_BY_HOP | {"content-length", PHASE_TOKEN, HOP_GUARD, PHASE_HEADER}


class ConditionalDecodeStep:
    """Offers the decode request to the gateway under `Prefer: if-available`.

    412 means that no worker holds the prompt, and the pipeline goes on. Any other answer, a refusal included,
    is the client's.
    """

    name: StepName = "conditional_decode"

    def __init__(self, gateway: Upstream) -> None:
        self._gateway = gateway

    async def run(self, state: RequestState) -> None:
        """Ask, and set `served` unless nobody holds the prompt.

        Raises:
            StepTimeout: no answer in time.
            StepFailed: no connection, or it broke.
            Overloaded: an answer that is not streamed does not fit the byte budget.
        """
        inbound = state.inbound
        if state.body.stream and not inbound.can_stream_answer:
            logger.info(
                "conditional-decode skipped: only FULL_DUPLEX_STREAMED can stream its answer",
                extra={"request_id": inbound.request_id},
            )
            return
        call = self._call(state)
        with inbound.stopwatch.waiting():
            answer = await self._gateway.open(call)
            inbound.cleanup.callback(answer.close)
            if answer.status == HTTPStatus.PRECONDITION_FAILED:
                # Read to its end, so that the connection can be used again.
                inbound.ticket.release(len((await answer.read()).body))
                return
            headers = _end_to_end(answer.headers)
            if state.body.stream and _is_event_stream(answer):
                state.served = ServedStream(answer.status, headers, answer)
            else:
                body = memoryview((await answer.read()).body)
                state.served = ServedAnswer(answer.status, headers, body)

    def _call(self, state: RequestState) -> Call:
        body = state.body.decode(state.token_ids)
        headers = (*state.legs.phase("decode"), _IF_AVAILABLE)
        return Call(self.name, state.inbound.api.path, headers, segments(body), state.inbound.ticket.reserve)


def _is_event_stream(answer: OpenAnswer) -> bool:
    media_type = dict(answer.headers).get("content-type", "").partition(";")[0]
    return answer.status == HTTPStatus.OK and media_type.strip().lower() == _EVENT_STREAM


def _end_to_end(headers: HeaderPairs) -> HeaderPairs:
    """The fields that are for the client: not about the connection (RFC 9110, 7.6.1), nor of the phases."""
    dropped = _NOT_FOR_CLIENTS | connection_options(headers)
    return tuple((name, value) for name, value in headers if name not in dropped)
