"""An epoch visits every window once, and a sequence depends on seed and index only."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pentad.schedules.ir.errors import PentadError
from pentad.workers.data.corpus import Corpus
from pentad.workers.data.samples import microbatch, permuted, sequence, window_count


class CountingShards:
    """The flat stream 0, 1, 2 ...; a document ends at each edge."""

    def __init__(self, edges: tuple[int, ...]) -> None:
        self.edges = np.array(edges)

    def overlaps(self, start: int, count: int) -> list[range]:
        return [range(start, start + count)]

    def tokens(self, part: range) -> np.ndarray:
        return np.array(part, dtype=np.uint32)


def counting_corpus(tokens: int, cuts: tuple[int, ...] = ()) -> Corpus:
    return Corpus(Path("counting"), tokens, tokens, len(cuts) + 1, "", False, CountingShards((0, *cuts, tokens)))  # type: ignore[arg-type]


@pytest.mark.parametrize("largest", [300, pytest.param(5000, marks=pytest.mark.slow)])
@settings(max_examples=60, deadline=None)
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
    windows = window_count(corpus, length)
    inputs = np.concatenate([sequence(corpus, 5, windows + index, length)[:-1] for index in range(windows)])
    assert np.array_equal(np.sort(inputs), np.arange(windows * length))
    assert (1000 - 1) - windows * length < length


def test_a_sequence_is_length_plus_one_contiguous_int64_tokens() -> None:
    tokens = sequence(counting_corpus(1000, cuts=(10, 500)), 0, 3, 100)
    assert tokens.dtype == np.int64 and tokens.shape == (101,)
    assert np.array_equal(np.diff(tokens), np.ones(100))


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_a_global_batch_is_the_same_for_any_number_of_ranks(ranks: int) -> None:
    corpus, size = counting_corpus(3000, cuts=(7, 1500)), 24
    batches = [microbatch(corpus, 1, step, size, range(size), 16) for step in range(3)]
    for step, (inputs, targets) in enumerate(batches):
        for rank in range(ranks):
            rows = range(rank, size, ranks)
            local = microbatch(corpus, 1, step, size, rows, 16)
            assert np.array_equal(local[0], inputs[rows]) and np.array_equal(local[1], targets[rows])


def test_sequence_indices_continue_from_step_to_step() -> None:
    corpus = counting_corpus(500)
    inputs, targets = microbatch(corpus, 9, 4, 6, [2, 5], 20)
    assert inputs.shape == targets.shape == (2, 20)
    for row, index in enumerate((26, 29)):
        tokens = sequence(corpus, 9, index, 20)
        assert np.array_equal(inputs[row], tokens[:-1]) and np.array_equal(targets[row], tokens[1:])


def test_a_corpus_shorter_than_a_sequence_is_refused() -> None:
    assert len(sequence(counting_corpus(17), 0, 5, 16)) == 17
    with pytest.raises(PentadError, match=r"data\.path is 'counting', which holds 16 tokens: expected at least 17"):
        sequence(counting_corpus(16), 0, 0, 16)
