from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.vllm import vllm_lab
from tests.vllm.vllm_client import Picture, chat, difference, text_part
from tests.vllm.vllm_lab import NONE, NONE_TRUST, NOTICED, OPENAI, TENSORS, TENSORS_TRUST, legs

if TYPE_CHECKING:
    from tests.vllm.vllm_lab import Lab, Variant

# A sidecar of its own: what it learns of a model, it learns by a name that the models here share.
AUTO = replace(vllm_lab.AUTO, name="auto-gemma3")

MODEL_FOLDER = "gemma3"


@pytest.mark.parametrize("variant", [OPENAI, TENSORS, TENSORS_TRUST], ids=str)
def test_pictures_whose_placeholders_mix_tokens(lab: Lab, salt: str, variant: Variant) -> None:
    """Gemma3 brackets every picture inside its span: prefill gets it in the OpenAI format and answers."""
    shown = [Picture(f"{salt}{index}", 112 + 28 * index, 112) for index in range(2)]
    body = chat([shown[0].part, text_part("Before: "), shown[1].part], salt)
    answer, record = lab.coordinate(variant, body)
    assert record["encode_form"] == variant.encode_form
    assert record["prefill_form"] == "openai"
    assert record["fallback_reason"] == ("" if variant is OPENAI else "image[0]: mixed-token span")
    assert len(lab.engines.stored("ec")) == 2
    lab.same(answer, lab.alone(body, salt))
    other_order = chat([shown[1].part, text_part("Before: "), shown[0].part], salt)
    assert difference(answer, lab.alone(other_order, f"{salt}-other")) > NOTICED


def test_a_mixed_span_is_rendered_again_with_tensors(lab: Lab, salt: str) -> None:
    """With `mm_payload: auto` tensors are asked for where nothing else can travel, later at once."""
    rendered = []
    for index in range(2):
        body = chat([Picture(f"{salt}{index}").part], f"{salt}{index}")
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
    refusal = lab.refused(variant, chat([Picture(salt).part], salt))
    assert refusal.status == 422
    assert "mm_payload: none" in refusal.message
    assert "image[0]" in refusal.message
    assert refusal.record["error"] == "epd_mixed_span"
    assert refusal.record["stage"] == "encode"
    assert legs(lab) == []


@pytest.mark.parametrize("variant", [OPENAI, TENSORS], ids=str)
def test_pictures_without_text_between_them(lab: Lab, salt: str, variant: Variant) -> None:
    """The renderer refuses them (it takes the newlines between two pictures for a part of both): a 400."""
    refusal = lab.refused(variant, chat([Picture(f"{salt}{index}").part for index in range(2)], salt))
    assert refusal.status == 400
    assert refusal.record["error"] == "epd_render_rejected"
    assert legs(lab) == []


@pytest.mark.parametrize("variant", [NONE, TENSORS], ids=str)
def test_text_is_not_concerned(lab: Lab, salt: str, variant: Variant) -> None:
    """A request without pictures is served under either setting."""
    body = chat([], salt)
    answer, record = lab.coordinate(variant, body)
    assert record["prefill_form"] == "tokens"
    lab.same(answer, lab.alone(body, salt))
