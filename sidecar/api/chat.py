"""`/v1/chat/completions`: the OpenAI chat API as vLLM serves it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from sidecar.api.document import DocumentBody, OpenAiErrors
from sidecar.api.openai_shape import (
    cap_to_one_token,
    check_count,
    item_context,
    other_media_member,
    read_body,
    typed_member,
)
from sidecar.errors import BadRequest
from sidecar.jsontext import (
    NULL,
    MalformedJson,
    Raw,
    RawObject,
    is_null,
    opener,
    read_name,
    read_object,
    to_raw,
)

if TYPE_CHECKING:
    from sidecar.api.interface import JsonTree, MediaPart

_MODALITY_OF_PART = {
    "image_url": "image",
    "input_image": "image",
    "audio_url": "audio",
    "input_audio": "audio",
    "video_url": "video",
}
_TEXT_PART_TYPES = frozenset({"text", "input_text", "output_text", "refusal", "thinking", "tool_reference"})

_content_decoder = msgspec.json.Decoder(list[RawObject | str])
_messages_decoder = msgspec.json.Decoder(list[RawObject])


class ChatPart:
    """One media part of a message.

    The URL stands at `part[type].url`; `input_image` has it as a bare string in `image_url`, `input_audio`
    has base64 `data` and a `format`. A `uuid` sent by the client is dropped: the renderer would take it as
    the hash and a worker as a file name.
    """

    def __init__(self, kind: str, members: RawObject, location: str) -> None:
        self.modality = _MODALITY_OF_PART[kind]
        self.location = location
        self.inline_format: str | None = None
        self._kind = kind
        self._members: dict[str, Any] = dict(members)
        self._check_alone()
        self._holder: dict[str, Any] = self._members
        self._url_field = "image_url"
        if kind != "input_image":
            self._holder = self._read_holder(members)
            self._members[kind] = self._holder
            self._url_field = "data" if kind == "input_audio" else "url"
        if kind == "input_audio":
            self.inline_format = self._read_format()
        self._check_url()

    def _check_alone(self) -> None:
        # With the uuid every part gets after render, an engine takes the first media member it finds.
        own = "image_url" if self._kind == "input_image" else self._kind
        other = other_media_member(self._members, own)
        if other:
            raise self._fault(f"a part of type {self._kind} must not have {other}")

    def _read_holder(self, members: RawObject) -> RawObject:
        value = members.get(self._kind)
        if value is None or is_null(value):
            raise self._no_url()
        try:
            return read_object(value)
        except MalformedJson:
            raise self._fault(f"{self._kind} must be an object") from None

    def _read_format(self) -> str:
        try:
            return read_name(self._holder.get("format", NULL))
        except MalformedJson:
            raise self._fault("input_audio.format must be a string") from None

    def _check_url(self) -> None:
        url = self._holder.get(self._url_field)
        if url is None or is_null(url) or len(url_text := memoryview(url)) <= len('""'):
            raise self._no_url()
        if bytes(url_text[:1]) != b'"':
            raise self._fault(f"the {self._url_field} of {self._kind} must be a string")

    def _no_url(self) -> BadRequest:
        return self._fault(f"{self._kind} has no {'data' if self._kind == 'input_audio' else 'URL'}")

    def _fault(self, text: str) -> BadRequest:
        return BadRequest(f"{self.location}: {text}", param=self.location, stage="media")

    @property
    def url(self) -> Raw:
        """JSON text of the URL, or of the base64 payload of inline audio."""
        url: Raw = self._holder[self._url_field]
        return url

    def set_url(self, url: Raw) -> None:
        """Replace the URL in place."""
        self._holder[self._url_field] = url

    def set_uuid(self, uuid: str) -> None:
        """Name the item by its render hash on every later leg."""
        self._members["uuid"] = to_raw(uuid)

    def data_url(self) -> Raw:
        """The item as one URL string; inline audio becomes a data URI."""
        if self.inline_format is None:
            return self.url
        prefix = msgspec.json.encode(f"data:audio/{self.inline_format};base64,")
        return Raw(prefix[:-1] + memoryview(self.url)[1:])

    def tree(self) -> JsonTree:
        """The part as it stands in the body now."""
        return self._members


class ChatBody(DocumentBody):
    """A chat request: its members, with media parts opened up in their places."""

    def __init__(self, document: RawObject) -> None:
        super().__init__(document)
        self.parts: list[ChatPart] = []
        self.unknown_part_types: list[str] = []
        self._messages = self._read_messages()

    def _read_messages(self) -> list[dict[str, Any]]:
        messages: list[JsonTree] = typed_member(_messages_decoder, self._document.get("messages"), "messages")
        check_count(messages, "messages")
        for index, message in enumerate(messages):
            content = message.get("content")
            location = f"messages[{index}].content"
            if content is None or is_null(content):
                continue
            if opener(content) == b"[":
                message["content"] = self._read_content(content, location)
            elif opener(content) != b'"':
                raise BadRequest(f"{location} must be a string or an array of parts", param=location)
        return messages

    def _read_content(self, content: Raw, location: str) -> list[Any]:
        items: list[Any] = typed_member(_content_decoder, content, location)
        check_count(items, location)
        for index, item in enumerate(items):
            if isinstance(item, dict):
                items[index] = self._read_part(item, f"{location}[{index}]")
        return items

    def _read_part(self, members: RawObject, location: str) -> JsonTree:
        # vLLM takes a part without a type, or with a uuid, for media it finds in it: past the address guard.
        members.pop("uuid", None)
        try:
            kind = read_name(members.get("type", NULL))
        except MalformedJson:
            raise BadRequest(f"{location}.type must be a string", param=location) from None
        if kind in _MODALITY_OF_PART:
            part = ChatPart(kind, members, location)
            self.parts.append(part)
            return part.tree()
        if kind not in _TEXT_PART_TYPES:
            self.unknown_part_types.append(kind)
        return members

    def encode(self, part: MediaPart) -> JsonTree:
        """Body of an encode call in the OpenAI format."""
        return {
            **item_context(self._document),
            "messages": [{"role": "user", "content": [part.tree()]}],
            "max_tokens": 1,
            "stream": False,
        }

    def prefill(self, token_ids: Raw | None = None) -> JsonTree:  # noqa: ARG002 - chat has no place for token ids
        """Body of a prefill call in the OpenAI format."""
        return {**cap_to_one_token(self._document, "max_completion_tokens"), "messages": self._messages}

    def decode(self, token_ids: Raw | None = None) -> JsonTree:  # noqa: ARG002 - chat has no place for token ids
        """Body of the decode request."""
        return {**self._document, "messages": self._messages}


class ChatApi(OpenAiErrors):
    """The chat API."""

    name = "chat"
    path = "/v1/chat/completions"
    render_answers_list = False

    def parse(self, body: bytes) -> ChatBody:
        """Read a chat body; raises BadRequest."""
        return ChatBody(read_body(body))
