"""encode: one sub-request per distinct media item, in parallel."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from sidecar.errors import EncodeMismatch, StepFailed, StepName, StepTimeout
from sidecar.jsontext import MalformedJson, is_null, read_object, read_value, segments, to_raw
from sidecar.multimodal.consistency import GridMismatch, check_grids
from sidecar.multimodal.entries import Descriptor, entries_of
from sidecar.multimodal.features import content_parts, single_entry_features
from sidecar.pipeline.calls import answer_object, post
from sidecar.pipeline.fanout import gather_all
from sidecar.pipeline.generate import GENERATE_PATH, encode_body

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sidecar.api.interface import JsonTree
    from sidecar.config import EncodeParams
    from sidecar.jsontext import Raw, Segments
    from sidecar.multimodal.entries import Entry
    from sidecar.multimodal.forms import EncodeForm
    from sidecar.pipeline.state import Prompt, RequestState
    from sidecar.upstream.client import Upstream

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Encoded:
    """What one encode call answered."""

    descriptors: list[Descriptor]
    headers: Mapping[str, str]
    failed: bool = False


class EncodeStep:
    """Sends every distinct item to an encoder and collects the descriptors.

    Equal items are encoded once: two encoders would otherwise answer with descriptors that contradict each
    other.
    """

    name: StepName = "encode"

    def __init__(self, params: EncodeParams, gateway: Upstream) -> None:
        self._params = params
        self._gateway = gateway

    async def run(self, state: RequestState) -> None:
        """Give every entry its descriptor.

        Raises:
            MixedSpan: an item cannot travel without its tensors; nothing has been sent.
            EncodeMismatch: an encoding does not fit the prompt.
            StepRejected, StepFailed: an encoder refused or failed.
        """
        record = state.inbound.record
        record.encode_form = form = self._form(state)
        record.encode_requests = 0
        if form == "skipped":
            return
        groups: dict[tuple[str, str], list[Entry]] = {}
        bodies: dict[tuple[str, str], JsonTree] = {}
        # All bodies exist before the first call leaves: one item that cannot be sent fails the whole request.
        # Equal items share a call, but each has a span of its own to check.
        for entry in _openai_entries(state) if form == "openai" else state.entries:
            identity = _identity(entry)
            groups.setdefault(identity, []).append(entry)
            bodies.setdefault(identity, _body(state, form, entry))
        record.encode_requests = len(bodies)
        deadline = asyncio.get_running_loop().time() + self._params.timeout
        encoded = await gather_all(
            [partial(self._encode, state, form, segments(body), deadline) for body in bodies.values()],
            limit=self._params.max_parallel,
        )
        state.legs.carry(encoded[0].headers)
        for encoding, group in zip(encoded, groups.values(), strict=True):
            for entry in group:
                entry.left_to_prefill = encoding.failed
            _take(state, encoding.descriptors, group)
        _check(state)

    def _form(self, state: RequestState) -> EncodeForm:
        if not state.entries or state.body.own_prompt is not None:
            return "skipped"
        if self._params.use_openai_format or state.prompt is None:
            return "openai"
        return "content_parts" if state.prompt.tensors_omitted else "features"

    async def _encode(
        self, state: RequestState, form: EncodeForm, body: Segments, deadline: float
    ) -> _Encoded:
        try:
            return await self._call_until(deadline, state, form, body)
        except (StepFailed, StepTimeout) as error:
            if self._params.on_failure == "fail":
                raise
            logger.warning(
                "encode failed, the item is left to prefill",
                extra={"request_id": state.inbound.request_id, "error": error.code, "detail": error.detail},
            )
            return _Encoded([], {}, failed=True)

    async def _call_until(
        self, deadline: float, state: RequestState, form: EncodeForm, body: Segments
    ) -> _Encoded:
        """One call, until a point in loop time: a late encoder has failed like any other."""
        try:
            async with asyncio.timeout_at(deadline) as scope:
                return await self._call(state, form, body)
        except TimeoutError:
            if not scope.expired():
                raise
            raise StepTimeout(
                self.name, f"encode took longer than {self._params.timeout:g} s (timeout of the encode step)"
            ) from None

    async def _call(self, state: RequestState, form: EncodeForm, body: Segments) -> _Encoded:
        answer = await post(
            state.inbound,
            self._gateway,
            step=self.name,
            path=state.inbound.api.path if form == "openai" else GENERATE_PATH,
            headers=state.legs.phase(self.name),
            body=body,
        )
        # Read here and not after all calls: the first refusal ends the others.
        members = answer_object(self.name, answer)
        return _Encoded(_descriptors(members.get("ec_transfer_params")), answer.headers)


def _identity(entry: Entry) -> tuple[str, str]:
    """Equal for equal items: by render hash, without a render step by equal URLs."""
    if entry.hash or entry.part is None:
        return entry.modality, entry.hash
    return entry.modality, hashlib.sha256(memoryview(entry.part.url)).hexdigest()


def _openai_entries(state: RequestState) -> list[Entry]:
    """One entry per part of the client's body, also for parts whose modality the renderer names otherwise."""
    placed = {id(entry.part): entry for entry in state.entries}
    return [placed.get(id(entry.part), entry) for entry in entries_of(state.body.parts)]


def _body(state: RequestState, form: EncodeForm, entry: Entry) -> JsonTree:
    if entry.part is not None and (form == "openai" or state.prompt is None):
        return state.body.encode(entry.part)
    if state.prompt is None:
        raise RuntimeError("an entry without a part comes from a render answer")
    if form == "features":
        token_ids = [state.prompt.token_ids[0], *_span_ids(state.prompt, entry)]
        return encode_body(state, token_ids, {"features": single_entry_features(entry)})
    parts = content_parts([entry], state.prompt.token_ids)
    placeholder = state.prompt.token_ids[entry.span.offset]
    return encode_body(state, [state.prompt.token_ids[0], placeholder], {"content_parts": parts})


def _span_ids(prompt: Prompt, entry: Entry) -> list[int]:
    # Copied from the prompt, never one token repeated: spans of some models mix tokens.
    return prompt.token_ids[entry.span.offset : entry.span.end]


def _take(state: RequestState, descriptors: Sequence[Descriptor], group: list[Entry]) -> None:
    """Attach an item's descriptor to the entries of its group and keep all that came with it for prefill."""
    state.descriptors.extend(descriptors)
    own = next((d for d in descriptors if d.key == group[0].hash), None)
    if own is None and len(descriptors) == 1:
        # An encoder that hashed the item itself: no coverage, but its grid can still be compared.
        own = descriptors[0]
    if own is None:
        logger.info(
            "encode answered without a descriptor",
            extra={"request_id": state.inbound.request_id, "entry": group[0].label},
        )
    for entry in group:
        entry.descriptor = own


def _descriptors(params: Raw | None) -> list[Descriptor]:
    """The non-empty objects of an `ec_transfer_params` map; anything else is no descriptor."""
    if params is None or is_null(params):
        return []
    try:
        by_key = read_object(params)
    except MalformedJson:
        return []
    return [
        descriptor for key, value in by_key.items() if (descriptor := _descriptor(key, value)) is not None
    ]


def _descriptor(key: str, value: Raw) -> Descriptor | None:
    try:
        members: dict[str, Any] = {name: read_value(item) for name, item in read_object(value).items()}
    except MalformedJson:
        return None
    if not members:
        return None
    metadata = members.get("metadata")
    host = members.get("peer_host")
    has_peer = isinstance(host, str) and bool(host) and type(members.get("peer_port")) is int
    return Descriptor(key, to_raw(value), metadata if isinstance(metadata, dict) else {}, has_peer)


def _check(state: RequestState) -> None:
    try:
        check_grids(state.entries, tensors_omitted=state.prompt is not None and state.prompt.tensors_omitted)
    except GridMismatch as mismatch:
        raise EncodeMismatch(
            f"the encoder output does not fit the prompt: {mismatch}; start render and encode with the same "
            "processor settings",
            stage="encode",
        ) from None
