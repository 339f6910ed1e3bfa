"""Writes the table of values in the chart's README from the comments in values.yaml.

    python -m deploy.envoy.chart.values_table

A comment that starts with `# -- ` documents the key below it, and everything below that key unless it has a
comment of its own (the convention of helm-docs).
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_CHART = Path(__file__).parent / "epd-sidecar"
README = _CHART / "README.md"
VALUES = _CHART / "values.yaml"

_BEGIN = "<!-- values: begin -->\n"
_END = "<!-- values: end -->\n"
_DOCUMENTS = "# -- "
_LONGEST_DEFAULT = 60


@dataclass(frozen=True)
class Value:
    """One row of the table.

    Attributes:
        key: dotted path.
        default: the value as JSON, or what it is called when it is long.
        description: the comment, in one line.
    """

    key: str
    default: str
    description: str


class Undocumented(Exception):
    """A value that no comment covers; the message names it."""


def documented_values(text: str) -> list[Value]:
    """The rows, in the file's order.

    Raises:
        Undocumented: a value has no comment, and none of its parents has one.
    """
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    lines = text.splitlines()
    return list(_rows(root, lines, "", covered=False))


def _rows(node: yaml.Node | None, lines: Sequence[str], path: str, *, covered: bool) -> Iterator[Value]:
    if not isinstance(node, yaml.MappingNode):
        return
    for key_node, value_node in node.value:
        key = f"{path}.{key_node.value}" if path else str(key_node.value)
        description = _comment_above(lines, key_node.start_mark)
        if description:
            yield Value(key, _default(yaml.SafeLoader("").construct_document(value_node)), description)
        elif not covered and not (isinstance(value_node, yaml.MappingNode) and value_node.value):
            raise Undocumented(f"{key} has no comment {_DOCUMENTS!r} above it")
        yield from _rows(value_node, lines, key, covered=covered or bool(description))


def _comment_above(lines: Sequence[str], key: yaml.Mark) -> str:
    """The comment that ends right above the line a key starts, from its `# --` on; "" if there is none."""
    if lines[key.line][: key.column].strip():
        return ""
    comment: list[str] = []
    for text in reversed(lines[: key.line]):
        stripped = text.strip()
        if stripped.startswith(_DOCUMENTS):
            return " ".join([stripped.removeprefix(_DOCUMENTS), *reversed(comment)])
        if not stripped.startswith("#"):
            return ""
        comment.append(stripped.removeprefix("#").strip())
    return ""


def _default(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    if len(text) <= _LONGEST_DEFAULT:
        return f"`{text}`"
    return "see values.yaml"


def readme_text() -> str:
    """The README as it should be: what it says now, with the table of these values."""
    before, rest = README.read_text(encoding="utf-8").split(_BEGIN)
    _, after = rest.split(_END)
    rows = [
        f"| `{value.key}` | {value.default} | {value.description.replace('|', '/')} |\n"
        for value in documented_values(VALUES.read_text(encoding="utf-8"))
    ]
    table = "".join(["| key | default | meaning |\n", "|---|---|---|\n", *rows])
    return f"{before}{_BEGIN}\n{table}\n{_END}{after}"


if __name__ == "__main__":
    README.write_text(readme_text(), encoding="utf-8")
    sys.stdout.write(f"{README} written\n")
