"""Prefill calls that decode's answer has overtaken: they outlive the ext_proc calls they belong to."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from sidecar.errors import SidecarError
from sidecar.extproc.frames import release_frames

if TYPE_CHECKING:
    from sidecar.limits import Ticket

logger = logging.getLogger(__name__)


class Companions:
    """Sees such calls through to their end; a failure is logged, for the client has its answer already.

    Attributes:
        have_seen_decode: whether any ext_proc call has brought decode's answer.
    """

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()
        self.have_seen_decode = False

    def adopt(self, work: asyncio.Task[None], ticket: Ticket, request_id: str) -> None:
        """Take over a running call with the ticket its answer is charged to; it has a timeout of its own."""
        task = asyncio.create_task(_see_through(work, ticket, request_id))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def ended(self) -> None:
        """Wait until none is left."""
        while self._running:
            await asyncio.wait(self._running)

    def cancel(self) -> None:
        """End them all: the process is about to stop."""
        for task in self._running:
            task.cancel()


async def _see_through(work: asyncio.Task[None], ticket: Ticket, request_id: str) -> None:
    with ticket:
        try:
            await work
        except SidecarError as error:
            logger.warning(
                "prefill failed after decode had answered",
                extra={
                    "request_id": request_id,
                    "error": error.code,
                    "reason": error.message,
                    "detail": error.detail,
                },
            )
            release_frames(error)
        except Exception:
            logger.exception("prefill failed in the sidecar", extra={"request_id": request_id})
