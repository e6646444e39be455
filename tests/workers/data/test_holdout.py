"""Documents that are held out are those that training never reads."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pentad.workers.data.holdout import evaluation_part, training_part


@dataclass(frozen=True)
class Documents:
    """The part of a corpus that a hold-out reads; a document starts at each of `starts`."""

    path: Path
    tokens: int
    starts: tuple[int, ...]

    def boundaries(self, start: int, count: int) -> np.ndarray:
        assert start + count <= self.tokens
        return np.array([edge - start for edge in self.starts if start <= edge < start + count], int)


def corpus_of(sizes: list[int]) -> Any:
    """A corpus of documents of these sizes."""
    return Documents(Path("corpus"), sum(sizes), tuple(accumulate(sizes[:-1], initial=0)))


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=40), holdout=st.floats(0.01, 0.5))
def test_the_last_documents_are_held_out(sizes: list[int], holdout: float) -> None:
    corpus = corpus_of(sizes)
    share = round(corpus.tokens * holdout)
    near = [start for start in corpus.starts if share // 2 < corpus.tokens - start <= share]
    part, trained = evaluation_part(corpus, holdout), training_part(corpus, holdout)
    assert (part.first, part.end) == (near[0] if near else corpus.tokens - share, corpus.tokens)
    assert trained.tokens == part.first and share // 2 <= part.end - part.first <= share


def test_without_a_share_all_is_trained_on_and_all_is_evaluated() -> None:
    corpus = corpus_of([5, 5])
    assert training_part(corpus, 0.0) is corpus
    assert evaluation_part(corpus, 0.0)[1:] == (0, 10)
    assert evaluation_part(corpus, 0.0).windows(4) == 2 and evaluation_part(corpus, 0.0).windows(20) == 0
