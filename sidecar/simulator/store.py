"""Bounded memory of past requests."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")

_MAX_STORED = 1 << 16


class Store(Generic[Key, Value]):
    """A mapping that forgets its oldest entries beyond 65536."""

    def __init__(self) -> None:
        self._entries: OrderedDict[Key, Value] = OrderedDict()

    def put(self, key: Key, value: Value) -> None:
        """Store or replace one entry."""
        self._entries[key] = value
        self._entries.move_to_end(key)
        if len(self._entries) > _MAX_STORED:
            self._entries.popitem(last=False)

    def get(self, key: Key) -> Value | None:
        """The value under a key, or None."""
        return self._entries.get(key)

    def drop(self, key: Key) -> None:
        """Forget one entry, if it is there."""
        self._entries.pop(key, None)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)
