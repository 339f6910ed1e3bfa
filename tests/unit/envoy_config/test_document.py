"""YAML with comments: what is read back is what was written, and comments stay comments."""

from __future__ import annotations

import re
import string

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sidecar.envoy_config.document import WIDTH, Entry, Item, Mapping, Node, Scalar, Sequence, render

SCALARS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
    st.sampled_from(["", "yes", "Off", "null", "~", "1", "1.5", "1e5", "0x1f", "1_000", "-", "- a", "a: b"]),
    st.sampled_from(
        ["#", "a #b", "%A%", "@type", "`", "*a", "&a", "!a", "|", ">", "'", '"', "12:30:45", "=", "<<"]
    ),
    st.sampled_from(
        ["30s", "0.5s", "127.0.0.1", "2026-11-29", "a'b\"c", "\u2028", "\x85", "\ufeff", "\U0001f600"]
    ),
    st.integers(),
    st.booleans(),
)
COMMENTS = st.one_of(st.just(""), st.text(st.characters(exclude_categories=["Cs"]), max_size=200))
KEYS = st.text(string.ascii_letters + "@._", min_size=1, max_size=12)


@st.composite
def mappings(draw: st.DrawFn, values: st.SearchStrategy[Node]) -> Mapping:
    keys = draw(st.lists(KEYS, unique=True, max_size=4))
    entries = [Entry(key, draw(values), draw(COMMENTS)) for key in keys]
    return Mapping(tuple(entries), block=draw(st.booleans()), spaced=draw(st.booleans()))


@st.composite
def sequences(draw: st.DrawFn, values: st.SearchStrategy[Node]) -> Sequence:
    items = [Item(draw(values), draw(COMMENTS)) for _ in range(draw(st.integers(0, 4)))]
    return Sequence(tuple(items), spaced=draw(st.booleans()))


NODES: st.SearchStrategy[Node] = st.recursive(
    SCALARS.map(Scalar), lambda values: st.one_of(mappings(values), sequences(values)), max_leaves=12
)


def plain(node: Node) -> object:
    if isinstance(node, Mapping):
        return {entry.key: plain(entry.value) for entry in node.entries}
    if isinstance(node, Sequence):
        return [plain(item.value) for item in node.items]
    return node.value


@given(mappings(NODES), COMMENTS)
def test_what_is_written_is_read_back(root: Mapping, head: str) -> None:
    """Any tree, whatever its texts and comments hold, loads as the same plain data."""
    text = render(root, head)
    assert (yaml.safe_load(text) or {}) == plain(root)


@given(SCALARS)
def test_nothing_is_left_to_the_reader(value: str | int | bool) -> None:
    """Unquoted text is text in YAML 1.1 and 1.2 alike: letters first, a duration or an IPv4 address."""
    text = render(Mapping((Entry("key", Scalar(value)),)), "").split("\n\n", 1)[-1]
    written = text.strip().removeprefix("key: ")
    if isinstance(value, str) and written[:1] not in ('"', "'"):
        assert re.fullmatch(r"[A-Za-z/_][\w./-]*|[0-9.]+s|[0-9]+(\.[0-9]+){3}", written, re.ASCII)
        assert written.lower() not in {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}


def pair(key: str, value: Node, comment: str = "") -> Mapping:
    return Mapping((Entry(key, value, comment),))


def body(root: Mapping | Sequence) -> list[str]:
    return render(root, "head").splitlines()[2:]


def test_short_things_stay_on_one_line() -> None:
    """A mapping without comments that fits is written inline; a pair in a list keeps its own line."""
    inner = Mapping((Entry("address", Scalar("127.0.0.1")), Entry("port_value", Scalar(1))))
    root = Mapping(
        (Entry("address", pair("socket_address", inner)), Entry("items", Sequence((Item(inner),))))
    )
    assert body(root) == [
        "address: {socket_address: {address: 127.0.0.1, port_value: 1}}",
        "items: [{address: 127.0.0.1, port_value: 1}]",
    ]
    commented = Sequence((Item(pair("a", inner), "about a"), Item(Scalar("b"))))
    assert body(pair("items", commented)) == [
        "items:",
        "  # about a",
        "  - a: {address: 127.0.0.1, port_value: 1}",
        "  - b",
    ]


def test_a_comment_stands_beside_or_above() -> None:
    """Beside a value where it fits on the line, else above, wrapped, with quoted text in one piece."""
    long = "word " * 22 + "`two words`"
    root = Mapping((Entry("a", Scalar(1), "short"), Entry("b", Scalar(2), long)))
    assert body(root) == [
        "a: 1  # short",
        "# " + ("word " * 22).strip(),
        "# `two words`",
        "b: 2",
    ]
    assert all(len(line) <= WIDTH for line in body(root))


def test_a_comment_on_the_first_key_of_an_item_stands_above_the_dash() -> None:
    """Nothing but the item itself follows a dash."""
    item = Mapping((Entry("name", Scalar("x"), "c " * 70), Entry("other", Scalar("y"))), block=True)
    lines = body(Sequence((Item(item),)))
    assert [line[:3] for line in lines] == ["# c", "# c", "- n", "  o"]


@pytest.mark.parametrize("spaced", [True, False])
def test_long_parts_are_set_apart(spaced: bool) -> None:
    """Blank lines between long entries and items where they are asked for, none elsewhere."""
    long = Mapping((Entry("a", Scalar("x" * 70)), Entry("b", Scalar("y" * 70))))
    root = Mapping(
        (Entry("first", long), Entry("second", Sequence((Item(long), Item(long)), spaced))), spaced=spaced
    )
    assert body(root).count("") == (2 if spaced else 0)
