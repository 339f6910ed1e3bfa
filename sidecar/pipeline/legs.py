"""Headers of the legs of one request: encode, prefill and decode through the gateway, and the render call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidecar.control_headers import HOP_GUARD, PHASE_TOKEN, ControlHeaders
from sidecar.http import HOP_BY_HOP, connection_options

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from sidecar.http import HeaderPairs, RequestHead

PHASE_HEADER = "epp-profile"
REQUEST_ID = "x-request-id"
_TRACE_STATE = "tracestate"

_NOT_FORWARDED = HOP_BY_HOP | frozenset(
    {
        "accept-encoding",  # the sub-request client asks for identity itself
        "content-encoding",
        "content-length",
        "content-type",
        "expect",
        "host",
        "http2-settings",
        "proxy-authorization",
        REQUEST_ID,
        "traceparent",
        HOP_GUARD,
    }
)


class LegHeaders:
    """Builds the headers of every leg of one request.

    Args:
        head: the client's request.
        request_id: validated id, the same on every leg.
        traceparent: trace context, the same on every leg.
        control_headers: what a client may not send on, `headers.strip` and forwarded names included.
        phase_token: secret that marks calls to the gateway as our own; "" for none.
        forwarded: response headers that travel from one phase to all later ones (lower-case names).
    """

    def __init__(
        self,
        head: RequestHead,
        request_id: str,
        traceparent: str,
        *,
        control_headers: ControlHeaders,
        phase_token: str,
        forwarded: Iterable[str],
    ) -> None:
        self._head = head
        self._control_headers = control_headers
        self._phase_token = phase_token
        self._forwarded = tuple(forwarded)
        self._carried: dict[str, str] = {}
        self._identity: HeaderPairs = (
            (REQUEST_ID, request_id),
            ("traceparent", traceparent),
            (HOP_GUARD, "1"),
        )
        # The state of another trace says nothing about this one.
        self._foreign_state = head.get("traceparent") != traceparent
        dropped = _NOT_FORWARDED | connection_options(head.headers)
        if self._foreign_state:
            dropped |= {_TRACE_STATE}
        self._from_client = tuple(
            (name, value)
            for name, value in head.headers
            if name not in dropped and name not in control_headers
        )

    def carry(self, answer_headers: Mapping[str, str]) -> None:
        """Keep the configured response headers of one phase for all later legs."""
        for name in self._forwarded:
            if name in answer_headers:
                self._carried[name] = answer_headers[name]

    def render(self) -> HeaderPairs:
        """Headers of the render call: no phase, and never the token, which is for the gateway only."""
        return (*self._from_client, ("content-type", "application/json"), *self._identity)

    def phase(self, phase: str, id_suffix: str = "") -> HeaderPairs:
        """Headers of a call to the gateway that names `phase`; `id_suffix` makes its request id its own."""
        token = ((PHASE_TOKEN, self._phase_token),) if self._phase_token else ()
        named = ((name, value + id_suffix if name == REQUEST_ID else value) for name, value in self.render())
        return (*named, (PHASE_HEADER, phase), *token, *self._carried.items())

    def decode(self) -> HeaderPairs:
        """What Envoy sets on the request it forwards; the client's other headers stay as they are."""
        return ((PHASE_HEADER, "decode"), *self._identity, *self._carried.items())

    def removed_from_decode(self) -> tuple[str, ...]:
        """Headers of the client that must not reach decode."""
        names = [name for name, _ in self._head.headers]
        state = (_TRACE_STATE,) if self._foreign_state and _TRACE_STATE in names else ()
        return (*self._control_headers.among(names), *state)
