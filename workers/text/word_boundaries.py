"""Which tokenizers split text in a known way, and where text for them can be cut without changing its tokens.

Byte-level tokenizers first split a text by a regular expression, and then encode each word by itself. With all of the
expressions below, no match spans a cut of `last_cut` or looks across one, so the two sides have the same tokens
separately as together.
"""

from __future__ import annotations

import re
from typing import Any

_SUFFIXES = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"


def _cased(suffixes: str, digits: str) -> str:
    """An expression for words in which capital letters come first; other symbols may end with slashes."""
    words = f"{_BEFORE}{_UPPER}*{_LOWER}+{suffixes}|{_BEFORE}{_UPPER}+{_LOWER}*{suffixes}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_EXPRESSIONS = {
    rf"{_SUFFIXES}|{_BEFORE}\p{{L}}+|\p{{N}}{{1,3}}|{_REST}",  # Llama 3, OLMo 2, GLM-4
    rf"{_SUFFIXES}|{_BEFORE}\p{{L}}+|\p{{N}}|{_REST}",  # Qwen2, Qwen3
    _cased(f"{_SUFFIXES}?", r"\p{N}{1,3}"),  # gpt-oss
    _cased("", r"\p{N}"),  # Mistral's Tekken
}
# DeepSeek-V3's expression leaves digits to an earlier step.
_WITHOUT_DIGITS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_DIGITS = {r"\p{N}{1,3}", r"\p{N}"}
_KANA_AND_HANZI = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_NOT_SUPPORTED = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "unk_token", "byte_fallback")
_CUT = re.compile(r"(?<=[A-Za-z0-9])(?= )|(?<=\S\n)(?=[^\s/])")


def why_not_by_words(content: dict[str, Any]) -> str | None:
    """Why a tokenizer with this `content` of its tokenizer.json is not known to be a byte-level BPE that encodes words
    independently; None if it is. Special tokens are taken as plain text."""
    model = content["model"]
    if model.get("type") != "BPE":
        return f"its model is {model.get('type')}, not BPE"
    for key in _NOT_SUPPORTED:
        if model.get(key):
            return f"its model has {key} {model[key]}"
    for step in _flat(content["normalizer"], "normalizers"):
        if step["type"] != "NFC":
            return f"its normalizer is {step['type']}, not NFC"
    if not _are_known(_flat(content["pre_tokenizer"], "pretokenizers")):
        return "its pre-tokenizer is not one of those in docs/data-build.md"
    faults = (_fault(token) for token in content["added_tokens"] if not token["special"])
    return next(filter(None, faults), None)


def _fault(token: dict[str, Any]) -> str | None:
    """Why text with this added token is not encoded word by word; None if it is."""
    if re.search(r"\s", token["content"]) or not token["content"]:
        return f"its token '{token['content']}' has spaces inside"
    if token["lstrip"] or token["rstrip"] or token["single_word"]:
        return f"its token '{token['content']}' takes in spaces or needs word borders beside it"
    return None


def last_cut(text: str) -> int:
    """The last index at which `text` can be cut; 0 if there is none."""
    for size in (2**12, len(text)):
        base = max(0, len(text) - size)
        found = [match.start() for match in _CUT.finditer(text, base)]
        if found:
            return found[-1]
    return 0


def in_one_step(pre_tokenizer: dict[str, Any]) -> dict[str, Any]:
    """The same pre-tokenizer; a sequence that consists only of GPT-2's expression is replaced by that step."""
    steps = _flat(pre_tokenizer, "pretokenizers")
    return steps[0] if len(steps) == 1 and steps[0]["type"] == "ByteLevel" else pre_tokenizer


def _are_known(steps: list[dict[str, Any]]) -> bool:
    """Whether these steps of a pre-tokenizer are known and together split at every cut."""
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
    """The expression whose matches a step isolates; None for other steps."""
    if step["type"] != "Split" or step["behavior"] != "Isolated" or step["invert"]:
        return None
    expression: str | None = step["pattern"].get("Regex")
    return expression and expression.replace("\r", r"\r").replace("\n", r"\n")


def _flat(step: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, with nested sequences flattened."""
    if step is None:
        return []
    return [inner for each in step[key] for inner in _flat(each, key)] if step["type"] == "Sequence" else [step]
