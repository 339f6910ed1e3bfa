"""In which form the media of one request travel; decided once, for the whole request.

The decision table of the wire contract, for the generate format (the OpenAI format carries the client's own
parts). Tensors present or omitted, metadata and coverage of every entry, and uniformity of the spans decide.
The strictness has one reason: a metadata-only prefill whose encoder output is missing, or a features prefill
over a mixed-token span, kills the engine process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from sidecar.multimodal.grid import rebuild_metadata

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sidecar.connectors.ec import EcConnector
    from sidecar.jsontext import Raw
    from sidecar.multimodal.entries import Entry

EncodeForm = Literal["features", "content_parts", "openai", "skipped"]
PrefillForm = Literal["kwargs_data", "mm_metadata", "content_parts", "openai", "tokens"]


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """How prefill carries the media.

    Attributes:
        form: the form.
        reason: why it is not `mm_metadata`, with the entry; "" when it is, or without media.
        metadata: one item per entry, in entry order, for `mm_metadata`.
    """

    form: PrefillForm
    reason: str = ""
    metadata: tuple[Raw, ...] = ()


def mixed_entry(entries: Sequence[Entry], token_ids: Sequence[int]) -> Entry | None:
    """The first entry whose span mixes tokens, None when all spans are uniform."""
    for entry in entries:
        if entry.span.uniform_token(token_ids) is None:
            return entry
    return None


def plan_prefill(
    entries: Sequence[Entry],
    token_ids: Sequence[int],
    *,
    tensors_omitted: bool,
    connector: EcConnector,
    mixed_spans_are_safe: bool,
) -> PrefillPlan:
    """Choose the form of a generate-format prefill.

    Args:
        entries: after encode, with their descriptors.
        token_ids: expanded token ids.
        tensors_omitted: whether the renderer kept `kwargs_data` to itself.
        connector: says what counts as coverage.
        mixed_spans_are_safe: `prefill.sparse_spans: verbatim`, for engines that know `is_embed`.
    """
    if not entries:
        return PrefillPlan("tokens")
    if not mixed_spans_are_safe:
        mixed = mixed_entry(entries, token_ids)
        if mixed is not None:
            return PrefillPlan("openai", f"{mixed.label}: mixed-token span")
    items: list[Raw] = []
    for entry in entries:
        item, reason = _metadata_item(entry, connector)
        if item is None:
            form: PrefillForm = "content_parts" if tensors_omitted else "kwargs_data"
            return PrefillPlan(form, f"{entry.label}: {reason}")
        items.append(item)
    return PrefillPlan("mm_metadata", metadata=tuple(items))


def _metadata_item(entry: Entry, connector: EcConnector) -> tuple[Raw | None, str]:
    """The metadata item of a covered entry, or None and why the entry needs its tensors or its media."""
    if entry.left_to_prefill:
        return None, "encode failed (on_failure: local)"
    gap = connector.coverage_gap(entry.descriptor, entry.hash)
    if gap:
        return None, gap
    if entry.metadata is not None:
        return entry.metadata, ""
    if entry.descriptor is None:
        return None, "no descriptor"
    return rebuild_metadata(entry.modality, entry.descriptor.metadata)
