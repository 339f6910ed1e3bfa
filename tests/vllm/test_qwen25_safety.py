from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.vllm.vllm_client import Picture, chat
from tests.vllm.vllm_engines import OTHER_ENCODE
from tests.vllm.vllm_lab import NONE, NONE_TRUST, OPENAI, TENSORS, TENSORS_TRUST, UNTRUSTED, VARIANTS, legs

if TYPE_CHECKING:
    from collections.abc import Collection

    from tests.vllm.vllm_lab import Lab, Variant

MODEL_FOLDER = "qwen2.5-vl"


@pytest.mark.parametrize("variant", UNTRUSTED, ids=str)
def test_a_deleted_encoding_costs_time_only(lab: Lab, salt: str, variant: Variant) -> None:
    """Without `ec_trust_descriptors`, prefill encodes a picture itself whose encoding is gone."""
    body = chat([Picture(f"{salt}{index}").part for index in range(2)], salt)
    deleted: list[set[str]] = []

    def delete() -> None:
        deleted.append(lab.engines.stored("ec"))
        lab.engines.clear("ec")

    lab.prefill.before = delete
    answer, record = lab.coordinate(variant, body)
    assert [len(names) for names in deleted] == [2]
    assert record["prefill_form"] == variant.prefill_form
    lab.same(answer, lab.alone(body, salt))


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_an_encoder_without_descriptors(lab: Lab, salt: str, variant: Variant) -> None:
    """An encoder that names no encodings never leads to a prefill of metadata alone."""
    body = chat([Picture(f"{salt}{index}").part for index in range(2)], salt)
    lab.encode.change_answer = without_descriptors
    answer, record = lab.coordinate(variant, body)
    assert (record["prefill_form"], record["fallback_reason"]) == fallback(variant, "image[0]")
    lab.same(answer, lab.alone(body, salt))


@pytest.mark.parametrize("variant", [TENSORS_TRUST, NONE_TRUST], ids=str)
def test_one_missing_descriptor_decides_for_the_whole_request(lab: Lab, salt: str, variant: Variant) -> None:
    """Of three pictures one has no descriptor: all travel with their tensors or as they came."""
    shown = [Picture(f"{salt}{index}", 84 + 28 * index, 84) for index in range(3)]
    body = chat([picture.part for picture in shown], salt)
    missing = lab.render(body)["features"]["mm_hashes"]["image"][1]
    lab.encode.change_answer = lambda answer: without_descriptors(answer, [missing])
    answer, record = lab.coordinate(variant, body)
    assert (record["prefill_form"], record["fallback_reason"]) == fallback(variant, "image[1]")
    lab.same(answer, lab.alone(body, salt))


def without_descriptors(answer: bytes, names: Collection[str] | None = None) -> bytes:
    """An encode answer without the descriptors of these hashes, or without any."""
    members = json.loads(answer)
    described = members["ec_transfer_params"]
    assert described
    kept = {name: value for name, value in described.items() if names is not None and name not in names}
    return json.dumps({**members, "ec_transfer_params": kept or None}).encode()


def fallback(variant: Variant, entry: str) -> tuple[str, str]:
    """Form and reason of a prefill that cannot rely on descriptors."""
    if variant is OPENAI:
        return "openai", ""
    form = "content_parts" if variant.mm_payload == "none" else "kwargs_data"
    return form, f"{entry}: no descriptor" if variant.trust else variant.fallback_reason


@pytest.mark.parametrize("variant", UNTRUSTED, ids=str)
def test_no_encoder_at_all(lab: Lab, salt: str, variant: Variant) -> None:
    """An encode pool that cannot be reached gives a 502 that names the phase; prefill is not called."""
    down = replace(variant, name=f"{variant.name}-encode-down", encode_down=True)
    refusal = lab.refused(down, chat([Picture(salt).part], salt))
    assert refusal.status == 502
    assert "encode failed" in refusal.message
    assert refusal.record["error"] == "epd_encode_failed"
    assert refusal.record["outcome"] == "upstream_error"
    assert legs(lab) == []


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_prefill_stands_in_for_the_encoder(lab: Lab, salt: str, variant: Variant) -> None:
    """With `encode.on_failure: local` an encode pool that cannot be reached costs time only."""
    name = f"{variant.name}-local"
    alone = replace(variant, name=name, encode_down=True, on_failure="local")
    body = chat([Picture(f"{salt}{index}").part for index in range(2)], salt)
    answer, record = lab.coordinate(alone, body)
    assert record["prefill_form"] == fallback(variant, "image[0]")[0]
    reason = "" if variant is OPENAI else "image[0]: encode failed (on_failure: local)"
    assert record["fallback_reason"] == reason
    lab.same(answer, lab.alone(body, salt))


@pytest.mark.parametrize("size", [(224, 196), (224, 224)], ids=["part-of-a-token", "whole-tokens"])
@pytest.mark.parametrize("variant", [OPENAI, NONE, NONE_TRUST], ids=str)
def test_an_encoder_with_other_processor_settings_is_found_out(
    lab: Lab, salt: str, variant: Variant, size: tuple[int, int]
) -> None:
    """Encodings of another size than their placeholders give a 502: prefill would die of them.

    The encoder scales one picture to 48 patches for 56 placeholder tokens, the other to 64 for 64.
    """
    lab.engines.use_other_encode()
    lab.encode.target = lab.engines.url(OTHER_ENCODE)
    refusal = lab.refused(variant, chat([Picture(salt, *size).part], salt))
    assert refusal.status == 502
    assert "does not fit the prompt: image[0]" in refusal.message
    assert "same processor settings" in refusal.message
    assert refusal.record["error"] == "epd_encode_mismatch"
    assert lab.prefill.passed == []


@pytest.mark.parametrize("variant", [TENSORS, TENSORS_TRUST], ids=str)
def test_rendered_tensors_do_not_depend_on_the_encoders_settings(
    lab: Lab, salt: str, variant: Variant
) -> None:
    """An encoder that gets tensors does not process the picture again: other settings change nothing."""
    lab.engines.use_other_encode()
    lab.encode.target = lab.engines.url(OTHER_ENCODE)
    body = chat([Picture(salt, 224, 224).part], salt)
    answer, record = lab.coordinate(variant, body)
    assert record["prefill_form"] == variant.prefill_form
    lab.same(answer, lab.alone(body, salt))


@pytest.mark.parametrize("variant", [OPENAI, NONE, NONE_TRUST], ids=str)
def test_the_right_encoder_answers_after_the_wrong_one(lab: Lab, salt: str, variant: Variant) -> None:
    """A refused request leaves nothing behind that the next one with other pictures could trip over."""
    lab.engines.use_other_encode()
    lab.encode.target = lab.engines.url(OTHER_ENCODE)
    lab.refused(variant, chat([Picture(f"{salt}wrong", 224, 196).part], salt))
    lab.encode.target = lab.engines.url("encode")
    body = chat([Picture(salt, 224, 224).part], salt)
    answer, _ = lab.coordinate(variant, body)
    lab.same(answer, lab.alone(body, salt))
