"""The access log: one JSON line per request, with every key of the sidecar's record."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from envoy_data_plane.envoy.config.accesslog.v3 import AccessLog
from envoy_data_plane.envoy.config.core.v3 import SubstitutionFormatString
from envoy_data_plane.envoy.extensions.access_loggers.file.v3 import FileAccessLog
from envoy_data_plane.google.protobuf import Struct, Value

from sidecar.observability.record import AccessRecord

if TYPE_CHECKING:
    from sidecar.envoy_config.annotations import Annotations
    from sidecar.envoy_config.deployment import Deployment

_OF_ENVOY = {
    "start_time": "%START_TIME%",
    "method": "%REQ(:METHOD)%",
    "path": "%PATH(NQ)%",
    "code": "%RESPONSE_CODE%",
    "details": "%RESPONSE_CODE_DETAILS%",
    "flags": "%RESPONSE_FLAGS%",
    "duration_ms": "%DURATION%",
    "route": "%ROUTE_NAME%",
    "upstream_cluster": "%UPSTREAM_CLUSTER%",
    "upstream_host": "%UPSTREAM_HOST%",
    "ext_proc": "%FILTER_STATE(envoy.filters.http.ext_proc:PLAIN)%",
}
"""Log key -> Envoy's command operator."""


def access_log(notes: Annotations, deployment: Deployment) -> AccessLog:
    """The log of the listener clients use, on Envoy's standard output."""
    record = [item.name for item in fields(AccessRecord)]
    operators = _OF_ENVOY | {key: f"%DYNAMIC_METADATA({deployment.namespace}:{key})%" for key in record}
    line = notes.note(
        Struct(fields={key: Value(string_value=operator) for key, operator in operators.items()}),
        path="without the query string, which may hold secrets",
        details="epd_... when the sidecar answered with an error",
    )
    notes.note(
        line,
        **{record[0]: "The sidecar's record. Null in all of them: the sidecar never answered this request."},
    )
    json_lines = notes.note(
        SubstitutionFormatString(json_format=line),
        json_format=(
            "One line per request, the sidecar's own sub-requests included (outcome `passthrough`, the phase "
            "in `route`); `epd-sidecar report FILE` prints a table."
            if deployment.shared
            else "One line per request; `epd-sidecar report FILE` prints it as a table."
        ),
    )
    return AccessLog(
        name="envoy.access_loggers.file",
        typed_config=notes.pack(FileAccessLog(path="/dev/stdout", log_format=json_lines)),
    )
