"""render: tokenizes the request and places its media entries."""

from __future__ import annotations

import logging
from collections import Counter
from http import HTTPStatus
from typing import TYPE_CHECKING

import msgspec

from sidecar.errors import BadRequest, RenderUnavailable, SidecarError, StepFailed, StepName
from sidecar.jsontext import (
    NULL,
    MalformedJson,
    Raw,
    check_utf8,
    is_null,
    opener,
    read_object,
    read_value,
    segments,
)
from sidecar.multimodal.entries import ITEM_HASH, Entry, entries_of, media_summary
from sidecar.multimodal.features import first_obstacle
from sidecar.multimodal.forms import mixed_entry
from sidecar.multimodal.spans import InvalidSpans, Span, check_spans
from sidecar.pipeline.calls import post, refusal
from sidecar.pipeline.state import Prompt

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sidecar.config import RenderParams
    from sidecar.observability.record import AccessRecord
    from sidecar.pipeline.state import RequestState
    from sidecar.pipeline.tensor_memory import TensorMemory
    from sidecar.upstream.client import Answer, Upstream

logger = logging.getLogger(__name__)

_KNOWN_MODALITIES = frozenset({"image", "audio", "video"})


class _Placeholder(msgspec.Struct):
    offset: int
    length: int


class _Features(msgspec.Struct):
    mm_hashes: dict[str, list[str]] = {}
    mm_placeholders: dict[str, list[_Placeholder]] = {}
    kwargs_data: dict[str, list[Raw] | None] | None = None
    mm_metadata: dict[str, list[Raw] | None] | None = None


class _Rendered(msgspec.Struct):
    token_ids: Raw
    features: _Features | None = None
    sampling_params: Raw = NULL


_rendered_decoder = msgspec.json.Decoder(_Rendered)
_rendered_list_decoder = msgspec.json.Decoder(list[_Rendered])
_token_ids_decoder = msgspec.json.Decoder(list[int])


class RenderStep:
    """Calls the render service and pairs its features with the request's media parts.

    Whether tensors were omitted is read off the answer, not off the configuration: a renderer that does not
    know `mm_payload` simply puts the request on the features path.
    """

    name: StepName = "render"

    def __init__(
        self, params: RenderParams, upstream: Upstream, *, tokens_in: bool, memory: TensorMemory
    ) -> None:
        """Create the step.

        Args:
            params: its configuration.
            upstream: the render service.
            tokens_in: whether encode or prefill use the generate format, where media without tensors have to
                travel as content parts.
            memory: what `mm_payload: auto` has learnt of models.
        """
        self._params = params
        self._upstream = upstream
        self._tokens_in = tokens_in
        self._memory = memory

    async def run(self, state: RequestState) -> None:
        """Fill in the prompt and the entries.

        Raises:
            StepRejected: the renderer refused the request.
            RenderUnavailable: the renderer has no such endpoint.
            StepFailed: it failed, or its answer is inconsistent.
            BadRequest: over `max_total_tokens` or `max_total_placeholder_tokens`, or a part of unknown type.
        """
        if state.body.own_prompt is not None:
            spans = [span for placed in state.body.own_prompt.spans.values() for span in placed]
            self._check_limits(len(state.body.own_prompt.token_ids), sum(span.length for span in spans))
            return
        entries, prompt = await self._render(state, omit=self._omits(state))
        obstacle = first_obstacle(entries, prompt.token_ids) if prompt.tensors_omitted else None
        if obstacle is not None and self._tokens_in and self._params.mm_payload == "auto":
            self._remember(state, obstacle.entry)
            logger.info("rendering again with tensors", extra={"request_id": state.inbound.request_id})
            state.inbound.record.fallback_reason = f"{obstacle}; rendered with tensors"
            entries, prompt = await self._render(state, omit=False)
        state.entries = entries
        state.prompt = prompt
        self._note(state.inbound.record, entries, prompt)
        self._check_limits(len(prompt.token_ids), _placeholder_tokens(entries))
        if not state.body.sets_processor_kwargs:
            _stamp(entries)

    def _omits(self, state: RequestState) -> bool:
        # Processor kwargs change the hashes, and content parts would be processed without them.
        if self._params.mm_payload == "tensors" or state.body.sets_processor_kwargs:
            return False
        model = state.body.model or ""
        return self._params.mm_payload == "none" or not any(
            self._memory.knows(model, part.modality) for part in state.body.parts
        )

    def _remember(self, state: RequestState, entry: Entry) -> None:
        # A modality of the renderer's own stands for all the client's.
        modalities = {part.modality for part in state.body.parts} if entry.part is None else {entry.modality}
        for modality in modalities:
            self._memory.remember(state.body.model or "", modality)

    async def _render(self, state: RequestState, *, omit: bool) -> tuple[list[Entry], Prompt]:
        record = state.inbound.record
        record.mm_payload = "none" if omit else "tensors"
        answer = await self._call(state, omit=omit)
        record.render_bytes = (record.render_bytes or 0) + len(answer.body)
        rendered = _read(answer, as_list=state.inbound.api.render_answers_list)
        token_ids = _token_ids(rendered.token_ids)
        entries = _pair(rendered.features, state)
        _check_placement(entries, len(token_ids))
        omitted = any(entry.kwargs_data is None for entry in entries)
        if omitted:
            sent = {} if rendered.features is None else rendered.features.kwargs_data or {}
            partly = any(items is not None for items in sent.values())
            _check_omission(state, entries, token_ids, asked=omit, partly=partly)
        return entries, Prompt(token_ids, rendered.token_ids, _sampling_params(rendered), omitted)

    def _note(self, record: AccessRecord, entries: Sequence[Entry], prompt: Prompt) -> None:
        record.prompt_tokens = len(prompt.token_ids)
        record.placeholder_tokens = _placeholder_tokens(entries)
        record.media = media_summary(Counter(entry.modality for entry in entries))
        record.render_form = ("omitted" if prompt.tensors_omitted else "tensors") if entries else "text"

    async def _call(self, state: RequestState, *, omit: bool) -> Answer:
        body = state.body.render()
        if omit:
            body |= {"mm_payload": "none", "return_mm_kwargs": False}
        answer = await post(
            state.inbound,
            self._upstream,
            step=self.name,
            path=f"{state.inbound.api.path}/render",
            headers=state.legs.render(),
            body=segments(body),
        )
        if answer.status != HTTPStatus.OK:
            raise _refusal(answer)
        return answer

    def _check_limits(self, tokens: int, placeholder_tokens: int) -> None:
        for count, limit, what, key in (
            (tokens, self._params.max_total_tokens, "prompt", "max_total_tokens"),
            (
                placeholder_tokens,
                self._params.max_total_placeholder_tokens,
                "media",
                "max_total_placeholder_tokens",
            ),
        ):
            if limit and count > limit:
                raise BadRequest(
                    f"the {what} takes {count} tokens, the limit is {limit} ({key}); shorten the request",
                    stage="render",
                )


def _placeholder_tokens(entries: Sequence[Entry]) -> int:
    return sum(entry.span.length for entry in entries)


def _refusal(answer: Answer) -> SidecarError:
    """Tell a wrong deployment, which is not the client's fault, from a refused request."""
    error = _error_members(answer)
    detail = f"HTTP {answer.status}: {answer.excerpt()}"
    if answer.status == HTTPStatus.FORBIDDEN and error.get("type") == "PermissionDeniedError":
        return RenderUnavailable(
            "the render service refuses render calls: start vllm serve with --enable-scale-out, or use "
            "vllm launch render",
            detail=detail,
            stage="render",
        )
    if answer.status == HTTPStatus.NOT_FOUND and not error:
        return RenderUnavailable(
            "the render service has no render endpoint: point the address of the render step at vllm launch "
            "render, or at vllm serve started with --enable-scale-out",
            detail=detail,
            stage="render",
        )
    return refusal("render", answer)


def _error_members(answer: Answer) -> Mapping[str, object]:
    try:
        error = read_value(read_object(answer.body).get("error", NULL))
    except MalformedJson:
        return {}
    return error if isinstance(error, dict) else {}


def _read(answer: Answer, *, as_list: bool) -> _Rendered:
    try:
        check_utf8(answer.body)
        if not as_list:
            return _rendered_decoder.decode(answer.body)
        prompts = _rendered_list_decoder.decode(answer.body)
    except (MalformedJson, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _failed(f"the answer is not a render response ({error})") from None
    if len(prompts) != 1:
        raise _failed(f"one prompt was sent, {len(prompts)} came back")
    return prompts[0]


def _token_ids(text: Raw) -> list[int]:
    try:
        token_ids = _token_ids_decoder.decode(text)
    except msgspec.DecodeError as error:
        raise _failed(f"token_ids is not a list of token ids ({error})") from None
    if not token_ids or min(token_ids) < 0:
        raise _failed("token_ids is empty or holds a negative id")
    return token_ids


def _sampling_params(rendered: _Rendered) -> Mapping[str, Raw]:
    if is_null(rendered.sampling_params):
        return {}
    try:
        return read_object(rendered.sampling_params)
    except MalformedJson:
        raise _failed("sampling_params is not an object") from None


def _pair(features: _Features | None, state: RequestState) -> list[Entry]:
    """Entries in request order: parts and features pair by position within a modality.

    Entries of a modality no part has (a renderer may merge modalities) come last and have no part.
    """
    placed = _placed_entries(features or _Features())
    entries = entries_of(state.body.parts)
    sent = Counter(entry.modality for entry in entries)
    foreign = [e for modality, items in placed.items() if modality not in _KNOWN_MODALITIES for e in items]
    unpaired = sum(count for modality, count in sent.items() if modality not in placed)
    known = placed.keys() & _KNOWN_MODALITIES
    if unpaired != len(foreign) or any(len(placed[modality]) != sent[modality] for modality in known):
        rendered = {modality: len(items) for modality, items in placed.items()}
        raise _failed(f"the request has media {dict(sent)}, the renderer placed {rendered}")
    paired = []
    for entry in entries:
        if entry.modality in placed:
            candidate = placed[entry.modality][entry.index]
            candidate.part = entry.part
            paired.append(candidate)
    return paired + foreign


def _placed_entries(features: _Features) -> dict[str, list[Entry]]:
    placed: dict[str, list[Entry]] = {}
    modalities = [name for name, items in features.mm_hashes.items() if items]
    if sorted(modalities) != sorted(name for name, items in features.mm_placeholders.items() if items):
        raise _failed("mm_hashes and mm_placeholders name different modalities")
    for modality in modalities:
        hashes = features.mm_hashes[modality]
        placeholders = features.mm_placeholders[modality]
        tensors = _items(features.kwargs_data, "kwargs_data", modality, len(hashes))
        metadata = _items(features.mm_metadata, "mm_metadata", modality, len(hashes))
        if len(hashes) != len(placeholders):
            raise _failed(f"{modality}: {len(hashes)} hashes, {len(placeholders)} placeholders")
        placed[modality] = [
            Entry(
                modality,
                index,
                None,
                hash=_checked_hash(hashes[index], modality, index),
                span=Span(placeholders[index].offset, placeholders[index].length),
                kwargs_data=tensors[index],
                metadata=metadata[index],
            )
            for index in range(len(hashes))
        ]
    return placed


def _items(
    field: Mapping[str, list[Raw] | None] | None, name: str, modality: str, count: int
) -> Sequence[Raw | None]:
    items = (field or {}).get(modality)
    if items is None:
        # A renderer leaves out a modality of which no entry has the field.
        return [None] * count
    if len(items) != count:
        raise _failed(f"{modality}: {count} hashes, {len(items)} items in {name}")
    result = [None if is_null(item) else item for item in items]
    if any(item is not None and opener(item) != b'"' for item in result):
        raise _failed(f"{modality}: an item of {name} is neither null nor a string")
    return result


def _checked_hash(value: str, modality: str, index: int) -> str:
    if not ITEM_HASH.fullmatch(value):
        raise _failed(f"the hash of {modality}[{index}] is not a plain name")
    return value


def _check_placement(entries: Sequence[Entry], total: int) -> None:
    try:
        check_spans((entry.span for entry in entries), total)
    except InvalidSpans as error:
        raise _failed(str(error)) from None
    lengths: dict[tuple[str, str], int] = {}
    for entry in entries:
        # Equal items have one encoding, and it fits one length only.
        if lengths.setdefault((entry.modality, entry.hash), entry.span.length) != entry.span.length:
            raise _failed(f"{entry.label} has the hash of another item, but a span of another length")


def _check_omission(
    state: RequestState, entries: Sequence[Entry], token_ids: Sequence[int], *, asked: bool, partly: bool
) -> None:
    """Raise StepFailed when the media cannot do without the missing tensors.

    Args:
        state: the request.
        entries: its entries, of which at least one has no tensors.
        token_ids: expanded token ids.
        asked: whether the renderer was asked to omit them.
        partly: whether it sent lists with null items: those come from its own cache.
    """
    if state.body.sets_processor_kwargs:
        raise _failed("no kwargs_data for a request that sets mm_processor_kwargs or media_io_kwargs")
    if not partly:
        if not asked:
            raise _failed("no kwargs_data although mm_payload: tensors was asked for")
        return
    mixed = mixed_entry(entries, token_ids)
    if mixed is not None:
        raise _failed(f"kwargs_data has null items, and the span of {mixed.label} mixes tokens")


def _stamp(entries: Sequence[Entry]) -> None:
    """Name every part by its hash on all later legs: encode, prefill and decode then agree on the key."""
    for entry in entries:
        if entry.part is not None:
            entry.part.set_uuid(entry.hash)


def _failed(reason: str) -> StepFailed:
    return StepFailed("render", f"the renderer's answer is inconsistent: {reason}")
