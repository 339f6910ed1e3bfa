from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.vllm.vllm_client import Picture, chat
from tests.vllm.vllm_lab import NONE_TRUST, VARIANTS

if TYPE_CHECKING:
    from tests.vllm.vllm_lab import Lab, Variant

MODEL_FOLDER = "qwen2.5-vl"


@pytest.mark.parametrize("rate", [1, 4])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_video_whose_placeholders_are_uniform(lab: Lab, salt: str, variant: Variant, rate: int) -> None:
    """A video of Qwen2.5-VL travels in every form, whatever its frame rate does to the positions.

    The renderer's metadata of a video also holds the seconds between its frames, which decide the positions
    of its tokens and which no descriptor names: prefill must not get metadata that lacks them.
    """
    body = chat([lab.video(salt, frames=16, rate=rate)], salt)
    answer, record = lab.coordinate(variant, body)
    assert record["media"] == "video:1"
    assert record["encode_form"] == variant.encode_form
    if variant is not NONE_TRUST:
        assert record["prefill_form"] == variant.prefill_form
    lab.same(answer, lab.alone(body, salt))


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_video_between_pictures(lab: Lab, salt: str, variant: Variant) -> None:
    """Both modalities are encoded, in prompt order."""
    shown = [Picture(f"{salt}{index}", 224, 112) for index in range(2)]
    body = chat([shown[0].part, lab.video(salt), shown[1].part], salt)
    answer, record = lab.coordinate(variant, body)
    assert record["media"] == "image:2,video:1"
    assert len(lab.engines.stored("ec")) == 3
    lab.same(answer, lab.alone(body, salt))
