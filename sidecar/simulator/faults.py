"""Faults of the connection and refusals of a wrong deployment, played before a role sees its request."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiohttp import web

from sidecar.simulator.errors import (
    ApiError,
    NotServed,
    bad_request,
    internal_error,
    model_not_found,
    scale_out_disabled,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

_GARBAGE = b'{"request_id": "cut off in the mid'
_ANNOUNCED_BYTES = 1 << 16
_SERVER_ERROR = 500


async def play(
    request: web.Request, fault: str, model: str, served: Sequence[str]
) -> web.StreamResponse | None:
    """Answer a request with a fault.

    Args:
        request: the request, its body read.
        fault: name of the fault, "" for none.
        model: model the request asks for.
        served: models the deployment serves.

    Returns:
        The spoilt answer; None when there is no fault, or one for the render role to put into its answer.

    Raises:
        ApiError: for a refusal or a status.
        NotServed: for a role without the endpoint.
    """
    match fault:
        case "garbage":
            return web.Response(body=_GARBAGE, content_type="application/json")
        case "drop-before-headers":
            _abort(request)
            return web.Response()
        case "drop-after-headers":
            response = web.StreamResponse()
            response.content_type = "application/json"
            response.content_length = _ANNOUNCED_BYTES
            await response.prepare(request)
            await response.write(_GARBAGE)
            _abort(request)
            return response
        case "hang":
            await asyncio.Event().wait()
        case "scale-out-403":
            raise scale_out_disabled()
        case "not-found":
            raise NotServed
        case "model-not-found":
            raise model_not_found(model, served)
        case _ if fault.startswith("status:"):
            raise _status_error(int(fault.removeprefix("status:")))
    return None


def _status_error(status: int) -> ApiError:
    message = f"the simulator was told to answer {status}"
    if status == _SERVER_ERROR:
        return internal_error(message)
    error = bad_request(message)
    kind = error.kind if status < _SERVER_ERROR else "InternalServerError"
    return ApiError(status, message, kind=kind)


def _abort(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()
