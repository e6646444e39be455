"""Holds out the end of a corpus from training, for evaluation."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from pentad.workers.data.corpus import Corpus

_SEARCHED = 2**20  # positions searched at a time


class CorpusPart(NamedTuple):
    """Positions `first` to `end` of a corpus's flat stream."""

    corpus: Corpus
    first: int
    end: int

    def windows(self, length: int) -> int:
        """The number of sequences of `length` inputs in it."""
        return max(0, (self.end - self.first - 1) // length)


def training_part(corpus: Corpus, holdout: float) -> Corpus:
    """The corpus without the held-out part."""
    return replace(corpus, tokens=first_held_out(corpus, holdout)) if holdout else corpus


def evaluation_part(corpus: Corpus, holdout: float) -> CorpusPart:
    """The held-out part of a corpus; all of it if `holdout` is 0."""
    return CorpusPart(corpus, first_held_out(corpus, holdout) if holdout else 0, corpus.tokens)


def first_held_out(corpus: Corpus, holdout: float) -> int:
    """The position at which the training data ends. The share `holdout` of the tokens comes after it, or down to half
    of that, so that it can be the start of a document."""
    count = round(corpus.tokens * holdout)
    target, limit = corpus.tokens - count, corpus.tokens - count // 2
    for start in range(target, limit, _SEARCHED):
        found = corpus.boundaries(start, min(_SEARCHED, limit - start))
        if len(found):
            return start + int(found[0])
    return target  # inside a long document
