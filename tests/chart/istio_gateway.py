"""An Envoy as Istio would configure it: a Gateway's listener with the patches of the chart's EnvoyFilters.

The patches are applied the way istiod does it: filters in the order of the patches, messages merged, repeated
fields appended. What istiod makes of a Gateway is reduced to what the patches touch.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from tests.e2e.e2e_stack import manager, named

if TYPE_CHECKING:
    from tests.chart.chart_rendering import Document

HTTP = "type.googleapis.com/envoy.extensions.filters.http"
MESH_LOG = {
    "name": "envoy.access_loggers.file",
    "typed_config": {
        "@type": "type.googleapis.com/envoy.extensions.access_loggers.file.v3.FileAccessLog",
        "path": "/dev/stderr",
    },
}
"""The access log that the mesh has configured."""


def as_istio_has_it(bootstrap: dict[str, Any], listener: str) -> None:
    """Reduce a listener's connection manager to its routes, with filters of Istio's before them."""
    ours = manager(bootstrap, listener)
    kept = {key: ours[key] for key in ("@type", "stat_prefix", "route_config")}
    ours.clear()
    ours |= kept | {
        "use_remote_address": True,
        "access_log": [copy.deepcopy(MESH_LOG)],
        "http_filters": [
            {"name": "envoy.filters.http.cors", "typed_config": {"@type": f"{HTTP}.cors.v3.Cors"}},
            {"name": "envoy.filters.http.fault", "typed_config": {"@type": f"{HTTP}.fault.v3.HTTPFault"}},
            {"name": "envoy.filters.http.router", "typed_config": {"@type": f"{HTTP}.router.v3.Router"}},
        ],
    }


def patch(bootstrap: dict[str, Any], listener: str, envoy_filter: Document) -> None:
    """Apply an EnvoyFilter to a listener."""
    place = named(bootstrap["static_resources"]["listeners"], listener)
    ours = manager(bootstrap, listener)
    for item in copy.deepcopy(envoy_filter["spec"]["configPatches"]):
        value = item["patch"]["value"]
        match item["applyTo"], item["patch"]["operation"]:
            case "HTTP_FILTER", "INSERT_FIRST":
                ours["http_filters"].insert(0, value)
            case "HTTP_FILTER", "INSERT_BEFORE":
                behind = item["match"]["listener"]["filterChain"]["filter"]["subFilter"]["name"]
                names = [present["name"] for present in ours["http_filters"]]
                ours["http_filters"].insert(names.index(behind), value)
            case "NETWORK_FILTER", "MERGE":
                merge(ours, value["typed_config"])
            case "LISTENER", "MERGE":
                merge(place, value)
            case unknown:
                raise ValueError(unknown)


def merge(message: dict[str, Any], more: dict[str, Any]) -> None:
    """What protobuf does when it merges two messages."""
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(message.get(key), dict):
            merge(message[key], value)
        elif isinstance(value, list):
            message[key] = [*message.get(key, []), *value]
        else:
            message[key] = value


def add_cluster(bootstrap: dict[str, Any], name: str) -> None:
    """The sidecar's cluster under Istio's name, next to the one whose health is waited for."""
    clusters = bootstrap["static_resources"]["clusters"]
    cluster = copy.deepcopy(named(clusters, "epd_sidecar"))
    cluster["name"] = cluster["load_assignment"]["cluster_name"] = name
    clusters.append(cluster)
