from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.multimodal.spans import InvalidSpans, Span, check_spans, collapse

spans = st.builds(Span, st.integers(-3, 12), st.integers(-2, 6))


def _covered(span: Span) -> list[int]:
    return list(range(span.offset, span.offset + span.length))


def _legal(given_spans: list[Span], total: int) -> bool:
    """The rules of spans, position by position."""
    covered = [position for span in given_spans for position in _covered(span)]
    return (
        all(span.length >= 1 for span in given_spans)
        and all(0 <= position < total for position in covered)
        and len(covered) == len(set(covered))
    )


@given(st.lists(spans, max_size=5), st.integers(0, 14))
def test_spans_are_legal_when_nonempty_inside_and_disjoint(given_spans: list[Span], total: int) -> None:
    """Spans pass exactly when each has a token, all lie inside and no position is covered twice."""
    if _legal(given_spans, total):
        check_spans(given_spans, total)
    else:
        with pytest.raises(InvalidSpans):
            check_spans(given_spans, total)


@pytest.mark.parametrize(
    ("given_spans", "message"),
    [
        ([Span(1, 2), Span(3, 0)], "span at 3 is empty"),
        ([Span(3, 3)], "[3, 6) lies outside the 5 token ids"),
        ([Span(-1, 2)], "[-1, 1) lies outside"),
        ([Span(3, 2), Span(0, 4)], "[3, 5) overlaps"),
        ([Span(0, 1 << 70)], "lies outside"),
    ],
)
def test_the_message_names_the_offender(given_spans: list[Span], message: str) -> None:
    """A refused span is named by its positions."""
    with pytest.raises(InvalidSpans, match=re.escape(message)):
        check_spans(given_spans, 5)


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[int], list[Span]]:
    """Token ids and disjoint spans in any order, some mixed, some touching."""
    token_ids: list[int] = []
    placed: list[Span] = []
    for _ in range(draw(st.integers(0, 6))):
        token_ids += draw(st.lists(st.integers(0, 3), max_size=3))
        length = draw(st.integers(1, 4))
        placed.append(Span(len(token_ids), length))
        token_ids += draw(
            st.one_of(
                st.integers(0, 3).map(lambda token, n=length: [token] * n),  # type: ignore[misc]  # n is the length here
                st.lists(st.integers(0, 3), min_size=length, max_size=length),
            )
        )
    token_ids += draw(st.lists(st.integers(0, 3), max_size=3))
    return token_ids, draw(st.permutations(placed))


def _collapse_by_position(token_ids: list[int], given_spans: list[Span]) -> list[int]:
    """Keep every id that no span covers, and the first id of every span."""
    covered = {position for span in given_spans for position in _covered(span)}
    firsts = {span.offset for span in given_spans}
    return [
        token for position, token in enumerate(token_ids) if position in firsts or position not in covered
    ]


@given(prompts())
def test_collapse_replaces_every_span_by_one_token(prompt: tuple[list[int], list[Span]]) -> None:
    """Uniform spans become one token each, all else stays; a mixed span is refused."""
    token_ids, given_spans = prompt
    mixed = [span for span in given_spans if len({token_ids[i] for i in _covered(span)}) > 1]
    if mixed:
        with pytest.raises(InvalidSpans, match="mixes tokens"):
            collapse(token_ids, given_spans)
    else:
        assert collapse(token_ids, given_spans) == _collapse_by_position(token_ids, given_spans)


def test_touching_spans_give_two_tokens() -> None:
    """Two spans without a token between them stay two placeholders, also of the same token."""
    assert collapse([5, 7, 7, 7, 7, 6], [Span(3, 2), Span(1, 2)]) == [5, 7, 7, 6]


@pytest.mark.parametrize("bad", [Span(2, 0), Span(4, 2), Span(0, 3), Span(-1, 1)])
def test_collapse_checks_the_spans(bad: Span) -> None:
    """Empty, outside and overlapping spans are refused instead of giving a wrong prompt."""
    with pytest.raises(InvalidSpans):
        collapse([7] * 5, [Span(1, 2), bad])


@given(st.lists(st.integers(0, 1), min_size=1, max_size=6), st.data())
def test_uniform_token_is_the_only_token_of_the_span(token_ids: list[int], data: st.DataObject) -> None:
    """The token of a uniform span, None as soon as a second token stands in it."""
    offset = data.draw(st.integers(0, len(token_ids) - 1))
    span = Span(offset, data.draw(st.integers(1, len(token_ids) - offset)))
    found = {token_ids[i] for i in _covered(span)}
    assert span.uniform_token(token_ids) == (found.pop() if len(found) == 1 else None)
