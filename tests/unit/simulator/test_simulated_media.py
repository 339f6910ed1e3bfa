"""Measuring media like Qwen2.5-VL's processor."""

from __future__ import annotations

import base64

import pytest

from sidecar.simulator.errors import ApiError
from sidecar.simulator.media import PixelBounds, embeds_of, image_grid, load
from tests.unit.simulator.simulator_caller import audio_url, image_url, video_url

BOUNDS = PixelBounds(3136, 12845056)


@pytest.mark.parametrize(
    ("size", "grid"),
    [
        ((640, 480), (1, 34, 46)),
        ((1, 1), (1, 4, 4)),
        ((28, 28), (1, 4, 4)),
        ((1120, 616), (1, 44, 80)),
        ((100, 72), (1, 6, 8)),
        ((8000, 6000), (1, 220, 294)),
    ],
)
def test_grid_follows_the_resize_rule(size: tuple[int, int], grid: tuple[int, int, int]) -> None:
    """Sides are rounded to 28 pixels and the area is kept within the bounds."""
    assert image_grid(*size, BOUNDS) == grid
    assert embeds_of(grid) == grid[1] * grid[2] // 4


def test_smaller_bounds_shrink_the_grid() -> None:
    """`max_pixels` limits the area of the resized image."""
    _, rows, columns = image_grid(640, 480, PixelBounds(3136, 100352))
    assert rows * columns * 14 * 14 <= 100352


def test_a_sliver_is_refused() -> None:
    """An aspect ratio above 200 is a 400."""
    with pytest.raises(ApiError, match="aspect ratio") as caught:
        image_grid(4001, 20, BOUNDS)
    assert caught.value.status == 400


def test_image_is_labelled_by_size_and_format() -> None:
    """The label is what a reader recognises the picture by; equal bytes have equal content."""
    url = image_url(320, 200)
    first, again = load(url, "image", BOUNDS), load(url, "image", BOUNDS)
    assert first.label == "320x200 jpeg"
    assert first == again
    assert first.content != load(image_url(320, 200, colour=200), "image", BOUNDS).content


def test_audio_and_video_are_measured_by_their_bytes() -> None:
    """More bytes give more tokens; video has a grid, audio none."""
    audio = [load(audio_url(size), "audio", BOUNDS) for size in (100, 40000)]
    video = [load(video_url(size), "video", BOUNDS) for size in (100, 400000)]
    assert audio[0].embeds < audio[1].embeds
    assert audio[0].grid is None
    assert video[0].embeds < video[1].embeds
    assert video[1].grid is not None
    assert video[1].embeds == embeds_of(video[1].grid)


@pytest.mark.parametrize(
    ("url", "status", "message"),
    [
        ("data:image/png;base64," + base64.b64encode(b"no picture").decode(), 400, "cannot identify image"),
        ("data:image/png;base64,!!!!", 400, "Failed to load image"),
        ("data:image/png;base64,", 400, "no data"),
        ("ftp://example.invalid/a.png", 400, "HTTP, data or file"),
        ("data:image/png,plain", 501, "Only base64"),
        ("https://example.invalid/a.png", 500, "downloads nothing"),
        ("file:///a.png", 500, "allowed-local-media-path"),
    ],
)
def test_media_that_cannot_be_read_are_refused(url: str, status: int, message: str) -> None:
    """Every fault of the media has vLLM's status and says what it is."""
    with pytest.raises(ApiError, match=message) as caught:
        load(url, "image", BOUNDS)
    assert caught.value.status == status
