"""prefill: computes the prompt's KV cache with one capped call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidecar.jsontext import MalformedJson, Raw, read_object, segments
from sidecar.pipeline.calls import answer_object, post

if TYPE_CHECKING:
    from sidecar.connectors.kv import KvConnector
    from sidecar.errors import StepName
    from sidecar.pipeline.parity import PromptTokenParity
    from sidecar.pipeline.prefill_request import PrefillRequests
    from sidecar.pipeline.state import RequestState
    from sidecar.upstream.client import Upstream


class PrefillStep:
    """Sends the prompt, and keeps the KV parameters of the answer."""

    name: StepName = "prefill"

    def __init__(
        self,
        requests: PrefillRequests,
        gateway: Upstream,
        kv: KvConnector,
        parity: PromptTokenParity | None = None,
    ) -> None:
        self._requests = requests
        self._gateway = gateway
        self._kv = kv
        self._parity = parity

    async def run(self, state: RequestState) -> None:
        """Call prefill; raises StepRejected or StepFailed."""
        path, body = self._requests.build(state, self._kv.prefill_params())
        answer = await post(
            state.inbound,
            self._gateway,
            step=self.name,
            path=path,
            headers=state.legs.phase(self.name),
            body=segments(body),
        )
        members = answer_object(self.name, answer)
        state.kv_answer = _object_or_none(members.get("kv_transfer_params"))
        state.legs.carry(answer.headers)
        if self._parity is not None:
            self._parity.prefill_answered(state.inbound.record, path, answer.body)


def _object_or_none(value: Raw | None) -> dict[str, Raw] | None:
    if value is None:
        return None
    try:
        return read_object(value)
    except MalformedJson:
        return None
