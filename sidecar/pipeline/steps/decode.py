"""decode: the request Envoy itself forwards, as the last step of the pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidecar.jsontext import segments
from sidecar.pipeline.request import DecodeRewrite

if TYPE_CHECKING:
    from sidecar.connectors.kv import KvConnector
    from sidecar.errors import StepName
    from sidecar.pipeline.state import RequestState


class DecodeStep:
    """Writes the client's own request again, uncapped, with what decode needs to find the KV cache."""

    name: StepName = "decode"

    def __init__(self, kv: KvConnector | None) -> None:
        self._kv = kv

    async def run(self, state: RequestState) -> None:
        """Set the rewrite; calls nobody."""
        body = state.body.decode(state.token_ids)
        params = None if self._kv is None else self._kv.decode_params(state.kv_answer)
        if params is not None:
            body |= {"kv_transfer_params": params}
        state.rewrite = DecodeRewrite(state.legs.decode(), state.legs.removed_from_decode(), segments(body))
