"""Comments on typed Envoy messages, and the messages as a document.

The values are the messages' own JSON form. This module adds what a reader needs: comments, defaults worth
showing, short fields before long ones, and the original of every message that is packed into an `Any`.
"""

from __future__ import annotations

from typing import Any, TypeVar

from betterproto2 import Casing, Message
from envoy_data_plane.envoy.config.bootstrap.v3 import Bootstrap, BootstrapStaticResources
from envoy_data_plane.envoy.config.cluster.v3 import Cluster
from envoy_data_plane.envoy.config.listener.v3 import Listener
from envoy_data_plane.envoy.config.route.v3 import Route
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpConnectionManager
from envoy_data_plane.google.protobuf import Any as Packed
from envoy_data_plane.google.protobuf import Struct

from sidecar.envoy_config.document import Entry, Item, Mapping, Node, Scalar, Sequence

M = TypeVar("M", bound=Message)

_TYPE_KEY = "@type"
_LAST: dict[type[Message], tuple[str, ...]] = {
    Bootstrap: ("static_resources",),
    Listener: ("filter_chains",),
    HttpConnectionManager: ("early_header_mutation_extensions", "access_log", "http_filters", "route_config"),
    Cluster: ("health_checks", "transport_socket", "typed_extension_protocol_options", "load_assignment"),
}
"""The long fields of a message, which come after its others."""


class Annotations:
    """What is said about the messages of one configuration. Messages are told apart by identity."""

    def __init__(self) -> None:
        self._comments: dict[tuple[int, str], str] = {}
        self._heads: dict[int, str] = {}
        self._shown: dict[int, tuple[str, ...]] = {}
        self._originals: dict[int, Message] = {}
        # An id belongs to its message only as long as the message lives.
        self._kept: list[Message] = []

    def note(self, message: M, **comments: str) -> M:
        """Put a comment on fields of a message (of a Struct: on its keys); returns the message."""
        self._comments |= {(id(message), name): comment for name, comment in comments.items()}
        self._kept.append(message)
        return message

    def head(self, message: M, comment: str) -> M:
        """Put a comment above a message that is an item of a list; returns the message."""
        self._heads[id(message)] = comment
        self._kept.append(message)
        return message

    def show(self, message: M, *names: str) -> M:
        """Print scalar fields of a message although they have their default; returns the message."""
        self._shown[id(message)] = names
        self._kept.append(message)
        return message

    def pack(self, message: Message) -> Packed:
        """The message as an `Any`, with what is said about it."""
        packed = Packed.pack(message)
        self._originals[id(packed)] = message
        self._kept.append(packed)
        return packed

    def document(self, root: Message | list[Message]) -> Mapping | Sequence:
        """The tree of one message, or of a list of them.

        Raises:
            ValueError: a comment is on a field that the message does not have, or does not print.
        """
        left = set(self._comments)
        messages = root if isinstance(root, list) else [root]
        data = [message.to_dict(casing=Casing.SNAKE) for message in messages]
        tree = (
            self._sequence(messages, data, left)
            if isinstance(root, list)
            else self._mapping(root, data[0], left)
        )
        if left:
            raise ValueError(f"comments on fields without a value: {sorted(name for _, name in left)}")
        return tree

    def _node(self, value: Any, data: Any, left: set[tuple[int, str]]) -> Node:
        if isinstance(data, dict):
            return self._mapping(value, data, left)
        if isinstance(data, list):
            return self._sequence(value, data, left)
        return Scalar(data)

    def _sequence(self, values: list[Any], data: list[Any], left: set[tuple[int, str]]) -> Sequence:
        items = [
            Item(self._node(value, item, left), self._heads.get(id(value), ""))
            for value, item in zip(values, data, strict=True)
        ]
        return Sequence(tuple(items), spaced=any(isinstance(value, Listener | Cluster) for value in values))

    def _mapping(self, value: Any, data: dict[str, Any], left: set[tuple[int, str]]) -> Mapping:
        message = self._originals.get(id(value), value)
        entries = []
        for key, item in self._fields(message, data):
            place = (id(message), key)
            left.discard(place)
            entries.append(
                Entry(key, self._node(_below(message, key), item, left), self._comments.get(place, ""))
            )
        return Mapping(
            tuple(entries),
            block=_TYPE_KEY in data or isinstance(message, Route),
            spaced=isinstance(message, Bootstrap | BootstrapStaticResources),
        )

    def _fields(self, message: Any, data: dict[str, Any]) -> list[tuple[str, Any]]:
        """What to print of a message, in order."""
        if shown := self._shown.get(id(message)):
            defaults = message.to_dict(casing=Casing.SNAKE, include_default_values=True)
            printed = {key: data.get(key, value) for key, value in defaults.items() if key in {*data, *shown}}
            data = {key: value for key, value in data.items() if key == _TYPE_KEY} | printed
        last = _LAST.get(type(message), ())
        return sorted(data.items(), key=lambda field: last.index(field[0]) + 1 if field[0] in last else 0)


def _below(message: Any, key: str) -> Any:
    """What stands in a field; for keys of maps and Structs, what they map to."""
    if isinstance(message, Struct):
        return message.fields[key]
    if isinstance(message, dict):
        return message[key]
    return None if key == _TYPE_KEY else getattr(message, key)
