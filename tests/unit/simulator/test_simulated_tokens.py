"""Tokens of the simulator."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sidecar.simulator.tokens import fewest_tokens, text_tokens, tokens_text


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_tokens_read_back_as_the_text(text: str) -> None:
    """Tokenizing loses nothing, so different texts have different tokens."""
    assert tokens_text(text_tokens(text)) == text


@given(st.text())
def test_no_text_becomes_a_special_token(text: str) -> None:
    """Client text cannot forge a placeholder, and the lower bound of the token count holds."""
    tokens = text_tokens(text)
    assert all(0 <= token < 151643 for token in tokens)
    assert fewest_tokens(text) <= len(tokens)


def test_special_tokens_are_left_out_of_the_text() -> None:
    """Reading back skips the template's tokens."""
    assert tokens_text([151644, *text_tokens("hello"), 151645]) == "hello"
