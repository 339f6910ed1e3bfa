from __future__ import annotations

import base64
import struct
from typing import Any

import msgpack
import pytest

from sidecar.jsontext import Raw, to_raw
from sidecar.multimodal.consistency import GridMismatch, check_grids
from sidecar.multimodal.entries import Descriptor, Entry
from sidecar.multimodal.spans import Span


def _metadata(modality: str, grid: list[int]) -> Raw:
    """The item a renderer sends for a grid."""
    tensor = ["int64", [3], msgpack.ExtType(3, struct.pack("<3q", *grid))]
    item = {f"{modality}_grid_thw": {"data": tensor, "field": ["batched", {"keep_on_cpu": True}]}}
    return to_raw(base64.b64encode(msgpack.packb(item)).decode())


def _entry(
    index: int,
    length: int,
    encoded: Any = None,
    rendered: list[int] | None = None,
    modality: str = "image",
    **more: Any,
) -> Entry:
    """An entry of `length` placeholder tokens whose descriptor states the grid `encoded`."""
    entry = Entry(modality, index, None, hash=f"h{index}", span=Span(0, length))
    if rendered is not None:
        entry.metadata = _metadata(modality, rendered)
    if encoded is not None:
        metadata = {f"{modality}_grid_thw": encoded, **more}
        entry.descriptor = Descriptor(entry.hash, to_raw({"metadata": metadata}), metadata, has_peer=False)
    return entry


@pytest.mark.parametrize("omitted", [True, False])
@pytest.mark.parametrize("modality", ["image", "video"])
def test_equal_grids_fit(modality: str, *, omitted: bool) -> None:
    """What render and encode agree on is let through."""
    check_grids([_entry(0, 4, [1, 4, 4], [1, 4, 4], modality)], tensors_omitted=omitted)


@pytest.mark.parametrize("omitted", [True, False])
@pytest.mark.parametrize("modality", ["image", "video"])
def test_unequal_grids_are_named_with_both_numbers(modality: str, *, omitted: bool) -> None:
    """Grids that differ fail, also when their products are equal, naming the entry and both grids."""
    entries = [_entry(0, 4, [1, 4, 4], [1, 4, 4], modality), _entry(1, 4, [1, 2, 8], [1, 4, 4], modality)]
    with pytest.raises(GridMismatch) as mismatch:
        check_grids(entries, tensors_omitted=omitted)
    for named in (f"{modality}[1]", "[1, 4, 4]", "[1, 2, 8]"):
        assert named in str(mismatch.value)


@pytest.mark.parametrize(
    ("lengths", "grids"),
    [
        ([4], [[1, 4, 4]]),
        ([4, 16], [[1, 4, 4], [1, 8, 8]]),
        ([8, 1], [[2, 4, 4], [1, 2, 2]]),
    ],
)
def test_four_patches_for_every_token_fit(lengths: list[int], grids: list[list[int]]) -> None:
    """Without tensors, each placeholder token stands for two by two patches."""
    check_grids(
        [_entry(i, length, grid) for i, (length, grid) in enumerate(zip(lengths, grids, strict=True))],
        tensors_omitted=True,
    )


@pytest.mark.parametrize(
    ("lengths", "grids", "named"),
    [
        ([5], [[1, 4, 4]], ("image[0]", "5 placeholder tokens", "16 patches")),
        ([32], [[1, 4, 4]], ("image[0]", "32 placeholder tokens", "16 patches")),
        ([64], [[1, 8, 8]], ("image[0]", "64 placeholder tokens", "64 patches")),
        ([4], [[1, 8, 8]], ("image[0]", "4 placeholder tokens", "64 patches")),
        ([4, 16], [[1, 4, 4], [1, 4, 4]], ("image[1]", "16 placeholder tokens", "16 patches")),
        ([4, 4, 4], [[1, 4, 4], None, [1, 4, 8]], ("image[2]", "4 placeholder tokens", "32 patches")),
    ],
)
def test_another_multiple_is_a_mismatch(
    lengths: list[int], grids: list[list[int] | None], named: tuple[str, ...]
) -> None:
    """Without tensors, any other number, whole or not, means that render and encode resize differently."""
    entries = [_entry(i, length, grid) for i, (length, grid) in enumerate(zip(lengths, grids, strict=True))]
    with pytest.raises(GridMismatch) as mismatch:
        check_grids(entries, tensors_omitted=True)
    for text in named:
        assert text in str(mismatch.value)


def test_with_tensors_only_grids_are_compared() -> None:
    """With tensors the encoder had the renderer's own pixels: the multiple says nothing new."""
    check_grids([_entry(0, 5, [1, 4, 4]), _entry(1, 9, [1, 2, 2])], tensors_omitted=False)


def test_videos_have_no_common_multiple() -> None:
    """The multiple is a rule for images only: a video's span may hold other tokens."""
    check_grids([_entry(0, 5, [2, 4, 4], modality="video")], tensors_omitted=True)


def test_a_grid_next_to_other_fields_is_compared_too() -> None:
    """A grid that cannot be rebuilt, for its neighbours, is known all the same."""
    entry = _entry(0, 4, [1, 2, 8], [1, 4, 4], "video", second_per_grid_ts=[1.0])
    with pytest.raises(GridMismatch):
        check_grids([entry], tensors_omitted=False)


@pytest.mark.parametrize("encoded", [None, [1, 4], [1.0, 4, 4], "x", [0, 4, 4]])
def test_an_unknown_grid_is_not_judged(encoded: Any) -> None:
    """Without a descriptor, or with one that states no grid, there is nothing to compare."""
    check_grids([_entry(0, 5, encoded, [1, 4, 4])], tensors_omitted=True)
