"""vLLM's wire form of processed items: base64(msgpack) of `{field: {"data": nested, "field": [kind, args]}}`.

A tensor is `[dtype, shape, Ext(3, little-endian bytes)]`. Metadata items are byte for byte what vLLM emits.
Items with tensors open their tensor with a mark derived from the item's hash, so an engine notices tensors
that travel under another hash; the megabytes behind the mark are zeros, encoded once per size.
"""

from __future__ import annotations

import binascii
import hashlib
import math
import struct
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgpack

from sidecar.simulator.errors import bad_request, internal_error, invalid_field

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sidecar.simulator.media import Grid
    from sidecar.simulator.tokens import Modality

ItemFields = dict[str, Any]
"""The fields of one item: grids as tuples of int, tensors as `Tensor`, anything else as msgpack gave it."""

Tensor = memoryview
"""The raw bytes of a tensor."""

GRID_FIELD: dict[str, str] = {"image": "image_grid_thw", "video": "video_grid_thw"}
AUDIO_FIELD = "audio_feature_lengths"
TENSOR_FIELD: dict[Modality, str] = {
    "image": "pixel_values",
    "video": "pixel_values_videos",
    "audio": "input_audio_features",
}

_MARK = b"epd-simulator:"
_MARK_BYTES = len(_MARK) + hashlib.sha256().digest_size
_RAW_VIEW = 3
_TENSOR_PARTS = 3
_GRID_DIMENSIONS = 3
_ITEM_BYTES = {"uint8": 1, "int8": 1, "bool": 1, "float16": 2, "bfloat16": 2, "int32": 4, "float32": 4} | {
    "int64": 8,
    "float64": 8,
}


def metadata_item(modality: Modality, grid: Grid | None, embeds: int) -> str:
    """The `mm_metadata` item of one entry: its grid, or the number of features of an audio clip."""
    if grid is None:
        return _base64(_pack({AUDIO_FIELD: _batched_int64((), (embeds,))}))
    return _base64(_pack({GRID_FIELD[modality]: _batched_int64((len(grid),), grid)}))


def kwargs_item(modality: Modality, grid: Grid | None, embeds: int, *, key: str, tensor_bytes: int) -> bytes:
    """The `kwargs_data` item of one entry as a JSON string, with a tensor of `tensor_bytes` bytes."""
    name, metadata = (
        (AUDIO_FIELD, _batched_int64((), (embeds,)))
        if grid is None
        else (GRID_FIELD[modality], _batched_int64((len(grid),), grid))
    )
    head = b"".join(
        (
            b"\x82",
            _pack(name),
            _pack(metadata),
            _pack(TENSOR_FIELD[modality]),
            b"\x82",
            _pack("data"),
            b"\x93",
            _pack("uint8"),
            _pack([tensor_bytes]),
            # ext 32 whatever the size: a decoder takes any width, and the head keeps one shape.
            b"\xc9" + struct.pack(">IB", tensor_bytes, _RAW_VIEW),
            _mark(key),
        )
    )
    # Base64 text can be joined where the bytes before it are a multiple of three.
    padding = -len(head) % 3
    return b"".join(
        (
            b'"',
            binascii.b2a_base64(head + bytes(padding), newline=False),
            _zeros_and_field(tensor_bytes - _MARK_BYTES - padding, tensor_bytes),
            b'"',
        )
    )


def read_item(text: object, path: str) -> ItemFields:
    """Decode one item as an engine does.

    Raises:
        ApiError: 400 for broken base64 or msgpack, 500 for msgpack of another shape.
    """
    if not isinstance(text, str):
        raise invalid_field(path, "Input should be a valid string")
    try:
        document = msgpack.unpackb(binascii.a2b_base64(text.encode("ascii"), strict_mode=True))
    except (ValueError, UnicodeEncodeError, msgpack.UnpackException):
        raise bad_request("Input data was truncated") from None
    if not isinstance(document, dict) or not document:
        raise internal_error()
    return {name: _read_field(name, elem) for name, elem in document.items()}


def carries_tensor_of(fields: ItemFields, modality: Modality, key: str) -> bool:
    """False when the tensor bears the mark of another hash; tensors made elsewhere bear none and pass."""
    tensor = fields.get(TENSOR_FIELD[modality])
    if not isinstance(tensor, memoryview) or tensor[: len(_MARK)] != _MARK:
        return True
    return bytes(tensor[:_MARK_BYTES]) == _mark(key)


def grid_of(fields: ItemFields, modality: Modality) -> Grid | None:
    """The grid among the fields, or None."""
    grid = fields.get(GRID_FIELD.get(modality, ""))
    return grid if isinstance(grid, tuple) and len(grid) == _GRID_DIMENSIONS else None


def audio_length(fields: ItemFields) -> int | None:
    """The number of audio features among the fields, or None."""
    length = fields.get(AUDIO_FIELD)
    return length[0] if isinstance(length, tuple) and length else None


@lru_cache(maxsize=8)
def _zeros_and_field(zeros: int, tensor_bytes: int) -> bytes:
    field = ["flat", {"keep_on_cpu": False, "slices": [[[0, tensor_bytes, None]]], "dim": 0}]
    return binascii.b2a_base64(bytes(zeros) + _pack("field") + _pack(field), newline=False)


def _mark(key: str) -> bytes:
    return _MARK + hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _batched_int64(shape: tuple[int, ...], values: Sequence[int]) -> dict[str, Any]:
    raw = struct.pack(f"<{len(values)}q", *values)
    return {
        "data": ["int64", list(shape), msgpack.ExtType(_RAW_VIEW, raw)],
        "field": ["batched", {"keep_on_cpu": True}],
    }


def _read_field(name: object, elem: object) -> object:
    if not isinstance(name, str) or not isinstance(elem, dict) or not {"data", "field"} <= elem.keys():
        raise internal_error()
    data = elem["data"]
    if not (isinstance(data, list) and len(data) == _TENSOR_PARTS and isinstance(data[0], str)):
        return data
    dtype, shape, raw = data
    if (
        dtype not in _ITEM_BYTES
        or not isinstance(shape, list)
        or not all(type(size) is int and size >= 0 for size in shape)
        or not isinstance(raw, msgpack.ExtType)
        or raw.code != _RAW_VIEW
        or len(raw.data) != math.prod(shape) * _ITEM_BYTES[dtype]
    ):
        raise internal_error()
    if dtype == "int64":
        return struct.unpack(f"<{len(raw.data) // 8}q", raw.data)
    return memoryview(raw.data)


def _pack(value: object) -> bytes:
    packed: bytes = msgpack.packb(value, use_bin_type=True)
    return packed


def _base64(data: bytes) -> str:
    return binascii.b2a_base64(data, newline=False).decode("ascii")
