from __future__ import annotations

from typing import Any

import pytest

from sidecar.pipeline.tensor_memory import TensorMemory
from tests.unit.pipeline.pipeline_support import TENSORS, Deployment, rendered, sent, two_images

MIXED = [1, 10, 7, 7, 7, 9, 11, 8, 8, 12]


def renderer(token_ids: list[int]) -> Any:
    """A render service that omits tensors when asked, over a prompt of these ids."""

    def render(body: Any) -> Any:
        tensors = None if body.get("mm_payload") == "none" else {"image": list(TENSORS[:2])}
        return rendered(token_ids, kwargs_data=tensors)

    return render


async def test_auto_omits_tensors_where_media_can_travel_without() -> None:
    """Uniform spans need no tensors: one render call, content parts to encode."""
    deployment = Deployment(mm_payload="auto", render=renderer([1, 10, 7, 7, 7, 7, 11, 8, 8, 12]))
    await deployment.run(two_images())
    assert len(deployment.renderer.calls) == 1
    record = deployment.record
    assert (record.mm_payload, record.render_form, record.encode_form) == ("none", "omitted", "content_parts")


async def test_auto_renders_again_with_tensors_for_a_mixed_span() -> None:
    """A span that mixes tokens does not fail the request: it is rendered again, and the log says why."""
    deployment = Deployment(mm_payload="auto", render=renderer(MIXED))
    await deployment.run(two_images())
    first, second = (sent(call) for call in deployment.renderer.calls)
    assert first["mm_payload"] == "none"
    assert "mm_payload" not in second
    assert "return_mm_kwargs" not in second
    record = deployment.record
    assert (record.mm_payload, record.render_form, record.encode_form) == ("tensors", "tensors", "features")
    assert record.fallback_reason == "image[0]: mixed-token span"
    assert record.render_bytes is not None


async def test_auto_remembers_the_model() -> None:
    """The next request for that model asks for tensors at once; another model is asked anew."""
    memory = TensorMemory()
    first = Deployment(mm_payload="auto", render=renderer(MIXED), tensor_memory=memory)
    await first.run(two_images(model="sparse"))
    second = Deployment(mm_payload="auto", render=renderer(MIXED), tensor_memory=memory)
    await second.run(two_images(model="sparse"))
    assert len(second.renderer.calls) == 1
    assert second.record.mm_payload == "tensors"
    other = Deployment(mm_payload="auto", render=renderer(MIXED), tensor_memory=memory)
    await other.run(two_images(model="other"))
    assert len(other.renderer.calls) == 2


async def test_auto_needs_no_tensors_in_the_openai_format() -> None:
    """Encode and prefill get the client's own parts: a mixed span is no obstacle."""
    deployment = Deployment(mm_payload="auto", render=renderer(MIXED), openai=True)
    await deployment.run(two_images())
    assert len(deployment.renderer.calls) == 1
    assert deployment.record.mm_payload == "none"


async def test_processor_kwargs_are_rendered_with_tensors_at_once() -> None:
    """As under `none`: those kwargs change the hashes."""
    deployment = Deployment(mm_payload="auto", render=renderer(MIXED))
    await deployment.run(two_images(mm_processor_kwargs={"max_pixels": 9}))
    assert len(deployment.renderer.calls) == 1
    assert deployment.record.mm_payload == "tensors"


def test_a_model_is_forgotten_after_an_hour() -> None:
    """The memory is a hint: a renderer that was upgraded is asked again."""
    now = 0.0
    memory = TensorMemory(lambda: now)
    memory.remember("m", "image")
    now = 3599.0
    assert memory.knows("m", "image")
    assert not memory.knows("m", "video")
    now = 3600.0
    assert not memory.knows("m", "image")


@pytest.mark.parametrize("count", [256, 257, 1000])
def test_the_memory_is_bounded(count: int) -> None:
    """Clients choose model names: the ones learnt first are forgotten first."""
    memory = TensorMemory(lambda: 0.0)
    for number in range(count):
        memory.remember(f"m{number}", "image")
    assert sum(memory.knows(f"m{number}", "image") for number in range(count)) == 256
    assert memory.knows(f"m{count - 1}", "image")
