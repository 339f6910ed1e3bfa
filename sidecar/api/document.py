"""What the API modules share: a body that is one JSON document, and the errors of the OpenAI-style ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from sidecar.api.openai_shape import (
    error_body,
    read_model,
    read_stream,
    read_tenancy,
    sets_processor_kwargs,
)

if TYPE_CHECKING:
    from sidecar.api.interface import JsonTree, OwnPrompt
    from sidecar.errors import SidecarError
    from sidecar.jsontext import Raw, RawObject


class DocumentBody(ABC):
    """A client body by the members every API has.

    Args:
        document: its members, without those a client may not control; BadRequest for a wrong type.
    """

    own_prompt: OwnPrompt | None = None

    def __init__(self, document: RawObject) -> None:
        self._document = document
        self.model = read_model(document)
        self.stream = read_stream(document)

    @property
    def sets_processor_kwargs(self) -> bool:
        """Whether the body sets processor kwargs; JSON null counts as unset, `{}` as set."""
        return sets_processor_kwargs(self._document)

    @property
    def tenancy(self) -> JsonTree:
        """`cache_salt` and `priority`, where set."""
        return read_tenancy(self._document)

    def render(self) -> JsonTree:
        """Body of the render call."""
        return self.decode()

    @abstractmethod
    def decode(self, token_ids: Raw | None = None) -> JsonTree:
        """Body of the decode request."""


class OpenAiErrors:
    """An API whose clients read errors in the OpenAI shape."""

    def error_body(self, error: SidecarError, request_id: str, *, expose_upstream: bool) -> bytes:
        """An error in the OpenAI shape."""
        return error_body(error, request_id, expose_upstream=expose_upstream)
