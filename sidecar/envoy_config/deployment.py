"""What one Envoy configuration is about: who listens where, and what the sidecar's settings ask of Envoy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sidecar.envoy_config.addresses import Address, TcpAddress

Topology = Literal["internal-listener", "reroute", "shared-listener"]
BodyMode = Literal["full-duplex-streamed", "buffered"]
Part = Literal["bootstrap", "listeners", "filter", "cluster", "access-log"]
Phase = Literal["encode", "prefill", "decode"]

PHASES: tuple[Phase, ...] = ("encode", "prefill", "decode")

LONGEST_MESSAGE_TIMEOUT = 3600.0
"""Seconds; Envoy refuses a longer message_timeout."""

DEADLINE_MARGIN = 10.0
"""Seconds that Envoy waits beyond `ext_proc.request_deadline`: the sidecar's own 504 comes first."""

REWRITE_ROOM = 1 << 20
"""Bytes that the sidecar may add to the largest body: transfer parameters of thousands of blocks."""

CHUNK = 1 << 20
"""Bytes that Envoy buffers of a stream."""

_SHORTEST_IDLE_TIMEOUT = 900
"""Seconds; a non-streaming decode is silent for as long as it generates."""
_IDLE_MARGIN = 60


@dataclass(frozen=True, slots=True)
class SidecarTls:
    """How Envoy recognises the sidecar.

    Attributes:
        ca: file with the certificates to trust, on Envoy's host.
        name: name (or IP address) the sidecar's certificate is issued for.
    """

    ca: str
    name: str


@dataclass(frozen=True, slots=True)
class Deployment:
    """Everything a configuration is written from.

    Attributes:
        topology: how decode and the sub-requests find their routes.
        body_mode: how the filter sends bodies.
        listen: where clients connect.
        admin_listen: Envoy's admin interface.
        internal: the listener of `gateway.address`; None where the sub-requests use the clients' listener.
        sidecars: endpoints of the ext_proc cluster, one per process.
        sidecar_tls: None for plaintext.
        workers: endpoints per phase; not used with a picker.
        picker: the endpoint picker, None when Envoy balances the load.
        namespace: namespace of the access-log record.
        request_deadline: seconds for everything before decode.
        max_body: largest client body, in bytes.
        render: base URL of the render service, "" without one.
        sees_answers: whether the sidecar reads the head of decode's answer.
        observes_prompt_tokens: whether the sidecar compares prompt token counts in decode's answers.
    """

    topology: Topology
    body_mode: BodyMode
    listen: TcpAddress
    admin_listen: TcpAddress
    internal: TcpAddress | None
    sidecars: tuple[Address, ...]
    sidecar_tls: SidecarTls | None
    workers: Mapping[Phase, tuple[Address, ...]]
    picker: Address | None
    namespace: str
    request_deadline: float
    max_body: int
    render: str
    sees_answers: bool
    observes_prompt_tokens: bool

    @property
    def buffered(self) -> bool:
        """Whether Envoy collects a body before it sends it to the sidecar."""
        return self.body_mode == "buffered"

    @property
    def shared(self) -> bool:
        """Whether clients and sub-requests use one listener."""
        return self.topology == "shared-listener"

    @property
    def client_listener(self) -> str:
        """Name of the listener clients use."""
        return "shared" if self.shared else "external"

    @property
    def buffer_limit(self) -> int:
        """Bytes that the clients' listener buffers of a request."""
        return self.max_body + REWRITE_ROOM if self.buffered else CHUNK

    @property
    def message_timeout(self) -> timedelta:
        """How long the filter waits for a reply, where it does."""
        seconds = min(self.request_deadline + DEADLINE_MARGIN, LONGEST_MESSAGE_TIMEOUT)
        return timedelta(milliseconds=math.ceil(seconds * 1000))

    @property
    def stream_idle_timeout(self) -> timedelta:
        """How long a request may be silent."""
        return timedelta(seconds=max(_SHORTEST_IDLE_TIMEOUT, math.ceil(self.request_deadline) + _IDLE_MARGIN))
