"""A YAML document with comments: a tree, and its text."""

from __future__ import annotations

import math
import re
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator

WIDTH = 120
"""Columns of a line."""

_DEEPEST_INLINE = 4
"""Brackets within brackets that still read well on one line."""

_PLAIN = re.compile(r"(?![yYnN]\Z)[A-Za-z/_][A-Za-z0-9_./-]*|[0-9]+(\.[0-9]+)?s|[0-9]+(\.[0-9]+){3}")
"""Text that may go without quotes; what YAML 1.1 reads as something else is quoted all the same."""
_QUOTED = re.compile("`[^`]*`")
_NO_BREAK = "\N{NO-BREAK SPACE}"


@dataclass(frozen=True, slots=True)
class Scalar:
    """Text, a whole number or a boolean."""

    value: str | int | bool


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of a mapping, with the comment on it."""

    key: str
    value: Node
    comment: str = ""


@dataclass(frozen=True, slots=True)
class Mapping:
    """Keys in order.

    Attributes:
        entries: the keys.
        block: never on one line.
        spaced: blank lines between long entries.
    """

    entries: tuple[Entry, ...]
    block: bool = False
    spaced: bool = False


@dataclass(frozen=True, slots=True)
class Item:
    """One item of a sequence, with the comment above it."""

    value: Node
    comment: str = ""


@dataclass(frozen=True, slots=True)
class Sequence:
    """Items in order.

    Attributes:
        items: the items.
        spaced: blank lines between them.
    """

    items: tuple[Item, ...]
    spaced: bool = False


Node = Scalar | Mapping | Sequence


def render(root: Mapping | Sequence, head: str) -> str:
    """The document as text, below the comment `head`, whose lines stay as they are."""
    lines = [*_commented(head.splitlines(), 0), "", *_block(root, 0)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _block(node: Mapping | Sequence, indent: int) -> Iterator[str]:
    if isinstance(node, Mapping):
        for number, entry in enumerate(node.entries):
            lines = list(_entry(entry, indent))
            if node.spaced and number and len(lines) > 1:
                yield ""
            yield from lines
    else:
        for number, item in enumerate(node.items):
            if node.spaced and number:
                yield ""
            yield from _item(item, indent)


def _entry(entry: Entry, indent: int) -> Iterator[str]:
    start = f"{' ' * indent}{_scalar(entry.key)}:"
    line = _one_line(start, entry.value)
    beside = f"{line}  # {entry.comment}"
    if line is not None and entry.comment.isprintable() and entry.comment and len(beside) <= WIDTH:
        yield beside
        return
    yield from _wrapped(entry.comment, indent)
    if line is not None:
        yield line
        return
    yield start
    assert not isinstance(entry.value, Scalar)  # noqa: S101  # a scalar is always one line
    yield from _block(entry.value, indent + 2)


def _item(item: Item, indent: int) -> Iterator[str]:
    yield from _wrapped(item.comment, indent)
    start = f"{' ' * indent}-"
    line = _one_line(start, item.value)
    is_pair = isinstance(item.value, Mapping) and len(item.value.entries) == 1
    if line is not None and not is_pair:
        yield line
        return
    assert not isinstance(item.value, Scalar)  # noqa: S101  # a scalar is always one line
    below = list(_block(item.value, indent + 2))
    first = next(number for number, text in enumerate(below) if not text.lstrip().startswith("#"))
    # A comment on the first key stands above the dash.
    yield from (text.removeprefix("  ") for text in below[:first])
    yield f"{start} {below[first].lstrip()}"
    yield from below[first + 1 :]


def _one_line(start: str, node: Node) -> str | None:
    """The node behind what opens its line, or None where it needs more lines."""
    text = _inline(node)
    if text is None:
        return None
    line = f"{start} {text}"
    return line if isinstance(node, Scalar) or len(line) <= WIDTH else None


def _inline(node: Node, depth: int = 0) -> str | None:
    """The node without a line break, or None where it has comments or is too deep."""
    if isinstance(node, Scalar):
        return _scalar(node.value)
    if isinstance(node, Sequence):
        texts = [None if item.comment else _inline(item.value, depth + 1) for item in node.items]
        opening, closing = "[", "]"
    else:
        texts = [_inline_entry(entry, depth + 1) for entry in node.entries]
        opening, closing = "{", "}"
        if node.block and node.entries:
            return None
    if any(text is None for text in texts) or (texts and depth >= _DEEPEST_INLINE):
        return None
    return f"{opening}{', '.join(text for text in texts if text is not None)}{closing}"


def _inline_entry(entry: Entry, depth: int) -> str | None:
    text = None if entry.comment else _inline(entry.value, depth)
    return None if text is None else f"{_scalar(entry.key)}: {text}"


def _scalar(value: str | int | bool) -> str:
    """As it may stand in a line, within brackets, too."""
    quoted = isinstance(value, str) and not _PLAIN.fullmatch(value)
    return yaml.safe_dump(
        [value], default_flow_style=True, default_style='"' if quoted else None, width=math.inf
    )[1:-2]


def _wrapped(comment: str, indent: int) -> Iterator[str]:
    width = WIDTH - indent - 2
    for paragraph in comment.splitlines():
        # What is quoted stays on one line.
        joined = _QUOTED.sub(lambda found: found[0].replace(" ", _NO_BREAK), paragraph)
        lines = textwrap.wrap(joined, width, break_long_words=False, break_on_hyphens=False)
        yield from _commented([line.replace(_NO_BREAK, " ") for line in lines], indent)


def _commented(lines: list[str], indent: int) -> Iterator[str]:
    for line in lines:
        shown = "".join(character if character.isprintable() else "?" for character in line)
        yield f"{' ' * indent}# {shown}"
