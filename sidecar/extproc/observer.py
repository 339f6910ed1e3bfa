"""The prompt tokens that decode reports, read out of its answer while it passes; no transport, no event loop.

A filter of Envoy copies the answer to the sidecar. What is held of it is bounded: a whole answer, or one
event of a stream, of more than `MAX_HELD` bytes is not read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from sidecar.api.usage import reported_prompt_tokens
from sidecar.extproc.event_stream import EventStream
from sidecar.http import first_value
from sidecar.jsontext import MalformedJson, read_object
from sidecar.pipeline.parity import RenderedPrompt

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sidecar.extproc.protocol import AnswerHead

MAX_HELD = 8 << 20
"""Bytes held of one answer."""

_OK = 200
_HANDED_ON = ("ok", "served")
_USAGE = b'"usage"'


class UsageReader(Protocol):
    """Reads the body of one answer."""

    @property
    def held(self) -> int:
        """Bytes held of the answer."""

    def receive(self, piece: bytes) -> bool:
        """Take the next piece; False when the rest of the answer cannot say anything any more."""

    def reported(self) -> int | None:
        """Prompt tokens by what has been received, None when it does not tell."""


class WholeAnswer:
    """A JSON answer, which says nothing before its end.

    Args:
        api: short name of the API it is in.
    """

    def __init__(self, api: str) -> None:
        self._api = api
        self._body = bytearray()

    @property
    def held(self) -> int:
        """Bytes held of the answer."""
        return len(self._body)

    def receive(self, piece: bytes) -> bool:
        """Take the next piece; False once there are too many bytes."""
        if len(self._body) + len(piece) > MAX_HELD:
            self._body.clear()
            return False
        self._body += piece
        return True

    def reported(self) -> int | None:
        """Prompt tokens of a complete answer; None for a part of one."""
        return _reported(self._api, self._body)


class StreamedAnswer:
    """An answer of server-sent events: the last one that has the count is right.

    Args:
        api: short name of the API it is in.
    """

    def __init__(self, api: str) -> None:
        self._api = api
        self._events = EventStream(MAX_HELD)
        self._last: int | None = None

    @property
    def held(self) -> int:
        """Bytes held of the answer."""
        return self._events.held

    def receive(self, piece: bytes) -> bool:
        """Take the next piece."""
        for data in self._events.receive(piece):
            if _USAGE in data and (count := _reported(self._api, data)) is not None:
                self._last = count
        return True

    def reported(self) -> int | None:
        """Prompt tokens by the last event that had them."""
        return self._last


def expected_prompt(head: AnswerHead, record: Mapping[str, str]) -> RenderedPrompt | None:
    """The prompt an answer is compared with; None for an answer that is not compared.

    Args:
        head: of the answer.
        record: the access-log record of its request, empty when the filter does not forward it.
    """
    if head.status != _OK or record.get("outcome") not in _HANDED_ON:
        return None
    return RenderedPrompt.of(record)


def usage_reader(head: AnswerHead, api: str) -> UsageReader | None:
    """Reads the body that follows `head`; None for one in a form it does not know.

    Args:
        head: of the answer.
        api: short name of the API it is in.
    """
    coding = first_value(head.headers, "content-encoding") or "identity"
    if coding.strip().lower() != "identity":
        return None
    kind, _, _ = (first_value(head.headers, "content-type") or "").partition(";")
    match kind.strip().lower():
        case "application/json":
            return WholeAnswer(api)
        case "text/event-stream":
            return StreamedAnswer(api)
        case _:
            return None


def _reported(api: str, text: bytes | bytearray) -> int | None:
    try:
        return reported_prompt_tokens(api, read_object(text))
    except MalformedJson:
        return None
