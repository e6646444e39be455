"""Where text can be cut without changing its tokens: between words, if the pre-tokenizer is a known one.

Byte-level tokenizers first split a text by a regular expression, then encode each word by itself. Under all of the
expressions below no match spans any of the boundaries here, and none looks across one, so both sides of a boundary
have the same tokens alone as together.
"""

from __future__ import annotations

import re
from itertools import groupby
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
_LETTER, _DIGIT, _SPACE, _NEWLINE, _APOSTROPHE, _CONTROL, _SYMBOL, _FOREIGN, _UNKNOWN = range(9)
_ENDS_OF_SPACES = (*range(0x80, 0x8F), 0x9F, 0xA0, 0xA8, 0xA9, 0xAF)  # U+0085, U+00A0, U+1680, U+2000 to U+3000


def _kind(byte: int) -> int:
    letter = chr(byte)
    if byte >= 0x80:
        return _UNKNOWN if byte in _ENDS_OF_SPACES else _FOREIGN
    if letter.isalpha() or letter.isdigit():
        return _LETTER if letter.isalpha() else _DIGIT
    if letter in " '\n":
        return {" ": _SPACE, "'": _APOSTROPHE, "\n": _NEWLINE}[letter]
    return _CONTROL if byte < 0x20 or byte == 0x7F else _SYMBOL


_KINDS = np.array([_kind(byte) for byte in range(256)], np.uint8)
_SMALL, _CAPITAL = (np.isin(np.arange(256), list(letters.encode())) for letters in (ascii_lowercase, ascii_uppercase))

# Cuts by the kinds of the bytes before and after.
_CUT = np.zeros((16, 16), bool)
_CUT[_LETTER, [_DIGIT, _SPACE, _NEWLINE, _CONTROL, _SYMBOL]] = True  # an apostrophe may begin a contraction
_CUT[_DIGIT, [_LETTER, _SPACE, _NEWLINE, _CONTROL, _SYMBOL, _APOSTROPHE]] = True
_CUT[[_APOSTROPHE, _SYMBOL], _DIGIT] = True
_CUT[[_APOSTROPHE, _SYMBOL, _FOREIGN], _SPACE] = True
_CUT_IN_TEXT = re.compile(r"(?<=[A-Za-z0-9])(?= )|(?<=\S\n)(?=[^\s/])")


class WordRule(NamedTuple):
    """A tokenizer that encodes words by themselves, except in texts that contain one of its `added` tokens, here by
    their first two characters, or that are not in NFC when it is `normalized`.

    `splits_symbols`: symbols are never in one word with letters or newlines, as in GPT-2, and the last of several
    newlines is a word of its own. `splits_digits`: each digit is one. `splits_case`: a capital letter after a small one
    begins another.
    """

    added: tuple[tuple[str, tuple[str, ...]], ...]
    normalized: bool
    splits_symbols: bool
    splits_digits: bool
    splits_case: bool

    def has_added(self, text: str) -> bool:
        """Whether a text contains an added token; hundreds of them often begin alike."""
        return any(start in text and any(token in text for token in tokens) for start, tokens in self.added)


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
    splits = (len(tokenizer.pre_tokenizer.pre_tokenize_str(text)) > 1 for text in (".a", "11", "aA"))
    tokens = sorted(token["content"] for token in added)
    by_start = tuple((start, tuple(group)) for start, group in groupby(tokens, key=lambda token: token[:2]))
    return WordRule(by_start, bool(normalizers), *splits)


def boundaries(text: bytes, stops: np.ndarray, rule: WordRule) -> np.ndarray:
    """Positions in UTF-8 `text` between words, ascending int64: 0, those of `stops`, and all where it can be cut."""
    array = np.frombuffer(text, np.uint8)
    kinds = _KINDS[array]
    marked = np.zeros(len(text) + 1, bool)
    marked[0] = marked[stops] = True
    cuts = _cuts_around(array, kinds, marked, rule)
    pairs = _CUT.copy()
    pairs[[_APOSTROPHE, _SYMBOL], _NEWLINE] = pairs[_SYMBOL, _LETTER] = rule.splits_symbols
    pairs[_DIGIT, _DIGIT] = rule.splits_digits
    marked[1:-1] |= pairs.ravel()[kinds[:-1] << 4 | kinds[1:]]
    for cut in cuts:
        marked[cut] = True
    return np.flatnonzero(marked)


def _cuts_around(text: np.ndarray, kinds: np.ndarray, stops: np.ndarray, rule: WordRule) -> list[np.ndarray]:
    """Cuts before and after bytes, by the kinds of the bytes on both sides of them in the same text."""
    found = []
    newlines, spaces = (_inner(kinds, kind, stops) for kind in (_NEWLINE, _SPACE))
    # The last of several spaces belongs to what follows it.
    lasts = np.concatenate([newlines, spaces]) if rule.splits_symbols else spaces
    before, after = kinds[lasts - 1], kinds[lasts + 1]
    found.append(lasts[_among(before, _SPACE, _NEWLINE, _CONTROL) & _among(after, _LETTER, _SYMBOL)])
    before, after = kinds[newlines - 1], kinds[newlines + 1]
    following = (_LETTER, _SYMBOL) if rule.splits_symbols else (_LETTER, _DIGIT)
    found.append(newlines[_among(after, *following) & (before != _UNKNOWN)] + 1)
    if not rule.splits_symbols:  # then a letter takes one symbol before it, unless that is in a run with what precedes
        symbols = _inner(kinds, _SYMBOL, stops)
        symbols = symbols[kinds[symbols + 1] == _LETTER]
        in_run = _among(kinds[symbols - 1], _SPACE, _SYMBOL) & (text[symbols - 1] != ord("/")) & ~stops[symbols]
        found.append(symbols[in_run] + 1)
    return found


def _among(found: np.ndarray, *kinds: int) -> np.ndarray:
    """Which of the kinds `found` are among `kinds`, bool."""
    table = np.zeros(9, bool)
    table[list(kinds)] = True
    return table[found]


def _inner(kinds: np.ndarray, kind: int, stops: np.ndarray) -> np.ndarray:
    """Where bytes of a kind are that do not end their text, and that are not the first of all."""
    found = 1 + np.flatnonzero(kinds[1:-1] == kind)
    return found[~stops[found + 1]]


def are_plain(text: np.ndarray, starts: np.ndarray, ends: np.ndarray, rule: WordRule) -> np.ndarray:
    """Which of the words that boundaries cut out of UTF-8 `text` uint8, from `starts` to `ends`, stay in one piece for
    sure, [words] bool: ASCII letters or symbols after at most one space, or letters after a symbol."""
    kinds = _KINDS[text]
    first = kinds[starts]
    letters = _all(kinds == _LETTER, starts + 1, ends) & _among(first, _LETTER, _SPACE, _SYMBOL)
    if rule.splits_case:
        letters &= ~_any(_SMALL[text[:-1]] & _CAPITAL[text[1:]], starts, ends - 1)
    return letters | (_all(kinds == _SYMBOL, starts + 1, ends) & _among(first, _SPACE, _SYMBOL))


def _any(marked: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    sums = np.append(0, np.cumsum(marked))
    return sums[ends] > sums[starts]


def _all(marked: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    return ~_any(~marked, starts, ends)


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
