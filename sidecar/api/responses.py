"""`/v1/responses`: the OpenAI responses API as vLLM serves it, without the state a server keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sidecar.api.document import DocumentBody, OpenAiErrors
from sidecar.api.openai_shape import (
    cap_to_one_token,
    check_count,
    item_context,
    other_media_member,
    read_body,
)
from sidecar.errors import BadRequest
from sidecar.jsontext import (
    MalformedJson,
    Raw,
    RawObject,
    is_null,
    opener,
    read_array,
    read_name,
    read_object,
    to_raw,
)

if TYPE_CHECKING:
    from sidecar.api.interface import JsonTree, MediaPart

_PART_FIELDS = ("content", "output")
"""Where an input item holds parts: a message its content, a function_call_output its output."""
_TEXT_PART_TYPES = frozenset(
    {"input_text", "output_text", "reasoning_text", "refusal", "summary_text", "text"}
)
_FOREIGN_MEDIA_TYPES = frozenset({"audio_url", "image_url", "input_audio", "video_url"})
"""Part types of the chat API: engines load them here, too, when an item passes for a reference."""
_STATE_FIELDS = ("previous_response_id", "conversation")
_ASSISTANT = Raw(b'"assistant"')
_UNSET = (b"null", b"false")


class ImagePart:
    """One `input_image` part: its URL stands in `image_url`, as a bare string."""

    modality = "image"
    inline_format = None

    def __init__(self, members: RawObject, location: str) -> None:
        self.location = location
        self._members = members
        other = other_media_member(members, "image_url")
        if other:
            raise self._fault(f"an input_image must not have {other}")
        url = members.get("image_url")
        if url is None or is_null(url) or len(text := memoryview(url)) <= len('""'):
            raise self._fault("input_image has no URL")
        if bytes(text[:1]) != b'"':
            raise self._fault("the image_url of input_image must be a string")

    def _fault(self, text: str) -> BadRequest:
        return BadRequest(f"{self.location}: {text}", param=self.location, stage="media")

    @property
    def url(self) -> Raw:
        """JSON text of the URL."""
        return self._members["image_url"]

    def set_url(self, url: Raw) -> None:
        """Replace the URL in place."""
        self._members["image_url"] = url

    def set_uuid(self, uuid: str) -> None:
        """Name the item by its render hash on every later leg."""
        self._members["uuid"] = to_raw(uuid)

    def data_url(self) -> Raw:
        """The item as one URL string."""
        return self.url

    def tree(self) -> JsonTree:
        """The part as it stands in the body now."""
        return self._members


class ResponsesBody(DocumentBody):
    """A responses request: its members, with the parts of its input items opened up in their places."""

    def __init__(self, document: RawObject) -> None:
        _refuse_state(document)
        super().__init__(document)
        self.parts: list[ImagePart] = []
        self.unknown_part_types: list[str] = []
        self._input = self._read_input()

    def _read_input(self) -> Raw | list[JsonTree]:
        value = self._document.get("input")
        if value is None or is_null(value):
            raise BadRequest("input is missing; send a string or an array of items", param="input")
        match opener(value):
            case b'"':
                return value
            case b"[":
                return [
                    self._read_item(item, f"input[{index}]")
                    for index, item in enumerate(_array(value, "input"))
                ]
            case _:
                raise BadRequest("input must be a string or an array of items", param="input")

    def _read_item(self, value: Raw, location: str) -> JsonTree:
        item: JsonTree = dict(_object(value, location))
        images = len(self.parts)
        for field in _PART_FIELDS:
            parts = item.get(field)
            if parts is None or is_null(parts) or opener(parts) == b'"':
                continue
            place = f"{location}.{field}"
            if opener(parts) != b"[":
                # An object here could hold media at a place where nothing guards their URLs.
                raise BadRequest(f"{place} must be a string or an array of parts", param=place)
            item[field] = [
                self._read_part(part, f"{place}[{index}]") for index, part in enumerate(_array(parts, place))
            ]
        if len(self.parts) > images and item.get("role") == _ASSISTANT:
            raise BadRequest(
                f"{location} is a turn of the assistant: engines drop its images; send them in a user turn",
                param=location,
                stage="media",
            )
        return item

    def _read_part(self, value: Raw, location: str) -> Raw | JsonTree:
        if opener(value) == b'"':
            return value
        members = _object(value, location)
        # Renderers take it for the hash, workers for a file name; with one, even a text part can be media.
        members.pop("uuid", None)
        kind = _part_type(members, location)
        if not is_null(members.get("file_id")):
            raise BadRequest(
                f"{location}.file_id is not supported: the phases have no uploaded files; send the image in "
                "image_url",
                param=f"{location}.file_id",
                stage="media",
            )
        if kind == "input_image":
            part = ImagePart(members, location)
            self.parts.append(part)
            return part.tree()
        if kind in _FOREIGN_MEDIA_TYPES:
            raise BadRequest(
                f"{location}: a part of type {kind} does not belong in this API; send images as input_image",
                param=location,
                stage="media",
            )
        if kind not in _TEXT_PART_TYPES:
            self.unknown_part_types.append(kind)
        return members

    def encode(self, part: MediaPart) -> JsonTree:
        """Body of an encode call in the OpenAI format."""
        return {
            **item_context(self._document),
            "input": [{"role": "user", "content": [part.tree()]}],
            "max_output_tokens": 1,
            "stream": False,
            "store": False,
        }

    def prefill(self, token_ids: Raw | None = None) -> JsonTree:  # noqa: ARG002 - no place for token ids
        """Body of a prefill call in the OpenAI format."""
        capped: JsonTree = dict(cap_to_one_token(self._document, limit="max_output_tokens"))
        # `include` only asks for more in the answer: log probabilities, for one.
        capped.pop("include", None)
        if "text" in capped:
            capped["text"] = _without_format(capped["text"])
        return {**capped, "input": self._input, "store": False}

    def decode(self, token_ids: Raw | None = None) -> JsonTree:  # noqa: ARG002 - no place for token ids
        """Body of the decode request."""
        return {**self._document, "input": self._input}


def _refuse_state(document: RawObject) -> None:
    """Refuse what only one worker could know: render, prefill and decode would each see another prompt."""
    for field in _STATE_FIELDS:
        if not is_null(document.get(field)):
            raise BadRequest(
                f"{field} is not supported with disaggregated serving: send the whole conversation in input",
                param=field,
            )
    if "background" in document and bytes(document["background"]) not in _UNSET:
        raise BadRequest(
            "background is not supported with disaggregated serving: leave it out or send false",
            param="background",
        )


def _without_format(text: Raw) -> Raw:
    if opener(text) != b"{":
        return text
    return to_raw({field: value for field, value in read_object(text).items() if field != "format"})


def _part_type(members: RawObject, location: str) -> str:
    try:
        kind = read_name(members["type"]) if "type" in members else ""
    except MalformedJson:
        kind = ""
    if not kind:
        # Engines guess the type of a part without one from its members, media included.
        raise BadRequest(f"{location}.type must be a string, such as input_image", param=f"{location}.type")
    return kind


def _array(value: Raw, location: str) -> list[Raw]:
    try:
        items = read_array(value)
    except MalformedJson as error:
        raise BadRequest(f"{location}: {error}", param=location) from None
    check_count(items, location)
    return items


def _object(value: Raw, location: str) -> dict[str, Any]:
    try:
        return read_object(value)
    except MalformedJson:
        raise BadRequest(f"{location} must be an object", param=location) from None


class ResponsesApi(OpenAiErrors):
    """The responses API."""

    name = "responses"
    path = "/v1/responses"
    render_answers_list = False

    def parse(self, body: bytes) -> ResponsesBody:
        """Read a responses body; raises BadRequest."""
        return ResponsesBody(read_body(body))
