"""Calls of filters in observability mode: copies of answers, which nobody waits for."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from sidecar.extproc.observer import expected_prompt, usage_reader
from sidecar.extproc.protocol import AnswerHead, AnswerPiece, CallEnded, Observed

if TYPE_CHECKING:
    from sidecar.extproc.channel import Channel
    from sidecar.extproc.observer import UsageReader
    from sidecar.extproc.protocol import Event
    from sidecar.pipeline.parity import PromptTokenParity

logger = logging.getLogger(__name__)

_MOST_HELD = 64 << 20
"""Bytes that all observed answers together may hold; an answer that comes on top is not compared."""


class Observation:
    """Reads such calls without ever answering them.

    A call ends as soon as nothing more of its answer matters: Envoy then copies no more of it, and need not
    keep the call for its `deferred_close_timeout`.

    Args:
        parity: compares the prompt tokens of decode's answers; None reads the calls and does nothing.
        namespace: of the record in the metadata that the filter forwards.
    """

    def __init__(self, parity: PromptTokenParity | None, namespace: str) -> None:
        self._parity = parity
        self._namespace = namespace
        self._running: set[asyncio.Task[object]] = set()
        self._ended = False
        self._held = 0
        self._saw_pieces = False
        self._warned = False

    async def watch(self, channel: Channel, first: Observed) -> None:
        """Read one call whose first message was `first`; returns when the call may end."""
        task = asyncio.current_task()
        if task is None or self._ended:
            return
        self._running.add(task)
        try:
            if self._parity is None:
                await _swallow(channel)
            else:
                await self._compare(self._parity, channel, first)
        except asyncio.CancelledError:
            if not self._ended:
                raise
            task.uncancel()
        except Exception:
            logger.exception("an observed answer cannot be read")
        finally:
            self._running.discard(task)

    def end(self) -> None:
        """End all such calls, those still to come included: the process is about to stop."""
        self._ended = True
        for task in self._running:
            task.cancel()

    async def _compare(self, parity: PromptTokenParity, channel: Channel, first: Observed) -> None:
        event: Event = first
        while isinstance(event, Observed) and not isinstance(event.part, AnswerHead):
            # A filter may mirror the request as well.
            event = await channel.read()
        if not isinstance(event, Observed) or not isinstance(event.part, AnswerHead):
            return
        head = event.part
        prompt = expected_prompt(head, head.metadata.get(self._namespace, {}))
        reader = None if prompt is None else usage_reader(head, prompt.api)
        if prompt is None or reader is None or head.end_of_stream:
            return
        try:
            if await self._read(channel, reader):
                parity.compare("decode", prompt, reader.reported())
        finally:
            self._held -= reader.held

    async def _read(self, channel: Channel, reader: UsageReader) -> bool:
        """Read the answer to its end; False when it is not worth it."""
        while True:
            match await channel.read():
                case Observed(AnswerPiece(data, end_of_stream)):
                    self._saw_pieces = True
                    before = reader.held
                    worthwhile = reader.receive(data)
                    self._held += reader.held - before
                    if not worthwhile or self._held > _MOST_HELD:
                        return False
                    if end_of_stream:
                        return True
                case CallEnded():
                    self._check_body_mode()
                    return True
                case _:
                    return False

    def _check_body_mode(self) -> None:
        """Say once that no answer has ever come with its body."""
        if not self._saw_pieces and not self._warned:
            self._warned = True
            logger.warning(
                "an observing filter sends heads of answers without their bodies; set its processing_mode."
                "response_body_mode to STREAMED, or no prompt tokens of decode are compared"
            )


async def _swallow(channel: Channel) -> None:
    while not isinstance(await channel.read(), CallEnded):
        pass
