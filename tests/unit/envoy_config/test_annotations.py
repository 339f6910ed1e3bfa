"""Comments on typed messages end up where the messages are printed, or nowhere at all is an error."""

from __future__ import annotations

from datetime import timedelta

import pytest
import yaml
from envoy_data_plane.envoy.config.core.v3 import TypedExtensionConfig
from envoy_data_plane.envoy.config.route.v3 import RouteAction
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import ExternalProcessor, ProcessingMode
from envoy_data_plane.google.protobuf import Struct, Value

from sidecar.envoy_config.annotations import Annotations
from sidecar.envoy_config.document import render


def lines(notes: Annotations, *messages: object) -> list[str]:
    return render(notes.document(list(messages)), "").splitlines()  # type: ignore[arg-type]  # messages all


def test_comments_follow_a_message_into_an_any() -> None:
    """What is packed keeps its comments, its order, and the type as its first key."""
    notes = Annotations()
    config = notes.show(ExternalProcessor(stat_prefix="x"), "failure_mode_allow")
    notes.note(config, failure_mode_allow="closed")
    mode = notes.note(ProcessingMode(), response_body_mode="never")
    config.processing_mode = notes.show(mode, "response_body_mode")
    packed = TypedExtensionConfig(name="filter", typed_config=notes.pack(config))
    assert lines(notes, notes.head(packed, "about it"))[-8:] == [
        "# about it",
        "- name: filter",
        "  typed_config:",
        '    "@type": type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor',
        "    failure_mode_allow: false  # closed",
        "    processing_mode:",
        "      response_body_mode: NONE  # never",
        "    stat_prefix: x",
    ]


def test_keys_of_a_struct_can_have_comments() -> None:
    """A Struct prints as the plain mapping it stands for."""
    notes = Annotations()
    struct = Struct(fields={"b": Value(string_value="%B%"), "a": Value(string_value="%A%")})
    notes.note(struct, a="about a")
    text = render(notes.document(struct), "")
    assert text.splitlines()[-2:] == ['b: "%B%"', 'a: "%A%"  # about a']
    assert yaml.safe_load(text) == {"b": "%B%", "a": "%A%"}


def test_equal_messages_have_their_own_comments() -> None:
    """A comment belongs to one message, not to all that look like it."""
    notes = Annotations()
    first, second = (RouteAction(cluster="x", timeout=timedelta(0)) for _ in range(2))
    notes.note(second, timeout="of the second")
    assert lines(notes, first, second)[-3:] == [
        "- {cluster: x, timeout: 0s}",
        "- cluster: x",
        "  timeout: 0s  # of the second",
    ]


@pytest.mark.parametrize("name", ["cluster_header", "no_such_field"])
def test_a_comment_on_nothing_is_an_error(name: str) -> None:
    """A comment whose field is not printed, or does not exist, would be lost silently."""
    notes = Annotations()
    action = notes.note(RouteAction(cluster="x"), **{name: "lost"})
    with pytest.raises(ValueError, match=name):
        notes.document(action)
