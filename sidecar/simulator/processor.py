"""The multimodal processor of a role: its settings, the keys it gives to items, and its cache."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import msgspec

from sidecar.simulator import media
from sidecar.simulator.deployment import Identity
from sidecar.simulator.errors import bad_request, invalid_field
from sidecar.simulator.fields import optional_object

if TYPE_CHECKING:
    from sidecar.simulator.deployment import Call, Deployment
    from sidecar.simulator.media import Media, MediaPart

_MEDIA_OPTIONS = ("mm_processor_kwargs", "media_io_kwargs")


def media_options(deployment: Deployment, call: Call) -> dict[str, object]:
    """The processor settings a body brings along; raises ApiError (400) where they are not trusted."""
    options: dict[str, object] = {}
    for name in _MEDIA_OPTIONS:
        value = optional_object(call.body, name)
        if not value:
            continue
        if not deployment.config.trust_mm_kwargs:
            raise bad_request(
                f"Per-request {name} are disabled by default. Start the server with "
                "--trust-request-mm-kwargs only when clients are trusted.",
                name,
            )
        options[name] = value
    return options


def process(
    deployment: Deployment, call: Call, part: MediaPart, index: int, options: dict[str, object]
) -> tuple[str, Media]:
    """The key of one item and what it is measured to be; `index` counts within its modality.

    The first item seen under a key answers for every later one, also for one without data.

    Raises:
        ApiError: 400 for a part without data whose uuid is missing or not cached, or what `media.load`
            raises.
    """
    bounds = _bounds(deployment, call, options)
    item = None if part.url is None else media.load(part.url, part.modality, bounds)
    if part.uuid is not None:
        identity = part.uuid
    elif item is not None:
        identity = item.content
    else:
        raise bad_request(
            f"multi_modal_data['{part.modality}'][{index}] is empty "
            f"but multi_modal_uuids['{part.modality}'][{index}] is missing."
        )
    key = _key(identity, options)
    caches = call.role != "encode" or deployment.config.encoder_caches
    if not caches and part.uuid is None and not options:
        key = f"renderer0-mm-{deployment.encoder_requests}-{part.modality}-{index}"
        deployment.violate(
            call,
            f"{part.modality} {index} has no uuid: an encoder without caches makes up the key {key!r}, "
            "and so does every other one for an item of its own",
        )
    if item is not None:
        deployment.identify(call, (part.modality, key), Identity(item.content, item.label))
    place = (call.role, part.modality, key, bounds)
    seen = deployment.seen_media.get(place) if caches else None
    if seen is not None:
        return key, seen
    if item is None:
        raise bad_request(f"Cache miss for {part.modality} at index {index} but data is not provided.")
    deployment.seen_media.put(place, item)
    return key, item


def _bounds(deployment: Deployment, call: Call, options: dict[str, object]) -> media.PixelBounds:
    bounds = deployment.pixel_bounds(call.role)
    processor = options.get("mm_processor_kwargs")
    if not isinstance(processor, dict):
        return bounds
    limits = {"min_pixels": bounds.smallest, "max_pixels": bounds.largest}
    for name in limits:
        if name in processor:
            if type(processor[name]) is not int or processor[name] < 1:
                raise invalid_field(f"mm_processor_kwargs.{name}", "Input should be a positive integer")
            limits[name] = processor[name]
    return media.PixelBounds(limits["min_pixels"], limits["max_pixels"])


def _key(identity: str, options: dict[str, object]) -> str:
    if not options:
        return identity
    return hashlib.sha256(identity.encode() + msgspec.json.encode(options, order="sorted")).hexdigest()
