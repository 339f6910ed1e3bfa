"""What prefill is sent, in the form the decision table gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sidecar.multimodal.forms import PrefillPlan, plan_prefill
from sidecar.pipeline.generate import GENERATE_PATH, prefill_body

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from sidecar.api.interface import JsonTree
    from sidecar.connectors.ec import EcConnector
    from sidecar.multimodal.entries import Descriptor
    from sidecar.pipeline.state import RequestState

_OPENAI = PrefillPlan("openai")


@dataclass(frozen=True, slots=True)
class PrefillRequests:
    """Builds prefill requests.

    Attributes:
        openai: whether prefill gets the client's own format.
        mixed_spans_are_safe: `sparse_spans: verbatim`, for engines that know `is_embed`.
        ec: how encoder output travels.
    """

    openai: bool
    mixed_spans_are_safe: bool
    ec: EcConnector

    def build(self, state: RequestState, kv_params: Mapping[str, Any] | None) -> tuple[str, JsonTree]:
        """Path and body of the call, with the transfer parameters at the top level; notes the form.

        Engines look there; a copy in extra_args alone fails their metadata check.

        Args:
            state: the request.
            kv_params: `kv_transfer_params`, None leaves the member out.
        """
        plan = self._plan(state)
        state.inbound.record.prefill_form = plan.form
        if plan.reason:
            state.inbound.record.fallback_reason = plan.reason
        if state.prompt is None or plan.form == "openai":
            path, body = state.inbound.api.path, state.body.prefill(state.token_ids)
            descriptors: Iterable[Descriptor] = state.descriptors
        else:
            path, body = GENERATE_PATH, prefill_body(state, state.prompt, plan)
            descriptors = self._covering(state)
        if kv_params is not None:
            body |= {"kv_transfer_params": kv_params}
        by_key = {d.key: d.value for d in descriptors} if self.ec.forwards_descriptors else {}
        return path, body | ({"ec_transfer_params": by_key} if by_key else {})

    def _plan(self, state: RequestState) -> PrefillPlan:
        if (own := state.body.own_prompt) is not None:
            return PrefillPlan(own.form)
        if self.openai or state.prompt is None:
            return _OPENAI
        return plan_prefill(
            state.entries,
            state.prompt.token_ids,
            tensors_omitted=state.prompt.tensors_omitted,
            connector=self.ec,
            mixed_spans_are_safe=self.mixed_spans_are_safe,
        )

    def _covering(self, state: RequestState) -> Iterable[Descriptor]:
        for entry in state.entries:
            if entry.descriptor is not None and not self.ec.coverage_gap(entry.descriptor, entry.hash):
                yield entry.descriptor
