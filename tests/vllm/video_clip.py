"""Writes a small MP4 video to standard output. Run by the Python of the vLLM environment.

Usage: video_clip.py SEED FRAMES FRAMES_PER_SECOND
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import cv2  # type: ignore[import-not-found]  # lives in the vLLM environment
import numpy as np  # type: ignore[import-not-found,unused-ignore]  # as cv2

_SIDE = 128
_TILES = 8


def clip(seed: int, frames: int, rate: int) -> bytes:
    """A clip whose frames are tiles of random colours."""
    random = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clip.mp4"
        writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"mp4v"), rate, (_SIDE, _SIDE))
        for _ in range(frames):
            tiles = random.integers(0, 256, (_TILES, _TILES, 3), dtype=np.uint8)
            writer.write(np.kron(tiles, np.ones((_SIDE // _TILES, _SIDE // _TILES, 1), np.uint8)))
        writer.release()
        return path.read_bytes()


if __name__ == "__main__":
    sys.stdout.buffer.write(clip(*(int(argument) for argument in sys.argv[1:4])))
