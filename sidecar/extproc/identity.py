"""Who a request is on every leg: its request id and its trace context."""

from __future__ import annotations

import logging
import re
import secrets
import uuid
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sidecar.http import RequestHead

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[a-zA-Z0-9-]{1,128}")
_TRACEPARENT = re.compile(
    r"(?!ff)(?P<version>[0-9a-f]{2})-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?P<more>-.*)?"
)


def request_id(head: RequestHead) -> str:
    """The client's `x-request-id` if it is 1 to 128 letters, digits and hyphens, else a new UUID4.

    A refused value is attacker-chosen text: the log gets its length only.
    """
    offered = head.get("x-request-id")
    if offered is not None:
        if _REQUEST_ID.fullmatch(offered):
            return offered
        logger.info("x-request-id replaced", extra={"rejected_length": len(offered)})
    return new_request_id()


def new_request_id() -> str:
    """A UUID4."""
    return str(uuid.uuid4())


def traceparent(head: RequestHead, from_call: str | None) -> str:
    """The W3C trace context all legs share.

    Args:
        head: the client's request; its own header comes first, several count as none (W3C Trace Context).
        from_call: `traceparent` of the ext_proc call's metadata, where a gateway puts a trace it starts.

    Returns:
        A well-formed `traceparent`. A new one is not sampled: the flag would say that a caller records the
        trace, which nobody does, and every worker with a parent-based sampler would record every request.
    """
    offered = [value for name, value in head.headers if name == "traceparent"]
    if len(offered) == 1 and _well_formed(offered[0]):
        return offered[0]
    if from_call is not None and _well_formed(from_call):
        return from_call
    return f"00-{_nonzero(16)}-{_nonzero(8)}-00"


def _well_formed(value: str) -> bool:
    match = _TRACEPARENT.fullmatch(value)
    # Version 00 has exactly four fields, a later version may append more.
    return match is not None and (match["version"] != "00" or match["more"] is None)


def _nonzero(size: int) -> str:
    """`size` random octets in hex; all zeros are not a valid id."""
    while not int(octets := secrets.token_hex(size), 16):
        pass
    return octets
