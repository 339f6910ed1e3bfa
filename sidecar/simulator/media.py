"""One media item: its bytes out of a data URI, and what a vision processor would make of it.

Images follow Qwen2.5-VL (patch 14, merge 2); only the header is read. Audio and video are not decoded: their
sizes follow from the number of bytes.
"""

from __future__ import annotations

import binascii
import hashlib
import io
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sidecar.simulator.errors import ApiError, bad_request, internal_error

if TYPE_CHECKING:
    from sidecar.simulator.tokens import Modality

Grid = tuple[int, int, int]
"""Temporal, vertical and horizontal patches."""

_PATCH = 14
_MERGE = 2
_FACTOR = _PATCH * _MERGE
_MAX_ASPECT_RATIO = 200
_AUDIO_BYTES_PER_TOKEN = 1280
_VIDEO_BYTES_PER_FRAME_PAIR = 1 << 16
_VIDEO_MAX_FRAME_PAIRS = 16
_VIDEO_SIDE = 8


@dataclass(frozen=True, slots=True)
class MediaPart:
    """One media item as a request carries it.

    Attributes:
        modality: what it is.
        url: its URL, or None when the part holds no data.
        uuid: key the sender gives it, or None.
    """

    modality: Modality
    url: str | None
    uuid: str | None


@dataclass(frozen=True, slots=True)
class PixelBounds:
    """Smallest and largest image area the processor keeps, in pixels."""

    smallest: int
    largest: int


@dataclass(frozen=True, slots=True)
class Media:
    """One processed item.

    Attributes:
        content: SHA-256 of the media bytes, 64 hex digits.
        label: what a reader would recognise it by, such as `640x480 jpeg`.
        grid: patches of an image or video, None for audio.
        embeds: number of embeddings, which is the number of placeholder tokens.
    """

    content: str
    label: str
    grid: Grid | None
    embeds: int


def load(url: str, modality: Modality, bounds: PixelBounds) -> Media:
    """Read and measure one item.

    Raises:
        ApiError: 400 for media that do not decode, 501 for a data URI without base64, 500 for files and
            downloads, as a vLLM without access to either answers.
    """
    subtype, data = _read_data_uri(url, modality)
    content = hashlib.sha256(data).hexdigest()
    match modality:
        case "image":
            width, height, name = _image_header(data)
            grid = image_grid(width, height, bounds)
            return Media(content, f"{width}x{height} {name}", grid, embeds_of(grid))
        case "video":
            pairs = min(1 + len(data) // _VIDEO_BYTES_PER_FRAME_PAIR, _VIDEO_MAX_FRAME_PAIRS)
            grid = (pairs, _VIDEO_SIDE, _VIDEO_SIDE)
            return Media(content, f"{len(data)}-byte {subtype}", grid, embeds_of(grid))
        case "audio":
            embeds = 1 + len(data) // _AUDIO_BYTES_PER_TOKEN
            return Media(content, f"{len(data)}-byte {subtype}", None, embeds)


def embeds_of(grid: Grid) -> int:
    """Embeddings of a grid: one per merged block of patches."""
    return math.prod(grid) // _MERGE**2


def image_grid(width: int, height: int, bounds: PixelBounds) -> Grid:
    """The patch grid of an image after Qwen2.5-VL's resize; sizes in pixels.

    Raises:
        ApiError: 400 when one side is more than 200 times the other.
    """
    if max(width, height) / min(width, height) > _MAX_ASPECT_RATIO:
        raise bad_request(
            f"absolute aspect ratio must be smaller than {_MAX_ASPECT_RATIO}, "
            f"got {max(width, height) / min(width, height)}"
        )
    rows = max(_FACTOR, round(height / _FACTOR) * _FACTOR)
    columns = max(_FACTOR, round(width / _FACTOR) * _FACTOR)
    if rows * columns > bounds.largest:
        shrink = math.sqrt(height * width / bounds.largest)
        rows = max(_FACTOR, math.floor(height / shrink / _FACTOR) * _FACTOR)
        columns = max(_FACTOR, math.floor(width / shrink / _FACTOR) * _FACTOR)
    elif rows * columns < bounds.smallest:
        grow = math.sqrt(bounds.smallest / (height * width))
        rows = math.ceil(height * grow / _FACTOR) * _FACTOR
        columns = math.ceil(width * grow / _FACTOR) * _FACTOR
    return 1, rows // _PATCH, columns // _PATCH


def _read_data_uri(url: str, modality: Modality) -> tuple[str, bytes]:
    scheme, _, rest = url.partition(":")
    match scheme:
        case "data":
            pass
        case "file":
            raise internal_error("Cannot load local files without `--allowed-local-media-path`.")
        case "http" | "https":
            raise internal_error("Cannot connect: the simulator downloads nothing, send a data: URL")
        case _:
            raise bad_request("The URL must be either a HTTP, data or file URL.")
    comma = rest.find(",")
    head = rest[: max(comma, 0)]
    if not head.endswith(";base64"):
        raise ApiError(501, "Only base64 data URLs are supported for now.", kind="NotImplementedError")
    media_type = head.removesuffix(";base64").partition(";")[0]
    try:
        data = binascii.a2b_base64(rest[comma + 1 :].encode("ascii"), strict_mode=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise bad_request(f"Failed to load {modality}: {error}") from None
    if not data:
        raise bad_request(f"Failed to load {modality}: no data")
    return media_type.rpartition("/")[2], data


def _image_header(data: bytes) -> tuple[int, int, str]:
    # Pillow comes with the `simulator` extra: the package must import without it, for the command line.
    from PIL import Image  # noqa: PLC0415 - optional dependency

    try:
        with Image.open(io.BytesIO(data)) as image:
            return image.width, image.height, str(image.format).lower()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        detail = "cannot identify image file" if isinstance(error, OSError) else str(error)
        raise bad_request(f"Failed to load image: {detail}") from None
