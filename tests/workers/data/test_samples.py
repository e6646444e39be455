"""An epoch visits every window once, and a sequence has the tokens, targets and documents of its spans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pentad.schedules.ir.errors import PentadError
from pentad.workers.data.corpus import Corpus, Overlap
from pentad.workers.data.corpus_index import RecordBatch
from pentad.workers.data.samples import TokenSpan, Windows, permuted, sample_of, shuffled, target_count


class CountingShards:
    """The flat stream 0, 1, 2 ...; documents start at `starts`, and every third token does not count as a target."""

    def __init__(self, starts: tuple[int, ...]) -> None:
        self.starts = np.array(starts)

    def overlaps(self, start: int, count: int) -> list[Overlap]:
        return [Overlap(0, RecordBatch(0, 0, 0, 0, 0), 0, start, start + count)]

    def tokens(self, part: Overlap) -> np.ndarray:
        return np.arange(part.first, part.end, dtype=np.uint32)

    def loss_mask(self, part: Overlap) -> np.ndarray:
        return np.arange(part.first, part.end) % 3 > 0

    def offsets(self, part: Overlap) -> np.ndarray:
        return np.append(self.starts, 10**9)


def counting_corpus(tokens: int, cuts: tuple[int, ...] = (), *, masked: bool = False) -> Corpus:
    shards: Any = CountingShards((0, *cuts))
    if not masked:
        shards.loss_mask = lambda part: np.ones(part.end - part.first, np.uint8)
    return Corpus(Path("counting"), tokens, tokens, len(cuts) + 1, "", "", masked, shards)


@pytest.mark.parametrize("largest", [300, pytest.param(5000, marks=pytest.mark.slow)])
@given(data=st.data(), seed=st.integers(-5, 10**12), epoch=st.integers(0, 10**9))
def test_an_epoch_visits_every_window_once(largest: int, data: st.DataObject, seed: int, epoch: int) -> None:
    count = data.draw(st.integers(1, largest))
    order = [permuted(index, count, f"{seed}/{epoch}") for index in range(count)]
    assert sorted(order) == list(range(count))


def test_the_order_of_an_epoch_never_changes() -> None:
    assert [permuted(index, 10, "0/0") for index in range(10)] == [6, 0, 8, 2, 9, 4, 7, 3, 1, 5]


def test_every_seed_and_epoch_has_its_own_order() -> None:
    orders = {
        tuple(permuted(index, 64, f"{seed}/{epoch}") for index in range(64)) for seed in (0, 1) for epoch in (0, 1)
    }
    assert len(orders) == 4


def test_all_orders_of_four_windows_occur() -> None:
    orders = {tuple(permuted(index, 4, f"{seed}/0") for index in range(4)) for seed in range(600)}
    assert len(orders) == 24


def test_the_order_is_not_correlated_with_the_index() -> None:
    count = 4001
    order = np.array([permuted(index, count, "3/1") for index in range(count)])
    for lag in (0, 1, 63, 64):  # 64 is the network's radix here
        assert abs(np.corrcoef(np.arange(count - lag), order[lag:])[0, 1]) < 0.06
        assert lag == 0 or abs(np.corrcoef(order[:-lag], order[lag:])[0, 1]) < 0.06


@pytest.mark.parametrize("length", [1, 7, 128])
def test_the_windows_of_an_epoch_tile_the_corpus(length: int) -> None:
    corpus = counting_corpus(1000, cuts=(1, 300, 301))
    windows = Windows(corpus, length)
    order = [shuffled(windows.sequences + index, windows.sequences, 5, "") for index in range(windows.sequences)]
    samples = [sample_of(corpus, windows.spans(number), length, False) for number in order]
    inputs = np.concatenate([sample.inputs for sample in samples])
    assert np.array_equal(np.sort(inputs), np.arange(windows.sequences * length))
    assert all(np.array_equal(sample.following, sample.inputs + 1) for sample in samples)
    assert (1000 - 1) - windows.sequences * length < length


def test_a_corpus_shorter_than_a_sequence_is_refused() -> None:
    assert Windows(counting_corpus(17), 16).sequences == 1
    with pytest.raises(PentadError, match=r"data\.path is 'counting', which holds 16 tokens: expected at least 17"):
        Windows(counting_corpus(16), 16)


@pytest.mark.parametrize("eod_mask_loss", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@given(cuts=st.sets(st.integers(1, 39)), start=st.integers(0, 10), sizes=st.lists(st.integers(1, 8), max_size=4))
def test_a_target_counts_unless_it_is_masked_or_starts_a_document(
    masked: bool, eod_mask_loss: bool, cuts: set[int], start: int, sizes: list[int]
) -> None:
    corpus = counting_corpus(50, tuple(sorted(cuts)), masked=masked)
    spans = [TokenSpan(start + 2 * number, size) for number, size in enumerate(sizes)]
    sample = sample_of(corpus, spans, 40, eod_mask_loss)
    used = sum(sizes)
    expected = [
        not (masked and target % 3 == 0) and not (eod_mask_loss and target in cuts)
        for target in sample.following[:used].tolist()
    ]
    assert sample.is_target.tolist() == expected + [False] * (40 - used)
    assert target_count(corpus, spans, eod_mask_loss) == sum(expected)


def test_documents_spans_and_padding_start_documents() -> None:
    corpus = counting_corpus(50, cuts=(4, 9, 30))
    assert sample_of(corpus, [TokenSpan(0, 12)], 12, False).document_starts == (0, 4, 9)
    assert sample_of(corpus, [TokenSpan(3, 4), TokenSpan(28, 4)], 10, False).document_starts == (0, 1, 4, 6, 8)
