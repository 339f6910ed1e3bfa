from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.vllm.vllm_client import LONG_TEXT, Picture, chat, text_part
from tests.vllm.vllm_lab import NONE_TRUST, OPENAI, TENSORS, legs

if TYPE_CHECKING:
    from tests.vllm.vllm_client import Answer
    from tests.vllm.vllm_lab import Lab, Variant

MODEL_FOLDER = "qwen2.5-vl"

VARIANTS = pytest.mark.parametrize("variant", [OPENAI, TENSORS, NONE_TRUST], ids=str)

TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks up one of two cities.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Oslo", "Lima"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
NAMED = {"type": "function", "function": {"name": "look_up"}}

SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "verdict",
        "schema": {
            "type": "object",
            "properties": {"verdict": {"type": "string", "enum": ["same", "different"]}},
            "required": ["verdict"],
            "additionalProperties": False,
        },
    },
}


def answer_of_both(lab: Lab, variant: Variant, body: dict[str, Any], salt: str) -> Answer:
    """The answer through Envoy, checked against that of one engine alone."""
    answer, record = lab.coordinate(variant, body)
    assert record["outcome"] == "ok"
    assert record["prefill_form"] == variant.prefill_form
    assert [status for _, status in legs(lab)] == [200, 200]
    lab.same(answer, lab.alone(body, salt))
    return answer


@VARIANTS
def test_a_model_may_call_a_tool(lab: Lab, salt: str, variant: Variant) -> None:
    """`tool_choice: auto`: the tools are part of the prompt in every phase."""
    body = chat([Picture(salt).part], salt, tools=[TOOL], tool_choice="auto")
    answer = answer_of_both(lab, variant, body, salt)
    del body["tools"], body["tool_choice"]
    assert answer.prompt_tokens > lab.alone(body, f"{salt}-without").prompt_tokens


@VARIANTS
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_model_must_call_a_tool(lab: Lab, salt: str, variant: Variant, choice: object) -> None:
    """A forced call is made by decode; the capped phases, which could not finish one, do not refuse it."""
    # The penalty ends the blanks between JSON tokens, which a model with random weights likes best.
    more = {"tool_choice": choice, "max_tokens": 400, "min_tokens": 0, "frequency_penalty": 2}
    body = chat([Picture(salt).part], salt, tools=[TOOL], **more)
    answer = answer_of_both(lab, variant, body, salt)
    (name, arguments), *_ = answer.calls
    assert name == "look_up"
    assert json.loads(arguments)["city"] in {"Oslo", "Lima"}


@VARIANTS
def test_a_conversation_with_a_tool_result_goes_on(lab: Lab, salt: str, variant: Variant) -> None:
    """Several turns, the assistant's tool call and its result reach every phase as one prompt."""
    call = {
        "id": "call-1",
        "type": "function",
        "function": {"name": "look_up", "arguments": '{"city": "Oslo"}'},
    }
    body = chat([Picture(salt).part], salt, tools=[TOOL])
    body["messages"] = [
        {"role": "system", "content": "Answer in one word."},
        *body["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call-1", "content": "Snow."},
        {"role": "user", "content": [text_part(f"And now? {LONG_TEXT}")]},
    ]
    answer_of_both(lab, variant, body, salt)


@VARIANTS
def test_an_answer_follows_a_json_schema(lab: Lab, salt: str, variant: Variant) -> None:
    """`response_format` binds decode; the capped phases, which could not finish it, do not refuse it."""
    body = chat([Picture(salt).part], salt, response_format=SCHEMA, max_tokens=120, min_tokens=0)
    answer = answer_of_both(lab, variant, body, salt)
    assert json.loads(answer.texts[0])["verdict"] in {"same", "different"}


@VARIANTS
def test_several_choices(lab: Lab, salt: str, variant: Variant) -> None:
    """`n: 2` gives two choices, sampled with the client's seed; the media are encoded once."""
    body = chat([Picture(salt).part], salt, n=2, temperature=0.9, seed=5)
    answer = answer_of_both(lab, variant, body, salt)
    one, other = answer.texts
    assert one != other


@VARIANTS
def test_a_stop_sequence_ends_the_answer(lab: Lab, salt: str, variant: Variant) -> None:
    """`stop` works as on the engine itself."""
    body = chat([Picture(salt).part], salt, max_tokens=24, min_tokens=0, ignore_eos=True)
    whole = lab.alone(body, f"{salt}-whole").texts[0]
    body["stop"] = [next(piece for piece in whole[4:] if not piece.isspace() and piece.isprintable())]
    lab.engines.clear_stores()
    answer = answer_of_both(lab, variant, body, salt)
    assert answer.finish_reasons == ("stop",)
    assert len(answer.texts[0]) < len(whole)


@VARIANTS
def test_template_arguments_shape_the_prompt(lab: Lab, salt: str, variant: Variant) -> None:
    """`chat_template_kwargs` reach every phase: a template that reads them makes another prompt."""
    body = chat([Picture(salt).part], salt, chat_template_kwargs={"enable_thinking": False})
    answer = answer_of_both(lab, variant, body, salt)
    del body["chat_template_kwargs"]
    assert answer.prompt_tokens > lab.alone(body, f"{salt}-without").prompt_tokens


@VARIANTS
def test_no_logprobs_unless_asked_for(lab: Lab, salt: str, variant: Variant) -> None:
    """A request without the optional fields gets the same text as from the engine itself."""
    body = chat([Picture(salt).part], salt)
    for name in ("logprobs", "top_logprobs", "seed", "min_tokens"):
        del body[name]
    assert answer_of_both(lab, variant, body, salt).tokens == ()


@pytest.mark.parametrize("variant", [OPENAI, NONE_TRUST], ids=str)
def test_unknown_models_are_not_found(lab: Lab, salt: str, variant: Variant) -> None:
    """The renderer's 404 for a model it does not know is the client's."""
    refusal = lab.refused(variant, chat([Picture(salt).part], salt, model="nobody-knows"))
    assert refusal.status == 404
    assert "render rejected the request: HTTP 404" in refusal.message
    assert refusal.record["error"] == "epd_render_rejected"
    assert legs(lab) == []


@pytest.mark.parametrize("variant", [OPENAI, NONE_TRUST], ids=str)
def test_a_corrupt_image_is_the_clients_fault(lab: Lab, salt: str, variant: Variant) -> None:
    """An image that cannot be decoded gives a 400 before anything is encoded."""
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,bm90IGFuIGltYWdl"}}
    refusal = lab.refused(variant, chat([part], salt))
    assert refusal.status == 400
    assert "render rejected the request: HTTP 400" in refusal.message
    assert refusal.record["error"] == "epd_render_rejected"
    assert refusal.record["outcome"] == "client_error"
    assert legs(lab) == []


@pytest.mark.parametrize("variant", [OPENAI, NONE_TRUST], ids=str)
def test_a_media_type_that_is_not_allowed_is_named(lab: Lab, salt: str, variant: Variant) -> None:
    """A TIFF is refused with its type in the message."""
    part = {"type": "image_url", "image_url": {"url": "data:image/tiff;base64,SUkqAA=="}}
    refusal = lab.refused(variant, chat([part], salt))
    assert refusal.status == 400
    assert "image/tiff" in refusal.message
    assert refusal.record["error"] == "epd_bad_request"
    assert legs(lab) == []


@pytest.mark.parametrize("variant", [OPENAI, NONE_TRUST], ids=str)
def test_processor_settings_the_renderer_does_not_allow(lab: Lab, salt: str, variant: Variant) -> None:
    """`mm_processor_kwargs` without `--trust-request-mm-kwargs` is the renderer's 400, and the client's."""
    body = chat([Picture(salt).part], salt, mm_processor_kwargs={"max_pixels": 12544})
    refusal = lab.refused(variant, body)
    assert refusal.status == 400
    assert "render rejected the request: HTTP 400" in refusal.message
    assert refusal.record["error"] == "epd_render_rejected"
    assert legs(lab) == []
