"""The wire form of processed items."""

from __future__ import annotations

import base64
import json
import math
from typing import TYPE_CHECKING, Any

import msgpack
import pytest

from sidecar.simulator.errors import ApiError
from sidecar.simulator.serialization import (
    audio_length,
    carries_tensor_of,
    grid_of,
    kwargs_item,
    metadata_item,
    read_item,
)

if TYPE_CHECKING:
    from sidecar.simulator.tokens import Modality

# Emitted by vLLM 0.32.
GOLDEN: list[tuple[Modality, tuple[int, int, int], str]] = [
    (
        "image",
        (1, 34, 46),
        (
            "ga5pbWFnZV9ncmlkX3Rod4KkZGF0YZOlaW50NjSRA8cYAwEAAAAAAAAAIgAAAAAAAAAuAAAAAAAAAKVmaWVsZJKnYmF0Y2hlZIGr"
            "a2VlcF9vbl9jcHXD"
        ),
    ),
    (
        "image",
        (1, 98, 146),
        (
            "ga5pbWFnZV9ncmlkX3Rod4KkZGF0YZOlaW50NjSRA8cYAwEAAAAAAAAAYgAAAAAAAACSAAAAAAAAAKVmaWVsZJKnYmF0Y2hlZIGr"
            "a2VlcF9vbl9jcHXD"
        ),
    ),
    (
        "video",
        (4, 34, 46),
        (
            "ga52aWRlb19ncmlkX3Rod4KkZGF0YZOlaW50NjSRA8cYAwQAAAAAAAAAIgAAAAAAAAAuAAAAAAAAAKVmaWVsZJKnYmF0Y2hlZIGr"
            "a2VlcF9vbl9jcHXD"
        ),
    ),
]
# Also emitted by vLLM 0.32: an int64 without dimensions, the form of an audio length.
GOLDEN_SCALAR = "gatudW1fcGF0Y2hlc4KkZGF0YZOlaW50NjSQ1wMDAAAAAAAAAKVmaWVsZJKnYmF0Y2hlZIGra2VlcF9vbl9jcHXD"


@pytest.mark.parametrize(("modality", "grid", "expected"), GOLDEN)
def test_metadata_is_byte_for_byte_vllms(
    modality: Modality, grid: tuple[int, int, int], expected: str
) -> None:
    """A grid item is what vLLM emits, and reads back."""
    item = metadata_item(modality, grid, math.prod(grid) // 4)
    assert item == expected
    assert grid_of(read_item(item, "x"), modality) == grid


def test_audio_metadata_has_the_form_of_a_scalar() -> None:
    """An audio length is an int64 tensor without dimensions."""
    item = base64.b64decode(metadata_item("audio", None, 3))
    scalar = base64.b64decode(GOLDEN_SCALAR)
    assert item.replace(b"\xb5audio_feature_lengths", b"") == scalar.replace(b"\xabnum_patches", b"")
    assert audio_length(read_item(metadata_item("audio", None, 3), "x")) == 3


@pytest.mark.parametrize("size", [64, 65, 66, 100, 4704, 70000])
@pytest.mark.parametrize("modality", ["image", "video", "audio"])
def test_kwargs_item_is_a_tensor_of_the_asked_size(modality: Modality, size: int) -> None:
    """A plain msgpack reader finds a uint8 tensor of exactly that many bytes, and its field."""
    grid = None if modality == "audio" else (1, 4, 4)
    text = json.loads(kwargs_item(modality, grid, 4, key="h", tensor_bytes=size))
    document = msgpack.unpackb(base64.b64decode(text, validate=True))
    (tensor,) = [elem for name, elem in document.items() if name.startswith(("pixel_values", "input_audio"))]
    dtype, shape, raw = tensor["data"]
    assert (dtype, shape, raw.code, len(raw.data)) == ("uint8", [size], 3, size)
    assert tensor["field"][0] == "flat"
    assert grid_of(read_item(text, "x"), modality) == grid


def test_tensors_of_another_hash_are_recognised() -> None:
    """The mark at the head of a tensor ties it to its hash; an unmarked tensor passes."""
    fields = read_item(json.loads(kwargs_item("image", (1, 4, 4), 4, key="a", tensor_bytes=100)), "x")
    assert carries_tensor_of(fields, "image", "a")
    assert not carries_tensor_of(fields, "image", "b")
    assert carries_tensor_of({"pixel_values": memoryview(bytes(100))}, "image", "b")


def _packed(value: Any) -> str:
    return base64.b64encode(msgpack.packb(value)).decode()


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("%%%", 400),
        (GOLDEN[0][2][:-8], 400),
        (GOLDEN[0][2][:-1], 400),
        (5, 400),
        (_packed([1]), 500),
        (_packed({}), 500),
        (_packed({"image_grid_thw": 3}), 500),
        (
            _packed({"f": {"data": ["int64", [2], msgpack.ExtType(3, bytes(8))], "field": ["batched", {}]}}),
            500,
        ),
        (
            _packed({"f": {"data": ["int9", [1], msgpack.ExtType(3, bytes(8))], "field": ["batched", {}]}}),
            500,
        ),
        (
            _packed({"f": {"data": ["int64", [1], msgpack.ExtType(1, bytes(8))], "field": ["batched", {}]}}),
            500,
        ),
    ],
)
def test_broken_items_are_refused(text: object, status: int) -> None:
    """Broken base64 or msgpack is a 400, a wrong shape inside a 500."""
    with pytest.raises(ApiError) as caught:
        read_item(text, "features.kwargs_data.image.0")
    assert caught.value.status == status
