"""The sequences of every step: which source each row comes from, and what it holds."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pentad.schedules.spec.data import DataSpec
from pentad.workers.data.corpus import Corpus
from pentad.workers.data.mixture import Mixture
from pentad.workers.data.samples import Sample, Span, sample_of, shuffled, target_count


class Sequences(Protocol):
    """How a corpus is cut into `sequences` sequences."""

    sequences: int

    def spans(self, number: int) -> list[Span]: ...


@dataclass(frozen=True)
class Source:
    """An open source."""

    corpus: Corpus
    cut: Sequences


class Dataset:
    """All samples of a run with this seed, in sequences of `length` tokens, `global_batch_size` a step."""

    def __init__(self, data: DataSpec, sources: list[Source], seed: int, length: int, global_batch_size: int) -> None:
        self.data, self.sources, self.seed, self.length = data, sources, seed, length
        self.mixture = Mixture(data, global_batch_size)
        self.all_count = data.packing == "windows" and not (
            data.eod_mask_loss or any(source.corpus.has_loss_mask for source in sources)
        )

    def rows(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """(source, index in the source) of every row of a step, both [global_batch_size]: the step's samples, in the
        order of keyed random numbers."""
        size = self.mixture.global_batch_size
        sources, indices = self.mixture.draws(step * size, size)
        key = hashlib.blake2b(f"{self.seed}/rows/{step}".encode(), digest_size=16).digest()
        order = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(size).argsort(kind="stable")
        return sources[order], indices[order]

    def sample(self, source: int, index: int) -> Sample:
        spans, corpus = self._spans(source, index), self.sources[source].corpus
        return sample_of(corpus, spans, self.length, self.data.eod_mask_loss)

    def target_counts(self, step: int, map_rows: Callable[..., Iterable[int]] = map) -> np.ndarray:
        """[sources] int64: target tokens of the step's global batch. `map_rows` may read rows at once."""
        sources, indices = self.rows(step)
        counts = np.full(len(sources), self.length)
        if not self.all_count:
            counts[:] = list(map_rows(self._target_count, sources.tolist(), indices.tolist()))
        return np.bincount(sources, counts, minlength=len(self.sources)).astype(np.int64)

    def _target_count(self, source: int, index: int) -> int:
        return target_count(self.sources[source].corpus, self._spans(source, index), self.data.eod_mask_loss)

    def _spans(self, source: int, index: int) -> list[Span]:
        corpus, cut = self.sources[source].corpus, self.sources[source].cut
        return cut.spans(shuffled(index, cut.sequences, self.seed, corpus.fingerprint))
