"""A deterministic, lossless stand-in for a tokenizer, with Qwen2.5's special tokens.

Text becomes one token per pair of UTF-8 bytes, so equal text has equal tokens, different text different ones,
and the tokens can be read back.
"""

from __future__ import annotations

import sys
from array import array
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable

Modality = Literal["image", "video", "audio"]

VOCABULARY = 152064
"""Number of tokens; every id is below it."""

IM_START = 151644
IM_END = 151645
AUDIO_PAD = 151646
AUDIO_START = 151647
AUDIO_END = 151648
VISION_START = 151652
VISION_END = 151653
IMAGE_PAD = 151655
VIDEO_PAD = 151656

PLACEHOLDER: dict[Modality, int] = {"image": IMAGE_PAD, "video": VIDEO_PAD, "audio": AUDIO_PAD}
"""The token that stands for one item of a modality before expansion, and repeats after it."""
MODALITY_OF: dict[int, Modality] = {token: modality for modality, token in PLACEHOLDER.items()}
FRAME: dict[Modality, tuple[int, int]] = {
    "image": (VISION_START, VISION_END),
    "video": (VISION_START, VISION_END),
    "audio": (AUDIO_START, AUDIO_END),
}
"""The tokens the chat template puts on either side of an item."""

_PAIRS = 256
"""First token of a byte pair; below it a token is one byte."""
_PAIRS_END = _PAIRS + (1 << 16)


def text_tokens(text: str) -> list[int]:
    """The tokens of a text; empty for an empty one."""
    data = text.encode("utf-8", "surrogatepass")
    even = len(data) & ~1
    pairs = array("H", data[:even])
    if sys.byteorder == "little":
        pairs.byteswap()
    tokens = [_PAIRS + pair for pair in pairs]
    tokens.extend(data[even:])
    return tokens


def fewest_tokens(text: str) -> int:
    """A lower bound of the number of tokens, without making them."""
    return len(text) // 2


def tokens_text(tokens: Iterable[int]) -> str:
    """The text behind tokens; special tokens are left out, broken UTF-8 is replaced."""
    data = bytearray()
    for token in tokens:
        if token < _PAIRS:
            data.append(token)
        elif token < _PAIRS_END:
            data += (token - _PAIRS).to_bytes(2, "big")
    return data.decode("utf-8", "replace")
