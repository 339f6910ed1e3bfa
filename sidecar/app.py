"""Puts the parts together: settings in, a running sidecar out."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack
from importlib.metadata import version
from typing import TYPE_CHECKING

from sidecar.admin import AdminServer
from sidecar.assembly import build_pipeline
from sidecar.extproc.listener import ListenError
from sidecar.extproc.rules import ServiceRules
from sidecar.extproc.server import Server
from sidecar.extproc.service import ExternalProcessor
from sidecar.limits import InFlightBudget
from sidecar.observability.metrics import Metrics
from sidecar.pipeline.parity import PromptTokenParity

if TYPE_CHECKING:
    from sidecar.config import Settings

logger = logging.getLogger(__name__)

_VERSION = version("epd-sidecar")


async def serve(settings: Settings) -> None:
    """Run until a signal has drained the server; raises ListenError when an address cannot be used."""
    budget = InFlightBudget(settings.limits.max_in_flight_requests, settings.limits.max_in_flight_bytes)
    metrics = Metrics(budget, _VERSION)
    async with AsyncExitStack() as stack:
        compares = settings.observability.prompt_token_parity == "warn"  # noqa: S105 - tokens of a prompt
        parity = None
        if compares:
            parity = PromptTokenParity(metrics.prompt_tokens_compared, metrics.prompt_tokens_differ)
        pipeline = await build_pipeline(settings, stack, user_agent=f"epd-sidecar/{_VERSION}", parity=parity)
        processor = ExternalProcessor(
            ServiceRules.from_settings(settings), pipeline.run, budget, metrics.observe, parity
        )
        server = Server(
            processor,
            settings.ext_proc.listen,
            cert_path=settings.ext_proc.tls.cert_path,
            drain_timeout=settings.ext_proc.drain_timeout,
        )
        admin = AdminServer(
            settings.admin.listen, exposition=metrics.exposition, ready=lambda: server.is_ready
        )
        try:
            await admin.start()
        except OSError as error:
            raise ListenError(
                f"admin.listen: cannot listen on {settings.admin.listen}: {error.strerror}"
            ) from error
        stack.push_async_callback(admin.stop)
        await server.start()
        logger.info(
            "started",
            extra={
                "version": _VERSION,
                "admin": settings.admin.listen,
                "gateway": settings.gateway.address,
                "steps": ",".join(step.type for step in settings.pipeline.steps),
            },
        )
        await server.serve()
    logger.info("stopped")
