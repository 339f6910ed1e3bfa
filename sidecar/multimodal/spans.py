"""Placeholder spans: where one media entry stands in the expanded token ids.

Rules of the wire contract: spans have at least one token, lie inside the ids and never overlap; touching
spans are legal. A span is uniform when all its ids are the same token; only then can it be replaced by one
placeholder (`collapse`), and only then can an engine place the encoder output without an embedding mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class InvalidSpans(ValueError):
    """Spans that no correct renderer produces; the message names the first offender."""


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """`[offset, offset + length)` in the expanded token ids."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        """First position after the span."""
        return self.offset + self.length

    def uniform_token(self, token_ids: Sequence[int]) -> int | None:
        """The single repeated token of the span, or None when the span mixes tokens."""
        token = token_ids[self.offset]
        return token if token_ids[self.offset : self.end].count(token) == self.length else None


UNPLACED = Span(0, 0)
"""The span of an entry no renderer has placed."""


def check_spans(spans: Iterable[Span], total: int) -> None:
    """Raise InvalidSpans unless all spans are non-empty, inside `total` tokens and disjoint."""
    end = 0
    for span in sorted(spans):
        if span.length < 1:
            raise InvalidSpans(f"span at {span.offset} is empty")
        if span.offset < 0 or span.end > total:
            raise InvalidSpans(f"span [{span.offset}, {span.end}) lies outside the {total} token ids")
        if span.offset < end:
            raise InvalidSpans(f"span [{span.offset}, {span.end}) overlaps the one before it")
        end = span.end


def collapse(token_ids: Sequence[int], spans: Iterable[Span]) -> list[int]:
    """The ids with every span replaced by one token, everything else kept.

    An engine expands `content_parts` placeholders itself: expanded ids would silently grow the prompt.

    Raises:
        InvalidSpans: empty, out of range, overlapping or mixed spans.
    """
    ordered = sorted(spans)
    check_spans(ordered, len(token_ids))
    collapsed: list[int] = []
    position = 0
    for span in ordered:
        token = span.uniform_token(token_ids)
        if token is None:
            raise InvalidSpans(f"span [{span.offset}, {span.end}) mixes tokens")
        collapsed.extend(token_ids[position : span.offset])
        collapsed.append(token)
        position = span.end
    collapsed.extend(token_ids[position:])
    return collapsed
