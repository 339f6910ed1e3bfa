from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from sidecar.multimodal.grid import rebuild_metadata
from tests.vllm.vllm_client import Picture, chat, difference
from tests.vllm.vllm_lab import CHAT, GENERATE, NONE, NONE_TRUST, NOTICED, OPENAI, VARIANTS, legs

if TYPE_CHECKING:
    from sidecar.jsontext import Raw
    from tests.vllm.vllm_lab import Lab, Variant

MODEL_FOLDER = "qwen2.5-vl"


def pictures(salt: str, count: int) -> list[Picture]:
    """Pictures of different sizes and formats; of four, the last is the first again."""
    sizes = ((112, 84), (448, 448), (196, 140), (84, 224))
    different = [
        Picture(f"{salt}{index}", *sizes[index], format="JPEG" if index % 2 else "PNG")
        for index in range(min(count, 3))
    ]
    return different + different[:1] * (count - len(different))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("count", [0, 1, 2, 4])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_the_answer_is_that_of_one_engine_alone(
    lab: Lab, salt: str, variant: Variant, count: int, stream: bool
) -> None:
    """Text, prompt length and logprobs are those of an engine that computes everything itself."""
    shown = pictures(salt, count)
    body = chat([picture.part for picture in shown], salt)
    answer, record = lab.coordinate(variant, body, stream=stream)

    distinct = len({picture.url for picture in shown})
    assert record["outcome"] == "ok"
    assert record["stream"] == ("true" if stream else "false")
    assert record["media"] == (f"image:{count}" if count else "")
    assert int(record["prompt_tokens"]) == answer.prompt_tokens
    assert int(record["encode_requests"]) == distinct == len(lab.engines.stored("ec"))
    assert lab.engines.stored("kv"), "prefill stored no KV block"
    if count:
        assert record["encode_form"] == variant.encode_form
        assert record["prefill_form"] == variant.prefill_form
        assert record["fallback_reason"] == variant.fallback_reason
    else:
        assert record["encode_form"] == "skipped"
        assert record["prefill_form"] == ("openai" if variant is OPENAI else "tokens")
    path = CHAT if variant is OPENAI else GENERATE
    assert legs(lab) == [(path, 200)] * (distinct + 1)
    # Decode would make up for a prefill of another prompt: it computes what it does not find.
    assert lab.prefill.passed[0].answer_json["usage"]["prompt_tokens"] == answer.prompt_tokens
    assert len(answer.tokens) == 8
    lab.same(answer, lab.alone(body, salt))


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_decode_uses_what_encode_computed(lab: Lab, salt: str, variant: Variant) -> None:
    """When encode gets each of two pictures under the other's hash, the answer is that of swapped pictures.

    Decode sees the pictures in the right order all the time: only encoder output that reached prefill, and KV
    that reached decode, can tell it otherwise. It also shows that the comparison notices a wrong picture.
    """
    one, other = Picture(f"{salt}one"), Picture(f"{salt}other")
    body = chat([one.part, other.part], salt)
    tensors = lab.render(body)["features"]["kwargs_data"]["image"]
    swaps = [(one.url.encode(), other.url.encode()), (tensors[0].encode(), tensors[1].encode())]
    lab.encode.change_request = lambda sent: swapped(sent, swaps)
    answer, record = lab.coordinate(variant, body)
    assert record["outcome"] == "ok"

    right = lab.alone(body, f"{salt}-right")
    wrong = lab.alone(chat([other.part, one.part], salt), f"{salt}-wrong")
    assert difference(right, wrong) > NOTICED
    assert difference(answer, right) > NOTICED
    lab.same(answer, wrong)


def swapped(body: bytes, pairs: list[tuple[bytes, bytes]]) -> bytes:
    """The body with the first member of a pair replaced by the second, or the second by the first."""
    for one, other in pairs:
        if one in body:
            return body.replace(one, other)
        if other in body:
            return body.replace(other, one)
    raise AssertionError("encode was sent neither picture")


def test_rebuilt_metadata_is_what_the_renderer_emits(lab: Lab, salt: str) -> None:
    """Without tensors, prefill gets byte for byte the features that the renderer sends along with tensors."""
    shown = pictures(salt, 4)
    body = chat([picture.part for picture in shown], salt)
    _, record = lab.coordinate(NONE_TRUST, body)
    assert record["prefill_form"] == "mm_metadata"
    rendered = lab.render(body)
    (prefill,) = lab.prefill.passed
    sent = prefill.request_json
    assert sent["token_ids"] == rendered["token_ids"]
    assert sent["features"] == {**rendered["features"], "kwargs_data": None}

    described: dict[str, Any] = {}
    for encode in lab.encode.passed:
        described |= encode.answer_json["ec_transfer_params"]
    hashes = rendered["features"]["mm_hashes"]["image"]
    rebuilt = [rebuild_metadata("image", described[name]["metadata"]) for name in hashes]
    assert [(_text(item), reason) for item, reason in rebuilt] == [
        (item, "") for item in rendered["features"]["mm_metadata"]["image"]
    ]


def _text(item: Raw | None) -> str:
    assert item is not None
    return str(json.loads(bytes(memoryview(item))))


def test_tensors_do_not_travel_when_they_are_not_wanted(lab: Lab, salt: str) -> None:
    """With `mm_payload: none` the render answer of a large picture is a few kilobytes."""
    body = chat([Picture(salt, 448, 448).part], salt)
    _, with_tensors = lab.coordinate(OPENAI, body)
    _, without = lab.coordinate(NONE, body)
    assert int(with_tensors["render_bytes"]) > 1_000_000
    assert int(without["render_bytes"]) < 20_000
