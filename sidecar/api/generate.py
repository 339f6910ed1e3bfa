"""`/inference/v1/generate`: tokens in, tokens out; the client has tokenized the prompt itself."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from sidecar.api.document import DocumentBody, OpenAiErrors
from sidecar.api.interface import OwnPrompt
from sidecar.api.openai_shape import (
    name_member,
    plain_output,
    read_body,
    typed_member,
)
from sidecar.errors import BadRequest
from sidecar.jsontext import MalformedJson, Raw, RawObject, is_null, opener, read_string, to_raw
from sidecar.multimodal.data_uri import is_data_uri
from sidecar.multimodal.entries import ITEM_HASH
from sidecar.multimodal.spans import InvalidSpans, Span, check_spans

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sidecar.api.interface import JsonTree, MediaPart

_MODALITY_OF_PART = {"image_url": "image", "audio_url": "audio", "video_url": "video"}
_FEATURE_MODALITIES = ("audio", "image", "video", "vision_chunk")
_REMOTE_SCHEMES = frozenset({"http", "https"})
_SHOWN = 32
"""Characters of a client's value that an error message repeats."""
_FALSE = Raw(b"false")
_ONE = Raw(b"1")


class _Placeholder(msgspec.Struct):
    offset: int
    length: int


_object_decoder = msgspec.json.Decoder(RawObject)
_objects_decoder = msgspec.json.Decoder(list[RawObject])
_token_ids_decoder = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0)]])
_hashes_decoder = msgspec.json.Decoder(dict[str, list[str]])
_placeholders_decoder = msgspec.json.Decoder(dict[str, list[_Placeholder]])
_items_decoder = msgspec.json.Decoder(dict[str, list[Raw]])


class ContentPart:
    """One flat `content_parts` item: `{"type", "url"}`.

    An engine takes a `uuid` verbatim as the key of the encoding, so the client's own never gets there: see
    `GenerateBody`.
    """

    inline_format = None

    def __init__(self, members: RawObject, location: str) -> None:
        kind = name_member(members.get("type"), f"{location}.type")
        if kind not in _MODALITY_OF_PART:
            raise BadRequest(
                f"{location}.type is {kind[:_SHOWN]!a}, which engines skip; "
                f"send one of {', '.join(_MODALITY_OF_PART)}",
                param=f"{location}.type",
            )
        self.modality = _MODALITY_OF_PART[kind]
        self.location = location
        self._members = members
        members.pop("uuid", None)
        self._check_url()

    def _check_url(self) -> None:
        url = self._members.get("url")
        if url is None or is_null(url) or len(memoryview(url)) <= len('""'):
            raise self._fault("url is missing; send the item itself, as a data: or http(s) URL")
        if is_data_uri(url):
            return
        try:
            scheme = read_string(url).partition(":")[0].lower()
        except MalformedJson:
            raise self._fault("url must be a string") from None
        if scheme not in _REMOTE_SCHEMES:
            raise self._fault("url must be a data:, http: or https: URL")

    def _fault(self, text: str) -> BadRequest:
        return BadRequest(f"{self.location}: {text}", param=f"{self.location}.url", stage="media")

    @property
    def url(self) -> Raw:
        """JSON text of the URL."""
        return self._members["url"]

    def set_url(self, url: Raw) -> None:
        """Replace the URL in place; a name given to the old one goes."""
        self._members["url"] = url
        self._members.pop("uuid", None)

    def set_uuid(self, uuid: str) -> None:
        """Name the item on every later leg."""
        self._members["uuid"] = to_raw(uuid)

    def data_url(self) -> Raw:
        """The item as one URL string."""
        return self.url

    def tree(self) -> JsonTree:
        """The item as it stands in the body now."""
        return self._members


class GenerateBody(DocumentBody):
    """A generate request, its media checked as an engine would check them, and stricter.

    Features travel as they are. Content parts are named on prefill and decode by a SHA-256 over modality and
    data URI: one name never stands for two items, which an engine with an encoder cache does not survive.
    """

    unknown_part_types = ()
    sets_processor_kwargs = False
    own_prompt: OwnPrompt

    def __init__(self, document: RawObject) -> None:
        super().__init__(document)
        self._sampling_params = typed_member(
            _object_decoder, document.get("sampling_params"), "sampling_params"
        )
        token_ids = typed_member(_token_ids_decoder, document.get("token_ids"), "token_ids")
        if not token_ids:
            raise BadRequest("token_ids is empty; send at least one token id", param="token_ids")
        self.parts = _read_content_parts(document)
        spans: Mapping[str, Sequence[Span]] = {}
        if not is_null(document.get("features")):
            if self.parts:
                raise BadRequest(
                    "features and content_parts exclude each other; send one of them", param="content_parts"
                )
            spans = _read_features(document["features"], len(token_ids))
        if self.parts:
            self.own_prompt = OwnPrompt(token_ids, {}, "content_parts")
        else:
            self.own_prompt = OwnPrompt(token_ids, spans, "kwargs_data" if spans else "tokens")

    def render(self) -> JsonTree:
        """Not part of this API: raises RuntimeError."""
        raise RuntimeError("the client has tokenized the prompt itself")

    def encode(self, part: MediaPart) -> JsonTree:  # noqa: ARG002 - prefill encodes what it is sent
        """Not part of this API: raises RuntimeError."""
        raise RuntimeError("media of a generate request are encoded by prefill")

    def prefill(self, token_ids: Raw | None = None) -> JsonTree:
        """Body of the prefill call: the client's, for one token."""
        body = self.decode(token_ids)
        body.pop("stream_options", None)
        body["stream"] = _FALSE
        body["sampling_params"] = {**plain_output(self._sampling_params), "max_tokens": _ONE}
        return body

    def decode(self, token_ids: Raw | None = None) -> JsonTree:  # noqa: ARG002 - the client's own ids stay
        """Body of the decode request."""
        body: JsonTree = dict(self._document)
        if self.parts:
            _name(self.parts)
            body["content_parts"] = [part.tree() for part in self.parts]
        return body


def _name(parts: Sequence[ContentPart]) -> None:
    """Give every part that holds its data a name of our own."""
    names: dict[tuple[str, int], str] = {}
    for part in parts:
        if "uuid" in part.tree() or not is_data_uri(part.url):
            continue
        # Equal downloads share one text, which is then read once.
        identity = (part.modality, id(part.url))
        if identity not in names:
            digest = hashlib.sha256(part.modality.encode())
            digest.update(memoryview(part.url))
            names[identity] = digest.hexdigest()
        part.set_uuid(names[identity])


def _read_content_parts(document: RawObject) -> list[ContentPart]:
    if is_null(document.get("content_parts")):
        return []
    items = typed_member(_objects_decoder, document["content_parts"], "content_parts")
    return [ContentPart(item, f"content_parts[{index}]") for index, item in enumerate(items)]


def _read_features(value: Raw, prompt_length: int) -> dict[str, list[Span]]:
    """The placeholder spans of checked features; modalities without items are left out."""
    members = typed_member(_object_decoder, value, "features")
    hashes = typed_member(_hashes_decoder, members.get("mm_hashes"), "features.mm_hashes")
    placeholders = typed_member(
        _placeholders_decoder, members.get("mm_placeholders"), "features.mm_placeholders"
    )
    tensors = _read_items(members, "kwargs_data")
    metadata = _read_items(members, "mm_metadata")
    for name, items in (
        ("mm_placeholders", placeholders),
        ("kwargs_data", tensors),
        ("mm_metadata", metadata),
    ):
        _check_parallel(hashes, items, f"features.{name}")
    spans = {
        modality: [Span(item.offset, item.length) for item in items]
        for modality, items in placeholders.items()
        if items
    }
    _check_hashes(hashes, spans)
    _check_tensors(tensors, metadata)
    try:
        check_spans((span for items in spans.values() for span in items), prompt_length)
    except InvalidSpans as error:
        raise _refused("features.mm_placeholders", str(error)) from None
    return spans


def _read_items(features: RawObject, field: str) -> dict[str, list[Raw]] | None:
    if is_null(features.get(field)):
        return None
    location = f"features.{field}"
    by_modality = typed_member(_items_decoder, features[field], location)
    for modality, items in by_modality.items():
        for index, item in enumerate(items):
            if not is_null(item) and opener(item) != b'"':
                raise _refused(_place(location, modality, index), "must be a string or null")
    return by_modality


def _check_parallel(
    hashes: Mapping[str, Sequence[str]], items: Mapping[str, Sequence[Any]] | None, location: str
) -> None:
    """Raise BadRequest unless a map has the modalities and lengths of `mm_hashes`; engines refuse others."""
    if items is None:
        return
    if items.keys() != hashes.keys():
        raise _refused(location, "must have the same modalities as features.mm_hashes")
    for modality, names in hashes.items():
        if len(items[modality]) != len(names):
            raise _refused(
                f"{location}[{modality[:_SHOWN]!a}]",
                f"has {len(items[modality])} items, features.mm_hashes has {len(names)}",
            )


def _check_hashes(hashes: Mapping[str, Sequence[str]], spans: Mapping[str, Sequence[Span]]) -> None:
    location = "features.mm_hashes"
    known: dict[str, tuple[str, int]] = {}
    for modality, names in hashes.items():
        if modality not in _FEATURE_MODALITIES:
            raise _refused(
                location,
                f"modality {modality[:_SHOWN]!a} is not supported; "
                f"supported here: {', '.join(_FEATURE_MODALITIES)}",
            )
        for index, name in enumerate(names):
            place = _place(location, modality, index)
            if not ITEM_HASH.fullmatch(name):
                raise _refused(
                    place, "must be a plain name: up to 256 letters, digits, dots, dashes, underscores"
                )
            # An engine looks encodings up by the hash alone, and each fits spans of one length only.
            item = (modality, spans[modality][index].length)
            if known.setdefault(name, item) != item:
                raise _refused(place, "is the hash of another item, of another modality or length")


def _check_tensors(
    tensors: Mapping[str, Sequence[Raw]] | None, metadata: Mapping[str, Sequence[Raw]] | None
) -> None:
    """Raise BadRequest for an item with metadata alone: no encode call runs that could complete it.

    An item with neither refers to the cache of the worker, by its hash.
    """
    for modality, items in (metadata or {}).items():
        for index, item in enumerate(items):
            if not is_null(item) and (tensors is None or is_null(tensors[modality][index])):
                raise _refused(
                    _place("features.kwargs_data", modality, index),
                    "is missing next to mm_metadata; send the tensors of the item, or neither",
                )


def _place(location: str, modality: str, index: int) -> str:
    return f"{location}[{modality[:_SHOWN]!a}][{index}]"


def _refused(location: str, reason: str) -> BadRequest:
    return BadRequest(f"{location}: {reason}", param=location)


class GenerateApi(OpenAiErrors):
    """The generate API."""

    name = "generate"
    path = "/inference/v1/generate"
    render_answers_list = False

    def parse(self, body: bytes) -> GenerateBody:
        """Read a generate body; raises BadRequest."""
        return GenerateBody(read_body(body))
