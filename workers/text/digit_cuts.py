"""Cuts text so that a pre-tokenizer that splits off digits can be replaced by one that does not, which is much faster.

The former (SmolLM2's, StarCoder 2's) splits off each digit, and then splits words by GPT-2's expression. By itself that
expression makes words of several digits, or of a space and digits. If no token combines a digit with anything else, the
tokens are still the same, except in two cases: of several spaces before a digit it puts the last one into the digit's
word, and digits that are not ASCII have several bytes. Cutting before or after a digit changes nothing for the former,
which splits there anyway; with cuts in these two cases both give the same tokens.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

_SPACE, _DIGIT = 1, 2
# Digits of Unicode 15 and 16, which Python may not know yet.
_NEW_DIGITS = ((0x10D40, 0x10D4A), (0x116D0, 0x116E4), (0x11BF0, 0x11BFA), (0x11F50, 0x11F5A), (0x16130, 0x1613A),
               (0x16D70, 0x16D7A), (0x1CCF0, 0x1CCFA), (0x1D2C0, 0x1D2D4), (0x1E4F0, 0x1E4FA),
               (0x1E5F1, 0x1E5FB))  # fmt: skip


def without_digits_step(content: dict[str, Any]) -> dict[str, Any] | None:
    """The faster pre-tokenizer for pieces from `cut_at_digits`; None if this tokenizer.json needs its own."""
    pre_tokenizer = content["pre_tokenizer"]
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer and pre_tokenizer["type"] == "Sequence" else []
    if content["normalizer"] is not None or [step["type"] for step in steps] != ["Digits", "ByteLevel"]:
        return None
    digits, byte_level = steps
    if not digits["individual_digits"] or not byte_level["use_regex"] or byte_level["add_prefix_space"]:
        return None
    fused = "".join(token for token in content["model"]["vocab"] if len(token) > 1)  # in which letters stand for bytes
    added = "".join(token["content"] for token in content["added_tokens"] if not token["special"])
    has_digits = any(map(fused.__contains__, "0123456789")) or any(map(str.isnumeric, added))
    return None if has_digits else byte_level


def cut_at_digits(texts: list[str]) -> tuple[list[str], list[int]]:
    """The pieces of all texts in order, and how many come before each text and in total."""
    joined = "".join(texts)
    bounds = np.cumsum([0, *map(len, texts)])
    places = np.unique(np.concatenate([*_cuts(joined), bounds]))
    pieces = [joined[start:stop] for start, stop in pairwise(places.tolist())]
    return pieces, np.searchsorted(places, bounds).tolist()


def _cuts(text: str) -> Iterator[np.ndarray]:
    """The places at which the text must be cut, and possibly more before digits, which do no harm."""
    is_ascii = text.isascii()
    codes = np.frombuffer(text.encode("ascii"), "u1") if is_ascii else np.frombuffer(text.encode("utf-32-le"), "<u4")
    is_digit, is_space = codes - codes.dtype.type(ord("0")) < 10, codes <= ord(" ")
    if not is_ascii:
        wide = np.flatnonzero(codes > 0x7F)
        kinds = _wide_kinds()[codes[wide]]
        is_space[wide[kinds == _SPACE]] = True
        digits = wide[kinds == _DIGIT]
        yield digits
        yield digits + 1
    yield np.flatnonzero(is_digit[2:] & is_space[1:-1] & is_space[:-2]) + 2


@cache
def _wide_kinds() -> np.ndarray:
    """[0x110000] uint8: the kind of each non-ASCII character by its code, _SPACE, _DIGIT or 0 for others."""
    kinds = np.zeros(0x110000, np.uint8)
    for code in range(0x80, 0x20000):  # higher codes are ideographs, which are letters
        letter = chr(code)
        if unicodedata.category(letter).startswith("N"):
            kinds[code] = _DIGIT
        elif letter.isspace():
            kinds[code] = _SPACE
    for start, stop in _NEW_DIGITS:
        kinds[start:stop] = _DIGIT
    return kinds
