"""Prefill calls that decode's answer has overtaken: they outlive the ext_proc calls they belong to."""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from sidecar.errors import SidecarError
from sidecar.extproc.frames import release_frames

if TYPE_CHECKING:
    from sidecar.limits import Ticket

logger = logging.getLogger(__name__)


class Companions:
    """Sees such calls through to their end; a failure is logged, for the client has its answer already.

    Attributes:
        calls_outlast_rewrites: whether an ext_proc call is known to go on after the rewrite, as it does where
            the filter sends the headers of answers.
    """

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()
        self._warned = False
        self.calls_outlast_rewrites = False

    def adopt(self, work: asyncio.Task[None], ticket: Ticket, request_id: str) -> None:
        """Take over a running call, which has a timeout of its own, and the ticket it holds its body on."""
        held = ExitStack()
        held.enter_context(ticket)
        self._running.add(work)
        work.add_done_callback(partial(self._end, held, request_id))

    def _end(self, held: ExitStack, request_id: str, work: asyncio.Task[None]) -> None:
        self._running.discard(work)
        held.close()
        if work.cancelled() or (error := work.exception()) is None:
            return
        if isinstance(error, SidecarError):
            logger.warning(
                "prefill failed after decode had answered",
                extra={
                    "request_id": request_id,
                    "error": error.code,
                    "reason": error.message,
                    "detail": error.detail,
                },
            )
        else:
            logger.error("prefill failed in the sidecar", exc_info=error, extra={"request_id": request_id})
        release_frames(error)

    def call_ended_early(self, request_id: str) -> None:
        """Note that a call ended before decode answered; says once what that may mean."""
        if self.calls_outlast_rewrites or self._warned:
            return
        self._warned = True
        logger.warning(
            "prefill cancelled: the call ended before decode answered, as in every call so far; unless the "
            "client has left, set the filter's processing_mode.response_header_mode to SEND",
            extra={"request_id": request_id},
        )

    async def ended(self) -> None:
        """Wait until none is left."""
        while self._running:
            await asyncio.wait(self._running)

    def cancel(self) -> None:
        """End them all: the process is about to stop."""
        for task in self._running:
            task.cancel()
