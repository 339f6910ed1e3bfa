"""The client APIs this sidecar coordinates, by exact request path."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import unquote

from sidecar.api.chat import ChatApi
from sidecar.api.completions import CompletionsApi
from sidecar.api.generate import GenerateApi
from sidecar.api.messages import MessagesApi
from sidecar.api.responses import ResponsesApi

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sidecar.api.interface import Api
    from sidecar.errors import SidecarError

_DEFAULT: Api = ChatApi()
_APIS: tuple[Api, ...] = (
    _DEFAULT,
    CompletionsApi(),
    ResponsesApi(),
    MessagesApi(),
    GenerateApi(),
)
_BY_PATH: Mapping[str, Api] = {api.path: api for api in _APIS}


def api_for_path(path: str) -> Api | None:
    """The API that owns a path (query string excluded), or None: the request passes through.

    Compared percent-decoded, as the workers do: an escaped spelling must not get around the pipeline.
    """
    return _BY_PATH.get(unquote(path))


def default_error_body(error: SidecarError, request_id: str, *, expose_upstream: bool) -> bytes:
    """An error for a request whose API is not known: the OpenAI shape."""
    return _DEFAULT.error_body(error, request_id, expose_upstream=expose_upstream)
