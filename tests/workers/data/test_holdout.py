"""Documents that are held out are those that training never reads."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pentad.schedules.ir.errors import PentadError
from pentad.workers.data.holdout import evaluation_part, first_held_out, training_part


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


@settings(max_examples=40)
@given(sizes=st.lists(st.integers(1, 50), min_size=2, max_size=40), holdout=st.floats(0.01, 0.5))
def test_the_last_documents_are_held_out_up_to_a_document_less(sizes: list[int], holdout: float) -> None:
    corpus = corpus_of(sizes)
    target = max(1, corpus.tokens - round(corpus.tokens * holdout))
    expected = next((start for start in corpus.starts if start >= target), None)
    if expected is None:
        with pytest.raises(PentadError, match=r"data.holdout is .*: expected more"):
            first_held_out(corpus, holdout)
        return
    part, trained = evaluation_part(corpus, holdout), training_part(corpus, holdout)
    assert (part.first, part.end, trained.tokens) == (expected, corpus.tokens, expected)


def test_without_a_share_all_is_trained_on_and_all_is_evaluated() -> None:
    corpus = corpus_of([5, 5])
    assert training_part(corpus, 0.0) is corpus
    assert evaluation_part(corpus, 0.0)[1:] == (0, 10)
    assert evaluation_part(corpus, 0.0).windows(4) == 2 and evaluation_part(corpus, 0.0).windows(20) == 0
