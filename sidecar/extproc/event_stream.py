"""Server-sent events out of the pieces of a stream, in bounded memory and linear time."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_COMMENT = b":"


class EventStream:
    """Gives the data of each complete event (WHATWG HTML, "Interpreting an event stream").

    Args:
        max_event: largest event, in bytes; a larger one is passed over.
    """

    def __init__(self, max_event: int) -> None:
        self._max_event = max_event
        self._line = bytearray()
        self._data = bytearray()
        self._too_large = False
        self._after_cr = False

    @property
    def held(self) -> int:
        """Bytes of the event that is not complete yet."""
        return len(self._line) + len(self._data)

    def receive(self, piece: bytes) -> Iterator[bytes]:
        """Take the next piece; gives the data of the events it completes. Iterate it to the end."""
        first, *rest = self._lines(piece)
        self._extend(first)
        for part in rest:
            yield from self._end_line()
            self._extend(part)

    def _lines(self, piece: bytes) -> list[bytes]:
        if self._after_cr and piece.startswith(b"\n"):
            # The second half of a line end whose first half ended the last piece.
            piece = piece[1:]
            self._after_cr = False
        if piece:
            self._after_cr = piece.endswith(b"\r")
        if b"\r" in piece:
            piece = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        return piece.split(b"\n")

    def _extend(self, part: bytes) -> None:
        if not part:
            return
        if self._too_large or self.held + len(part) > self._max_event:
            self._too_large = True
            self._data.clear()
            # Of the event only its end counts, which is an empty line.
            self._line[:] = _COMMENT
        else:
            self._line += part

    def _end_line(self) -> Iterator[bytes]:
        line, self._line = bytes(self._line), bytearray()
        if line:
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data += value.removeprefix(b" ") + b"\n"
            return
        data, self._data = bytes(self._data[:-1]), bytearray()
        self._too_large = False
        if data:
            yield data
