"""Texts of errors."""

from __future__ import annotations

from pentad.schedules.ir.errors import LONGEST, PentadError


def test_a_very_long_value_leaves_the_key_and_what_was_expected() -> None:
    """A name in a file may have any length."""
    (sentence,) = PentadError(f"a is {'x' * 10**6}: expected y").sentences
    assert sentence.startswith("a is xxx") and sentence.endswith("xxx: expected y")
    assert len(sentence) < LONGEST
    assert PentadError("a is 1: expected 2").sentences == ["a is 1: expected 2"]
