"""Encodes documents, with fastokens where it gives the same tokens as `tokenizers`, which is many times slower."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from pentad.workers.data.corpus_writer import Document, token_dtype
from pentad.workers.data.tokenizer import encode, vocab_size
from pentad.workers.text.digit_cuts import cut_at_digits, without_digits_step
from pentad.workers.text.word_boundaries import in_one_step, last_cut, why_not_by_words

_AT_ONCE, _SLOW_AT_ONCE = 2**22, 2**21  # characters; `tokenizers` needs about 100 bytes per token
_LONGEST_REASON = 200  # characters
# Text on which the two libraries differ. A long s after an apostrophe may count as a contraction, like 's. With GPT-2's
# words and single digits, U+180E may or may not be a space, and Unicode 17's digits (here their first bytes) digits.
_ODD = ("'\u017f".encode(), "\u180e".encode(), b"\xf0\x91\xb7", b"\xf0\x96\xbf")
# Words, spaces, and the newest letters and symbols of Unicode, which older libraries classify differently.
_SAMPLES = (
    "It's  12.5 \n\n x",
    "\u00e9e\u0301 \u017fS\u00df",
    "\u5c71\u3042",
    "1\u0661\u00b2",
    "a \U0001fae8",
    " \u1c89b \U000323b0",
)


class TextChunk(NamedTuple):
    """Some text of a document; `last` ends the document. Empty documents give no chunk."""

    text: str
    last: bool


class Encoder:
    """Encodes text as `tokenizer` does and ends every document with the token `end`. `note` gets a line that says why
    if fastokens cannot encode the text, or not all of it."""

    def __init__(self, tokenizer: Tokenizer, end: int, note: Callable[[str], None] = lambda line: None) -> None:
        self.tokenizer, self.note, self.has_failed = tokenizer, note, False
        self.dtype = token_dtype(vocab_size(tokenizer))
        self.end = np.array([end], self.dtype)
        self.content = json.loads(tokenizer.to_str())
        self.splits_words = why_not_by_words(self.content) is None
        self.fast = self._start()

    def documents(self, chunks: Iterable[TextChunk]) -> Iterator[Document]:
        """The documents' tokens, which do not depend on how the text was cut into chunks.

        Holds a few megabytes of text, or a whole document if it cannot be cut without changing its tokens.
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
        if self.fast is not None:
            try:
                return self._encode_fast(self.fast, texts)
            except _Failure as error:
                if not self.has_failed:
                    self.note(f"`tokenizers` encodes some text: {error}")
                self.has_failed, self.fast = True, self._start()  # after a failure, its state is undefined
        return self._encode_slow(texts)

    def _start(self) -> _Fast | None:
        """The fast tokenizer, if one gives the same tokens as `tokenizer`; else None, with a note."""
        try:
            return _fast(self.tokenizer, self.content)
        except _Failure as error:
            self.note(f"`tokenizers` encodes the text, 15 to 200 times slower: {error}")
            return None

    def _encode_slow(self, texts: list[str]) -> list[np.ndarray]:
        return [np.array(ids, self.dtype) for ids in encode(self.tokenizer, texts)]

    def _encode_fast(self, fast: _Fast, texts: list[str]) -> list[np.ndarray]:
        odd = [fast.is_odd(text) for text in texts]
        others = iter(fast.encode([text for text, is_odd in zip(texts, odd, strict=True) if not is_odd], self.dtype))
        slow = iter(self._encode_slow([text for text, is_odd in zip(texts, odd, strict=True) if is_odd]))
        return [next(slow if is_odd else others) for is_odd in odd]

    def _groups(self, chunks: Iterable[TextChunk]) -> Iterator[list[TextChunk]]:
        """Groups of whole documents; only the last one of a group may continue in the next, at a place where it can be
        cut."""
        limit = _AT_ONCE if self.fast else _SLOW_AT_ONCE
        group: list[TextChunk] = []
        begun: list[str] = []  # the chunks of the document that has not ended
        size = 0
        for text, last in chunks:
            begun.append(text)
            size += len(text)
            if last:
                group.append(TextChunk("".join(begun), True))
                begun = []
            if size < limit:
                continue
            cut = last_cut(text) if begun and self.splits_words else 0
            if cut:
                group.append(TextChunk("".join([*begun[:-1], text[:cut]]), False))
                begun = [text[cut:]]
            if group:
                yield group
                group = []
            size = sum(map(len, begun))
        if group:
            yield group


class _Failure(Exception):
    """fastokens cannot be used; the message says why."""


class _Fast:
    """A fastokens tokenizer. Its methods raise _Failure, whatever fastokens raises."""

    def __init__(self, content: dict[str, Any]) -> None:
        try:
            import fastokens
        except ImportError as error:  # some platforms have no wheel
            raise _Failure(f"fastokens cannot be imported ({error})") from None
        without_digits = without_digits_step(content)
        self.cuts_at_digits = without_digits is not None
        same = {"pre_tokenizer": without_digits or in_one_step(content["pre_tokenizer"]), "post_processor": None}
        with _failures():
            self.tokenizer = fastokens.Tokenizer.from_json_str(json.dumps(content | same))
        vocab = content["model"]["vocab"]
        missing = [bytes([byte]) for byte, letter in enumerate(_alphabet()) if letter not in vocab]
        self.odd = {True: [byte for byte in missing if byte.isascii()], False: [*missing, *_ODD]}  # by text.isascii()

    def is_odd(self, text: str) -> bool:
        """Whether `tokenizers` may give other tokens for a text, or drops bytes of it that have no token."""
        odd = self.odd[text.isascii()]
        return bool(odd) and any(map(text.encode().__contains__, odd))

    def encode(self, texts: list[str], dtype: np.dtype) -> list[np.ndarray]:
        """Token ids of each text, without begin and end tokens; special tokens are plain text."""
        pieces, bounds = cut_at_digits(texts) if self.cuts_at_digits else (texts, range(len(texts) + 1))
        with _failures():
            ids, offsets = self.tokenizer.encode_batch_flat(pieces, add_special_tokens=False, split_special_tokens=True)
        tokens = np.frombuffer(ids, "<u4").astype(dtype)
        return [tokens[start:stop] for start, stop in pairwise(np.frombuffer(offsets, "<u8")[bounds].tolist())]


@contextmanager
def _failures() -> Iterator[None]:
    """Turns whatever fastokens raises into a _Failure. A panic in its Rust code is a BaseException."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        text = " ".join(str(error).split())[:_LONGEST_REASON]
        raise _Failure(f"fastokens has failed ({type(error).__name__}: {text})") from None


def _fast(tokenizer: Tokenizer, content: dict[str, Any]) -> _Fast:
    """The fast equivalent of `tokenizer`. Raises _Failure if there is none, or it gives other tokens for samples."""
    if obstacle := why_not_by_words(content):
        raise _Failure(obstacle)
    fast = _Fast(content)
    samples = [text for text in _SAMPLES if not fast.is_odd(text)]
    found = [ids.tolist() for ids in fast.encode(samples, np.dtype(np.uint32))]
    if found != encode(tokenizer, samples):
        raise _Failure("fastokens has other tokens for the samples")
    return fast


def _alphabet() -> list[str]:
    """The letters that stand for bytes 0 to 255 in a byte-level tokenizer's tokens, as in GPT-2."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(0x100)]
