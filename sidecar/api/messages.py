"""`/v1/messages`: the Anthropic messages API as vLLM serves it."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec

from sidecar.api.document import DocumentBody
from sidecar.api.openai_shape import (
    cap_to_one_token,
    check_count,
    item_context,
    name_member,
    read_body,
    typed_member,
)
from sidecar.errors import BadRequest
from sidecar.jsontext import Raw, RawObject, is_null, opener

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sidecar.api.interface import JsonTree, MediaPart
    from sidecar.errors import SidecarError

_DATA_FIELD = {"base64": "data", "url": "url"}
"""Where an image source holds its data, by its type."""
_BLOCKS_WITHOUT_MEDIA = frozenset(
    {
        "redacted_thinking",
        "text",
        "thinking",
        "tool_addition",
        "tool_reference",
        "tool_removal",
        "tool_result",
        "tool_use",
    }
)
_IGNORED_IN_RESULTS = frozenset({"document", "search_result"})
"""Blocks of a tool result that vLLM takes and does not read."""
_FORCED_TOOL = frozenset({"any", "tool"})
_AUTO = Raw(b'"auto"')

_ERROR_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

_object_decoder = msgspec.json.Decoder(RawObject)
_objects_decoder = msgspec.json.Decoder(list[RawObject])


class ImagePart:
    """One `image` block.

    A base64 source keeps its data where the client put it. A URL source takes the data URI in place of its
    URL: engines read both sources as one URL, and the megabytes of a download are shared by equal images.
    Engines give this API no place for a uuid: they hash the image themselves, as render does.
    """

    modality = "image"

    def __init__(self, members: RawObject, source: RawObject, kind: str, location: str) -> None:
        self.location = location
        self.inline_format: str | None = None
        self._source: dict[str, Any] = source
        self._members: dict[str, Any] = {**members, "source": source}
        self._field = _DATA_FIELD[kind]
        data = source.get(self._field)
        if data is None or is_null(data):
            raise self._fault(f"the {kind} source of the image has no {self._field}")
        if not _is_string(data):
            raise self._fault(f"source.{self._field} must be a string")
        if len(memoryview(data)) <= len('""'):
            raise self._fault(f"source.{self._field} is empty")
        if kind == "base64":
            self.inline_format = name_member(source.get("media_type"), f"{location}.source.media_type")

    def _fault(self, text: str) -> BadRequest:
        return BadRequest(
            f"{self.location}: {text}", param=f"{self.location}.source.{self._field}", stage="media"
        )

    @property
    def url(self) -> Raw:
        """JSON text of the URL, or of the base64 data."""
        url: Raw = self._source[self._field]
        return url

    def set_url(self, url: Raw) -> None:
        """Replace the URL, or the base64 data, in place."""
        self._source[self._field] = url

    def set_uuid(self, uuid: str) -> None:
        """Nothing: the API has no place for it."""

    def data_url(self) -> Raw:
        """The image as one URL string; base64 data becomes a data URI."""
        if self.inline_format is None:
            return self.url
        prefix = msgspec.json.encode(f"data:{self.inline_format};base64,")
        return Raw(prefix[:-1] + memoryview(self.url)[1:])

    def tree(self) -> JsonTree:
        """The block as it stands in the body now."""
        return self._members


class MessagesBody(DocumentBody):
    """A messages request: its members, with image blocks opened up in their places.

    `parts` has them in the order in which engines place them: of a user turn first the images inside its tool
    results, which become turns of their own ahead of it, then its own.
    """

    def __init__(self, document: RawObject) -> None:
        super().__init__(document)
        self.parts: list[ImagePart] = []
        self.unknown_part_types: list[str] = []
        self._on_prefill = _prefill_changes(document)
        messages = typed_member(_objects_decoder, document.get("messages"), "messages")
        check_count(messages, "messages")
        self._messages = [
            self._read_message(message, f"messages[{index}]") for index, message in enumerate(messages)
        ]

    def _read_message(self, message: RawObject, location: str) -> JsonTree:
        role = name_member(message.get("role"), f"{location}.role")
        content = message.get("content")
        # Of a system turn engines read nothing but text.
        if role == "system" or content is None or is_null(content) or _is_string(content):
            return message
        place = f"{location}.content"
        items = typed_member(_objects_decoder, content, place)
        check_count(items, place)
        blocks: list[JsonTree] = [*items]
        kinds = [_block_type(block, f"{place}[{index}]") for index, block in enumerate(blocks)]
        if role == "user":
            for index, kind in enumerate(kinds):
                if kind == "tool_result":
                    blocks[index] = self._read_tool_result(blocks[index], f"{place}[{index}].content")
        for index, kind in enumerate(kinds):
            blocks[index] = self._read_block(kind, blocks[index], f"{place}[{index}]")
        return {**message, "content": blocks}

    def _read_tool_result(self, block: RawObject, place: str) -> JsonTree:
        content = block.get("content")
        if content is None or is_null(content) or _is_string(content):
            return block
        items = typed_member(_objects_decoder, content, place)
        check_count(items, place)
        nested = []
        for index, item in enumerate(items):
            kind = _block_type(item, f"{place}[{index}]")
            ignored = kind in _IGNORED_IN_RESULTS
            nested.append(item if ignored else self._read_block(kind, item, f"{place}[{index}]"))
        return {**block, "content": nested}

    def _read_block(self, kind: str, block: JsonTree, location: str) -> JsonTree:
        if kind in _BLOCKS_WITHOUT_MEDIA:
            return block
        block.pop("uuid", None)
        if kind != "image":
            self.unknown_part_types.append(kind)
            return block
        source = typed_member(_object_decoder, block.get("source"), f"{location}.source")
        source_type = name_member(source.get("type"), f"{location}.source.type")
        if source_type not in _DATA_FIELD:
            self.unknown_part_types.append(f"image from {source_type}")
            return block
        part = ImagePart(block, source, source_type, location)
        self.parts.append(part)
        return part.tree()

    def encode(self, part: MediaPart) -> JsonTree:
        """Body of an encode call in the client's own format."""
        return {
            **item_context(self._document),
            "messages": [{"role": "user", "content": [part.tree()]}],
            "max_tokens": 1,
            "stream": False,
        }

    def prefill(self, token_ids: Raw | None = None) -> JsonTree:  # noqa: ARG002 - no place for token ids
        """Body of a prefill call in the client's own format.

        `thinking` stays, because it shapes the prompt: engines accept a budget above the one token of a leg
        whose `kv_transfer_params` say `do_remote_decode`.
        """
        return {**cap_to_one_token(self._document), **self._on_prefill, "messages": self._messages}

    def decode(self, token_ids: Raw | None = None) -> JsonTree:  # noqa: ARG002 - no place for token ids
        """Body of the decode request."""
        return {**self._document, "messages": self._messages}


def _prefill_changes(document: RawObject) -> JsonTree:
    """Members that a one-token leg sends otherwise: no forced tool, no output format."""
    changes: JsonTree = {}
    if not is_null(document.get("tool_choice")):
        choice = typed_member(_object_decoder, document["tool_choice"], "tool_choice")
        kind = name_member(choice.get("type"), "tool_choice.type")
        if kind in _FORCED_TOOL:
            choice = {field: value for field, value in choice.items() if field != "name"} | {"type": _AUTO}
        changes["tool_choice"] = choice
    if not is_null(document.get("output_config")):
        config = typed_member(_object_decoder, document["output_config"], "output_config")
        changes["output_config"] = {field: value for field, value in config.items() if field != "format"}
    return changes


def _block_type(block: JsonTree, location: str) -> str:
    return name_member(block.get("type"), f"{location}.type")


def _is_string(value: Raw) -> bool:
    return opener(value) == b'"'


class MessagesApi:
    """The messages API."""

    name = "messages"
    path = "/v1/messages"
    render_answers_list = False

    def parse(self, body: bytes) -> MessagesBody:
        """Read a messages body; raises BadRequest."""
        return MessagesBody(read_body(body))

    def error_body(self, error: SidecarError, request_id: str, *, expose_upstream: bool) -> bytes:
        """`{"type": "error", "error": {"type", "message"}, "request_id"}`, as Anthropic clients read it."""
        inner = {
            "type": _error_type(error.status),
            "message": f"{error.message} (request id: {request_id})",
        }
        if expose_upstream and error.upstream_body:
            inner["upstream"] = error.upstream_body
        return msgspec.json.encode({"type": "error", "error": inner, "request_id": request_id})


def _error_type(status: int) -> str:
    client_error = status < HTTPStatus.INTERNAL_SERVER_ERROR
    return _ERROR_TYPES.get(status, "invalid_request_error" if client_error else "api_error")
