from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.vllm import vllm_lab
from tests.vllm.vllm_client import Picture, chat
from tests.vllm.vllm_lab import NONE, NONE_TRUST, OPENAI, TENSORS, TENSORS_TRUST, VARIANTS, legs

if TYPE_CHECKING:
    from tests.vllm.vllm_lab import Lab, Variant

# A sidecar of its own: what it learns of a model, it learns by a name that the models here share.
AUTO = replace(vllm_lab.AUTO, name="auto-qwen3")

MODEL_FOLDER = "qwen3-vl"


@pytest.mark.parametrize("variant", [*VARIANTS, AUTO], ids=str)
def test_pictures_of_a_second_architecture(lab: Lab, salt: str, variant: Variant) -> None:
    """Two pictures of Qwen3-VL, whose vision features enter several layers, travel in every form."""
    shown = [Picture(f"{salt}0", 320, 256), Picture(f"{salt}1", 256, 384, format="JPEG")]
    body = chat([picture.part for picture in shown], salt)
    answer, record = lab.coordinate(variant, body)
    assert record["encode_form"] == variant.encode_form
    assert record["prefill_form"] == variant.prefill_form
    assert len(lab.engines.stored("ec")) == 2
    lab.same(answer, lab.alone(body, salt))


@pytest.mark.parametrize("variant", [OPENAI, TENSORS, TENSORS_TRUST], ids=str)
def test_a_video_whose_placeholders_mix_tokens(lab: Lab, salt: str, variant: Variant) -> None:
    """The span of a video holds time stamps: prefill gets it in the OpenAI format, which is always safe."""
    body = chat([lab.video(salt)], salt)
    answer, record = lab.coordinate(variant, body)
    assert record["media"] == "video:1"
    assert record["encode_form"] == variant.encode_form
    assert record["prefill_form"] == "openai"
    assert record["fallback_reason"] == ("" if variant is OPENAI else "video[0]: mixed-token span")
    assert len(lab.engines.stored("ec")) == 1
    lab.same(answer, lab.alone(body, salt))


@pytest.mark.parametrize("variant", [OPENAI, TENSORS, TENSORS_TRUST], ids=str)
def test_a_video_between_pictures(lab: Lab, salt: str, variant: Variant) -> None:
    """One mixed span decides for the whole request."""
    shown = [Picture(f"{salt}{index}", 256, 256) for index in range(2)]
    body = chat([shown[0].part, lab.video(salt), shown[1].part], salt)
    answer, record = lab.coordinate(variant, body)
    assert record["media"] == "image:2,video:1"
    assert record["prefill_form"] == "openai"
    assert record["fallback_reason"] == ("" if variant is OPENAI else "video[0]: mixed-token span")
    lab.same(answer, lab.alone(body, salt))


def test_a_mixed_span_is_rendered_again_with_tensors(lab: Lab, salt: str) -> None:
    """With `mm_payload: auto` tensors are asked for where nothing else can travel, later at once."""
    rendered = []
    for index in range(2):
        body = chat([lab.video(f"{salt}{index}")], f"{salt}{index}")
        answer, record = lab.coordinate(AUTO, body)
        assert record["render_form"] == "tensors"
        assert record["encode_form"] == "features"
        assert record["prefill_form"] == "openai"
        rendered.append(int(record["render_bytes"]))
        lab.same(answer, lab.alone(body, f"{salt}{index}"))
    assert rendered[0] > rendered[1] > 0


@pytest.mark.parametrize("variant", [NONE, NONE_TRUST], ids=str)
def test_a_mixed_span_needs_its_tensors(lab: Lab, salt: str, variant: Variant) -> None:
    """With `mm_payload: none` nothing is sent, and the refusal names the setting and the entry."""
    refusal = lab.refused(variant, chat([Picture(salt, 256, 256).part, lab.video(salt)], salt))
    assert refusal.status == 422
    assert "mm_payload: none" in refusal.message
    assert "video[0]" in refusal.message
    assert refusal.record["error"] == "epd_mixed_span"
    assert refusal.record["stage"] == "encode"
    assert legs(lab) == []
