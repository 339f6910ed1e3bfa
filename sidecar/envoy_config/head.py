"""The comment at the head of a configuration: what it is, what it needs, how it was made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidecar.control_headers import PHASE_TOKEN
from sidecar.envoy_config.addresses import TcpAddress
from sidecar.pipeline.legs import PHASE_HEADER

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sidecar.envoy_config.addresses import Address
    from sidecar.envoy_config.deployment import Deployment, Part, Phase


def text(part: Part, deployment: Deployment, origin: str) -> str:
    """The lines of the comment, without `#`."""
    match part:
        case "bootstrap":
            about = _bootstrap(deployment)
        case "listeners":
            about = _LISTENERS
        case "filter":
            about = "\n".join(_filter(deployment))
        case "cluster":
            about = _CLUSTER
        case "access-log":
            about = _ACCESS_LOG
    return f"{about}\n\n{origin}"


_LISTENERS = """\
Envoy 1.40, for `static_resources.listeners`: everything but the clusters, which are the sidecar's
(`--part cluster`) and those of the phases, named in the routes."""

_FILTER = """\
Envoy 1.40, for `http_filters` of the listener that clients use: before any endpoint picker and the router. It
calls the cluster that `--part cluster` prints.

The connection manager around it needs what `--part listeners` shows: `stream_idle_timeout` above the deadline
of the sidecar; `normalize_path`, `merge_slashes` and `path_with_escaped_slashes_action: REJECT_REQUEST`, so
that the sidecar and the workers read the same path."""

_EARLY_REMOVAL = f"""\
And `early_header_mutation_extensions` that remove `{PHASE_HEADER}` and `{PHASE_TOKEN}`."""

_BUFFER = """\
The listener needs its `per_connection_buffer_limit_bytes`: Envoy answers larger bodies, and larger rewritten
ones, with 413."""

_CLUSTER = """\
Envoy 1.40, for `static_resources.clusters`: the sidecar, called by the filter that `--part filter` prints."""

_ACCESS_LOG = """\
Envoy 1.40, for `access_log` of the connection manager with the filter that `--part filter` prints."""


def _filter(deployment: Deployment) -> Iterator[str]:
    yield _FILTER
    if not deployment.shared:
        yield _EARLY_REMOVAL
    if deployment.buffered:
        yield _BUFFER


def _bootstrap(deployment: Deployment) -> str:
    match deployment.topology:
        case "internal-listener":
            title, prose = "the default, right for every gateway.", _INTERNAL_LISTENER
        case "reroute":
            title, prose = 'one proxy hop less for decode than "internal-listener".', _REROUTE
        case "shared-listener":
            title, prose = "for a gateway that has one listener only.", _SHARED_LISTENER
    title = f'Envoy 1.40 bootstrap, topology "{deployment.topology}": {title}'
    return f"{title}\n\n{_diagram(deployment)}\n\n{prose}"


_INTERNAL_LISTENER = """\
The client route's backend is the internal listener: the rewritten request re-enters Envoy there and matches
`EPP-Profile: decode`, as every sub-request of the sidecar matches its own phase. Re-entry costs one more hop
on loopback and works whatever the gateway does with per-route filters."""

_PICKER_AT_THE_LISTENER = """\
Right only where the endpoint picker is enabled at the listener: the filters a listener disables are fixed by
the route found when the headers arrive, and a picker that only the decode route enables is skipped."""

_REROUTE = f"""\
The sidecar sets `EPP-Profile: decode` and clears the route cache (`ext_proc.clear_route_cache: true`), so the
external listener itself picks the decode route.
{_PICKER_AT_THE_LISTENER}
Istio and Envoy Gateway attach per-route filters that way: use "internal-listener" there."""

_SHARED_LISTENER = f"""\
The sidecar sends every sub-request with `{PHASE_TOKEN}` to the listener the clients use; the filter runs
on every route and lets only requests with the right token choose their phase. Needs in the sidecar's
configuration:
  gateway:
    address: http://HOST:PORT of this listener
    phase_token: file:/run/secrets/epd-phase-token   # or SIDECAR__GATEWAY__PHASE_TOKEN
  ext_proc: {{clear_route_cache: true}}
{_PICKER_AT_THE_LISTENER}"""


def _diagram(deployment: Deployment) -> str:
    listen, sidecars = _place(deployment.listen), _places(deployment.sidecars)
    picker = "" if deployment.picker is None else f"endpoint picker {_place(deployment.picker)}"
    after_sidecar = f", then {picker}" if picker else ""
    decode = f"decode{_workers(deployment, 'decode')}"
    others = f"encode{_workers(deployment, 'encode')}, prefill{_workers(deployment, 'prefill')}"
    if deployment.internal is None:
        lines = [
            f"client  -> {listen} [sidecar {sidecars}{after_sidecar}] -> {decode}",
            f"sidecar -> {listen} [the same filters; the token lets its sub-requests pass] -> {others}",
        ]
    else:
        internal = f"internal {_place(deployment.internal)}{f' [{picker}]' if picker else ''}"
        if deployment.topology == "internal-listener":
            client = f"external {listen} [sidecar {sidecars}] -> {internal}"
        else:
            client = f"external {listen} [sidecar {sidecars}{after_sidecar}]"
        lines = [f"client  -> {client} -> {decode}", f"sidecar -> {internal} -> {others}"]
    if deployment.render:
        lines.append(f"sidecar -> render {deployment.render}")
    return "\n".join(f"  {line}" for line in lines)


def _workers(deployment: Deployment, phase: Phase) -> str:
    return "" if deployment.picker else f" {_places(deployment.workers[phase])}"


def _places(addresses: Sequence[Address]) -> str:
    more = f" and {len(addresses) - 1} more" if len(addresses) > 1 else ""
    return f"{_place(addresses[0])}{more}"


def _place(address: Address) -> str:
    """The address; on loopback the port is enough."""
    return f":{address.port}" if isinstance(address, TcpAddress) and address.is_loopback else str(address)
