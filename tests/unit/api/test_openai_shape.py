from __future__ import annotations

import json
from typing import Any

import pytest

from sidecar.api import api_for_path, default_error_body
from sidecar.api.openai_shape import error_body
from sidecar.errors import BadRequest, Overloaded, SidecarError, StepFailed, StepRejected


def _error(error: SidecarError, *, expose_upstream: bool = False) -> dict[str, Any]:
    body = json.loads(error_body(error, "req-1", expose_upstream=expose_upstream))
    assert list(body) == ["error"]
    members: dict[str, Any] = body["error"]
    return members


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    ("value", "refused"), [("true", True), ("1", True), ("false", False), ("null", False)]
)
def test_beam_search_is_refused(path: str, value: str, *, refused: bool) -> None:
    """A decode engine that fetches the KV cache of one beam does not survive the others."""
    api = api_for_path(path)
    assert api is not None
    prompt = b'"prompt":"hi"' if path == "/v1/completions" else b'"messages":[]'
    body = b'{"model":"m",%s,"use_beam_search":%s}' % (prompt, value.encode())
    if not refused:
        api.parse(body)
        return
    with pytest.raises(BadRequest, match="use_beam_search is not supported") as caught:
        api.parse(body)
    assert caught.value.param == "use_beam_search"


@pytest.mark.parametrize(
    ("error", "kind", "code", "param"),
    [
        (
            BadRequest("model must be a string", param="model"),
            "invalid_request_error",
            "epd_bad_request",
            "model",
        ),
        (StepRejected("encode", 422, "no"), "invalid_request_error", "epd_encode_rejected", None),
        (StepFailed("prefill", "no"), "server_error", "epd_prefill_failed", None),
        (Overloaded("full"), "server_error", "epd_overloaded", None),
    ],
)
def test_errors_have_the_openai_shape(error: SidecarError, kind: str, code: str, param: str | None) -> None:
    """Message with the request id, type, param and code: what OpenAI clients read."""
    members = _error(error)
    assert set(members) == {"message", "type", "param", "code"}
    assert (members["type"], members["code"], members["param"]) == (kind, code, param)
    assert members["message"].startswith(error.message)
    assert "req-1" in members["message"]


def test_an_upstreams_body_reaches_the_client_only_on_request() -> None:
    """`errors.expose_upstream` decides; the log's detail never leaves."""
    error = StepFailed("render", "render failed", detail="secret-detail", upstream_body="secret-body")
    assert "secret" not in json.dumps(_error(error))
    exposed = json.dumps(_error(error, expose_upstream=True))
    assert "secret-body" in exposed
    assert "secret-detail" not in exposed


def test_errors_without_an_api_have_the_openai_shape() -> None:
    """A request whose API is not known yet gets the same shape."""
    error = Overloaded("full")
    assert default_error_body(error, "r", expose_upstream=False) == error_body(
        error, "r", expose_upstream=False
    )


@pytest.mark.parametrize(
    "path",
    ["/v1/chat/completions/", "/V1/chat/completions", "/v1/chat/completions?x=1", "/v1/models", "", "/"],
)
def test_paths_match_exactly(path: str) -> None:
    """Anything but the exact path of an API passes through."""
    assert api_for_path(path) is None


def test_the_chat_path_has_the_chat_api() -> None:
    """The registry finds an API by its path."""
    api = api_for_path("/v1/chat/completions")
    assert api is not None
    assert api.name == "chat"
