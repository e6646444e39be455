"""Encodes documents: each distinct word once, where the tokenizer treats words independently of their neighbours."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable, Iterator
from itertools import chain, repeat
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer

from pentad.workers.data.byte_pairs import byte_pairs
from pentad.workers.data.corpus_writer import Document, token_dtype
from pentad.workers.data.tokenizer import encode, vocab_size
from pentad.workers.data.word_boundaries import WordRule, are_plain, boundaries, last_cut, word_rule

_AT_ONCE, _PLAIN_AT_ONCE = 2**23, 2**21  # characters; without the cache encoding needs about 100 bytes a token
_MOST_WORDS = 2**21  # kept at a time; some 200 bytes each
_LONGEST = 64  # bytes of a word that is encoded together with others, one merge a round


class TextChunk(NamedTuple):
    """Some text of a document; `last` ends the document. Empty documents give no chunk."""

    text: str
    last: bool


class Encoder:
    """Encodes text as `tokenizer` does and ends every document with the token `end`."""

    def __init__(self, tokenizer: Tokenizer, end: int) -> None:
        self.dtype = token_dtype(vocab_size(tokenizer))
        self.end = np.array([end], self.dtype)
        content = json.loads(tokenizer.to_str())
        self.rule = word_rule(tokenizer, content)
        self.words = _Words(tokenizer, self.rule, content, self.dtype) if self.rule else None
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
        if self.rule is None or self.words is None:
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
    return not rule.has_added(text) and (not rule.normalized or unicodedata.is_normalized("NFC", text))


class _Words:
    """The token ids of the words seen so far."""

    def __init__(self, tokenizer: Tokenizer, rule: WordRule, content: dict[str, Any], dtype: np.dtype) -> None:
        self.tokenizer, self.rule, self.dtype = tokenizer, rule, dtype
        self.pairs = byte_pairs(content["model"])
        self._forget()

    def _forget(self) -> None:
        self.numbers: dict[str, int] = {}
        self.tokens = _Grown(self.dtype)
        self.starts, self.counts = _Grown(np.dtype(np.int64)), _Grown(np.dtype(np.int64))  # of each word in `tokens`

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Token ids of each text; peaks at some 20 bytes a character."""
        if not texts:
            return []
        raw = [text.encode() for text in texts]
        stops = np.cumsum([len(text) for text in raw])
        joined = b"".join(raw)
        cuts = boundaries(joined, stops, self.rule)
        words = pa.LargeStringArray.from_buffers(len(cuts) - 1, pa.py_buffer(cuts), pa.py_buffer(joined))
        distinct = words.dictionary_encode()
        numbers = self._numbers(distinct.dictionary)[distinct.indices.to_numpy()]
        starts, counts = self.starts.values[numbers], self.counts.values[numbers]
        ends = np.cumsum(counts)
        places = np.repeat(starts - (ends - counts), counts)
        places += np.arange(len(places))
        bounds = np.append(0, ends)[np.searchsorted(cuts, stops)]
        return np.split(self.tokens.values[places], bounds[:-1])

    def _numbers(self, words: pa.LargeStringArray) -> np.ndarray:
        """The numbers of distinct words, [words] int64; learns those that are new."""
        names = words.to_pylist()
        if len(self.numbers) + len(names) > _MOST_WORDS:
            self._forget()
        found = np.fromiter(map(self.numbers.get, names, repeat(-1)), np.int64, len(names))
        new = np.flatnonzero(found < 0)
        if len(new):
            found[new] = numbers = np.arange(len(self.numbers), len(self.numbers) + len(new))
            learned = [names[number] for number in new.tolist()]
            self._learn(words.take(pa.array(new)), learned)
            self.numbers.update(zip(learned, numbers.tolist(), strict=True))
        return found

    def _learn(self, words: pa.LargeStringArray, names: list[str]) -> None:
        """Adds the tokens of new words: of plain ones all at once, of others with the tokenizer."""
        offsets, text = (
            np.frombuffer(buffer, dtype) for buffer, dtype in zip(words.buffers()[1:], ("<i8", "u1"), strict=True)
        )
        offsets = offsets[: len(words) + 1]
        lengths, fast = np.diff(offsets), np.zeros(len(words), bool)
        if self.pairs:
            fast = are_plain(text, offsets[:-1], offsets[1:], self.rule) & (lengths <= _LONGEST)
        starts, counts = np.empty((2, len(words)), np.int64)
        tokens = np.empty(0, self.dtype)
        if self.pairs and fast.any():
            tokens, starts[fast], counts[fast] = self.pairs.encode(
                text[: offsets[-1]][np.repeat(fast, lengths)], lengths[fast]
            )
        others = encode(self.tokenizer, [names[number] for number in np.flatnonzero(~fast).tolist()])
        counts[~fast] = sizes = np.fromiter(map(len, others), np.int64, len(others))
        starts[~fast] = len(tokens) + np.cumsum(sizes) - sizes
        self.starts.extend(self.tokens.used + starts)
        self.counts.extend(counts)
        self.tokens.extend(tokens)
        self.tokens.extend(np.fromiter(chain.from_iterable(others), self.dtype, int(sizes.sum())))


class _Grown:
    """An array that grows at its end: the first `used` of `values` count."""

    def __init__(self, dtype: np.dtype) -> None:
        self.values, self.used = np.empty(2**18, dtype), 0

    def extend(self, values: np.ndarray) -> None:
        end = self.used + len(values)
        if end > len(self.values):
            larger = np.empty(2 * end, self.values.dtype)
            larger[: self.used] = self.values[: self.used]
            self.values = larger
        self.values[self.used : end] = values
        self.used = end
