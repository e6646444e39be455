"""Holds documents out from training: the last ones of a corpus, for evaluation."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from pentad.schedules.ir.errors import PentadError
from pentad.workers.data.corpus import Corpus

_SEARCHED = 2**20  # positions at a time


class Part(NamedTuple):
    """Positions `first` to `end` of a corpus's flat stream."""

    corpus: Corpus
    first: int
    end: int

    def windows(self, length: int) -> int:
        """Sequences of `length` inputs in it."""
        return max(0, (self.end - self.first - 1) // length)


def training_part(corpus: Corpus, holdout: float) -> Corpus:
    """The corpus without the documents that are held out."""
    return replace(corpus, tokens=first_held_out(corpus, holdout)) if holdout else corpus


def evaluation_part(corpus: Corpus, holdout: float) -> Part:
    """The documents that are held out; with a share of 0, all."""
    return Part(corpus, first_held_out(corpus, holdout) if holdout else 0, corpus.tokens)


def first_held_out(corpus: Corpus, holdout: float) -> int:
    """The position of the first document that is held out, such that the share `holdout` of the tokens is, or up to a
    document less. Raises PentadError if that leaves no document to train on, or none to hold out."""
    target = max(1, corpus.tokens - round(corpus.tokens * holdout))
    for start in range(target, corpus.tokens, _SEARCHED):
        found = corpus.boundaries(start, min(_SEARCHED, corpus.tokens - start))
        if len(found):
            return start + int(found[0])
    raise PentadError(
        f"data.holdout is {holdout:g}: expected more, since the last document of '{corpus.path}' has a larger share of "
        f"its {corpus.tokens:,} tokens"
    )
