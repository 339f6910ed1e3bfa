"""The state of one request on its way through the steps; nothing else is shared between steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sidecar.api import ClientBody
    from sidecar.jsontext import Raw
    from sidecar.multimodal.entries import Descriptor, Entry
    from sidecar.pipeline.legs import LegHeaders
    from sidecar.pipeline.request import DecodeRewrite, InboundRequest, ServedAnswer, ServedStream


@dataclass(frozen=True, slots=True)
class Prompt:
    """The rendered prompt.

    Attributes:
        token_ids: expanded token ids.
        text: the same as JSON text, forwarded as received.
        sampling_params: the renderer's sampling parameters; never a source of `max_tokens`.
        tensors_omitted: the media entries came without `kwargs_data`.
    """

    token_ids: list[int] = field(repr=False)
    text: Raw = field(repr=False)
    sampling_params: Mapping[str, Raw] = field(repr=False)
    tensors_omitted: bool


@dataclass(slots=True)
class RequestState:
    """One request between the client's complete body and what becomes of it.

    Attributes:
        inbound: what the client sent, with its record, ticket and stopwatch.
        body: the parsed body; steps rewrite media parts in place.
        legs: header builder of all legs.
        entries: media entries in request order.
        prompt: set by render, None without that step.
        descriptors: all descriptors the encoders answered, in entry order, without duplicates.
        kv_answer: `kv_transfer_params` of the prefill answer, None when it had none.
        served: set by conditional-decode when a worker answered: no further step runs.
        rewrite: set by decode or prefill-decode, which end the pipeline.
    """

    inbound: InboundRequest
    body: ClientBody
    legs: LegHeaders
    entries: list[Entry]
    prompt: Prompt | None = None
    descriptors: list[Descriptor] = field(default_factory=list)
    kv_answer: Mapping[str, Raw] | None = None
    served: ServedAnswer | ServedStream | None = None
    rewrite: DecodeRewrite | None = None

    @property
    def token_ids(self) -> Raw | None:
        """JSON text of the rendered token ids, None without a render step."""
        return None if self.prompt is None else self.prompt.text
