"""A corpus is described in plain data, and its histogram of lengths counts every document and token once."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from corpora import build
from hypothesis import given
from hypothesis import strategies as st

from pentad.workers.preprocess.inspect import inspect_corpus, length_histogram


@given(lengths=st.lists(st.integers(0, 2**20), min_size=1, max_size=50))
def test_every_document_is_in_the_bin_of_its_length(lengths: list[int]) -> None:
    found = length_histogram(np.array(lengths, np.int64))
    assert found[0]["documents"] and found[-1]["documents"], "no empty bin at the ends"
    for each in found:
        inside = [length for length in lengths if each["shortest"] <= length <= each["longest"]]
        assert (each["documents"], each["tokens"]) == (len(inside), sum(inside))
    assert sum(each["documents"] for each in found) == len(lengths)


def test_bins_end_at_powers_of_two() -> None:
    found = length_histogram(np.array([0, 1, 2, 3, 4, 5, 8, 9]))
    assert [(each["shortest"], each["longest"], each["documents"]) for each in found] == [
        (0, 1, 2),
        (2, 2, 1),
        (3, 4, 2),
        (5, 8, 2),
        (9, 16, 1),
    ]


def test_inspect_describes_the_corpus_as_plain_data(tmp_path: Path) -> None:
    source = tmp_path / "source.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("the cat", "the dog")))
    corpus = build(source)
    found = inspect_corpus(corpus.path, samples=2, length=1000)
    assert json.loads(json.dumps(found)) == found
    assert (found["tokens"], found["documents"], found["vocab_size"]) == (corpus.tokens, 2, corpus.vocab_size)
    assert found["trained_tokens"] == corpus.tokens
    assert [[(segment["text"], segment["trained"]) for segment in sample] for sample in found["samples"]] == [
        [("the cat<|endoftext|>", True)],
        [("the dog<|endoftext|>", True)],
    ]
    assert [shard["tokens"] for shard in found["shards"]] == [corpus.tokens]
