from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.jsontext import Raw, read_string, read_value, to_raw
from sidecar.multimodal.grid import descriptor_grid, item_grid, rebuild_metadata

VECTORS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "golden" / "mm_metadata.json").read_text()
)["vectors"]
"""Metadata items as a real engine emitted them."""
REBUILDABLE = [vector for vector in VECTORS if vector["rebuildable"]]
OTHERS = [vector for vector in VECTORS if not vector["rebuildable"]]

INT64_MAX = 2**63 - 1


IMAGES = [vector for vector in REBUILDABLE if vector["modality"] == "image"]


@pytest.mark.parametrize("vector", IMAGES, ids=lambda vector: f"{vector['value']}")
def test_a_rebuilt_item_is_the_engines_own(vector: dict[str, Any]) -> None:
    """The item rebuilt from a descriptor's grid is, byte for byte, what the engine's renderer emits."""
    item, reason = rebuild_metadata(vector["modality"], {vector["field"]: vector["value"]})
    assert reason == ""
    assert item is not None
    assert bytes(item) == b'"%b"' % vector["base64"].encode()


@pytest.mark.parametrize("vector", REBUILDABLE, ids=lambda vector: f"{vector['modality']}-{vector['value']}")
def test_the_grid_of_a_renderers_item_is_read(vector: dict[str, Any]) -> None:
    """The grid in an item of an engine is found, whatever its modality."""
    assert item_grid(vector["modality"], to_raw(vector["base64"])) == tuple(vector["value"])


@pytest.mark.parametrize("vector", OTHERS, ids=lambda vector: vector["name"])
def test_items_with_other_fields_still_tell_their_grid(vector: dict[str, Any]) -> None:
    """An item with further fields gives its grid if it has one; an item without gives none."""
    grid = item_grid(vector["modality"], to_raw(vector["base64"]))
    assert (grid is not None) == (vector["modality"] == "video")


@given(st.tuples(*[st.integers(1, INT64_MAX)] * 3))
def test_every_int64_grid_survives(grid: tuple[int, int, int]) -> None:
    """Rebuilding and reading back gives the grid again, up to the last int64."""
    item, reason = rebuild_metadata("image", {"image_grid_thw": list(grid)})
    assert item is not None
    assert reason == ""
    assert item_grid("image", item) == grid
    fields = msgpack.unpackb(base64.b64decode(read_string(item)))
    assert list(fields) == ["image_grid_thw"]
    assert list(fields["image_grid_thw"]) == ["data", "field"]


def test_a_video_is_not_rebuilt() -> None:
    """A renderer sends its seconds per grid, too: without them an engine places the tokens elsewhere."""
    item, reason = rebuild_metadata("video", {"video_grid_thw": [4, 34, 46]})
    assert item is None
    assert "video" in reason
    assert descriptor_grid("video", {"video_grid_thw": [4, 34, 46]}) == (4, 34, 46)


REJECTED_VALUES = [
    "[1,34.0,46]",
    "[1,34,46.5]",
    "[1,3.4e1,46]",
    "[true,34,46]",
    "[1,false,46]",
    '["1",34,46]',
    '"1,34,46"',
    "[[1,34,46]]",
    "[1,[34],46]",
    "[1,null,46]",
    "[1,34]",
    "[1,34,46,1]",
    "[]",
    "{}",
    '{"0":1,"1":34,"2":46}',
    "null",
    "46",
    "true",
    "[0,34,46]",
    "[1,34,0]",
    "[1,-34,46]",
    "[1,34,-0]",
    "[1,34,9223372036854775808]",
    "[1,34,18446744073709551616]",
    "[1,34,-9223372036854775809]",
]


@pytest.mark.parametrize("value", REJECTED_VALUES)
@pytest.mark.parametrize("modality", ["image", "video"])
def test_what_is_not_a_grid_of_three_int64_is_not_rebuilt(modality: str, value: str) -> None:
    """Only a flat list of three JSON integers from 1 to 2^63-1 gives an item; else the field is named."""
    field = f"{modality}_grid_thw"
    metadata = read_value(Raw(f'{{"{field}":{value}}}'.encode()))
    item, reason = rebuild_metadata(modality, metadata)
    assert item is None
    assert reason == f"metadata not encodable ({field})"
    assert descriptor_grid(modality, metadata) is None


@pytest.mark.parametrize(
    ("modality", "metadata", "reason"),
    [
        ("image", {}, "no metadata"),
        ("video", {}, "no metadata"),
        ("audio", {}, "no metadata"),
        ("image", {"video_grid_thw": [1, 2, 2]}, "metadata not encodable (video_grid_thw)"),
        ("video", {"image_grid_thw": [1, 2, 2]}, "metadata not encodable (image_grid_thw)"),
        (
            "video",
            {"video_grid_thw": [1, 2, 2], "second_per_grid_ts": [1.0]},
            "metadata not encodable (second_per_grid_ts)",
        ),
        (
            "video",
            {"timestamps": [0.25, 1.25], "video_grid_thw": [1, 2, 2]},
            "metadata not encodable (timestamps)",
        ),
        ("image", {"image_grid_thw": [1, 2, 2], "extra": None}, "metadata not encodable (extra)"),
        ("image", {"num_patches": [1]}, "metadata not encodable (num_patches)"),
        ("audio", {"audio_feature_lengths": [7]}, "metadata not encodable (audio_feature_lengths)"),
        ("audio", {"image_grid_thw": [1, 2, 2]}, "metadata not encodable (image_grid_thw)"),
        ("vision_chunk", {"grid_thws": [1, 2, 2]}, "metadata not encodable (grid_thws)"),
    ],
)
def test_only_a_lone_grid_of_the_own_modality_is_rebuilt(
    modality: str, metadata: dict[str, Any], reason: str
) -> None:
    """Another field, even next to a good grid, has a dtype nobody can tell: no item, it is named."""
    assert rebuild_metadata(modality, metadata) == (None, reason)


def test_a_field_name_cannot_break_the_log_line() -> None:
    """A field's name comes from a worker: only plain characters of it reach the reason, and few."""
    _, reason = rebuild_metadata("image", {"a\n\x1b[31m" + "b" * 200 + "=x y": 1})
    assert reason.isprintable()
    assert " " not in reason.removeprefix("metadata not encodable ")
    assert len(reason) < 100


@pytest.mark.parametrize("modality", ["audio", "vision_chunk", ""])
def test_a_modality_without_grids_states_none(modality: str) -> None:
    """Only images and videos have grids, whatever else the metadata holds."""
    metadata = {"image_grid_thw": [1, 2, 2], "": [1, 2, 3]}
    assert descriptor_grid(modality, metadata) is None
    assert item_grid(modality, to_raw(REBUILDABLE[0]["base64"])) is None


def _item(value: Any) -> Raw:
    return to_raw(base64.b64encode(msgpack.packb(value)).decode())


def _tensor(dtype: Any, shape: Any, code: int, data: bytes) -> Raw:
    tensor = [dtype, shape, msgpack.ExtType(code, data)]
    return _item({"image_grid_thw": {"data": tensor, "field": ["batched", {}]}})


GRID_BYTES = b"".join(number.to_bytes(8, "little") for number in (1, 34, 46))


@pytest.mark.parametrize(
    "item",
    [
        to_raw(None),
        to_raw(7),
        to_raw(""),
        to_raw("not base64!"),
        to_raw("é"),
        to_raw("AAA"),
        to_raw("gQ=="),
        _item([1, 2]),
        _item({}),
        _item({"image_grid_thw": None}),
        _item({"image_grid_thw": {"data": None}}),
        _item({"image_grid_thw": {"data": "abc"}}),
        _item({"image_grid_thw": {"data": [1, 2, 3]}}),
        _item({"image_grid_thw": {"data": ["int64", [3], GRID_BYTES]}}),
        _tensor("int32", [3], 3, GRID_BYTES),
        _tensor("int64", [4], 3, GRID_BYTES),
        _tensor("int64", [3], 1, GRID_BYTES),
        _tensor("int64", [3], 3, GRID_BYTES[:-1]),
        _tensor("int64", [3], 3, b"\xff" * 24),
        to_raw(base64.b64encode(b"\xdd\xff\xff\xff\xff").decode()),
        to_raw(base64.b64encode(b"\x91" * 4096).decode()),
        to_raw("A" * (1 << 20)),
    ],
)
def test_an_unreadable_item_has_no_grid(item: Raw) -> None:
    """A renderer's item that is not understood says nothing; it is forwarded, not judged."""
    assert item_grid("image", item) is None


@given(st.binary(max_size=60))
def test_reading_an_item_never_fails(data: bytes) -> None:
    """No bytes of a renderer can make the comparison of grids raise."""
    grid = item_grid("image", to_raw(base64.b64encode(data).decode()))
    assert grid is None or len(grid) == 3
