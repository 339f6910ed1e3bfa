"""The decision table: which form the media of a generate-format request travel in, row by row."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from sidecar.errors import MixedSpan, StepFailed
from tests.unit.pipeline.pipeline_support import (
    GRIDS,
    HASHES,
    METADATA,
    MIXED_IDS,
    PHASE_TOKEN,
    TENSORS,
    TOKEN_IDS,
    Deployment,
    descriptor,
    rendered,
    rendered_text,
    sent,
    two_images,
)

COVERED = {HASHES[0]: descriptor(GRIDS[0]), HASHES[1]: descriptor(GRIDS[1])}
ONE_COVERED = {HASHES[0]: descriptor(GRIDS[0])}
PROCESSOR_KWARGS = {"mm_processor_kwargs": {"max_pixels": 9}}

PRESENT: dict[str, Any] = {"kwargs_data": {"image": list(TENSORS[:2])}}
NULL: dict[str, Any] = {"kwargs_data": None}
ABSENT: dict[str, Any] = {"kwargs_data": ...}
NULL_MODALITY: dict[str, Any] = {"kwargs_data": {"image": None}}
NULL_ITEM: dict[str, Any] = {"kwargs_data": {"image": [TENSORS[0], None]}}
NULL_ITEMS: dict[str, Any] = {"kwargs_data": {"image": [None, None]}}
WITH_METADATA: dict[str, Any] = {"mm_metadata": {"image": list(METADATA)}}


def _row(name: str, *values: Any) -> Any:
    return pytest.param(*values, id=name)


@pytest.mark.parametrize(
    ("asked", "kwargs", "features", "descriptors", "encode_form", "prefill_form"),
    [
        _row("tensors-covered", "tensors", {}, PRESENT, COVERED, "features", "mm_metadata"),
        _row("tensors-uncovered", "tensors", {}, PRESENT, ONE_COVERED, "features", "kwargs_data"),
        _row(
            "tensors-kwargs-covered",
            "tensors",
            PROCESSOR_KWARGS,
            PRESENT,
            COVERED,
            "features",
            "mm_metadata",
        ),
        _row("tensors-kwargs-uncovered", "tensors", PROCESSOR_KWARGS, PRESENT, {}, "features", "kwargs_data"),
        _row("none-kwargs-covered", "none", PROCESSOR_KWARGS, PRESENT, COVERED, "features", "mm_metadata"),
        _row("none-kwargs-uncovered", "none", PROCESSOR_KWARGS, PRESENT, {}, "features", "kwargs_data"),
        _row("none-old-renderer-covered", "none", {}, PRESENT, COVERED, "features", "mm_metadata"),
        _row("none-old-renderer-uncovered", "none", {}, PRESENT, ONE_COVERED, "features", "kwargs_data"),
        _row("none-omitted-covered", "none", {}, NULL, COVERED, "content_parts", "mm_metadata"),
        _row("none-absent-covered", "none", {}, ABSENT, COVERED, "content_parts", "mm_metadata"),
        _row(
            "none-null-modality-covered", "none", {}, NULL_MODALITY, COVERED, "content_parts", "mm_metadata"
        ),
        _row("none-omitted-uncovered", "none", {}, NULL, ONE_COVERED, "content_parts", "content_parts"),
        _row(
            "none-omitted-metadata-without-descriptor",
            "none",
            {},
            NULL | WITH_METADATA,
            ONE_COVERED,
            "content_parts",
            "content_parts",
        ),
        _row("tensors-null-item-covered", "tensors", {}, NULL_ITEM, COVERED, "content_parts", "mm_metadata"),
        _row("tensors-null-item-uncovered", "tensors", {}, NULL_ITEM, {}, "content_parts", "content_parts"),
        _row(
            "tensors-null-items-covered", "tensors", {}, NULL_ITEMS, COVERED, "content_parts", "mm_metadata"
        ),
        _row("tensors-null-items-uncovered", "tensors", {}, NULL_ITEMS, {}, "content_parts", "content_parts"),
        _row("none-null-items-covered", "none", {}, NULL_ITEMS, COVERED, "content_parts", "mm_metadata"),
    ],
)
async def test_rows_that_reach_prefill(
    *,
    asked: str,
    kwargs: dict[str, Any],
    features: dict[str, Any],
    descriptors: dict[str, Any],
    encode_form: str,
    prefill_form: str,
) -> None:
    """What was asked, what came back and what the encoders hold decide both forms, for the whole request."""
    deployment = Deployment(
        mm_payload=asked, render=rendered(**features), descriptors=descriptors, phase_token=PHASE_TOKEN
    )
    await deployment.run(two_images(**kwargs))
    record = deployment.record
    assert (record.encode_form, record.prefill_form) == (encode_form, prefill_form)
    assert record.render_form == ("tensors" if encode_form == "features" else "omitted")
    assert bool(record.fallback_reason) == (prefill_form != "mm_metadata")
    for call in deployment.encodes:
        assert encode_form in sent(call)
    body = deployment.prefill_body
    match prefill_form:
        case "mm_metadata":
            assert body["token_ids"] == TOKEN_IDS
            assert body["features"]["mm_metadata"] == {"image": list(METADATA)}
            assert body["features"]["kwargs_data"] is None
            assert set(body["ec_transfer_params"]) == set(HASHES[:2])
        case "kwargs_data":
            assert body["token_ids"] == TOKEN_IDS
            assert body["features"]["kwargs_data"] == {"image": list(TENSORS[:2])}
            assert "mm_metadata" not in body["features"]
        case _:
            assert body["token_ids"] == [1, 10, 7, 11, 8, 12]
            assert [part["uuid"] for part in body["content_parts"]] == list(HASHES[:2])
            assert "features" not in body


@pytest.mark.parametrize(
    ("asked", "kwargs", "features", "named"),
    [
        _row("none-kwargs-missing", "none", PROCESSOR_KWARGS, NULL, "mm_processor_kwargs"),
        _row("none-empty-kwargs-missing", "none", {"media_io_kwargs": {}}, NULL, "media_io_kwargs"),
        _row("none-kwargs-null-item", "none", PROCESSOR_KWARGS, NULL_ITEM, "mm_processor_kwargs"),
        _row("tensors-kwargs-null-item", "tensors", PROCESSOR_KWARGS, NULL_ITEM, "mm_processor_kwargs"),
        _row("tensors-null", "tensors", {}, NULL, "mm_payload: tensors"),
        _row("tensors-absent", "tensors", {}, ABSENT, "mm_payload: tensors"),
        _row("tensors-kwargs-null", "tensors", PROCESSOR_KWARGS, NULL, "kwargs_data"),
    ],
)
async def test_rows_that_fail_at_render(
    asked: str, kwargs: dict[str, Any], features: dict[str, Any], named: str
) -> None:
    """Tensors that must be there and are not fail the request before the gateway hears of it."""
    deployment = Deployment(mm_payload=asked, render=rendered(**features), descriptors=COVERED)
    with pytest.raises(StepFailed) as failed:
        await deployment.run(two_images(**kwargs))
    assert (failed.value.status, failed.value.code) == (502, "epd_render_failed")
    assert named in failed.value.message
    assert deployment.gateway.calls == []


async def test_a_null_item_over_a_mixed_span_fails_at_render() -> None:
    """Without its tensors the item would have to travel as a content part, which a mixed span forbids."""
    deployment = Deployment(render=rendered(MIXED_IDS, **NULL_ITEM), descriptors=COVERED)
    with pytest.raises(StepFailed) as failed:
        await deployment.run(two_images())
    assert (failed.value.status, failed.value.code) == (502, "epd_render_failed")
    assert "image[0]" in failed.value.message
    assert deployment.gateway.calls == []


@pytest.mark.parametrize("sparse_spans", ["openai", "verbatim"])
async def test_a_mixed_span_without_tensors_is_422_and_nothing_leaves(sparse_spans: str) -> None:
    """The message names the configuration and the entry; no sub-request has been sent."""
    mixed_second = [1, 10, 7, 7, 7, 7, 11, 8, 9, 12]
    deployment = Deployment(
        mm_payload="none",
        render=rendered(mixed_second, **NULL),
        descriptors=COVERED,
        sparse_spans=sparse_spans,
    )
    with pytest.raises(MixedSpan) as failed:
        await deployment.run(two_images())
    assert (failed.value.status, failed.value.code) == (422, "epd_mixed_span")
    assert "mm_payload: none" in failed.value.message
    assert "image[1]" in failed.value.message
    assert deployment.record.stage == "encode"
    assert deployment.gateway.calls == []


async def test_a_mixed_span_of_an_equal_item_is_422_too() -> None:
    """Equal items are encoded once, but every one of their spans is checked before anything leaves."""
    deployment = Deployment(
        mm_payload="none",
        render=rendered(
            [1, 10, 7, 7, 11, 8, 9, 12],
            **NULL,
            mm_hashes={"image": [HASHES[0]] * 2},
            mm_placeholders={"image": [{"offset": 2, "length": 2}, {"offset": 5, "length": 2}]},
        ),
    )
    with pytest.raises(MixedSpan, match=r"image\[1\]"):
        await deployment.run(two_images())
    assert deployment.gateway.calls == []


@pytest.mark.parametrize("asked", ["tensors", "none"])
async def test_text_skips_encode_and_sends_tokens(asked: str) -> None:
    """A prompt without media makes no encode call and no media fields."""
    deployment = Deployment(mm_payload=asked, render=rendered_text())
    await deployment.run({"messages": [{"role": "user", "content": "hi"}]})
    record = deployment.record
    assert (record.render_form, record.encode_form, record.prefill_form) == ("text", "skipped", "tokens")
    assert (record.encode_requests, record.fallback_reason, record.media) == (0, "", "")
    assert deployment.encodes == []
    assert not {"features", "content_parts", "ec_transfer_params"} & set(deployment.prefill_body)


@pytest.mark.parametrize("features", [PRESENT, PRESENT | WITH_METADATA])
async def test_features_over_a_mixed_span_go_in_the_openai_format(features: dict[str, Any]) -> None:
    """The tokens-in form would kill the engine: prefill gets the client's own body instead."""
    deployment = Deployment(render=rendered(MIXED_IDS, **features), descriptors=COVERED)
    await deployment.run(two_images(max_tokens=50))
    assert deployment.record.encode_form == "features"
    assert deployment.record.prefill_form == "openai"
    assert deployment.record.fallback_reason == "image[0]: mixed-token span"
    (prefill,) = deployment.prefills
    assert prefill.path == "/v1/chat/completions"
    body = sent(prefill)
    assert [part.get("uuid") for part in body["messages"][0]["content"]] == [None, *HASHES[:2]]
    assert body["max_tokens"] == 1
    assert set(body["ec_transfer_params"]) == set(HASHES[:2])


@pytest.mark.parametrize(
    ("descriptors", "form"), [(COVERED, "mm_metadata"), (ONE_COVERED, "kwargs_data"), ({}, "kwargs_data")]
)
async def test_verbatim_sends_mixed_spans_as_features(descriptors: dict[str, Any], form: str) -> None:
    """`sparse_spans: verbatim` is for engines that place the encoder output themselves."""
    deployment = Deployment(render=rendered(MIXED_IDS), descriptors=descriptors, sparse_spans="verbatim")
    await deployment.run(two_images())
    assert deployment.record.prefill_form == form
    assert deployment.prefill_body["token_ids"] == MIXED_IDS


STATES: dict[str, tuple[Any, bool, str]] = {
    "covered": (descriptor(...), True, ""),
    "nothing": (None, False, "no descriptor"),
    "evicted": ({"item_indices": [0], "metadata": {}}, False, "descriptor without peer address"),
    "no-peer": (descriptor(..., peer=False), False, "descriptor without peer address"),
    "no-metadata": (descriptor(), False, "no metadata"),
    "not-encodable": (
        descriptor() | {"metadata": {"image_grid_thw": ..., "timestamps": [1.0]}},
        False,
        "metadata not encodable (timestamps)",
    ),
}
"""State of one entry: its descriptor, whether it is covered without render metadata, why not."""


def _of(state: str, index: int) -> Any:
    value = STATES[state][0]
    if value is None:
        return None
    metadata = {key: GRIDS[index] if item is ... else item for key, item in value["metadata"].items()}
    return value | {"metadata": metadata}


@pytest.mark.parametrize("omitted", [True, False], ids=["omitted", "tensors"])
@pytest.mark.parametrize(("first", "second"), list(itertools.product(STATES, STATES)))
async def test_one_uncovered_entry_decides_for_all(first: str, second: str, *, omitted: bool) -> None:
    """Metadata-only prefill needs every entry covered; else all take the safe form, and the log says why."""
    states = (first, second)
    deployment = Deployment(
        mm_payload="none" if omitted else "tensors",
        render=rendered(**(NULL if omitted else PRESENT)),
        descriptors={HASHES[i]: _of(state, i) for i, state in enumerate(states)},
    )
    await deployment.run(two_images())
    uncovered = [(i, state) for i, state in enumerate(states) if not STATES[state][1]]
    if uncovered:
        index, state = uncovered[0]
        assert deployment.record.prefill_form == ("content_parts" if omitted else "kwargs_data")
        assert deployment.record.fallback_reason == f"image[{index}]: {STATES[state][2]}"
    else:
        assert deployment.record.prefill_form == "mm_metadata"
        assert deployment.record.fallback_reason == ""


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("omitted", [True, False], ids=["omitted", "tensors"])
async def test_render_metadata_counts_only_with_a_usable_descriptor(state: str, *, omitted: bool) -> None:
    """The renderer's own item is taken as it is, but never without an encoding to load."""
    deployment = Deployment(
        mm_payload="none" if omitted else "tensors",
        render=rendered(**((NULL if omitted else PRESENT) | WITH_METADATA)),
        descriptors={HASHES[0]: _of("covered", 0), HASHES[1]: _of(state, 1)},
    )
    await deployment.run(two_images())
    usable = state in {"covered", "no-metadata", "not-encodable"}
    assert (deployment.record.prefill_form == "mm_metadata") is usable
    if usable:
        assert deployment.prefill_body["features"]["mm_metadata"] == {"image": list(METADATA)}


async def test_the_renderers_items_are_forwarded_as_they_are() -> None:
    """An item this sidecar could not rebuild, or not even read, travels as the same text."""
    items = ["gatudW1fcGF0Y2hlc4KkZGF0YZOlaW50NjSQ1wMBAAAAAAAAAA==", "b3BhcXVl"]
    deployment = Deployment(
        render=rendered(**PRESENT, mm_metadata={"image": items}),
        descriptors={HASHES[0]: descriptor(), HASHES[1]: descriptor()},
    )
    await deployment.run(two_images())
    assert deployment.prefill_body["features"]["mm_metadata"] == {"image": items}


async def test_null_metadata_items_are_rebuilt_from_the_descriptor() -> None:
    """A null in the renderer's metadata is no metadata: the descriptor's grid fills it in."""
    deployment = Deployment(
        mm_payload="none",
        render=rendered(**NULL, mm_metadata={"image": [METADATA[0], None]}),
        descriptors=COVERED,
    )
    await deployment.run(two_images())
    assert deployment.prefill_body["features"]["mm_metadata"] == {"image": list(METADATA)}


@pytest.mark.parametrize("mm_payload", ["none", "tensors"])
async def test_shared_storage_never_relies_on_descriptors(mm_payload: str) -> None:
    """Files may be missing: without trust there is no metadata-only prefill and no descriptor is sent."""
    deployment = Deployment(
        ec="ec-shared-storage",
        mm_payload=mm_payload,
        render=rendered(**(NULL if mm_payload == "none" else PRESENT) | WITH_METADATA),
        descriptors=COVERED,
    )
    await deployment.run(two_images())
    assert deployment.record.prefill_form == ("content_parts" if mm_payload == "none" else "kwargs_data")
    assert deployment.record.fallback_reason.startswith("image[0]: no descriptor")
    assert "ec_transfer_params" not in deployment.prefill_body


async def test_trusted_shared_storage_relies_on_descriptors_without_peers() -> None:
    """`ec_trust_descriptors` lets the metadata-only prefill work with shared storage too."""
    deployment = Deployment(
        ec="ec-shared-storage",
        trust_descriptors=True,
        mm_payload="none",
        render=rendered(**NULL),
        descriptors={HASHES[i]: descriptor(GRIDS[i], peer=False) for i in range(2)},
    )
    await deployment.run(two_images())
    assert deployment.record.prefill_form == "mm_metadata"
    assert set(deployment.prefill_body["ec_transfer_params"]) == set(HASHES[:2])
