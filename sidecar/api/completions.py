"""`/v1/completions`: the OpenAI completions API as vLLM serves it; one prompt per request, no media."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

from sidecar.api.document import DocumentBody, OpenAiErrors
from sidecar.api.openai_shape import (
    cap_to_one_token,
    read_body,
)
from sidecar.errors import BadRequest
from sidecar.jsontext import is_null, opener

if TYPE_CHECKING:
    from sidecar.api.interface import JsonTree, MediaPart
    from sidecar.jsontext import Raw, RawObject

_UNSET = (b"null", b"false")

_token_ids_decoder = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0)]])


class CompletionsBody(DocumentBody):
    """A completions request.

    After render its prompt travels as the rendered token ids, so `suffix`, which the renderer has worked into
    them, goes: engines refuse it next to token ids.
    """

    parts = ()
    unknown_part_types = ()
    sets_processor_kwargs = False

    def __init__(self, document: RawObject) -> None:
        super().__init__(document)
        _check_prompt(document)

    def encode(self, part: MediaPart) -> JsonTree:  # noqa: ARG002 - there is no part to pass
        """Not part of this API: raises RuntimeError."""
        raise RuntimeError("a completions request has no media")

    def prefill(self, token_ids: Raw | None = None) -> JsonTree:
        """Body of a prefill call in the OpenAI format."""
        return _with_token_ids(cap_to_one_token(self._document), token_ids)

    def decode(self, token_ids: Raw | None = None) -> JsonTree:
        """Body of the decode request."""
        return _with_token_ids(self._document, None if self._echoes_text() else token_ids)

    def _echoes_text(self) -> bool:
        # Given token ids, an engine echoes what they spell: special tokens included, the client's spaces not
        # always. Given the text, it makes the very tokens that the renderer made.
        echo = "echo" in self._document and bytes(self._document["echo"]) not in _UNSET
        return echo and _is_text(self._document["prompt"])


def _check_prompt(document: RawObject) -> None:
    prompt = document.get("prompt")
    if prompt is None or is_null(prompt):
        raise BadRequest(
            "prompt is missing; send one string or one array of token ids",
            param="prompt",
        )
    if not is_null(document.get("prompt_embeds")):
        raise BadRequest(
            "prompt_embeds is not supported with disaggregated serving; send the prompt itself",
            param="prompt_embeds",
        )
    if _is_text(prompt):
        return
    try:
        token_ids = _token_ids_decoder.decode(prompt)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise BadRequest(
            "prompt must be one string or one array of token ids (integers from 0); send each prompt of a "
            "batch in a request of its own",
            param="prompt",
        ) from None
    if not token_ids:
        raise BadRequest("prompt is an empty array; send at least one token id", param="prompt")


def _is_text(prompt: Raw) -> bool:
    return opener(prompt) == b'"'


def _with_token_ids(members: RawObject, token_ids: Raw | None) -> JsonTree:
    if token_ids is None:
        return dict(members)
    kept = {field: value for field, value in members.items() if field != "suffix" or is_null(value)}
    return {**kept, "prompt": token_ids}


class CompletionsApi(OpenAiErrors):
    """The completions API."""

    name = "completions"
    path = "/v1/completions"
    render_answers_list = True

    def parse(self, body: bytes) -> CompletionsBody:
        """Read a completions body; raises BadRequest."""
        return CompletionsBody(read_body(body))
