"""A completions request through the whole pipeline."""

from __future__ import annotations

from typing import Any

import pytest

from sidecar.api.completions import CompletionsApi
from sidecar.errors import BadRequest, StepFailed
from tests.unit.pipeline.api_deployment import ApiDeployment
from tests.unit.pipeline.pipeline_support import rendered_text, sent

TOKENS = [11, 12, 13]
PREFILL_PARAMS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
DECODE_PARAMS = {"remote_host": "10.0.0.2", "do_remote_decode": False, "do_remote_prefill": True}


def deployment(**settings: Any) -> ApiDeployment:
    settings.setdefault("render", [rendered_text(TOKENS)])
    return ApiDeployment(api=CompletionsApi(), **settings)


def asking(prompt: Any = "Once upon", **members: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": prompt, "max_tokens": 50, **members}


@pytest.mark.parametrize("prompt", ["Once upon", [5, 6]])
async def test_in_the_openai_format_prefill_gets_the_rendered_tokens(prompt: Any) -> None:
    """Render sees the client's prompt, prefill and decode its tokens; nothing is encoded."""
    epd = deployment(openai=True)
    decode = await epd.decode(asking(prompt, stream=True, cache_salt="s", priority=1))
    (render,) = epd.renderer.calls
    assert (render.path, sent(render)["prompt"]) == ("/v1/completions/render", prompt)
    (prefill,) = epd.gateway.calls
    assert prefill.path == "/v1/completions"
    assert sent(prefill) == {
        "model": "m",
        "prompt": TOKENS,
        "max_tokens": 1,
        "stream": False,
        "cache_salt": "s",
        "priority": 1,
        "kv_transfer_params": PREFILL_PARAMS,
    }
    assert decode == asking(TOKENS, stream=True, cache_salt="s", priority=1) | {
        "kv_transfer_params": DECODE_PARAMS
    }


async def test_in_the_generate_format_prefill_gets_tokens_only() -> None:
    """The tokens, the renderer's sampling parameters but one token, and what isolates tenants."""
    epd = deployment()
    decode = await epd.decode(asking(cache_salt="s"))
    (prefill,) = epd.gateway.calls
    assert prefill.path == "/inference/v1/generate"
    assert sent(prefill) == {
        "request_id": "req-1",
        "model": "m",
        "stream": False,
        "sampling_params": {"temperature": 0.5, "max_tokens": 1, "stop": []},
        "cache_salt": "s",
        "token_ids": TOKENS,
        "kv_transfer_params": PREFILL_PARAMS,
    }
    assert decode == asking(TOKENS, cache_salt="s") | {"kv_transfer_params": DECODE_PARAMS}


@pytest.mark.parametrize("openai", [True, False])
async def test_the_record_tells_of_a_text_request(*, openai: bool) -> None:
    """The access log names the API, the prompt's length and the forms taken."""
    epd = deployment(openai=openai)
    await epd.run(asking(stream=True))
    record = epd.record
    assert (record.api, record.model, record.stream, record.media) == ("completions", "m", True, "")
    assert (record.prompt_tokens, record.placeholder_tokens) == (3, 0)
    assert (record.render_form, record.encode_form) == ("text", "skipped")
    assert record.prefill_form == ("openai" if openai else "tokens")
    assert (record.stage, record.fallback_reason) == ("decode", "")


@pytest.mark.parametrize("openai", [True, False])
async def test_mm_payload_is_for_the_render_copy_only(*, openai: bool) -> None:
    """A request without media may be rendered without tensors; no later leg hears of it."""
    epd = deployment(openai=openai, mm_payload="none")
    decode = await epd.decode(asking(mm_payload="tensors"))
    assert sent(epd.renderer.calls[0])["mm_payload"] == "none"
    assert "mm_payload" not in sent(epd.gateway.calls[0]) | decode


async def test_an_echo_repeats_the_clients_text() -> None:
    """Decode makes the tokens of an echoed text itself; prefill computes the same ones."""
    epd = deployment(openai=True)
    assert (await epd.decode(asking("<b> Once", echo=True)))["prompt"] == "<b> Once"
    assert epd.prefill_body["prompt"] == TOKENS
    assert "echo" not in epd.prefill_body


async def test_without_a_render_step_the_prompt_is_the_clients() -> None:
    """Both legs carry the client's own prompt, suffix included."""
    epd = deployment(openai=True, steps=("prefill", "decode"))
    decode = await epd.decode(asking(suffix="end"))
    assert (epd.prefill_body["prompt"], epd.prefill_body["suffix"]) == ("Once upon", "end")
    assert (decode["prompt"], decode["suffix"]) == ("Once upon", "end")


@pytest.mark.parametrize(
    "body", [asking(["a", "b"]), asking([[1], [2]]), asking([]), asking(None), asking(7), {"model": "m"}]
)
async def test_a_refused_prompt_reaches_no_upstream(body: dict[str, Any]) -> None:
    """A batch, an empty or a missing prompt is a 400 that names the field, before any call."""
    epd = deployment()
    with pytest.raises(BadRequest) as refused:
        await epd.run(body)
    assert refused.value.param == "prompt"
    assert (epd.renderer.calls, epd.gateway.calls) == ([], [])
    assert epd.record.api == "completions"


@pytest.mark.parametrize(
    "answer",
    [[], [rendered_text(TOKENS), rendered_text(TOKENS)], rendered_text(TOKENS), [rendered_text([])]],
)
async def test_an_answer_for_another_number_of_prompts_is_the_renderers_fault(answer: Any) -> None:
    """One prompt was sent: anything but a list of one prompt ends the request, and prefill is not asked."""
    epd = deployment(render=answer)
    with pytest.raises(StepFailed) as failed:
        await epd.run(asking())
    assert (failed.value.status, failed.value.stage) == (502, "render")
    assert epd.gateway.calls == []


async def test_the_token_limit_holds_for_token_prompts() -> None:
    """A prompt over `max_total_tokens` is refused, also when the client sent the tokens."""
    epd = deployment(max_total_tokens=2)
    with pytest.raises(BadRequest, match="max_total_tokens"):
        await epd.run(asking(TOKENS))
    assert epd.gateway.calls == []


@pytest.mark.parametrize("openai", [True, False])
async def test_the_transfer_parameters_are_ours(*, openai: bool) -> None:
    """What a client put in their place is replaced on prefill and decode."""
    epd = deployment(openai=openai)
    forged = {"remote_host": "10.6.6.6", "prompt_token_ids": [1]}
    body = asking(
        kv_transfer_params=forged, ec_transfer_params=forged, vllm_xargs={"kv_transfer_params": forged}
    )
    decode = await epd.decode(body)
    assert epd.prefill_body["kv_transfer_params"] == PREFILL_PARAMS
    assert decode["kv_transfer_params"] == DECODE_PARAMS
    for leg in (sent(epd.renderer.calls[0]), epd.prefill_body, decode):
        assert "10.6.6.6" not in str(leg)
        assert "ec_transfer_params" not in leg
