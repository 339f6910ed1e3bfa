"""Runs the configured steps over one request, each under its own timeout and clock."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from sidecar.errors import BadRequest, StepTimeout
from sidecar.jsontext import MalformedJson, parsed_size
from sidecar.multimodal.entries import entries_of, media_summary
from sidecar.pipeline.legs import LegHeaders
from sidecar.pipeline.state import RequestState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sidecar.api import ClientBody
    from sidecar.api.interface import OwnPrompt
    from sidecar.control_headers import ControlHeaders
    from sidecar.errors import StepName
    from sidecar.multimodal.entries import Entry
    from sidecar.observability.record import AccessRecord
    from sidecar.pipeline.request import InboundRequest, PipelineResult


_MODEL_LENGTH = 256
"""Characters of the requested model that the access log gets: the client chose it."""


class Step(Protocol):
    """One step: reads and extends the request's state."""

    @property
    def name(self) -> StepName:
        """Short name, as codes and the access log have it."""

    async def run(self, state: RequestState) -> None:
        """Do the step's work; raises SidecarError."""


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step and the seconds it may take; None for one that waits for nobody, or bounds itself."""

    step: Step
    timeout: float | None


@dataclass(frozen=True, slots=True)
class LegRules:
    """What the deployment says about the headers of the legs.

    Attributes:
        control_headers: what a client may not send on.
        phase_token: secret of our own calls to the gateway; "" for none.
        forwarded: response headers that travel from phase to phase.
    """

    control_headers: ControlHeaders
    phase_token: str
    forwarded: tuple[str, ...]


class Pipeline:
    """The steps of every request, in order; the last one sets the rewrite, unless a worker answers before.

    Args:
        steps: in order.
        rules: headers of the legs.
        mixed_spans_are_safe: `sparse_spans: verbatim`, for engines that know `is_embed`.
    """

    def __init__(
        self, steps: Sequence[TimedStep], rules: LegRules, *, mixed_spans_are_safe: bool = False
    ) -> None:
        self._steps = tuple(steps)
        self._rules = rules
        self._mixed_spans_are_safe = mixed_spans_are_safe

    async def run(self, inbound: InboundRequest) -> PipelineResult:
        """Coordinate one request; raises SidecarError, with `inbound.record` telling how far it came."""
        record = inbound.record
        record.api = inbound.api.name
        _charge_parsing(inbound)
        body = inbound.api.parse(inbound.body)
        record.model = (body.model or "")[:_MODEL_LENGTH]
        record.stream = body.stream
        _refuse_unknown_parts(body)
        entries = entries_of(body.parts)
        _note_prompt(record, entries, body.own_prompt)
        if body.own_prompt is not None and not self._mixed_spans_are_safe:
            _check_own_spans(body.own_prompt)
        legs = LegHeaders(
            inbound.head,
            inbound.request_id,
            inbound.traceparent,
            control_headers=self._rules.control_headers,
            phase_token=self._rules.phase_token,
            forwarded=self._rules.forwarded,
        )
        state = RequestState(inbound, body, legs, entries)
        for timed in self._steps:
            record.stage = timed.step.name
            started = time.perf_counter()
            try:
                await _run(timed, state)
            finally:
                _note_duration(record, timed.step.name, (time.perf_counter() - started) * 1000)
            if state.served is not None:
                return state.served
        if state.rewrite is None:
            raise RuntimeError("the pipeline ended without a decode request")
        return state.rewrite


def _charge_parsing(inbound: InboundRequest) -> None:
    """Charge what the parsed body will take, before it is parsed: small members cost a multiple."""
    try:
        inbound.ticket.reserve(parsed_size(inbound.body))
    except MalformedJson as error:
        raise BadRequest(f"the body has {error}") from None


def _refuse_unknown_parts(body: ClientBody) -> None:
    """Refuse parts of a type nobody here knows: a renderer may take one for media, past the address guard."""
    if body.unknown_part_types:
        kind = body.unknown_part_types[0]
        raise BadRequest(f"content parts of type {kind[:32]!a} are not supported with disaggregated encoding")


def _check_own_spans(prompt: OwnPrompt) -> None:
    """Refuse features over a mixed-token span before any engine sees them: no engine survives one."""
    for modality, spans in prompt.spans.items():
        for index, span in enumerate(spans):
            if span.uniform_token(prompt.token_ids) is None:
                raise BadRequest(
                    f"features: the span of {modality}[{index}] mixes tokens, which engines do not survive; "
                    "send the item in content_parts"
                )


def _note_prompt(record: AccessRecord, entries: Sequence[Entry], prompt: OwnPrompt | None) -> None:
    """What is known before any step; render says more about a prompt it makes."""
    counts = Counter(entry.modality for entry in entries)
    if prompt is not None:
        counts.update({modality: len(spans) for modality, spans in prompt.spans.items()})
        record.prompt_tokens = len(prompt.token_ids)
        record.placeholder_tokens = sum(span.length for spans in prompt.spans.values() for span in spans)
    record.media = media_summary(counts)


async def _run(timed: TimedStep, state: RequestState) -> None:
    try:
        async with asyncio.timeout(timed.timeout) as scope:
            await timed.step.run(state)
    except TimeoutError:
        if not scope.expired():
            raise
        name = timed.step.name
        listed = name.replace("_", "-")
        raise StepTimeout(
            name, f"{name} took longer than {timed.timeout:g} s (timeout of the {listed} step)"
        ) from None


def _note_duration(record: AccessRecord, step: StepName, milliseconds: float) -> None:
    match step:
        case "media":
            record.media_ms = milliseconds
        case "render":
            record.render_ms = milliseconds
        case "encode":
            record.encode_ms = milliseconds
        case "prefill" | "prefill_decode":
            record.prefill_ms = milliseconds
