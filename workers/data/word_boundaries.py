"""Where text can be cut without changing its tokens: between words, if the pre-tokenizer is a known one.

Byte-level tokenizers first split a text by a regular expression, then encode each word by itself. Under all of the
expressions below no match spans any of the boundaries here, and none looks across one, so both sides of a boundary
have the same tokens alone as together.
"""

from __future__ import annotations

import re
from string import ascii_lowercase, ascii_uppercase
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

_SUFFIXES = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"


def _cased(suffixes: str, digits: str) -> str:
    """Words in which capital letters come first; other symbols may end with slashes."""
    words = f"{_BEFORE}{_UPPER}*{_LOWER}+{suffixes}|{_BEFORE}{_UPPER}+{_LOWER}*{suffixes}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_EXPRESSIONS = {
    rf"{_SUFFIXES}|{_BEFORE}\p{{L}}+|\p{{N}}{{1,3}}|{_REST}",  # Llama 3, OLMo 2, GLM-4
    rf"{_SUFFIXES}|{_BEFORE}\p{{L}}+|\p{{N}}|{_REST}",  # Qwen2, Qwen3
    _cased(f"{_SUFFIXES}?", r"\p{N}{1,3}"),  # gpt-oss
    _cased("", r"\p{N}"),  # Mistral's Tekken
}
# DeepSeek-V3's leaves digits to an earlier step.
_WITHOUT_DIGITS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_DIGITS = {r"\p{N}{1,3}", r"\p{N}"}
_KANA_AND_HANZI = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"

# Kinds of bytes. The last byte of a non-ASCII space is among _UNKNOWN.
_LETTER, _DIGIT, _SPACE, _APOSTROPHE, _CONTROL, _SYMBOL, _FOREIGN, _UNKNOWN = range(8)
_ENDS_OF_SPACES = (*range(0x80, 0x8F), 0x9F, 0xA0, 0xA8, 0xA9, 0xAF)  # U+0085, U+00A0, U+1680, U+2000 to U+3000


def _kind(byte: int) -> int:
    letter = chr(byte)
    if byte >= 0x80:
        return _UNKNOWN if byte in _ENDS_OF_SPACES else _FOREIGN
    if letter.isalpha() or letter.isdigit():
        return _LETTER if letter.isalpha() else _DIGIT
    if letter in " '":
        return _SPACE if letter == " " else _APOSTROPHE
    return _CONTROL if byte < 0x20 or byte == 0x7F else _SYMBOL


_KINDS = np.array([_kind(byte) for byte in range(256)], np.uint8)
# By the kinds of the bytes before and after.
_CUT = np.zeros((8, 8), bool)
_CUT[_LETTER, [_DIGIT, _SPACE, _CONTROL, _SYMBOL]] = True  # a letter and an apostrophe may be a contraction
_CUT[_DIGIT, [_LETTER, _SPACE, _CONTROL, _SYMBOL, _APOSTROPHE]] = True
_CUT[[_APOSTROPHE, _SYMBOL], _DIGIT] = True
_CUT[[_APOSTROPHE, _SYMBOL, _FOREIGN], _SPACE] = True
# Before the last of several spaces: by the kind of the byte before it, and of the byte after it.
_LAST_SPACE = np.zeros((8, 8), bool)
_LAST_SPACE[[[_SPACE], [_CONTROL]], [_LETTER, _SYMBOL]] = True

_CUT_IN_TEXT = re.compile(r"(?<=[A-Za-z0-9])(?= )|(?<=\S\n)(?=[^\s/])")


class WordRule(NamedTuple):
    """A tokenizer that encodes words by themselves, except in texts that contain one of its `added` tokens, or that are
    not in NFC when it is `normalized`.

    Letters are a word of their own after a symbol if `splits_symbols`, and where a capital letter follows a small one
    if `splits_case`.
    """

    added: tuple[str, ...]
    normalized: bool
    splits_symbols: bool
    splits_case: bool


def word_rule(tokenizer: Tokenizer, content: dict[str, Any]) -> WordRule | None:
    """The rule of a tokenizer with this `content` of a tokenizer.json, or None if it is not known to have one. Special
    tokens are taken as plain text."""
    normalizers = _flat(content["normalizer"], "normalizers")
    added = [token for token in content["added_tokens"] if not token["special"]]
    if (
        any(step["type"] != "NFC" for step in normalizers)
        or not _splits_words(_flat(content["pre_tokenizer"], "pretokenizers"))
        or content["model"].get("dropout")
        or any(re.search(r"\s", token["content"]) or not token["content"] for token in added)
        or any(token["lstrip"] or token["rstrip"] or token["single_word"] for token in added)
    ):
        return None
    splits_symbols, splits_case = (len(tokenizer.pre_tokenizer.pre_tokenize_str(text)) > 1 for text in (".a", "aA"))
    return WordRule(tuple(token["content"] for token in added), bool(normalizers), splits_symbols, splits_case)


def boundaries(text: bytes, stops: np.ndarray, rule: WordRule) -> np.ndarray:
    """Positions in UTF-8 `text` between words, ascending int64: 0, those of `stops`, and all where it can be cut."""
    cut = _CUT.copy()
    cut[_SYMBOL, _LETTER] = rule.splits_symbols
    kinds = _KINDS[np.frombuffer(text, np.uint8)]
    marked = np.zeros(len(text) + 1, bool)
    marked[0] = marked[stops] = True
    spaces = 1 + np.flatnonzero(kinds[1:-1] == _SPACE)
    last = _LAST_SPACE[kinds[spaces - 1], kinds[spaces + 1]] & ~marked[spaces + 1]
    marked[spaces[last]] = True
    marked[1:-1] |= cut.ravel()[kinds[:-1] << 3 | kinds[1:]]
    return np.flatnonzero(marked)


def are_letters(text: np.ndarray, starts: np.ndarray, ends: np.ndarray, rule: WordRule) -> np.ndarray:
    """Which of the words that boundaries cut out of UTF-8 `text` uint8, from `starts` to `ends`, stay in one piece for
    sure, [words] bool: ASCII letters, the first of which may follow a space or symbol."""
    kinds = _KINDS[text]
    others = np.append(0, np.cumsum(kinds != _LETTER))
    found = (others[ends] == others[np.minimum(starts + 1, ends)]) & (ends > starts)
    found &= np.isin(kinds[starts], [_LETTER, _SPACE, _SYMBOL])
    if rule.splits_case:
        small, capital = (
            np.isin(text, list(letters)) for letters in (ascii_lowercase.encode(), ascii_uppercase.encode())
        )
        turns = np.append(0, np.cumsum(small[:-1] & capital[1:]))
        found &= turns[np.maximum(ends - 1, 0)] == turns[starts]
    return found


def last_cut(text: str) -> int:
    """The last index at which `text` can be cut, or 0."""
    for size in (2**12, len(text)):
        base = max(0, len(text) - size)
        found = [match.start() for match in _CUT_IN_TEXT.finditer(text, base)]
        if found:
            return found[-1]
    return 0


def _splits_words(steps: list[dict[str, Any]]) -> bool:
    """Whether these steps of a pre-tokenizer are known ones that together split at every boundary."""
    split = digits = False
    for step in steps:
        expression = _expression(step)
        if step["type"] == "ByteLevel" and not step["add_prefix_space"]:
            split |= step["use_regex"]  # GPT-2's expression
        elif step["type"] == "Digits" or expression in _DIGITS:
            digits = True
        elif expression in _EXPRESSIONS or (expression == _WITHOUT_DIGITS and digits):
            split = True
        elif expression != _KANA_AND_HANZI:
            return False
    return split


def _expression(step: dict[str, Any]) -> str | None:
    """The expression whose matches a step isolates."""
    if step["type"] != "Split" or step["behavior"] != "Isolated" or step["invert"]:
        return None
    expression: str | None = step["pattern"].get("Regex")
    return expression and expression.replace("\r", r"\r").replace("\n", r"\n")


def _flat(step: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, which may be a sequence of some."""
    if step is None:
        return []
    return [inner for each in step[key] for inner in _flat(each, key)] if step["type"] == "Sequence" else [step]
