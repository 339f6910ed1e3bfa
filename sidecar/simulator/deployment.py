"""What the four roles share: the knobs, the records, and the stores a connector would be.

Stores hold keys and sizes only, never media or tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from sidecar.simulator.bootstrap import Rooms
from sidecar.simulator.errors import model_not_found
from sidecar.simulator.media import PixelBounds
from sidecar.simulator.recorder import Recorder
from sidecar.simulator.store import Store

if TYPE_CHECKING:
    from sidecar.simulator.config import Role, SimulatorConfig
    from sidecar.simulator.media import Media
    from sidecar.simulator.recorder import Exchange
    from sidecar.simulator.tokens import Modality


@dataclass(frozen=True, slots=True)
class Identity:
    """What a media key stands for.

    Attributes:
        content: SHA-256 of the media bytes.
        label: what a reader would recognise the media by.
    """

    content: str
    label: str


class Address(NamedTuple):
    """Where something listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Call:
    """One request to one role, its body already known to be a JSON object.

    Attributes:
        role: role that serves it.
        body: the JSON body.
        exchange: its record.
        address: address it came in at.
    """

    role: Role
    body: dict[str, Any]
    exchange: Exchange
    address: Address


MediaKey = tuple["Modality", str]


class Deployment:
    """State of one simulated deployment.

    Attributes:
        config: the knobs.
        recorder: exchanges and violations.
        encodings: number of embeddings per encoder output, by modality and key.
        processed: keys the prefill engine's processor cache holds.
        seen_media: what each role's processor made of the items it saw, by its settings.
        encoder_requests: requests with media parts the encoder saw; one without caches puts it into keys.
        identities: what each key stands for, as the roles saw it.
        kv: `remote_request_id` of the KV blocks prefill computed, by prompt key.
        kv_owner: prompt key by `remote_request_id`.
        invented_requests: prefill answers so far, for engine request ids.
        rooms: where prefill and decode of SGLang meet.
        reservations: request ids, without their suffix, that reserved a prefill endpoint.
    """

    def __init__(self, config: SimulatorConfig) -> None:
        self.config = config
        self.recorder = Recorder()
        self.clear()

    def clear(self) -> None:
        """Forget all requests; the knobs stay."""
        self.recorder.clear()
        self.encodings: Store[MediaKey, int] = Store()
        self.processed: Store[MediaKey, None] = Store()
        self.seen_media: Store[tuple[Role, Modality, str, PixelBounds], Media] = Store()
        self.encoder_requests = 0
        self.identities: Store[MediaKey, Identity] = Store()
        self.kv: Store[str, str] = Store()
        self.kv_owner: Store[str, str] = Store()
        self.invented_requests = 0
        self.rooms = Rooms(self.recorder)
        self.reservations: Store[str, None] = Store()

    def pixel_bounds(self, role: Role) -> PixelBounds:
        """The processor settings of a role."""
        largest = self.config.max_pixels
        if role == "encode" and self.config.encode_max_pixels is not None:
            largest = self.config.encode_max_pixels
        return PixelBounds(self.config.min_pixels, largest)

    def violate(self, call: Call, message: str) -> None:
        """Record a breach of the contract that the engine survives."""
        self.recorder.violate(call.exchange, message)

    def served_model(self, name: str | None) -> str:
        """The model a body asks for, the first one when it names none; raises ApiError (404)."""
        if name is None:
            return self.config.models[0]
        if name not in self.config.models:
            raise model_not_found(name, self.config.models)
        return name

    def identify(self, call: Call, key: MediaKey, identity: Identity) -> None:
        """Note what a key stands for; one key for two different media is a violation."""
        known = self.identities.get(key)
        if known is not None and known.content != identity.content:
            self.violate(
                call,
                f"{key[0]} key {key[1]!r} stands for {identity.label} (sha256 {identity.content[:8]}) here, "
                f"for {known.label} (sha256 {known.content[:8]}) before",
            )
        self.identities.put(key, identity)
