"""What a deployment says about the Envoy side, picked out of the settings tree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from sidecar.control_headers import ControlHeaders
from sidecar.extproc.admission import AdmissionRules

if TYPE_CHECKING:
    from sidecar.config import Settings


@dataclass(frozen=True, slots=True)
class ServiceRules:
    """What the deployment says about the Envoy side.

    Attributes:
        admission: which requests are ours.
        read_timeout: seconds for a whole upload.
        request_deadline: seconds from the headers to the decode request.
        metadata_namespace: namespace of the dynamic metadata.
        expose_upstream: whether clients see excerpts of upstream errors.
    """

    admission: AdmissionRules
    read_timeout: float
    request_deadline: float
    metadata_namespace: str
    expose_upstream: bool

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        """Pick the rules out of the settings tree."""
        control_headers = ControlHeaders(
            (*settings.headers.strip, *settings.pipeline.forward_response_headers)
        )
        return cls(
            admission=AdmissionRules(
                max_body=settings.ext_proc.max_request_body_size,
                phase_token=settings.gateway.phase_token,
                control_headers=control_headers,
                clear_route_cache=settings.ext_proc.clear_route_cache,
            ),
            read_timeout=settings.ext_proc.read_timeout,
            request_deadline=settings.ext_proc.request_deadline,
            metadata_namespace=settings.observability.metadata_namespace,
            expose_upstream=settings.errors.expose_upstream,
        )
