"""The listeners: the one clients use, and the internal one of the sub-requests."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutation as Mutation
from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutationRemoveOnMatch
from envoy_data_plane.envoy.config.core.v3 import Http1ProtocolOptions, TypedExtensionConfig
from envoy_data_plane.envoy.config.listener.v3 import Filter, FilterChain, Listener
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import (
    HttpConnectionManager,
    HttpConnectionManagerPathWithEscapedSlashesAction,
    HttpFilter,
)
from envoy_data_plane.envoy.extensions.http.early_header_mutation.header_mutation.v3 import HeaderMutation
from envoy_data_plane.envoy.type.matcher.v3 import StringMatcher

from sidecar.config.values import format_duration, format_megabytes
from sidecar.control_headers import PHASE_TOKEN
from sidecar.envoy_config.access_log import access_log
from sidecar.envoy_config.clusters import DESTINATION, envoy_address
from sidecar.envoy_config.deployment import CHUNK
from sidecar.envoy_config.filters import client_filters, picker, router
from sidecar.envoy_config.routes import INTERNAL, client_routes, internal_routes
from sidecar.pipeline.legs import PHASE_HEADER

if TYPE_CHECKING:
    from sidecar.envoy_config.addresses import TcpAddress
    from sidecar.envoy_config.annotations import Annotations
    from sidecar.envoy_config.deployment import Deployment, Topology

_CLIENT_SLOT: dict[Topology, str] = {
    "internal-listener": "No endpoint picker here: this listener picks no worker. See the internal listener.",
    "reroute": (
        "An endpoint picker (a second ext_proc filter) for decode goes HERE, after the sidecar and before "
        "the router, enabled: it sees the rewritten request. Never set `disabled: true` on the filter "
        "itself: a client route that must not run it uses ExtProcPerRoute `disabled: true`, the decode "
        "route nothing."
    ),
    "shared-listener": (
        "An endpoint picker (a second ext_proc filter) goes HERE, after the sidecar and before the router, "
        "enabled: it sees the rewritten decode request and every sub-request. Never `disabled: true` on it."
    ),
}
"""Where an endpoint picker belongs on the listener clients use, when there is none."""

_CLIENT_PICKER: dict[Topology, str] = {
    "reroute": (
        "The endpoint picker, for decode: it sees the rewritten request. Never set `disabled: true` on the "
        "filter itself: a client route that must not run it uses ExtProcPerRoute `disabled: true`, the "
        "decode route nothing."
    ),
    "shared-listener": (
        "The endpoint picker: it sees the rewritten decode request and every sub-request. Never `disabled: "
        "true` on it."
    ),
}

_EVERY_PHASE = (
    "every request of every phase, the re-entered decode request included, passes this listener once."
)
_INTERNAL_SLOT: dict[Topology, str] = {
    "internal-listener": (
        f"An endpoint picker (a second ext_proc filter) goes HERE, before the router: {_EVERY_PHASE}"
    ),
    "reroute": "An endpoint picker for encode and prefill goes HERE, before the router.",
}
_INTERNAL_PICKER: dict[Topology, str] = {
    "internal-listener": f"The endpoint picker: {_EVERY_PHASE}",
    "reroute": "The endpoint picker, for encode and prefill.",
}


def all_listeners(notes: Annotations, deployment: Deployment) -> list[Listener]:
    """Every listener of the deployment, the clients' first."""
    listeners = [_clients(notes, deployment)]
    if deployment.internal is not None:
        listeners.append(_internal(notes, deployment, deployment.internal))
    return listeners


def _clients(notes: Annotations, deployment: Deployment) -> Listener:
    manager = HttpConnectionManager(
        stat_prefix=deployment.client_listener,
        stream_idle_timeout=deployment.stream_idle_timeout,
        request_headers_timeout=timedelta(seconds=30),
        normalize_path=True,
        merge_slashes=True,
        path_with_escaped_slashes_action=HttpConnectionManagerPathWithEscapedSlashesAction.REJECT_REQUEST,
        preserve_external_request_id=True,
        http_protocol_options=Http1ProtocolOptions(enable_trailers=True),
        use_remote_address=True,
        access_log=[access_log(notes, deployment)],
        http_filters=_client_filters(notes, deployment),
        route_config=client_routes(notes, deployment),
    )
    notes.note(
        manager,
        stream_idle_timeout=(
            "Also runs while the sidecar works and while a non-streaming decode generates: keep it above "
            f"`ext_proc.request_deadline` ({format_duration(deployment.request_deadline)}) and above the "
            "longest silent generation."
        ),
        normalize_path=(
            "The sidecar and the workers must read the same path: without these three, "
            "`/v1/chat%2Fcompletions` is a foreign path to the filter and a chat request to the worker."
        ),
        preserve_external_request_id=(
            "A client's x-request-id is kept (the sidecar validates it), so that logs can be joined."
        ),
        http_protocol_options=(
            "Trailers of HTTP/1.1 requests reach the filters, as those of HTTP/2 requests do."
        ),
        use_remote_address=(
            "The client's address is the connection's, and x-envoy-... headers of clients are dropped."
        ),
    )
    if deployment.shared:
        notes.note(
            manager,
            http_filters=(
                "No header is stripped before these: it would strip the requests of the sidecar. The "
                "sidecar removes a client's control headers and picks the route again; `x-epd-hop` without "
                "the token is a loop, answered 508."
            ),
        )
    else:
        manager.early_header_mutation_extensions = [_early_removal(notes, deployment)]
        notes.note(
            manager,
            early_header_mutation_extensions=(
                "Before routing and before every filter: no client chooses a phase or presents a token. The "
                "hop guard `x-epd-hop` must stay: it turns a `gateway.address` that points at this listener "
                "by mistake into a 508 instead of an endless loop. A client that forges it gets that 508 "
                "itself and reaches nobody."
            ),
        )
    listener = _listener(
        notes, deployment.client_listener, deployment.listen, manager, deployment.buffer_limit
    )
    return notes.note(listener, per_connection_buffer_limit_bytes=_about_limit(deployment))


def _client_filters(notes: Annotations, deployment: Deployment) -> list[HttpFilter]:
    filters = client_filters(notes, deployment)
    topology = deployment.topology
    if deployment.picker is not None and topology in _CLIENT_PICKER:
        return [*filters, picker(notes, _CLIENT_PICKER[topology]), router(notes)]
    return [*filters, router(notes, _CLIENT_SLOT[topology])]


def _early_removal(notes: Annotations, deployment: Deployment) -> TypedExtensionConfig:
    mutations = [Mutation(remove=PHASE_HEADER), Mutation(remove=PHASE_TOKEN)]
    if deployment.picker is not None:
        # The sidecar removes it as well; where it is an address to connect to, one lock is not enough.
        named = HeaderMutationRemoveOnMatch(key_matcher=StringMatcher(prefix=DESTINATION))
        mutations.append(Mutation(remove_on_match=named))
    return TypedExtensionConfig(
        name="envoy.http.early_header_mutation.header_mutation",
        typed_config=notes.pack(HeaderMutation(mutations=mutations)),
    )


def _internal(notes: Annotations, deployment: Deployment, address: TcpAddress) -> Listener:
    topology = deployment.topology
    if deployment.picker is None:
        filters = [router(notes, _INTERNAL_SLOT[topology])]
    else:
        filters = [picker(notes, _INTERNAL_PICKER[topology]), router(notes)]
    manager = HttpConnectionManager(
        stat_prefix=INTERNAL,
        stream_idle_timeout=deployment.stream_idle_timeout,
        http_protocol_options=Http1ProtocolOptions(enable_trailers=True),
        http_filters=filters,
        route_config=internal_routes(notes, deployment),
    )
    listener = _listener(notes, INTERNAL, address, manager, CHUNK)
    return notes.note(
        listener,
        address=(
            "The sidecar's gateway (`gateway.address`). A client that reaches it chooses phases at will: "
            "never expose it."
        ),
    )


def _listener(
    notes: Annotations, name: str, address: TcpAddress, manager: HttpConnectionManager, limit: int
) -> Listener:
    chain = Filter(name="envoy.filters.network.http_connection_manager", typed_config=notes.pack(manager))
    return Listener(
        name=name,
        address=envoy_address(address),
        per_connection_buffer_limit_bytes=limit,
        filter_chains=[FilterChain(filters=[chain])],
    )


def _about_limit(deployment: Deployment) -> str:
    if deployment.buffered:
        return (
            "The body limit in BUFFERED mode: `ext_proc.max_request_body_size` "
            f"({format_megabytes(deployment.max_body)} MB) and room for what the sidecar adds. Envoy answers "
            "a longer body 413 itself, in plain text, and a rewritten one that has grown beyond it as well: "
            "media that the sidecar inlines count."
        )
    return (
        "Size of the chunks the filter sends to the sidecar. It limits no body in FULL_DUPLEX_STREAMED: the "
        "sidecar does (`ext_proc.max_request_body_size`). In BUFFERED mode it is the body limit, and "
        "Envoy's own 413 lies beyond it."
    )
