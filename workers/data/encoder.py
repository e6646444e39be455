"""Encodes documents: each distinct word once, where the tokenizer treats words independently of their neighbours."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer

from pentad.workers.data.corpus_writer import Document, token_dtype
from pentad.workers.data.tokenizer import encode, vocab_size
from pentad.workers.data.word_boundaries import WordRule, boundaries, last_cut, word_rule

_AT_ONCE, _PLAIN_AT_ONCE = 2**23, 2**21  # characters; without the cache encoding needs about 100 bytes a token
_MOST_WORDS = 2**21  # kept at a time; some 200 bytes each


class TextChunk(NamedTuple):
    """Some text of a document; `last` ends the document. Empty documents give no chunk."""

    text: str
    last: bool


class Encoder:
    """Encodes text as `tokenizer` does and ends every document with the token `end`."""

    def __init__(self, tokenizer: Tokenizer, end: int) -> None:
        self.dtype = token_dtype(vocab_size(tokenizer))
        self.end = np.array([end], self.dtype)
        self.words = _Words(tokenizer, self.dtype)
        self.rule = word_rule(tokenizer)
        self.tokenizer = tokenizer

    def documents(self, chunks: Iterable[TextChunk]) -> Iterator[Document]:
        """The documents' tokens, the same ones wherever the text was cut into chunks.

        Holds a few megabytes of text, or one whole document where it cannot be cut without changing its tokens.
        """
        parts: list[np.ndarray] = []
        for group in self._groups(chunks):
            for chunk, ids in zip(group, self.encode([chunk.text for chunk in group]), strict=True):
                parts.append(ids)
                if chunk.last:
                    yield Document(np.concatenate([*parts, self.end]))
                    parts = []

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Token ids of each text, without begin and end tokens."""
        if self.rule is None:
            return [np.array(ids, self.dtype) for ids in encode(self.tokenizer, texts)]
        found: dict[int, np.ndarray] = {}
        plain = [number for number, text in enumerate(texts) if not _is_regular(text, self.rule)]
        for number, ids in zip(plain, encode(self.tokenizer, [texts[number] for number in plain]), strict=True):
            found[number] = np.array(ids, self.dtype)
        regular = [number for number in range(len(texts)) if number not in found]
        found |= dict(zip(regular, self.words.encode([texts[number] for number in regular]), strict=True))
        return [found[number] for number in range(len(texts))]

    def _groups(self, chunks: Iterable[TextChunk]) -> Iterator[list[TextChunk]]:
        """Whole documents together; only the last of a group may go on, from a place where it can be cut."""
        limit = _PLAIN_AT_ONCE if self.rule is None else _AT_ONCE
        group: list[TextChunk] = []
        begun: list[str] = []  # of the document that has not ended
        size = 0
        for text, last in chunks:
            begun.append(text)
            size += len(text)
            if last:
                group.append(TextChunk("".join(begun), True))
                begun = []
            if size < limit:
                continue
            cut = last_cut(text) if begun and self.rule else 0
            if cut:
                group.append(TextChunk("".join([*begun[:-1], text[:cut]]), False))
                begun = [text[cut:]]
            if group:
                yield group
                group = []
            size = sum(map(len, begun))
        if group:
            yield group


def _is_regular(text: str, rule: WordRule) -> bool:
    """Whether only the pre-tokenizer and the model decide on the tokens of a text."""
    return not any(token in text for token in rule.added) and (
        not rule.normalized or unicodedata.is_normalized("NFC", text)
    )


class _Words:
    """The token ids of the words seen so far, one after the other."""

    def __init__(self, tokenizer: Tokenizer, dtype: np.dtype) -> None:
        self.tokenizer, self.dtype = tokenizer, dtype
        self._forget()

    def _forget(self) -> None:
        self.numbers: dict[str, int] = {}
        self.tokens = np.empty(2**20, self.dtype)
        self.ends = np.zeros(2**18, np.int64)  # [1 + words]: of each word in `tokens`

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Token ids of each text; peaks at some 20 bytes a character."""
        if not texts:
            return []
        raw = [text.encode() for text in texts]
        stops = np.cumsum([len(text) for text in raw])
        joined = b"".join(raw)
        cuts = boundaries(joined, stops)
        words = pa.LargeStringArray.from_buffers(len(cuts) - 1, pa.py_buffer(cuts), pa.py_buffer(joined))
        distinct = words.dictionary_encode()
        names = distinct.dictionary.to_pylist()
        self._learn(names)
        numbers = np.fromiter(map(self.numbers.__getitem__, names), np.int64, len(names))
        numbers = numbers[distinct.indices.to_numpy()]
        starts, counts = self.ends[numbers], self.ends[numbers + 1] - self.ends[numbers]
        ends = np.cumsum(counts)
        places = np.repeat(starts - (ends - counts), counts)
        places += np.arange(len(places))
        bounds = np.concatenate([[0], ends])[np.searchsorted(cuts, stops)]
        return np.split(self.tokens[places], bounds[:-1])

    def _learn(self, names: list[str]) -> None:
        if len(self.numbers) + len(names) > _MOST_WORDS:
            self._forget()
        new = [name for name in names if name not in self.numbers]
        ids = encode(self.tokenizer, new)
        known, used = len(self.numbers), self.ends[len(self.numbers)]
        ends = used + np.cumsum([len(word) for word in ids], dtype=np.int64)
        if ends.size:
            self.tokens = _grown(self.tokens, ends[-1])
            self.tokens[used : ends[-1]] = np.fromiter((token for word in ids for token in word), self.dtype)
            self.ends = _grown(self.ends, known + 1 + len(new))
            self.ends[known + 1 : known + 1 + len(new)] = ends
        self.numbers.update(zip(new, range(known, known + len(new)), strict=True))


def _grown(array: np.ndarray, size: int) -> np.ndarray:
    """The array, or a copy with room for at least `size` elements."""
    if size <= len(array):
        return array
    larger = np.empty(2 * int(size), array.dtype)
    larger[: len(array)] = array
    return larger
