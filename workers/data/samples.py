"""The content of a run's sequences: a pure function of (seed, source, index in the source), so no rank owns any data.

An epoch of a source visits each of its sequences once, in the order of a keyed permutation of range(N) that needs no
table: a mixed-radix Feistel network with cycle walking (Black and Rogaway, "Ciphers with Arbitrary Finite Domains",
2002, method 3).
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.batch import BatchSizes
from pentad.schedules.spec.data import DataSpec
from pentad.workers.data.corpus import Corpus
from pentad.workers.data.mixture import Mixture

_ROUNDS = 8
NEAR = 1024  # gaps of up to this many tokens between spans are read too: cheaper than another read
MapRows = Callable[..., Iterable[Any]]  # `map`, or a thread pool's `map`
DIGEST_BITS = 40  # so that sums of 2^13 digests are exact in float64


class TokenSpan(NamedTuple):
    """Tokens `start` to `start + size` of a corpus's flat stream, each of which has the next token as its target."""

    start: int
    size: int


class Sample(NamedTuple):
    """A sequence of S tokens. `document_starts` are the positions, beginning with 0, at which a document, a part of one
    or the padding at the end starts."""

    inputs: np.ndarray  # [S] int64
    following: np.ndarray  # [S] int64, the token after each input
    is_target: np.ndarray  # [S] bool, whether that token counts as a target
    document_starts: tuple[int, ...]

    def part(self, first: int, end: int) -> Sample:
        """Positions `first` to `end` as a sample with one document."""
        inputs, following, is_target = (each[first:end] for each in self[:3])
        return Sample(inputs, following, is_target, (0,))


class Windows:
    """A corpus cut into `sequences` windows of `length` inputs.

    Adjacent windows share one token: the last target of one is the first input of the next. Raises PentadError, naming
    the corpus's `key`, if the corpus is shorter than one window.
    """

    def __init__(self, corpus: Corpus, length: int, key: str = "data.path") -> None:
        self.corpus, self.length, self.sequences = corpus, length, (corpus.tokens - 1) // length
        if self.sequences < 1:
            raise PentadError(
                f"{key} is '{corpus.path}', which holds {corpus.tokens} tokens: "
                f"expected at least {length + 1} (batch.sequence_length + 1)"
            )

    def spans(self, number: int) -> list[TokenSpan]:
        return [TokenSpan(number * self.length, self.length)]

    def lengths(self, number: int) -> np.ndarray:
        edges = np.concatenate([[0], self.corpus.boundaries(number * self.length, self.length), [self.length]])
        lengths = np.diff(edges)
        return lengths[lengths > 0]


def digest_of(batch: int, samples: Mapping[int, Sample]) -> int:
    """A digest of the samples of these rows of a batch. The digests of disjoint sets of rows add up, modulo
    2^DIGEST_BITS, to that of their union, so the sum over ranks tells whether each row was read exactly once."""
    return sum(document_digest(batch, row, *part) for row, each in samples.items() for part in _documents(each)) % (
        2**DIGEST_BITS
    )


def document_digest(batch: int, row: int, first: int, sample: Sample) -> int:
    """The digest of a document, or a part of one, at position `first` of a row; 0 if it has no targets and so does not
    train."""
    if not sample.is_target.any():
        return 0
    place = f"{batch}/{row}/{first}".encode()
    found = hashlib.blake2b(sample.inputs.data, digest_size=DIGEST_BITS // 8, key=place)
    found.update(sample.following.data)
    found.update(sample.is_target.data)
    return int.from_bytes(found.digest(), "little")


def _documents(sample: Sample) -> Iterator[tuple[int, Sample]]:
    """(first position, sample) of each document of a sequence."""
    for first, end in pairwise((*sample.document_starts, len(sample.inputs))):
        yield first, sample.part(first, end)


def sample_of(corpus: Corpus, spans: list[TokenSpan], length: int, eod_mask_loss: bool) -> Sample:
    """The sequence of `length` tokens made of these spans, padded with zeros. See DataSpec for `eod_mask_loss`."""
    windows, at = _windows(spans)
    tokens, used = _joined(corpus.read, windows, np.int64), len(at)
    inputs, following = np.zeros((2, length), np.int64)
    is_target, is_start = np.zeros(length, bool), np.zeros(length, bool)
    inputs[:used], following[:used] = tokens[at], tokens[at + 1]
    is_target[:used] = _target_mask(corpus, windows, at, eod_mask_loss)
    is_start[:used] = _document_starts(corpus, windows)[at]
    is_start[np.cumsum([0, *(span.size for span in spans)])[: None if used < length else -1]] = True
    return Sample(inputs, following, is_target, tuple(np.flatnonzero(is_start).tolist()))


def target_count(corpus: Corpus, spans: list[TokenSpan], eod_mask_loss: bool) -> int:
    """The number of targets in `sample_of`, without reading tokens."""
    if corpus.has_loss_mask:
        return int(_target_mask(corpus, *_windows(spans), eod_mask_loss).sum())
    ends = (len(corpus.boundaries(span.start + 1, span.size)) for span in spans) if eod_mask_loss else ()
    return sum(span.size for span in spans) - sum(ends)


def _windows(spans: list[TokenSpan]) -> tuple[list[TokenSpan], np.ndarray]:
    """The windows to read for spans and the token after each, and the indices of the spans' positions in the
    concatenated windows. Spans close to each other share a window: a sequence may have thousands."""
    if not spans:
        return [], np.empty(0, np.int64)
    starts, sizes = np.array(spans, np.int64).T
    order = starts.argsort(kind="stable")
    ends = np.maximum.accumulate((starts + sizes)[order] + 1)
    first = np.append(0, 1 + np.flatnonzero(starts[order[1:]] > ends[:-1] + NEAR))  # first span of each window
    begins, ends = starts[order[first]], np.append(ends[first[1:] - 1], ends[-1])
    joined = np.cumsum(ends - begins) - (ends - begins)
    window = np.searchsorted(begins, starts, "right") - 1
    shifts = joined[window] - begins[window] + starts - (np.cumsum(sizes) - sizes)
    windows = [TokenSpan(*each) for each in zip(begins.tolist(), (ends - begins).tolist(), strict=True)]
    return windows, np.repeat(shifts, sizes) + np.arange(sizes.sum())


def _clipped(spans: list[TokenSpan], parts: Sequence[tuple[int, int]]) -> Iterator[TokenSpan]:
    """The spans of the given parts, each (first position, length) in the concatenated `spans`."""
    ends = [*accumulate(span.size for span in spans)]
    for first, length in parts:
        for at in range(bisect_right(ends, first), len(spans)):
            start, size = spans[at]
            before = ends[at] - size
            if before >= first + length:
                break
            begin, end = max(0, first - before), min(size, first + length - before)
            if begin < end:
                yield TokenSpan(start + begin, end - begin)


def _joined(read: Callable[[int, int], np.ndarray], windows: list[TokenSpan], dtype: type) -> np.ndarray:
    """[tokens of all windows]: what `read` returns for each window, concatenated."""
    return np.concatenate([np.empty(0, dtype), *(read(*window) for window in windows)])


def _document_starts(corpus: Corpus, windows: list[TokenSpan]) -> np.ndarray:
    """[tokens of all windows] bool: whether a document starts at each token."""

    def starts(start: int, count: int) -> np.ndarray:
        found = np.zeros(count, bool)
        found[corpus.boundaries(start, count)] = True
        return found

    return _joined(starts, windows, bool)


def _target_mask(corpus: Corpus, windows: list[TokenSpan], at: np.ndarray, eod_mask_loss: bool) -> np.ndarray:
    """[positions] bool: whether the token after each position counts."""
    mask = _joined(corpus.loss_mask, windows, bool)[at + 1]
    return mask & ~_document_starts(corpus, windows)[at + 1] if eod_mask_loss else mask


def shuffled(index: int, sequences: int, seed: int, fingerprint: str) -> int:
    """The number of the sequence that is sample `index` of a source, counted over all epochs."""
    epoch, index_in_epoch = divmod(index, sequences)
    return permuted(index_in_epoch, sequences, f"{seed}/{fingerprint}/{epoch}")


def permuted(index: int, count: int, key: str) -> int:
    """Element `index` of the permutation of range(count) that `key` selects."""
    high_radix = math.isqrt(count - 1) + 1
    low_radix = -(-count // high_radix)
    value = _feistel(index, high_radix, low_radix, key)
    while value >= count:  # cycle walking: at most high_radix values of the network are out of range
        value = _feistel(value, high_radix, low_radix, key)
    return value


def _feistel(value: int, high_radix: int, low_radix: int, key: str) -> int:
    """A permutation of range(high_radix * low_radix): the two digits of `value` shift each other in turn."""
    high, low = divmod(value, low_radix)
    for number in range(0, _ROUNDS, 2):
        high = (high + _noise(key, number, low)) % high_radix
        low = (low + _noise(key, number + 1, high)) % low_radix
    return high * low_radix + low


def _noise(key: str, number: int, digit: int) -> int:
    """64 uniform bits for a round of the network and one of its digits."""
    return int.from_bytes(hashlib.blake2b(f"{key}/{number}/{digit}".encode(), digest_size=8).digest(), "little")


class Sequences(Protocol):
    """How a corpus is cut into `sequences` sequences."""

    sequences: int

    def spans(self, number: int) -> list[TokenSpan]: ...

    def lengths(self, number: int) -> np.ndarray:
        """[documents] int64: the number of positions of each document, or part of one, in a sequence."""


@dataclass(frozen=True)
class OpenSource:
    """An open source: its corpus, and how that is cut into sequences."""

    corpus: Corpus
    cut: Sequences


class Dataset:
    """All samples of a run with this seed, in sequences of `length` tokens, and batches of these `sizes`."""

    def __init__(self, data: DataSpec, sources: list[OpenSource], seed: int, length: int, sizes: BatchSizes) -> None:
        self.data, self.sources, self.seed, self.length = data, sources, seed, length
        self.mixture = Mixture(data, sizes)
        self.all_count = data.packing == "windows" and not (
            data.eod_mask_loss or any(source.corpus.has_loss_mask for source in sources)
        )

    def rows(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """(source, index in the source) of every row of a step, both [batch size]: the step's samples, shuffled with
        keyed random numbers."""
        sizes = self.mixture.sizes
        size = sizes.size(step)
        sources, indices = self.mixture.draws(sizes.first_sample(step), size)
        key = hashlib.blake2b(f"{self.seed}/rows/{step}".encode(), digest_size=16).digest()
        order = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(size).argsort(kind="stable")
        return sources[order], indices[order]

    def sample(self, source: int, index: int) -> Sample:
        spans, corpus = self._spans(source, index), self.sources[source].corpus
        return sample_of(corpus, spans, self.length, self.data.eod_mask_loss)

    def documents(self, source: int, index: int, parts: Sequence[tuple[int, int]]) -> list[Sample]:
        """The documents of a sample that are at the given (first position, length)."""
        spans, corpus = self._spans(source, index), self.sources[source].corpus
        cut = [*_clipped(spans, parts)]
        ends = [*accumulate((length for _, length in parts), initial=0)]
        joined = sample_of(corpus, cut, ends[-1], self.data.eod_mask_loss)
        return [joined.part(*each) for each in pairwise(ends)]

    def digest(self, step: int) -> int:
        """`digest_of` all rows of a step's batch."""
        pairs = zip(*self.rows(step), strict=True)
        return digest_of(step, {row: self.sample(int(source), int(index)) for row, (source, index) in enumerate(pairs)})

    def document_lengths(self, step: int, map_rows: MapRows = map) -> list[np.ndarray]:
        """By row, the number of positions of each document, or of its part in the row. Reads no tokens. `map_rows` may
        read rows in parallel."""
        return [*map_rows(self._lengths, *(each.tolist() for each in self.rows(step)))]

    def target_counts(self, step: int, map_rows: MapRows = map) -> np.ndarray:
        """[sources] int64: the target tokens of a step's global batch by source. `map_rows` as above."""
        sources, indices = self.rows(step)
        counts = np.full(len(sources), self.length)
        if not self.all_count:
            counts[:] = list(map_rows(self._target_count, sources.tolist(), indices.tolist()))
        return np.bincount(sources, counts, minlength=len(self.sources)).astype(np.int64)

    def _target_count(self, source: int, index: int) -> int:
        corpus = self.sources[source].corpus
        if self.data.packing == "documents" and not corpus.has_loss_mask:  # end tokens are never inputs
            return int(self._lengths(source, index).sum())
        return target_count(corpus, self._spans(source, index), self.data.eod_mask_loss)

    def _lengths(self, source: int, index: int) -> np.ndarray:
        return self.sources[source].cut.lengths(self._number(source, index))

    def _spans(self, source: int, index: int) -> list[TokenSpan]:
        return self.sources[source].cut.spans(self._number(source, index))

    def _number(self, source: int, index: int) -> int:
        corpus, cut = self.sources[source].corpus, self.sources[source].cut
        return shuffled(index, cut.sequences, self.seed, corpus.fingerprint)
