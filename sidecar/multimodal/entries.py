"""Media entries: one per media item of the request, from the client's part to the encoder's descriptor."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sidecar.multimodal.spans import UNPLACED, Span

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from sidecar.api import MediaPart
    from sidecar.jsontext import Raw


ITEM_HASH = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,255}")
"""What a media hash may look like: a worker uses it as a file name."""


@dataclass(frozen=True, slots=True)
class Descriptor:
    """Where one encoding is, as the encoder announced it.

    Attributes:
        key: key of the map it came in; the entry's hash, unless the encoder hashed the item itself.
        value: JSON text of the descriptor object, forwarded as it is.
        metadata: the descriptor's `metadata` object, {} when it has none.
        has_peer: whether it names the worker that holds the encoding (`peer_host`, `peer_port`).
    """

    key: str
    value: Raw
    metadata: Mapping[str, Any]
    has_peer: bool


@dataclass(slots=True)
class Entry:
    """One media item.

    Attributes:
        modality: as the renderer names it; the part's own modality before render.
        index: position within the modality.
        part: the client's part; None when the renderer's modality cannot be paired with one.
        hash: render hash, "" without a render step.
        span: placeholder span in the expanded token ids; `UNPLACED` without a render step.
        kwargs_data: JSON text of the processed tensors, None when omitted.
        metadata: JSON text of the renderer's metadata item, None when it sent none.
        descriptor: the encoder's descriptor for this entry, None until encode has run or when it gave none.
        left_to_prefill: the encode call failed, and the prefill worker encodes the item itself.
    """

    modality: str
    index: int
    part: MediaPart | None
    hash: str = ""
    span: Span = UNPLACED
    kwargs_data: Raw | None = field(default=None, repr=False)
    metadata: Raw | None = field(default=None, repr=False)
    descriptor: Descriptor | None = field(default=None, repr=False)
    left_to_prefill: bool = False

    @property
    def label(self) -> str:
        """How messages and the access log name the entry: `image[1]`."""
        return f"{self.modality}[{self.index}]"


def entries_of(parts: Iterable[MediaPart]) -> list[Entry]:
    """One entry per part, in walk order, counted within each modality."""
    counts: dict[str, int] = {}
    entries = []
    for part in parts:
        index = counts.get(part.modality, 0)
        counts[part.modality] = index + 1
        entries.append(Entry(part.modality, index, part))
    return entries


def media_summary(counts: Mapping[str, int]) -> str:
    """Items per modality, as the access log prints them: `image:2,audio:1`."""
    return ",".join(f"{modality}:{count}" for modality, count in counts.items())
