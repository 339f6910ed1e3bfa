"""What becomes of a request, decided from its head alone."""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sidecar.control_headers import HOP_GUARD, PHASE_TOKEN, ControlHeaders
from sidecar.errors import BadRequest, BodyTooLarge, LoopDetected, UnsupportedEncoding
from sidecar.extproc.exchange import check_body_mode
from sidecar.extproc.protocol import HeaderChange

if TYPE_CHECKING:
    from sidecar.api import Api
    from sidecar.extproc.protocol import RequestHeaders
    from sidecar.http import RequestHead

_MOST_DIGITS = 18
"""Longer numbers exceed every limit; reading them takes time quadratic in their length."""


@dataclass(frozen=True, slots=True)
class PassThrough:
    """Not ours: forward it with this change of its headers.

    Attributes:
        change: what the header reply does.
    """

    change: HeaderChange


@dataclass(frozen=True, slots=True)
class Coordinate:
    """Ours: collect the body and run the pipeline."""

    api: Api


Decision = PassThrough | Coordinate


@dataclass(frozen=True, slots=True)
class AdmissionRules:
    """What the deployment says about admission.

    Attributes:
        max_body: largest body accepted, in bytes.
        phase_token: secret of our own sub-requests; "" when the topology needs none.
        control_headers: names no client may send on.
        clear_route_cache: whether a change of headers lets Envoy choose the route again.
    """

    max_body: int
    phase_token: str
    control_headers: ControlHeaders
    clear_route_cache: bool


def decide(event: RequestHeaders, api: Api | None, rules: AdmissionRules) -> Decision:
    """Decide about one request.

    Args:
        event: its head, and how the filter will send the body.
        api: the API that owns method and path, None if none does.
        rules: the deployment's rules.

    Raises:
        LoopDetected: a sub-request came back to the filter.
        UnsupportedBodyMode: the filter's body mode cannot carry a rewrite.
        BadRequest: no body.
        UnsupportedEncoding: the body is compressed.
        BodyTooLarge: the announced length is over the limit.
    """
    head = event.head
    if _is_own(head, rules.phase_token):
        # The route of a sub-request hangs on its epp-profile and hop guard: both stay, and so does the route.
        return PassThrough(HeaderChange(remove_headers=(PHASE_TOKEN,)))
    if head.get(HOP_GUARD) is not None:
        raise LoopDetected(
            f"a request with {HOP_GUARD} reached the ext_proc filter: gateway.address leads back to a route "
            "with this filter; point it at the internal listener, or set gateway.phase_token"
        )
    if api is None:
        names = rules.control_headers.among(name for name, _ in head.headers)
        # A forged control header may have chosen the route already.
        return PassThrough(HeaderChange((), names, clear_route_cache=bool(names) and rules.clear_route_cache))
    check_body_mode(event.mode)
    if event.end_of_stream:
        raise BadRequest(f"POST {head.path} needs a JSON body")
    _check_encoding(head)
    _check_length(head, rules.max_body)
    return Coordinate(api)


def _is_own(head: RequestHead, token: str) -> bool:
    offered = [value for name, value in head.headers if name == PHASE_TOKEN]
    # latin-1 restores the octets; compare_digest refuses str beyond ASCII.
    return bool(token) and any(
        hmac.compare_digest(value.encode("latin-1"), token.encode()) for value in offered
    )


def _check_encoding(head: RequestHead) -> None:
    for name, value in head.headers:
        if name != "content-encoding":
            continue
        for coding in value.split(","):
            if coding.strip().lower() not in ("", "identity"):
                raise UnsupportedEncoding(
                    "the body has a content-encoding; send it uncompressed, without content-encoding"
                )


def _check_length(head: RequestHead, limit: int) -> None:
    announced = head.get("content-length") or ""
    # What is not a number says nothing here; the bytes are counted as they arrive.
    if not (announced.isascii() and announced.isdigit()):
        return
    digits = announced.lstrip("0") or "0"
    if len(digits) > _MOST_DIGITS or int(digits) > limit:
        raise BodyTooLarge(
            f"content-length {digits[:_MOST_DIGITS]} is over the limit of {limit} bytes "
            "(ext_proc.max_request_body_size)"
        )
