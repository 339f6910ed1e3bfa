"""The whole configuration, or one part of it, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from envoy_data_plane.envoy.config.bootstrap.v3 import Admin, Bootstrap, BootstrapStaticResources

from sidecar.envoy_config import head
from sidecar.envoy_config.access_log import access_log
from sidecar.envoy_config.annotations import Annotations
from sidecar.envoy_config.clusters import all_clusters, envoy_address, sidecar
from sidecar.envoy_config.document import render
from sidecar.envoy_config.filters import client_filters
from sidecar.envoy_config.listeners import all_listeners

if TYPE_CHECKING:
    from sidecar.envoy_config.deployment import Deployment, Part


def write(part: Part, deployment: Deployment, origin: str) -> str:
    """YAML with comments.

    Args:
        part: what to write.
        deployment: what it is about.
        origin: how the text was made, one or more lines for its head.
    """
    notes = Annotations()
    match part:
        case "bootstrap":
            tree = notes.document(_bootstrap(notes, deployment))
        case "listeners":
            tree = notes.document([*all_listeners(notes, deployment)])
        case "filter":
            tree = notes.document(list(client_filters(notes, deployment)))
        case "cluster":
            tree = notes.document([sidecar(notes, deployment)])
        case "access-log":
            tree = notes.document([access_log(notes, deployment)])
    return render(tree, head.text(part, deployment, origin))


def _bootstrap(notes: Annotations, deployment: Deployment) -> Bootstrap:
    admin = Admin(address=envoy_address(deployment.admin_listen))
    notes.note(
        admin,
        address=(
            "Unauthenticated and able to stop the process: loopback only."
            if deployment.admin_listen.is_loopback
            else "Unauthenticated and able to stop the process: let nobody but its operators reach it."
        ),
    )
    return Bootstrap(
        admin=admin,
        static_resources=BootstrapStaticResources(
            listeners=all_listeners(notes, deployment), clusters=all_clusters(notes, deployment)
        ),
    )
