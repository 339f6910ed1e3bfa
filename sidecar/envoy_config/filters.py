"""The HTTP filters: the sidecar's, the one that observes prompt token counts, the endpoint picker's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutationRules
from envoy_data_plane.envoy.config.core.v3 import GrpcService, GrpcServiceEnvoyGrpc
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import (
    ExternalProcessor,
    MetadataOptions,
    MetadataOptionsMetadataNamespaces,
    ProcessingMode,
    ProcessingModeBodySendMode,
    ProcessingModeHeaderSendMode,
)
from envoy_data_plane.envoy.extensions.filters.http.router.v3 import Router
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpFilter
from envoy_data_plane.envoy.type.matcher.v3 import RegexMatcher
from envoy_data_plane.envoy.type.v3 import HttpStatus, StatusCode

from sidecar.config.values import format_duration

if TYPE_CHECKING:
    from sidecar.envoy_config.annotations import Annotations
    from sidecar.envoy_config.deployment import Deployment

SIDECAR_CLUSTER = "epd_sidecar"
PICKER_CLUSTER = "picker"

_NAME = "envoy.filters.http.ext_proc"
_SEND, _SKIP = ProcessingModeHeaderSendMode.SEND, ProcessingModeHeaderSendMode.SKIP


def client_filters(notes: Annotations, deployment: Deployment) -> list[HttpFilter]:
    """What a request of a client passes before any endpoint picker and the router."""
    filters = [_sidecar(notes, deployment)]
    if deployment.observes_prompt_tokens:
        filters.append(_prompt_token_parity(notes, deployment))
    return filters


def picker(notes: Annotations, comment: str) -> HttpFilter:
    """The endpoint picker's filter."""
    mode = ProcessingMode(
        request_header_mode=_SEND,
        request_body_mode=ProcessingModeBodySendMode.FULL_DUPLEX_STREAMED,
        request_trailer_mode=_SEND,
        response_header_mode=_SKIP,
        response_trailer_mode=_SKIP,
    )
    config = ExternalProcessor(
        stat_prefix="picker",
        grpc_service=_service(PICKER_CLUSTER),
        status_on_error=HttpStatus(code=StatusCode.ServiceUnavailable),
        processing_mode=notes.show(mode, "response_body_mode"),
    )
    notes.show(config, "failure_mode_allow")
    notes.note(config, failure_mode_allow="without a pick there is no address to send the request to")
    return notes.head(HttpFilter(name=f"{_NAME}/picker", typed_config=notes.pack(config)), comment)


def router(notes: Annotations, comment: str = "") -> HttpFilter:
    """The last filter."""
    last = HttpFilter(name="envoy.filters.http.router", typed_config=notes.pack(Router()))
    return notes.head(last, comment) if comment else last


def _sidecar(notes: Annotations, deployment: Deployment) -> HttpFilter:
    config = ExternalProcessor(
        stat_prefix="epd_sidecar",
        grpc_service=_service(SIDECAR_CLUSTER),
        status_on_error=HttpStatus(code=StatusCode.ServiceUnavailable),
        processing_mode=_mode(notes, deployment),
        message_timeout=deployment.message_timeout,
        metadata_options=MetadataOptions(receiving_namespaces=_namespaces(deployment)),
        mutation_rules=notes.note(
            HeaderMutationRules(
                disallow_system=True,
                disallow_expression=RegexMatcher(regex="^(transfer-encoding|connection|x-forwarded-.*)$"),
                disallow_is_error=True,
            ),
            disallow_system=":path and the other pseudo-headers",
        ),
    )
    notes.show(config, "failure_mode_allow")
    notes.note(
        config,
        failure_mode_allow=(
            "Fail closed. A request that skips the sidecar reaches decode without KV of its media, and one "
            "that fails open after its body has been streamed away reaches it empty."
        ),
        status_on_error="the sidecar is down, not broken: clients may retry",
        message_timeout=_about_message_timeout(deployment),
        metadata_options="Without it the access-log record is dropped silently.",
        mutation_rules=(
            "What the sidecar never writes must not be writable: these would break the request's framing."
        ),
    )
    return HttpFilter(name=_NAME, typed_config=notes.pack(config))


def _mode(notes: Annotations, deployment: Deployment) -> ProcessingMode:
    body = ProcessingModeBodySendMode
    mode = ProcessingMode(
        request_header_mode=_SEND,
        request_body_mode=body.BUFFERED if deployment.buffered else body.FULL_DUPLEX_STREAMED,
        request_trailer_mode=_SEND,
        response_header_mode=_SEND if deployment.sees_answers else _SKIP,
        response_trailer_mode=_SKIP,
    )
    notes.show(mode, "response_body_mode")
    notes.note(
        mode,
        request_body_mode=(
            "the body in one message, up to the listener's buffer limit"
            if deployment.buffered
            else "no body limit, and the header reply may wait"
        ),
        request_trailer_mode=(
            "control headers in trailers are removed, too"
            if deployment.buffered
            else "FULL_DUPLEX_STREAMED requires it"
        ),
    )
    if deployment.sees_answers:
        notes.note(
            mode,
            response_header_mode="the prefill-decode step reads the head of the answer",
            response_body_mode="the answer itself, SSE included, never passes the sidecar",
        )
    else:
        notes.note(mode, response_header_mode="the answer, SSE included, never passes the sidecar")
    return mode


def _about_message_timeout(deployment: Deployment) -> str:
    if deployment.buffered:
        return (
            f"Above `ext_proc.request_deadline` ({format_duration(deployment.request_deadline)}), so that "
            "the sidecar's own 504 comes first. The default of 200 ms ends every request that has media."
        )
    return (
        "Not applied in FULL_DUPLEX_STREAMED, where the sidecar keeps `ext_proc.request_deadline` itself. In "
        "BUFFERED mode the default of 200 ms ends every request that has media."
    )


def _prompt_token_parity(notes: Annotations, deployment: Deployment) -> HttpFilter:
    config = ExternalProcessor(
        stat_prefix="prompt_token_parity",
        grpc_service=_service(SIDECAR_CLUSTER),
        observability_mode=True,
        failure_mode_allow=True,
        processing_mode=notes.show(
            ProcessingMode(
                request_header_mode=_SKIP,
                response_header_mode=_SEND,
                response_body_mode=ProcessingModeBodySendMode.STREAMED,
                request_trailer_mode=_SKIP,
                response_trailer_mode=_SEND,
            ),
            "request_body_mode",
        ),
        metadata_options=MetadataOptions(forwarding_namespaces=_namespaces(deployment)),
    )
    notes.note(
        config,
        observability_mode="copies: Envoy waits for no reply",
        failure_mode_allow="an answer does not depend on its observer",
        metadata_options="the sidecar's record travels with the copies: it says what was rendered",
    )
    observer = HttpFilter(name=f"{_NAME}/prompt-token-parity", typed_config=notes.pack(config))
    return notes.head(
        observer,
        "`observability.prompt_token_parity: warn`: the sidecar reads the usage in decode's answers.",
    )


def _service(cluster: str) -> GrpcService:
    return GrpcService(envoy_grpc=GrpcServiceEnvoyGrpc(cluster_name=cluster))


def _namespaces(deployment: Deployment) -> MetadataOptionsMetadataNamespaces:
    return MetadataOptionsMetadataNamespaces(untyped=[deployment.namespace])
