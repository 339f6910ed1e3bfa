"""prefill: computes the prompt's KV cache with one capped call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sidecar.jsontext import MalformedJson, Raw, read_object, segments
from sidecar.multimodal.forms import PrefillPlan, plan_prefill
from sidecar.pipeline.calls import answer_object, post
from sidecar.pipeline.generate import GENERATE_PATH, prefill_body

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sidecar.api.interface import JsonTree
    from sidecar.config import PrefillParams
    from sidecar.connectors.ec import EcConnector
    from sidecar.connectors.kv import KvConnector
    from sidecar.errors import StepName
    from sidecar.multimodal.entries import Descriptor
    from sidecar.pipeline.state import RequestState
    from sidecar.upstream.client import Upstream

_OPENAI = PrefillPlan("openai")


class PrefillStep:
    """Sends the prompt in the form the decision table gives, and keeps the KV parameters of the answer."""

    name: StepName = "prefill"

    def __init__(self, params: PrefillParams, gateway: Upstream, kv: KvConnector, ec: EcConnector) -> None:
        self._params = params
        self._gateway = gateway
        self._kv = kv
        self._ec = ec

    async def run(self, state: RequestState) -> None:
        """Call prefill; raises StepRejected or StepFailed."""
        plan = self._plan(state)
        state.inbound.record.prefill_form = plan.form
        if plan.reason:
            state.inbound.record.fallback_reason = plan.reason
        path, body = self._request(state, plan)
        answer = await post(
            state,
            self._gateway,
            step=self.name,
            path=path,
            headers=state.legs.phase(self.name),
            body=segments(body),
        )
        members = answer_object(self.name, answer)
        state.kv_answer = _object_or_none(members.get("kv_transfer_params"))
        state.legs.carry(answer.headers)

    def _plan(self, state: RequestState) -> PrefillPlan:
        if (own := state.body.own_prompt) is not None:
            return PrefillPlan(own.form)
        if self._params.use_openai_format or state.prompt is None:
            return _OPENAI
        return plan_prefill(
            state.entries,
            state.prompt.token_ids,
            tensors_omitted=state.prompt.tensors_omitted,
            connector=self._ec,
            mixed_spans_are_safe=self._params.sparse_spans == "verbatim",
        )

    def _request(self, state: RequestState, plan: PrefillPlan) -> tuple[str, JsonTree]:
        """Path and body of the call, with the transfer parameters at the top level.

        Engines look there; a copy in extra_args alone fails their metadata check.
        """
        params: dict[str, Any] = {"kv_transfer_params": self._kv.prefill_params()}
        if state.prompt is None or plan.form == "openai":
            token_ids = None if state.prompt is None else state.prompt.text
            path, body = state.inbound.api.path, state.body.prefill(token_ids)
            descriptors: Iterable[Descriptor] = state.descriptors
        else:
            path, body = GENERATE_PATH, prefill_body(state, state.prompt, plan)
            descriptors = _covering(state, self._ec)
        by_key = {d.key: d.value for d in descriptors} if self._ec.forwards_descriptors else {}
        return path, body | params | ({"ec_transfer_params": by_key} if by_key else {})


def _covering(state: RequestState, ec: EcConnector) -> Iterable[Descriptor]:
    for entry in state.entries:
        if entry.descriptor is not None and not ec.coverage_gap(entry.descriptor, entry.hash):
            yield entry.descriptor


def _object_or_none(value: Raw | None) -> dict[str, Raw] | None:
    if value is None:
        return None
    try:
        return read_object(value)
    except MalformedJson:
        return None
