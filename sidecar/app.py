"""Puts the parts together: settings in, a running sidecar out."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack
from importlib.metadata import version
from typing import TYPE_CHECKING

from sidecar.admin import AdminServer
from sidecar.connectors.ec import ec_connector
from sidecar.connectors.kv import kv_connector
from sidecar.control_headers import ControlHeaders
from sidecar.extproc.listener import ListenError
from sidecar.extproc.rules import ServiceRules
from sidecar.extproc.server import Server
from sidecar.extproc.service import ExternalProcessor
from sidecar.limits import InFlightBudget
from sidecar.observability.metrics import Metrics
from sidecar.pipeline.runner import LegRules, Pipeline, TimedStep
from sidecar.pipeline.steps.conditional_decode import ConditionalDecodeStep
from sidecar.pipeline.steps.decode import DecodeStep
from sidecar.pipeline.steps.encode import EncodeStep
from sidecar.pipeline.steps.media import MediaStep
from sidecar.pipeline.steps.prefill import PrefillStep
from sidecar.pipeline.steps.render import RenderStep
from sidecar.pipeline.tensor_memory import TensorMemory
from sidecar.upstream.addresses import AddressPolicy
from sidecar.upstream.client import Upstream
from sidecar.upstream.media import MediaFetcher

if TYPE_CHECKING:
    from sidecar.config import Settings

logger = logging.getLogger(__name__)

_VERSION = version("epd-sidecar")


async def serve(settings: Settings) -> None:
    """Run until a signal has drained the server; raises ListenError when an address cannot be used."""
    budget = InFlightBudget(settings.limits.max_in_flight_requests, settings.limits.max_in_flight_bytes)
    metrics = Metrics(budget, _VERSION)
    async with AsyncExitStack() as stack:
        pipeline = await build_pipeline(settings, stack)
        processor = ExternalProcessor(
            ServiceRules.from_settings(settings), pipeline.run, budget, metrics.observe
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


async def build_pipeline(settings: Settings, stack: AsyncExitStack) -> Pipeline:
    """The configured steps, with their upstreams started on `stack`."""
    rules = settings.pipeline
    gateway = await _started(
        _gateway(settings, head_timeout=settings.gateway.timeout, timeout_key="gateway.timeout"), stack
    )
    steps: list[TimedStep] = []
    if (media := rules.media) is not None:
        fetcher = MediaFetcher(
            AddressPolicy(media.allow_private_networks),
            allowed_domains=media.allowed_domains,
            download_timeout=media.download_timeout,
            max_download_size=media.max_download_size,
            user_agent=f"epd-sidecar/{_VERSION}",
        )
        stack.push_async_callback(fetcher.close)
        steps.append(TimedStep(MediaStep(media, fetcher), None))
    if (render := rules.render) is not None:
        upstream = await _started(
            Upstream(
                render.address,
                head_timeout=render.timeout,
                timeout_key="timeout of the render step",
                address_key="address of the render step",
                max_idle=render.max_idle_conns_per_host,
                idle_timeout=render.idle_conn_timeout,
            ),
            stack,
        )
        tokens_in = any(step and not step.use_openai_format for step in (rules.encode, rules.prefill))
        step = RenderStep(render, upstream, tokens_in=tokens_in, memory=TensorMemory())
        steps.append(TimedStep(step, render.timeout))
    if (conditional := rules.conditional_decode) is not None:
        # Its own client: the head of an answer that is not streamed comes after all of its tokens.
        probe = _gateway(
            settings,
            head_timeout=conditional.timeout,
            timeout_key="timeout of the conditional-decode step",
        )
        steps.append(TimedStep(ConditionalDecodeStep(await _started(probe, stack)), conditional.timeout))
    if (encode := rules.encode) is not None:
        steps.append(TimedStep(EncodeStep(encode, gateway), None))
    if (prefill := rules.prefill) is not None:
        ec = ec_connector(prefill.ec_connector, trust_descriptors=rules.ec_trust_descriptors)
        kv = kv_connector(prefill.kv_connector)
        steps.append(TimedStep(PrefillStep(prefill, gateway, kv, ec), prefill.timeout))
    if (decode := rules.decode) is not None:
        # Without a prefill step nobody has a cache for decode to fetch.
        fetched_by = kv_connector(decode.kv_connector) if rules.prefill is not None else None
        steps.append(TimedStep(DecodeStep(fetched_by), None))
    control_headers = ControlHeaders((*settings.headers.strip, *rules.forward_response_headers))
    return Pipeline(
        steps,
        LegRules(control_headers, settings.gateway.phase_token, rules.forward_response_headers),
        mixed_spans_are_safe=rules.prefill is not None and rules.prefill.sparse_spans == "verbatim",
    )


def _gateway(settings: Settings, *, head_timeout: float, timeout_key: str) -> Upstream:
    return Upstream(
        settings.gateway.address,
        head_timeout=head_timeout,
        timeout_key=timeout_key,
        address_key="gateway.address",
        max_idle=settings.gateway.max_idle_conns_per_host,
        idle_timeout=settings.gateway.idle_conn_timeout,
    )


async def _started(upstream: Upstream, stack: AsyncExitStack) -> Upstream:
    await upstream.start()
    stack.push_async_callback(upstream.stop)
    return upstream
