"""Holds the end of a corpus out from training, for evaluation."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from pentad.workers.data.corpus import Corpus

_SEARCHED = 2**20  # positions at a time


class CorpusPart(NamedTuple):
    """Positions `first` to `end` of a corpus's flat stream."""

    corpus: Corpus
    first: int
    end: int

    def windows(self, length: int) -> int:
        """Sequences of `length` inputs in it."""
        return max(0, (self.end - self.first - 1) // length)


def training_part(corpus: Corpus, holdout: float) -> Corpus:
    """The corpus without what is held out."""
    return replace(corpus, tokens=first_held_out(corpus, holdout)) if holdout else corpus


def evaluation_part(corpus: Corpus, holdout: float) -> CorpusPart:
    """What is held out; with a share of 0, all."""
    return CorpusPart(corpus, first_held_out(corpus, holdout) if holdout else 0, corpus.tokens)


def first_held_out(corpus: Corpus, holdout: float) -> int:
    """The position that ends the training data: the share `holdout` of the tokens is after it, or as little as half of
    that, so that it can be where a document starts."""
    count = round(corpus.tokens * holdout)
    target, limit = corpus.tokens - count, corpus.tokens - count // 2
    for start in range(target, limit, _SEARCHED):
        found = corpus.boundaries(start, min(_SEARCHED, limit - start))
        if len(found):
            return start + int(found[0])
    return target  # inside a long document
