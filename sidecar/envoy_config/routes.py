"""The routes of each listener."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import TYPE_CHECKING

from envoy_data_plane.envoy.config.core.v3 import (
    DataSource,
    HeaderValue,
    HeaderValueOption,
    HeaderValueOptionHeaderAppendAction,
)
from envoy_data_plane.envoy.config.route.v3 import (
    DirectResponseAction,
    HeaderMatcher,
    Route,
    RouteAction,
    RouteConfiguration,
    RouteMatch,
    VirtualHost,
)
from envoy_data_plane.envoy.type.matcher.v3 import RegexMatcher, StringMatcher

from sidecar.envoy_config.deployment import PHASES
from sidecar.pipeline.legs import PHASE_HEADER

if TYPE_CHECKING:
    from sidecar.envoy_config.annotations import Annotations
    from sidecar.envoy_config.deployment import Deployment

INTERNAL = "internal"
"""The internal listener, and the cluster that leads to it."""

# Two expressions: Envoy loads none whose RE2 program is larger than 100.
_ALIASES = "/(invocations|v1/chat/completions/batch|cohere/v2/chat)"
_SGLANG_ALIASES = "/(generate|vertex_generate|api/(chat|generate)|v1/score)"
_NO_TIMEOUT = timedelta(0)

_ABOUT_ALIASES = (
    "vLLM takes the bodies of the coordinated paths here, too, past the sidecar. Safer still: replace the "
    "last route by the paths your clients need; engines have others that steer them."
)
_ABOUT_SGLANG_ALIASES = (
    "SGLang takes prompts here, too, and with them the address of a bootstrap server of the client's choice."
)
_ABOUT_FILTERS = "No route disables the filter: a route that does so for a phase could be chosen by a client."
_ABOUT_RETRIES = (
    "No retry_policy: a retry replays the same KV and encoder-cache handles, which a worker may have "
    "consumed already; only the client can start over."
)
_ABOUT_SSE = "SSE answers take as long as they take"
_ABOUT_PASSTHROUGH = "What the sidecar passes through (GET /v1/models, tokenize, ...) carries no phase."


def client_routes(notes: Annotations, deployment: Deployment) -> RouteConfiguration:
    """Routes of the listener clients use."""
    routes = [notes.head(_not_for_clients("not-for-clients", _ALIASES), _ABOUT_ALIASES)]
    if deployment.sees_answers:
        sglang = _not_for_clients("not-for-clients-sglang", _SGLANG_ALIASES)
        routes.append(notes.head(sglang, _ABOUT_SGLANG_ALIASES))
    match deployment.topology:
        case "internal-listener":
            reentry = Route(name="reentry", match=_any(), route=_to(INTERNAL))
            routes.append(notes.head(notes.note(reentry, route=_ABOUT_SSE), _ABOUT_RETRIES))
        case "reroute":
            decode = Route(name="decode", match=_phase("decode"), route=_to("decode"))
            routes.append(notes.head(notes.note(decode, route=_ABOUT_SSE), _ABOUT_RETRIES))
            routes.append(_passthrough(notes))
        case "shared-listener":
            phases = _phases(notes)
            notes.head(phases[0], f"{_ABOUT_FILTERS}\n{_ABOUT_RETRIES}")
            routes += [*phases, _unknown_phase(_with_phase()), _passthrough(notes)]
    name = deployment.client_listener
    return _only_host(name, "all" if deployment.shared else "clients", routes)


def internal_routes(notes: Annotations, deployment: Deployment) -> RouteConfiguration:
    """Routes of the internal listener: the sub-requests, and what re-enters."""
    if deployment.topology == "reroute":
        routes = [*_phases(notes), _unknown_phase(_any())]
    else:
        routes = [*_phases(notes), _unknown_phase(_with_phase()), _passthrough(notes)]
    return _only_host(INTERNAL, "phases", routes)


def _only_host(name: str, host: str, routes: list[Route]) -> RouteConfiguration:
    return RouteConfiguration(name=name, virtual_hosts=[VirtualHost(name=host, domains=["*"], routes=routes)])


def _phases(notes: Annotations) -> list[Route]:
    routes = [Route(name=phase, match=_phase(phase), route=_to(phase)) for phase in PHASES]
    notes.note(routes[0], route="the sidecar's step timeouts apply")
    return routes


def _passthrough(notes: Annotations) -> Route:
    return notes.head(Route(name="other", match=_any(), route=_to("decode")), _ABOUT_PASSTHROUGH)


def _unknown_phase(match: RouteMatch) -> Route:
    known = ", ".join(PHASES)
    return _not_found("unknown-phase", match, f"no route for this EPP-Profile; known phases: {known}")


def _to(cluster: str) -> RouteAction:
    return RouteAction(cluster=cluster, timeout=_NO_TIMEOUT)


def _any() -> RouteMatch:
    return RouteMatch(prefix="/")


def _not_for_clients(name: str, paths: str) -> Route:
    match = RouteMatch(safe_regex=RegexMatcher(regex=paths))
    return _not_found(name, match, "this path is not for clients")


def _phase(phase: str) -> RouteMatch:
    header = HeaderMatcher(name=PHASE_HEADER, string_match=StringMatcher(exact=phase))
    return RouteMatch(prefix="/", headers=[header])


def _with_phase() -> RouteMatch:
    return RouteMatch(prefix="/", headers=[HeaderMatcher(name=PHASE_HEADER, present_match=True)])


def _not_found(name: str, match: RouteMatch, message: str) -> Route:
    """A route answered 404 in the engines' error shape."""
    error = {"message": message, "type": "NotFoundError", "param": None, "code": 404}
    body = json.dumps({"error": error}, separators=(",", ":"))
    content_type = HeaderValueOption(
        header=HeaderValue(key="content-type", value="application/json"),
        append_action=HeaderValueOptionHeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD,
    )
    return Route(
        name=name,
        match=match,
        direct_response=DirectResponseAction(status=404, body=DataSource(inline_string=body)),
        response_headers_to_add=[content_type],
    )
