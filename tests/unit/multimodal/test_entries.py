from __future__ import annotations

import json

from sidecar.api.chat import ChatApi
from sidecar.multimodal.entries import Entry, entries_of, media_summary

PARTS = {
    "image": {"type": "image_url", "image_url": {"url": "http://i"}},
    "audio": {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    "video": {"type": "video_url", "video_url": {"url": "http://v"}},
}


def _entries(*modalities: str) -> list[Entry]:
    body = {"messages": [{"role": "user", "content": [PARTS[modality] for modality in modalities]}]}
    return entries_of(ChatApi().parse(json.dumps(body).encode()).parts)


def test_entries_are_counted_within_their_modality() -> None:
    """Each part is one entry, in walk order; its index counts its own modality only."""
    entries = _entries("image", "audio", "image", "video", "audio")
    assert [entry.label for entry in entries] == ["image[0]", "audio[0]", "image[1]", "video[0]", "audio[1]"]
    assert all(entry.part is not None and entry.part.modality == entry.modality for entry in entries)


def test_the_summary_counts_per_modality_in_order_of_appearance() -> None:
    """The access log names each modality with its count, "" without media."""
    assert media_summary({"image": 2, "audio": 1}) == "image:2,audio:1"
    assert media_summary({}) == ""


def test_megabytes_stay_out_of_the_representation() -> None:
    """An entry printed by accident does not print its tensors."""
    entry = _entries("image")[0]
    assert "kwargs_data" not in repr(entry)
    assert "descriptor" not in repr(entry)
