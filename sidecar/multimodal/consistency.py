"""Engine safety: does the encoder's answer fit the rendered prompt?

A prefill that loads an encoding of another size than its placeholder span dies with its engine. Render and
encode disagree when they run with different processor settings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidecar.multimodal.grid import descriptor_grid, item_grid

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sidecar.multimodal.entries import Entry


_PATCHES_PER_TOKEN = 4


class GridMismatch(ValueError):
    """An encoding does not fit its entry; the message names the entry and both numbers."""


def check_grids(entries: Iterable[Entry], *, tensors_omitted: bool) -> None:
    """Compare every known descriptor grid with what render said of the entry.

    With metadata from render the grids must be equal. With omitted tensors, a placeholder token must stand
    for four patches (t*h*w of the grid by the span length): all models that announce an image grid merge two
    by two. Any other number, whole or not, means that the encoder has resized the image differently.

    Raises:
        GridMismatch: they do not fit.
    """
    for entry in entries:
        if entry.descriptor is None:
            continue
        encoded = descriptor_grid(entry.modality, entry.descriptor.metadata)
        if encoded is None:
            continue
        rendered = None if entry.metadata is None else item_grid(entry.modality, entry.metadata)
        if rendered is not None and rendered != encoded:
            raise GridMismatch(f"{entry.label}: render has grid {list(rendered)}, encode has {list(encoded)}")
        if tensors_omitted and entry.modality == "image":
            patches = encoded[0] * encoded[1] * encoded[2]
            if patches != entry.span.length * _PATCHES_PER_TOKEN:
                raise GridMismatch(
                    f"{entry.label}: render has {entry.span.length} placeholder tokens, "
                    f"encode has {patches} patches"
                )
