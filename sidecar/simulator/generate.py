"""Bodies of `/inference/v1/generate`, validated like vLLM does."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from sidecar.simulator.errors import internal_error, invalid_body, invalid_field
from sidecar.simulator.fields import JsonObject, optional_object, token_list
from sidecar.simulator.media import MediaPart
from sidecar.simulator.serialization import ItemFields, read_item
from sidecar.simulator.tokens import PLACEHOLDER

if TYPE_CHECKING:
    from sidecar.simulator.tokens import Modality

_PART_TYPES: dict[str, Modality] = {"image_url": "image", "audio_url": "audio", "video_url": "video"}


@dataclass(frozen=True, slots=True)
class FeatureItem:
    """One entry of `features`.

    Attributes:
        modality: its modality.
        key: its hash.
        offset: first token of its span.
        length: tokens of its span.
        tensors: decoded `kwargs_data` item, None when null.
        metadata: decoded `mm_metadata` item, None when null.
    """

    modality: Modality
    key: str
    offset: int
    length: int
    tensors: ItemFields | None
    metadata: ItemFields | None

    @property
    def fields(self) -> ItemFields:
        """The merged item; metadata wins."""
        return (self.tensors or {}) | (self.metadata or {})


@dataclass(frozen=True, slots=True)
class GenerateBody:
    """A valid body: token ids, and media either as features or as content parts.

    Attributes:
        token_ids: expanded with features, unexpanded with content parts.
        sampling_params: the object of that name.
        features: entries in prompt order.
        content_parts: entries in request order.
        skipped_parts: content parts of a type vLLM passes over without a word.
    """

    token_ids: list[int]
    sampling_params: JsonObject
    features: tuple[FeatureItem, ...]
    content_parts: tuple[MediaPart, ...]
    skipped_parts: int


def read_generate(body: JsonObject) -> GenerateBody:
    """Validate a body.

    Raises:
        ApiError: 400 for everything vLLM's own validation refuses, 500 for items of another shape.
    """
    token_ids = token_list(body, "token_ids")
    sampling_params = optional_object(body, "sampling_params")
    if sampling_params is None:
        raise invalid_field("sampling_params", "Field required")
    features = optional_object(body, "features")
    parts = body.get("content_parts")
    if features and parts:
        raise invalid_body("content_parts and features are mutually exclusive")
    media = _read_content_parts(parts) if parts else ()
    return GenerateBody(
        token_ids,
        sampling_params,
        _read_features(features, len(token_ids), has_ec=bool(optional_object(body, "ec_transfer_params")))
        if features
        else (),
        media,
        len(parts) - len(media) if parts else 0,
    )


def _read_features(features: JsonObject, prompt_length: int, *, has_ec: bool) -> tuple[FeatureItem, ...]:
    hashes = _modality_map(features, "mm_hashes")
    placeholders = _modality_map(features, "mm_placeholders")
    if hashes is None or placeholders is None:
        raise invalid_field("features", "mm_hashes and mm_placeholders are required")
    kwargs = _modality_map(features, "kwargs_data")
    metadata = _modality_map(features, "mm_metadata")
    for name, other in (
        ("mm_placeholders", placeholders),
        ("kwargs_data", kwargs),
        ("mm_metadata", metadata),
    ):
        if other is not None:
            _check_complete(name, hashes, other)
    items: list[FeatureItem] = []
    for modality, keys in hashes.items():
        for index, key in enumerate(keys):
            path = f"{modality}.{index}"
            if not isinstance(key, str) or not key:
                raise invalid_field(f"features.mm_hashes.{path}", "Input should be a valid string")
            offset, length = _read_span(placeholders[modality][index], path, prompt_length)
            items.append(
                FeatureItem(
                    _known_modality(modality),
                    key,
                    offset,
                    length,
                    _read_optional_item(kwargs, modality, index, "kwargs_data"),
                    _read_optional_item(metadata, modality, index, "mm_metadata"),
                )
            )
    items.sort(key=lambda item: item.offset)
    for before, after in pairwise(items):
        if before.offset + before.length > after.offset:
            raise invalid_field("features", "mm_placeholders must be globally non-overlapping and sorted")
    if not has_ec and any(item.metadata is not None and item.tensors is None for item in items):
        raise invalid_body("metadata-only multimodal items require ec_transfer_params")
    return tuple(items)


def _modality_map(features: JsonObject, name: str) -> dict[str, list[Any]] | None:
    value = features.get(name)
    if value is None:
        return None
    if not isinstance(value, dict) or not all(isinstance(items, list) for items in value.values()):
        raise invalid_field(f"features.{name}", "Input should be a valid dictionary of lists")
    return value


def _check_complete(name: str, hashes: dict[str, list[Any]], other: dict[str, list[Any]]) -> None:
    if hashes.keys() != other.keys():
        raise invalid_field("features", f"{name} must use the same modalities as mm_hashes")
    for modality, keys in hashes.items():
        if len(keys) != len(other[modality]):
            raise invalid_field("features", f"{modality} {name} and mm_hashes must have the same length")


def _known_modality(name: str) -> Modality:
    for modality in PLACEHOLDER:
        if modality == name:
            return modality
    raise internal_error(f"Internal server error: the model has no modality {name!r}")


def _read_span(span: Any, path: str, prompt_length: int) -> tuple[int, int]:
    offset, length = (span.get("offset"), span.get("length")) if isinstance(span, dict) else (None, None)
    where = f"features.mm_placeholders.{path}"
    if type(offset) is not int or type(length) is not int:
        raise invalid_field(where, "offset and length should be valid integers")
    if offset < 0 or length <= 0:
        raise invalid_field(where, f"offset must be >= 0 and length > 0, got {offset} and {length}")
    if offset + length > prompt_length:
        raise invalid_body("mm_placeholders must remain within the token_ids sequence")
    return offset, length


def _read_optional_item(
    items: dict[str, list[Any]] | None, modality: str, index: int, name: str
) -> ItemFields | None:
    if items is None or items[modality][index] is None:
        return None
    return read_item(items[modality][index], f"features.{name}.{modality}.{index}")


def _read_content_parts(parts: Any) -> tuple[MediaPart, ...]:
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise invalid_field("content_parts", "Input should be a valid list of dictionaries")
    media = []
    for index, part in enumerate(parts):
        modality = _PART_TYPES.get(str(part.get("type")))
        if modality is None:
            continue
        url, uuid = part.get("url"), part.get("uuid")
        for name, value in (("url", url), ("uuid", uuid)):
            if value is not None and not isinstance(value, str):
                raise invalid_field(f"content_parts.{index}.{name}", "Input should be a valid string")
        media.append(MediaPart(modality, url, uuid))
    return tuple(media)
