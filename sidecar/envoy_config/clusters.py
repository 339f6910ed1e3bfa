"""The clusters: sidecar, internal listener, endpoint picker, workers."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from envoy_data_plane.envoy.config.cluster.v3 import (
    CircuitBreakers,
    CircuitBreakersThresholds,
    Cluster,
    ClusterDiscoveryType,
    ClusterDnsLookupFamily,
    ClusterLbPolicy,
    ClusterOriginalDstLbConfig,
)
from envoy_data_plane.envoy.config.core.v3 import Address as EnvoyAddress
from envoy_data_plane.envoy.config.core.v3 import (
    DataSource,
    HealthCheck,
    HealthCheckGrpcHealthCheck,
    Http1ProtocolOptions,
    Http2ProtocolOptions,
    KeepaliveSettings,
    Pipe,
    SocketAddress,
    TransportSocket,
)
from envoy_data_plane.envoy.config.core.v3 import HttpProtocolOptions as CommonHttpOptions
from envoy_data_plane.envoy.config.endpoint.v3 import (
    ClusterLoadAssignment,
    Endpoint,
    LbEndpoint,
    LocalityLbEndpoints,
)
from envoy_data_plane.envoy.extensions.transport_sockets.tls.v3 import (
    CertificateValidationContext,
    CommonTlsContext,
    SubjectAltNameMatcher,
    SubjectAltNameMatcherSanType,
    UpstreamTlsContext,
)
from envoy_data_plane.envoy.extensions.upstreams.http.v3 import (
    HttpProtocolOptions,
    HttpProtocolOptionsExplicitHttpConfig,
)
from envoy_data_plane.envoy.type.matcher.v3 import StringMatcher

from sidecar.envoy_config.addresses import TcpAddress, ip_of
from sidecar.envoy_config.deployment import PHASES
from sidecar.envoy_config.filters import PICKER_CLUSTER, SIDECAR_CLUSTER
from sidecar.envoy_config.routes import INTERNAL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sidecar.envoy_config.addresses import Address
    from sidecar.envoy_config.annotations import Annotations
    from sidecar.envoy_config.deployment import Deployment, SidecarTls

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
"""The gRPC service whose health is the sidecar's readiness."""

DESTINATION = "x-gateway-destination-endpoint"
"""The header in which an endpoint picker names the worker, as ip:port."""

_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
_NO_LIMIT = 100_000

_ABOUT_WORKERS = (
    "Workers. The idle timeout stays below the 5 s keep-alive of vLLM's HTTP server: without retries, a "
    "request on a connection the worker is about to close would fail. The connect timeout leaves room for a "
    "second and a third SYN (after 1 s and 3 s): a burst of new connections overflows a worker's listen "
    "backlog."
)
_ABOUT_PICKED = f"Each request goes to the address that the endpoint picker wrote into `{DESTINATION}`."


def all_clusters(notes: Annotations, deployment: Deployment) -> list[Cluster]:
    """Every cluster of the deployment."""
    clusters = [sidecar(notes, deployment)]
    if deployment.topology == "internal-listener" and deployment.internal is not None:
        clusters.append(_internal(notes, deployment.internal))
    if deployment.picker is not None:
        clusters.append(_picker(notes, deployment.picker))
    workers = [_worker(notes, deployment, phase) for phase in PHASES]
    about = _ABOUT_WORKERS if deployment.picker is None else f"{_ABOUT_WORKERS}\n{_ABOUT_PICKED}"
    return [*clusters, notes.head(workers[0], about), *workers[1:]]


def sidecar(notes: Annotations, deployment: Deployment) -> Cluster:
    """The ext_proc cluster."""
    second = timedelta(seconds=1)
    cluster = Cluster(
        name=SIDECAR_CLUSTER,
        type=_discovery(deployment.sidecars),
        connect_timeout=second,
        lb_policy=ClusterLbPolicy.LEAST_REQUEST,
        circuit_breakers=_unlimited(),
        health_checks=[
            HealthCheck(
                timeout=second,
                interval=second,
                no_traffic_interval=second,
                unhealthy_threshold=1,
                healthy_threshold=1,
                grpc_health_check=HealthCheckGrpcHealthCheck(service_name=SERVICE),
            )
        ],
        typed_extension_protocol_options={_OPTIONS: notes.pack(_grpc())},
        load_assignment=_endpoints(SIDECAR_CLUSTER, deployment.sidecars),
    )
    if deployment.sidecar_tls is not None:
        cluster.transport_socket = _tls(notes, deployment.sidecar_tls)
    notes.note(
        cluster,
        lb_policy=("One endpoint per sidecar process; requests differ in cost by orders of magnitude."),
        circuit_breakers=(
            "The defaults (1024) turn a burst of waiting requests into errors; `limits` of the sidecar "
            "answer 503 instead."
        ),
        health_checks="A draining sidecar reports NOT_SERVING; new requests then go to the other endpoints.",
    )
    return _resolved(notes, cluster)


def _internal(notes: Annotations, address: TcpAddress) -> Cluster:
    options = HttpProtocolOptions(
        common_http_protocol_options=CommonHttpOptions(idle_timeout=timedelta(seconds=60)),
        explicit_http_config=HttpProtocolOptionsExplicitHttpConfig(
            http_protocol_options=Http1ProtocolOptions(enable_trailers=True)
        ),
    )
    notes.note(
        options, common_http_protocol_options="far below the listener's hour: never a stale connection"
    )
    return Cluster(
        name=INTERNAL,
        type=ClusterDiscoveryType.STATIC,
        connect_timeout=timedelta(seconds=5),
        circuit_breakers=_unlimited(),
        typed_extension_protocol_options={_OPTIONS: notes.pack(options)},
        load_assignment=_endpoints(INTERNAL, [address]),
    )


def _picker(notes: Annotations, address: Address) -> Cluster:
    cluster = Cluster(
        name=PICKER_CLUSTER,
        type=_discovery([address]),
        connect_timeout=timedelta(seconds=1),
        circuit_breakers=_unlimited(),
        typed_extension_protocol_options={_OPTIONS: notes.pack(_grpc())},
        load_assignment=_endpoints(PICKER_CLUSTER, [address]),
    )
    notes.head(
        cluster,
        "Plaintext HTTP/2. The picker of the Gateway API inference extension serves TLS unless it is "
        "started with `--secure-serving=false`.",
    )
    return _resolved(notes, cluster)


def _worker(notes: Annotations, deployment: Deployment, phase: str) -> Cluster:
    options = HttpProtocolOptions(
        common_http_protocol_options=CommonHttpOptions(idle_timeout=timedelta(seconds=4)),
        explicit_http_config=HttpProtocolOptionsExplicitHttpConfig(
            http_protocol_options=Http1ProtocolOptions()
        ),
    )
    cluster = Cluster(
        name=phase,
        connect_timeout=timedelta(seconds=5),
        circuit_breakers=_unlimited(),
        typed_extension_protocol_options={_OPTIONS: notes.pack(options)},
    )
    if deployment.picker is not None:
        cluster.type = ClusterDiscoveryType.ORIGINAL_DST
        cluster.lb_policy = ClusterLbPolicy.CLUSTER_PROVIDED
        cluster.original_dst_lb_config = ClusterOriginalDstLbConfig(
            use_http_header=True, http_header_name=DESTINATION
        )
        return cluster
    addresses = next(found for name, found in deployment.workers.items() if name == phase)
    cluster.type = _discovery(addresses)
    cluster.load_assignment = _endpoints(phase, addresses)
    return _resolved(notes, cluster)


def _discovery(addresses: Sequence[Address]) -> ClusterDiscoveryType:
    named = any(isinstance(address, TcpAddress) and address.is_name for address in addresses)
    return ClusterDiscoveryType.STRICT_DNS if named else ClusterDiscoveryType.STATIC


def _resolved(notes: Annotations, cluster: Cluster) -> Cluster:
    """The cluster, told which addresses of a name to use."""
    if cluster.type == ClusterDiscoveryType.STRICT_DNS:
        cluster.dns_lookup_family = ClusterDnsLookupFamily.V4_PREFERRED
        notes.note(cluster, type="every address of a name is an endpoint")
        notes.note(cluster, dns_lookup_family="by default a name with an IPv6 address is tried there only")
    return cluster


def _endpoints(cluster: str, addresses: Sequence[Address]) -> ClusterLoadAssignment:
    endpoints = [LbEndpoint(endpoint=Endpoint(address=envoy_address(address))) for address in addresses]
    return ClusterLoadAssignment(
        cluster_name=cluster, endpoints=[LocalityLbEndpoints(lb_endpoints=endpoints)]
    )


def envoy_address(address: Address) -> EnvoyAddress:
    """An address as Envoy writes it."""
    if isinstance(address, TcpAddress):
        return EnvoyAddress(socket_address=SocketAddress(address=address.host, port_value=address.port))
    return EnvoyAddress(pipe=Pipe(path=address.path))


def _unlimited() -> CircuitBreakers:
    thresholds = CircuitBreakersThresholds(
        max_connections=_NO_LIMIT, max_pending_requests=_NO_LIMIT, max_requests=_NO_LIMIT
    )
    return CircuitBreakers(thresholds=[thresholds])


def _grpc() -> HttpProtocolOptions:
    keepalive = KeepaliveSettings(interval=timedelta(seconds=30), timeout=timedelta(seconds=5))
    return HttpProtocolOptions(
        explicit_http_config=HttpProtocolOptionsExplicitHttpConfig(
            http2_protocol_options=Http2ProtocolOptions(connection_keepalive=keepalive)
        )
    )


def _tls(notes: Annotations, tls: SidecarTls) -> TransportSocket:
    by_address = ip_of(tls.name) is not None
    kinds = SubjectAltNameMatcherSanType
    name = SubjectAltNameMatcher(
        san_type=kinds.IP_ADDRESS if by_address else kinds.DNS, matcher=StringMatcher(exact=tls.name)
    )
    validation = CertificateValidationContext(
        trusted_ca=DataSource(filename=tls.ca), match_typed_subject_alt_names=[name]
    )
    notes.note(
        validation,
        trusted_ca="read when Envoy starts",
        match_typed_subject_alt_names="Without it any certificate of this authority would do.",
    )
    context = UpstreamTlsContext(
        sni="" if by_address else tls.name,
        common_tls_context=notes.note(
            CommonTlsContext(alpn_protocols=["h2"], validation_context=validation),
            alpn_protocols="gRPC servers insist on it",
        ),
    )
    return TransportSocket(name="envoy.transport_sockets.tls", typed_config=notes.pack(context))
