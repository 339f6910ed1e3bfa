"""Builds the pipeline a configuration asks for: its steps, with what each of them works with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidecar.connectors.ec import ec_connector
from sidecar.connectors.kv import kv_connector
from sidecar.control_headers import ControlHeaders
from sidecar.pipeline.prefill_request import PrefillRequests
from sidecar.pipeline.runner import LegRules, Pipeline, TimedStep
from sidecar.pipeline.steps.conditional_decode import ConditionalDecodeStep
from sidecar.pipeline.steps.decode import DecodeStep
from sidecar.pipeline.steps.encode import EncodeStep
from sidecar.pipeline.steps.media import MediaStep
from sidecar.pipeline.steps.prefill import PrefillStep
from sidecar.pipeline.steps.prefill_decode import PrefillDecodeStep
from sidecar.pipeline.steps.render import RenderStep
from sidecar.pipeline.tensor_memory import TensorMemory
from sidecar.upstream.addresses import AddressPolicy
from sidecar.upstream.client import Upstream
from sidecar.upstream.media import MediaFetcher

if TYPE_CHECKING:
    from contextlib import AsyncExitStack

    from sidecar.config import (
        ConditionalDecodeParams,
        MediaParams,
        PrefillDecodeParams,
        PrefillParams,
        RenderParams,
        Settings,
    )
    from sidecar.pipeline.parity import PromptTokenParity


async def build_pipeline(
    settings: Settings, stack: AsyncExitStack, *, user_agent: str, parity: PromptTokenParity | None
) -> Pipeline:
    """The configured steps.

    Args:
        settings: the whole configuration.
        stack: holds the upstreams, which are started here.
        user_agent: what media servers are told.
        parity: compares prompt token counts; None to compare none.
    """
    rules = settings.pipeline
    gateway = await _started(
        _gateway(settings, head_timeout=settings.gateway.timeout, timeout_key="gateway.timeout"), stack
    )
    steps: list[TimedStep] = []
    if rules.media is not None:
        steps.append(_media(rules.media, stack, user_agent))
    if rules.render is not None:
        steps.append(await _render(rules.render, settings, stack))
    if rules.conditional_decode is not None:
        steps.append(await _conditional_decode(rules.conditional_decode, settings, stack))
    if (encode := rules.encode) is not None:
        steps.append(TimedStep(EncodeStep(encode, gateway), None))
    if (prefill := rules.prefill) is not None:
        requests = _prefill_requests(prefill, settings)
        kv = kv_connector(prefill.kv_connector)
        steps.append(TimedStep(PrefillStep(requests, gateway, kv, parity), prefill.timeout))
    if (decode := rules.decode) is not None:
        # Without a prefill step nobody has a cache for decode to fetch.
        fetched_by = kv_connector(decode.kv_connector) if rules.prefill is not None else None
        steps.append(TimedStep(DecodeStep(fetched_by), None))
    if (both := rules.prefill_decode) is not None:
        concurrent = PrefillDecodeStep(
            _prefill_requests(both, settings),
            gateway,
            bootstrap_port=both.bootstrap_port,
            timeout=both.timeout,
            parity=parity,
        )
        steps.append(TimedStep(concurrent, both.timeout))
    prefilling = rules.prefill or rules.prefill_decode
    control_headers = ControlHeaders((*settings.headers.strip, *rules.forward_response_headers))
    return Pipeline(
        steps,
        LegRules(control_headers, settings.gateway.phase_token, rules.forward_response_headers),
        mixed_spans_are_safe=prefilling is not None and prefilling.sparse_spans == "verbatim",
    )


def _media(params: MediaParams, stack: AsyncExitStack, user_agent: str) -> TimedStep:
    fetcher = MediaFetcher(
        AddressPolicy(params.allow_private_networks),
        allowed_domains=params.allowed_domains,
        download_timeout=params.download_timeout,
        max_download_size=params.max_download_size,
        user_agent=user_agent,
    )
    stack.push_async_callback(fetcher.close)
    return TimedStep(MediaStep(params, fetcher), None)


async def _render(params: RenderParams, settings: Settings, stack: AsyncExitStack) -> TimedStep:
    service = Upstream(
        params.address,
        head_timeout=params.timeout,
        timeout_key="timeout of the render step",
        address_key="address of the render step",
        max_idle=params.max_idle_conns_per_host,
        idle_timeout=params.idle_conn_timeout,
    )
    rules = settings.pipeline
    formatted = (rules.encode, rules.prefill, rules.prefill_decode)
    tokens_in = any(step and not step.use_openai_format for step in formatted)
    upstream = await _started(service, stack)
    return TimedStep(RenderStep(params, upstream, tokens_in=tokens_in, memory=TensorMemory()), params.timeout)


async def _conditional_decode(
    params: ConditionalDecodeParams, settings: Settings, stack: AsyncExitStack
) -> TimedStep:
    # Its own client: the head of an answer that is not streamed comes after all of its tokens.
    probe = _gateway(
        settings, head_timeout=params.timeout, timeout_key="timeout of the conditional-decode step"
    )
    return TimedStep(ConditionalDecodeStep(await _started(probe, stack)), params.timeout)


def _prefill_requests(params: PrefillParams | PrefillDecodeParams, settings: Settings) -> PrefillRequests:
    return PrefillRequests(
        openai=params.use_openai_format,
        mixed_spans_are_safe=params.sparse_spans == "verbatim",
        ec=ec_connector(params.ec_connector, trust_descriptors=settings.pipeline.ec_trust_descriptors),
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
