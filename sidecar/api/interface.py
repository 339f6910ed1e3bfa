"""What the pipeline needs to know about a client API, and nothing else.

An API module reads the client's body into a `ClientBody`; the steps ask that body for the variants the phases
need. Adding an API is one module that implements `Api` and `ClientBody`, and one line in the registry.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sidecar.errors import SidecarError
    from sidecar.jsontext import Raw
    from sidecar.multimodal.spans import Span

JsonTree = dict[str, Any]
"""A JSON object whose leaves are `Raw` text; what `jsontext.segments` writes."""


@dataclass(frozen=True, slots=True)
class OwnPrompt:
    """A prompt the client tokenized itself.

    Attributes:
        token_ids: expanded token ids.
        spans: placeholder spans per modality, of the items the client placed itself.
        form: how the client's body carries its media.
    """

    token_ids: Sequence[int]
    spans: Mapping[str, Sequence[Span]]
    form: Literal["kwargs_data", "content_parts", "tokens"]


class MediaPart(Protocol):
    """One media item of the client's body, still in its place."""

    @property
    def modality(self) -> str:
        """`image`, `audio` or `video`."""

    @property
    def location(self) -> str:
        """Path of the part in the body, for messages: `messages[0].content[2]`."""

    @property
    def inline_format(self) -> str | None:
        """What inline base64 holds: the `format` of `input_audio`, the media type of an Anthropic image.

        None for an item that is named by a URL.
        """

    @property
    def url(self) -> Raw:
        """JSON text of the URL string; of an inline item, of its base64 payload."""

    def set_url(self, url: Raw) -> None:
        """Replace the URL in place."""

    def set_uuid(self, uuid: str) -> None:
        """Name the item by its render hash on every later leg."""

    def data_url(self) -> Raw:
        """The item as one URL string, as a `content_parts` item carries it."""

    def tree(self) -> JsonTree:
        """The part as it stands in the body now."""


class ClientBody(Protocol):
    """A parsed client body: fields the client may not control are gone, everything else is as sent."""

    @property
    def model(self) -> str | None:
        """The requested model, None for the engine's default."""

    @property
    def stream(self) -> bool:
        """Whether the client asks for a streamed answer."""

    @property
    def parts(self) -> Sequence[MediaPart]:
        """Media items in walk order, which is the order of entries."""

    @property
    def unknown_part_types(self) -> Sequence[str]:
        """Types of content parts that are neither text nor media this API knows."""

    @property
    def sets_processor_kwargs(self) -> bool:
        """Whether `mm_processor_kwargs` or `media_io_kwargs` is set to anything but null."""

    @property
    def tenancy(self) -> JsonTree:
        """`cache_salt` and `priority`, where set: they travel in the generate format too."""

    def render(self) -> JsonTree:
        """Body of the render call."""

    def encode(self, part: MediaPart) -> JsonTree:
        """Body of an encode call in the OpenAI format: one user turn with just this part, one token."""

    def prefill(self, token_ids: Raw | None = None) -> JsonTree:
        """Body of a prefill call in the OpenAI format: everything that shapes the prompt, one token.

        Args:
            token_ids: JSON text of the rendered token ids, None without a render step.
        """

    def decode(self, token_ids: Raw | None = None) -> JsonTree:
        """Body of the decode request: uncapped, streaming flag untouched; `token_ids` as for prefill."""

    @property
    def own_prompt(self) -> OwnPrompt | None:
        """The prompt of a client that sends tokens itself; it is neither rendered nor encoded."""


class Api(Protocol):
    """One client API."""

    @property
    def name(self) -> str:
        """Short name, as the access log prints it."""

    @property
    def path(self) -> str:
        """The exact request path."""

    @property
    def render_answers_list(self) -> bool:
        """Whether the render service answers this API with one object per prompt in an array."""

    def parse(self, body: bytes) -> ClientBody:
        """Read a client body; raises BadRequest when a field has the wrong type."""

    def error_body(self, error: SidecarError, request_id: str, *, expose_upstream: bool) -> bytes:
        """The error as this API's clients expect it: JSON that names the request id."""
