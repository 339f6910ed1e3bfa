"""Media fields of a generate-format body: `features` (processed tensors or metadata) and `content_parts`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sidecar.errors import MixedSpan
from sidecar.jsontext import NULL, Raw, to_raw

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sidecar.multimodal.entries import Entry
    from sidecar.multimodal.spans import Span

_PART_TYPE = {"image": "image_url", "audio": "audio_url", "video": "video_url"}


@dataclass(frozen=True, slots=True)
class Obstacle:
    """An entry that cannot travel as a content part, and why."""

    entry: Entry
    reason: str

    def __str__(self) -> str:
        return f"{self.entry.label}: {self.reason}"


def content_parts(entries: Sequence[Entry], token_ids: Sequence[int]) -> list[dict[str, Any]]:
    """Flat `content_parts` items, one per entry.

    The uuid is the render hash, which the engine then uses verbatim as the key of the encoding.

    Raises:
        MixedSpan: a span mixes tokens, so no single placeholder stands for it; or the modality is one an
            engine would skip without a word.
    """
    obstacle = first_obstacle(entries, token_ids)
    if obstacle is not None:
        raise MixedSpan(
            f"media cannot travel without their tensors (mm_payload: none): {obstacle}; "
            "set mm_payload: tensors or auto on the render step for this model"
        )
    return [
        {"type": _PART_TYPE[entry.modality], "url": entry.part.data_url(), "uuid": entry.hash}
        for entry in entries
        if entry.part is not None
    ]


def first_obstacle(entries: Sequence[Entry], token_ids: Sequence[int]) -> Obstacle | None:
    """The first entry that no content part can stand for; None when all can travel so."""
    for entry in entries:
        if entry.modality not in _PART_TYPE or entry.part is None:
            return Obstacle(entry, "no content part for this modality")
        if entry.span.uniform_token(token_ids) is None:
            return Obstacle(entry, "mixed-token span")
    return None


def single_entry_features(entry: Entry) -> dict[str, Any]:
    """`features` of an encode call: one entry whose span follows a single leading token."""
    return {
        "mm_hashes": {entry.modality: [entry.hash]},
        "mm_placeholders": {entry.modality: [{"offset": 1, "length": entry.span.length}]},
        "kwargs_data": {entry.modality: [entry.kwargs_data]},
    }


def kwargs_features(entries: Sequence[Entry]) -> dict[str, Any]:
    """`features` of a prefill that carries the processed tensors of every entry."""
    return {**_placement(entries), "kwargs_data": _by_modality(entries, lambda e: e.kwargs_data or NULL)}


def metadata_features(entries: Sequence[Entry], items: Sequence[Raw]) -> dict[str, Any]:
    """`features` of a prefill that carries only metadata; `items` holds one per entry, in entry order."""
    item_of = {id(entry): item for entry, item in zip(entries, items, strict=True)}
    return {
        **_placement(entries),
        "kwargs_data": None,
        "mm_metadata": _by_modality(entries, lambda e: item_of[id(e)]),
    }


def _placement(entries: Sequence[Entry]) -> dict[str, Any]:
    return {
        "mm_hashes": _by_modality(entries, lambda e: to_raw(e.hash)),
        "mm_placeholders": _by_modality(entries, lambda e: _placeholder(e.span)),
    }


def _placeholder(span: Span) -> Raw:
    return to_raw({"offset": span.offset, "length": span.length})


def _by_modality(entries: Sequence[Entry], value: Callable[[Entry], Raw]) -> dict[str, list[Raw]]:
    # Every map gets the same modalities and lengths: an engine refuses partial maps.
    result: dict[str, list[Raw]] = {}
    for entry in entries:
        result.setdefault(entry.modality, []).append(value(entry))
    return result
