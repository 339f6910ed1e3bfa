"""A request as the model sees it: expanded token ids and the media entries inside them."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, assert_never

import msgspec

from sidecar.simulator import media, serialization
from sidecar.simulator.conversation import ConversationApi, read_turns
from sidecar.simulator.errors import bad_request, internal_error, invalid_field
from sidecar.simulator.fields import optional_string, token_list
from sidecar.simulator.generate import read_generate
from sidecar.simulator.processor import media_options, process
from sidecar.simulator.tokens import (
    FRAME,
    IM_END,
    IM_START,
    MODALITY_OF,
    PLACEHOLDER,
    fewest_tokens,
    text_tokens,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sidecar.simulator.deployment import Call, Deployment
    from sidecar.simulator.generate import FeatureItem
    from sidecar.simulator.media import Grid, MediaPart
    from sidecar.simulator.tokens import Modality

Api = Literal["chat", "completions", "responses", "messages", "generate"]
Source = Literal["media", "tensors", "metadata", "cached"]

_CACHE_SALT_LENGTH = 128
_CACHE_SALT_FORBIDDEN = frozenset("@/\\\0")


@dataclass(frozen=True, slots=True)
class Entry:
    """One media item of a prompt.

    Attributes:
        modality: its modality.
        key: its hash or uuid, under which engines cache and transfer it.
        offset: first token of its span in the expanded ids.
        length: tokens of its span.
        embeds: embeddings it needs, None when the request does not tell.
        grid: its patch grid, None for audio or when the request does not tell.
        label: what a reader would recognise it by.
        content: SHA-256 of the media bytes, "" when unknown.
        source: `media` bytes, processed `tensors`, `metadata` alone, or only a `cached` key.
    """

    modality: Modality
    key: str
    offset: int
    length: int
    embeds: int | None
    grid: Grid | None
    label: str
    content: str
    source: Source


@dataclass(frozen=True, slots=True)
class Prompt:
    """Expanded token ids with their media entries in prompt order."""

    token_ids: list[int]
    entries: tuple[Entry, ...]
    cache_salt: str

    def placeholders(self) -> dict[str, list[dict[str, int]]]:
        """The spans by modality, in prompt order; empty without media."""
        spans: dict[str, list[dict[str, int]]] = {}
        for entry in self.entries:
            spans.setdefault(entry.modality, []).append({"offset": entry.offset, "length": entry.length})
        return spans

    def key(self) -> str:
        """What KV blocks are found by: the tokens, the media in them, and the tenant's salt."""
        digest = hashlib.sha256(array("Q", self.token_ids).tobytes())
        media_keys = [(entry.modality, entry.offset, entry.key) for entry in self.entries]
        digest.update(msgspec.json.encode([media_keys, self.cache_salt]))
        return digest.hexdigest()


def read_prompt(deployment: Deployment, call: Call, api: Api) -> Prompt:
    """The prompt of one request in any API.

    Raises:
        ApiError: what vLLM answers to a body it refuses.
    """
    salt = _cache_salt(call)
    match api:
        case "generate":
            token_ids, entries = _generate_prompt(deployment, call)
        case "completions":
            token_ids, entries = _completions_tokens(deployment, call), ()
        case "chat" | "responses" | "messages":
            token_ids, entries = _conversation_prompt(deployment, call, api)
        case _:
            assert_never(api)
    limit = deployment.config.max_model_len
    if api == "generate" and len(token_ids) >= limit:
        raise bad_request(
            f"The decoder prompt (length {len(token_ids)}) is longer than the maximum model length of "
            f"{limit}."
        )
    _check_length(deployment, len(token_ids))
    return Prompt(token_ids, entries, salt)


def _cache_salt(call: Call) -> str:
    salt = optional_string(call.body, "cache_salt")
    if salt is None:
        return ""
    if not salt:
        raise bad_request("Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt")
    if len(salt) > _CACHE_SALT_LENGTH or not _CACHE_SALT_FORBIDDEN.isdisjoint(salt):
        raise bad_request(
            f"Parameter 'cache_salt' must be at most {_CACHE_SALT_LENGTH} characters and must not contain "
            "'@', '/', '\\', or NUL.",
            "cache_salt",
        )
    return salt


def _check_length(deployment: Deployment, tokens: int) -> None:
    limit = deployment.config.max_model_len
    if tokens >= limit:
        raise bad_request(
            f"This model's maximum context length is {limit} tokens. "
            f"However, your prompt contains at least {tokens} input tokens.",
            "input_tokens",
        )


def _completions_tokens(deployment: Deployment, call: Call) -> list[int]:
    prompt = call.body.get("prompt")
    if isinstance(prompt, str):
        if not prompt:
            raise invalid_field("prompt", "the prompt is empty")
        _check_length(deployment, fewest_tokens(prompt))
        return text_tokens(prompt)
    if isinstance(prompt, list) and any(not isinstance(token, int) for token in prompt):
        raise bad_request("the simulator takes one prompt per request", "prompt")
    return token_list(call.body, "prompt")


def _conversation_prompt(
    deployment: Deployment, call: Call, api: ConversationApi
) -> tuple[list[int], tuple[Entry, ...]]:
    options = media_options(deployment, call)
    tokens: list[int] = []
    parts: list[MediaPart] = []
    for turn in read_turns(api, call.body):
        tokens += (IM_START, *text_tokens(f"{turn.speaker}\n"))
        for part in turn.parts:
            if isinstance(part, str):
                _check_length(deployment, len(tokens) + fewest_tokens(part))
                tokens += text_tokens(part)
            else:
                start, end = FRAME[part.modality]
                tokens += (start, PLACEHOLDER[part.modality], end)
                parts.append(part)
        tokens += (IM_END, *text_tokens("\n"))
    tokens += (IM_START, *text_tokens("assistant\n"))
    limit = deployment.config.max_images
    if limit and sum(part.modality == "image" for part in parts) > limit:
        raise bad_request(f"At most {limit} image(s) may be provided in one prompt.", "image")
    return _expand(deployment, call, tokens, parts, options)


def _generate_prompt(deployment: Deployment, call: Call) -> tuple[list[int], tuple[Entry, ...]]:
    body = read_generate(call.body)
    if body.skipped_parts:
        deployment.violate(call, f"{body.skipped_parts} content_parts have a type that vLLM skips silently")
    if not body.content_parts:
        return body.token_ids, tuple(_feature_entry(deployment, call, item) for item in body.features)
    for modality, count in Counter(part.modality for part in body.content_parts).items():
        targets = body.token_ids.count(PLACEHOLDER[modality])
        if targets < count:
            raise internal_error(f"Failed to apply prompt replacement for mm_items['{modality}'][{targets}]")
        if targets > count:
            deployment.violate(
                call,
                f"token_ids hold {targets} {modality} placeholders for {count} content_parts: expanded ids "
                "with content_parts silently grow the prompt",
            )
    return _expand(deployment, call, body.token_ids, list(body.content_parts), {})


def _feature_entry(deployment: Deployment, call: Call, item: FeatureItem) -> Entry:
    fields = item.fields
    grid = serialization.grid_of(fields, item.modality)
    embeds = media.embeds_of(grid) if grid else serialization.audio_length(fields)
    if item.tensors is not None and not serialization.carries_tensor_of(
        item.tensors, item.modality, item.key
    ):
        deployment.violate(call, f"{item.modality} {item.key!r} comes with the tensors of another item")
    source: Source = (
        "tensors" if item.tensors is not None else "metadata" if item.metadata is not None else "cached"
    )
    known = deployment.identities.get((item.modality, item.key))
    return Entry(
        item.modality,
        item.key,
        item.offset,
        item.length,
        embeds,
        grid,
        known.label if known else "unknown",
        known.content if known else "",
        source,
    )


def _expand(
    deployment: Deployment,
    call: Call,
    tokens: Sequence[int],
    parts: Sequence[MediaPart],
    options: dict[str, object],
) -> tuple[list[int], tuple[Entry, ...]]:
    """Replace one placeholder per part by as many as the item has embeddings."""
    if not parts:
        return list(tokens), ()
    if call.role == "encode":
        deployment.encoder_requests += 1
    queues: dict[Modality, list[MediaPart]] = {modality: [] for modality in PLACEHOLDER}
    for part in parts:
        queues[part.modality].append(part)
    taken: Counter[Modality] = Counter()
    expanded: list[int] = []
    entries: list[Entry] = []
    for token in tokens:
        modality = MODALITY_OF.get(token)
        if modality is None or taken[modality] == len(queues[modality]):
            expanded.append(token)
            continue
        index = taken[modality]
        taken[modality] += 1
        part = queues[modality][index]
        key, item = process(deployment, call, part, index, options)
        offset, length = len(expanded), item.embeds
        if deployment.config.sparse_spans:
            # The span then covers the frame too, whose tokens get no embedding.
            offset, length = offset - 1, length + 2
        entries.append(
            Entry(modality, key, offset, length, item.embeds, item.grid, item.label, item.content, "media")
        )
        expanded += [token] * item.embeds
    return expanded, tuple(entries)
