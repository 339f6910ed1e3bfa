"""A generate request through the whole pipeline: its prompt is the client's own."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

import pytest

from sidecar.api.generate import GenerateApi
from sidecar.errors import BadRequest
from tests.unit.pipeline.media_deployment import MediaDeployment
from tests.unit.pipeline.pipeline_support import HASHES, MIXED_IDS, SPANS, TENSORS, TOKEN_IDS, sent

PATH = "/inference/v1/generate"
URL = "https://cdn.example/a.png"
PNG = b"\x89PNG" + bytes(range(200))
PNG_URI = "data:image/png;base64," + base64.b64encode(PNG).decode()
KV_NIXL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def asking(**members: Any) -> dict[str, Any]:
    return {"model": "m", "token_ids": TOKEN_IDS, "sampling_params": {"max_tokens": 50}, **members}


def features(**members: Any) -> dict[str, Any]:
    return {
        "mm_hashes": {"image": list(HASHES[:2])},
        "mm_placeholders": {"image": [{"offset": o, "length": n} for o, n in SPANS]},
        "kwargs_data": {"image": list(TENSORS[:2])},
        **members,
    }


def part(url: str, kind: str = "image_url", **members: Any) -> dict[str, Any]:
    return {"type": kind, "url": url, **members}


def name_of(uri: str, modality: str = "image") -> str:
    return hashlib.sha256(f'{modality}"{uri}"'.encode()).hexdigest()


def deployment(**settings: Any) -> MediaDeployment:
    chosen: dict[str, Any] = {"api": GenerateApi(), **settings}
    return MediaDeployment(**chosen)


@pytest.mark.parametrize("openai", [True, False])
@pytest.mark.parametrize(
    ("media", "form", "summary"),
    [
        ({}, "tokens", ""),
        ({"features": features()}, "kwargs_data", "image:2"),
        ({"features": features(kwargs_data=None)}, "kwargs_data", "image:2"),
        ({"features": features(kwargs_data={"image": [TENSORS[0], None]})}, "kwargs_data", "image:2"),
        (
            {"features": features(mm_metadata={"image": ["bTA=", None]})},
            "kwargs_data",
            "image:2",
        ),
    ],
)
async def test_the_clients_tokens_go_to_prefill_and_decode(
    media: dict[str, Any], form: str, summary: str, *, openai: bool
) -> None:
    """No render, no encode; prefill is capped, decode untouched, both with their transfer parameters."""
    epd = deployment(openai=openai)
    rest = {"cache_salt": "s", "priority": 2, "return_token_ids": True, **media}
    body = asking(stream=True, stream_options={"include_usage": True}, **rest)
    decode = await epd.decode(body)
    assert (epd.renderer.calls, epd.encodes) == ([], [])
    (prefill,) = epd.prefills
    assert prefill.path == PATH
    assert sent(prefill) == asking(**rest) | {
        "stream": False,
        "sampling_params": {"max_tokens": 1},
        "kv_transfer_params": KV_NIXL,
    }
    params = {"remote_host": "10.0.0.2", "do_remote_decode": False, "do_remote_prefill": True}
    assert decode == body | {"kv_transfer_params": params}
    record = epd.record
    assert (record.api, record.model, record.stream, record.media) == ("generate", "m", True, summary)
    assert (record.encode_form, record.prefill_form, record.fallback_reason) == ("skipped", form, "")
    assert record.prompt_tokens == len(TOKEN_IDS)
    assert record.placeholder_tokens == (6 if summary else 0)


async def test_decode_gets_the_clients_text() -> None:
    """Byte for byte, but for the parameters at its end."""
    text = b'{ "token_ids":[ 1, 2],"x":1.50E+2,\n"sampling_params":{"max_tokens":9, "seed":-0} }'
    rewrite = await deployment(kv="kv-shared-storage").run(text)
    assert b"".join(rewrite.body) == (
        b'{"token_ids":[ 1, 2],"x":1.50E+2,"sampling_params":{"max_tokens":9, "seed":-0},'
        b'"kv_transfer_params":{"do_remote_decode":false,"do_remote_prefill":true}}'
    )


async def test_content_parts_are_inlined_and_named() -> None:
    """Downloads take the place of their URLs, all items carry our name for them on both legs."""
    epd = deployment(media={URL: ("image/png", PNG)})
    sound = "data:audio/wav;base64,AAAA"
    parts = [part(URL, uuid="../x"), part("DATA:audio/WAV;base64,AAAA", "audio_url"), part(URL, uuid="other")]
    decode = await epd.decode(asking(content_parts=parts))
    assert epd.downloads.fetched == [URL]
    image = part(PNG_URI, uuid=name_of(PNG_URI))
    inlined = [image, part(sound, "audio_url", uuid=name_of(sound, "audio")), image]
    assert decode["content_parts"] == epd.prefill_body["content_parts"] == inlined
    assert decode["token_ids"] == epd.prefill_body["token_ids"] == TOKEN_IDS
    assert (epd.renderer.calls, epd.encodes) == ([], [])
    assert (epd.record.prefill_form, epd.record.encode_form) == ("content_parts", "skipped")
    assert (epd.record.media, epd.record.placeholder_tokens) == ("image:2,audio:1", 0)


@pytest.mark.parametrize(
    ("item", "named"),
    [
        (part("data:image/svg+xml;base64,AAAA"), "image/svg+xml"),
        (part("data:audio/wav;base64,AAAA"), "audio/wav"),
        (part("data:image/png,AAAA"), "base64"),
        (part("data:image/png;base64,A*AA"), "base64"),
        (part("file:///etc/passwd"), "http"),
        (part("http://"), "host"),
    ],
)
async def test_bad_media_is_refused_by_place(item: Any, named: str) -> None:
    """A bad item is a 400 that names its place, before any call."""
    epd = deployment(media={URL: ("image/png", PNG)})
    with pytest.raises(BadRequest) as refused:
        await epd.run(asking(content_parts=[part(URL), item]))
    assert refused.value.message.startswith("content_parts[1]: ")
    assert named in refused.value.message
    assert epd.gateway.calls == []


async def test_a_mixed_span_is_refused_unless_engines_survive_it() -> None:
    """It would kill the engine: 400 naming the item; with `sparse_spans: verbatim` it travels as sent."""
    body = asking(token_ids=MIXED_IDS, features=features())
    epd = deployment()
    with pytest.raises(BadRequest, match=r"image\[0\] mixes tokens"):
        await epd.run(body)
    assert epd.gateway.calls == []
    verbatim = deployment(sparse_spans="verbatim")
    assert (await verbatim.decode(body))["features"] == features()
    assert verbatim.prefill_body["features"] == features()


@pytest.mark.parametrize("place", ["top", "extra_args", "vllm_xargs"])
async def test_forged_transfer_parameters_reach_no_worker(place: str) -> None:
    """Not from any place of the client's body; the connectors' own stand in their stead."""
    forged = {"kv_transfer_params": {"remote_host": "6.6.6.6"}, "ec_transfer_params": {"h": "6.6.6.6"}}
    places: dict[str, dict[str, Any]] = {
        "top": forged,
        "extra_args": {"sampling_params": {"extra_args": forged}},
        "vllm_xargs": {"vllm_xargs": forged},
    }
    epd = deployment()
    decode = await epd.decode(asking(features=features(), **places[place]))
    assert "6.6.6.6" not in json.dumps([decode, epd.prefill_body])
    assert decode["kv_transfer_params"]["remote_host"] == "10.0.0.2"
    assert "ec_transfer_params" not in decode | epd.prefill_body


async def test_features_without_tensors_are_refused_before_any_call() -> None:
    """Metadata alone needs an encoding that nobody makes for this request."""
    epd = deployment()
    with pytest.raises(BadRequest, match="mm_metadata"):
        await epd.run(asking(features=features(kwargs_data=None, mm_metadata={"image": ["bTA=", None]})))
    assert epd.gateway.calls == []


async def test_token_limits_hold_without_a_render_call() -> None:
    """The limits of the render step bound the tokens a client sends itself, too."""
    limited = deployment(max_total_tokens=len(TOKEN_IDS) - 1, steps=("render", "prefill", "decode"))
    with pytest.raises(BadRequest, match="max_total_tokens"):
        await limited.run(asking())
    assert limited.renderer.calls == []
    assert limited.gateway.calls == []
