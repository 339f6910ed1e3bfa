"""Grids of processed media, and the `mm_metadata` item that carries one.

An item is base64(msgpack) of `{field: {"data": tensor, "field": [kind, kwargs]}}`; a tensor is
`[dtype, shape, Ext(3, little-endian bytes)]`. Rebuilding an item from an encoder's descriptor stands in for a
renderer that returns metadata along with omitted tensors; everything about it is in this module.
"""

from __future__ import annotations

import base64
import binascii
import struct
from typing import TYPE_CHECKING, Any

import msgpack

from sidecar.jsontext import MalformedJson, Raw, read_string

if TYPE_CHECKING:
    from collections.abc import Mapping

Grid = tuple[int, int, int]
"""Temporal, height and width patches of one item."""

_GRID_FIELD = {"image": "image_grid_thw", "video": "video_grid_thw"}
_TENSOR_EXT = 3
_INT64_MAX = (1 << 63) - 1
_MAX_ITEM_LENGTH = 64 << 10
"""A metadata item is around 116 characters; a longer one is not read for its grid."""


def descriptor_grid(modality: str, metadata: Mapping[str, Any]) -> Grid | None:
    """The grid a descriptor's metadata states, whatever else stands next to it; None when it states none."""
    field = _GRID_FIELD.get(modality)
    return None if field is None else _grid(metadata.get(field))


def rebuild_metadata(modality: str, metadata: Mapping[str, Any]) -> tuple[Raw | None, str]:
    """The metadata item a renderer would emit, from a descriptor's metadata.

    Only the lone grid of an image can be rebuilt: three integers from 1 to 2^63 - 1. Any other field has a
    dtype or shape the descriptor does not tell. A video is never rebuilt: a renderer also sends the seconds
    per grid, no descriptor has them, and without them an engine takes other positions for the tokens and
    answers something else, unnoticed.

    Returns:
        JSON text of the base64 string and "", or None and the reason.
    """
    field = _GRID_FIELD.get(modality)
    if not metadata:
        return None, "no metadata"
    others = sorted(name for name in metadata if name != field)
    if others:
        return None, f"metadata not encodable ({_printable(others[0])})"
    grid = _grid(metadata[field]) if field else None
    if field is None or grid is None:
        return None, f"metadata not encodable ({field})"
    if modality == "video":
        return None, "metadata of a video is not in its descriptor"
    return _item(field, grid), ""


def item_grid(modality: str, item: Raw) -> Grid | None:
    """The grid in a renderer's metadata item, None when it has none or is not readable."""
    field = _GRID_FIELD.get(modality)
    if field is None or len(memoryview(item)) > _MAX_ITEM_LENGTH:
        return None
    try:
        fields = msgpack.unpackb(base64.b64decode(read_string(item), validate=True))
        dtype, shape, data = fields[field]["data"]
        if dtype != "int64" or shape != [3] or data.code != _TENSOR_EXT:
            return None
        return _grid(list(struct.unpack("<3q", data.data)))
    except (MalformedJson, binascii.Error, ValueError, TypeError, KeyError, AttributeError, struct.error):
        return None


def _grid(value: Any) -> Grid | None:
    if not isinstance(value, list) or len(value) != len(("t", "h", "w")):
        return None
    # bool is an int to Python, and JSON 1.0 is a float: neither is a JSON integer.
    if not all(type(number) is int and 1 <= number <= _INT64_MAX for number in value):
        return None
    temporal, height, width = value
    return temporal, height, width


def _item(field: str, grid: Grid) -> Raw:
    packed = msgpack.packb(
        {
            field: {
                "data": ["int64", [len(grid)], msgpack.ExtType(_TENSOR_EXT, struct.pack("<3q", *grid))],
                "field": ["batched", {"keep_on_cpu": True}],
            }
        }
    )
    return Raw(b'"%b"' % base64.b64encode(packed))


def _printable(name: str) -> str:
    return "".join(c for c in name[:64] if c.isalnum() or c in "_-.")
