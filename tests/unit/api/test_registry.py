from __future__ import annotations

import pytest

from sidecar.api import api_for_path


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/chat/complet%69ons", "/v1%2Fchat/completions"])
def test_a_path_is_ours_however_it_is_escaped(path: str) -> None:
    """Workers decode a path before they match it: no spelling gets around the pipeline."""
    api = api_for_path(path)
    assert api is not None
    assert api.name == "chat"


@pytest.mark.parametrize(
    "path",
    ["/v1/chat/completions/", "/v1/chat/completions/render", "/V1/chat/completions", "//v1/chat", "/", ""],
)
def test_other_paths_are_not_ours(path: str) -> None:
    """The match is exact."""
    assert api_for_path(path) is None
