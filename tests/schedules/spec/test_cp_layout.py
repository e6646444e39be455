"""Positions and attention work of context ranks; no fully masked block is computed."""

from __future__ import annotations

from itertools import product
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paths import ROOT
from uneven import MIXES, rows_of

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.cp_layout import (
    CP_LAYOUTS,
    CpLayout,
    CpMethod,
    attention_pairs,
    check_context_parallel,
    document_chunks,
    document_lengths,
    document_positions,
    imbalance,
    positions,
    zigzag,
)
from pentad.workers.parallel.document_mask import Block, plan_steps

SIZES = (1, 2, 3, 4, 8)
BOTH: tuple[CpLayout, ...] = ("zigzag", "contiguous")


@st.composite
def rows(draw, parts: int) -> tuple[int, tuple[int, ...]]:
    """A sequence length and the first positions of its documents."""
    length = parts * draw(st.integers(1, 6))
    return length, (0, *sorted(draw(st.sets(st.integers(1, length - 1)) if length > 1 else st.just(set()))))


@pytest.mark.parametrize(("cp", "placement"), list(product(SIZES, BOTH)))
def test_every_position_has_one_holder_and_all_ranks_hold_equally_many(cp, placement):
    held = [positions(48, cp, rank, placement) for rank in range(cp)]
    assert {len(each) for each in held} == {48 // cp}
    assert sorted(np.concatenate(held)) == list(range(48))
    assert all((np.diff(each) > 0).all() for each in held)


@pytest.mark.parametrize("cp", SIZES[1:])
def test_zigzag_is_balanced_and_contiguous_is_not(cp):
    length = 4096 * 2 * cp
    assert imbalance(length, cp, "zigzag") == 1.0
    assert imbalance(length, cp, "contiguous") == pytest.approx(2 * cp - 1, rel=1e-3)


@given(data=st.data(), cp=st.sampled_from(SIZES))
def test_every_token_of_documents_is_in_one_chunk_and_all_chunks_are_as_large(data, cp):
    length, starts = data.draw(rows(2 * cp))
    lengths = document_lengths(starts, length)
    borders = document_chunks(lengths, cp)
    assert (borders[:, 0] == 0).all() and (borders[:, -1] == lengths).all()
    sizes = np.diff(borders)
    assert ((sizes == lengths[:, None] // (2 * cp)) | (sizes == -(-lengths[:, None] // (2 * cp)))).all()
    assert set(sizes.sum(0)) == {length // (2 * cp)}
    held = [positions(length, cp, rank, "zigzag", starts) for rank in range(cp)]
    assert sorted(np.concatenate(held)) == list(range(length))
    for each in held:
        parts = [each] if cp == 1 else np.split(each, 2)
        assert {len(part) for part in parts} == {length // cp // len(parts)}
        assert all((np.diff(part) > 0).all() for part in parts)


@given(lengths=st.lists(st.integers(0, 200), min_size=1, max_size=12), cp=st.sampled_from(SIZES[1:]))
def test_the_work_of_any_two_ranks_differs_by_less_than_two_pairs_a_token(lengths, cp):
    lengths = [*lengths, -sum(lengths) % (2 * cp)]
    work = _pairs_of_documents(lengths, cp)
    assert (np.ptp(work, axis=1) < 2 * np.maximum(lengths, 1)).all()
    assert np.ptp(work.sum(0)) <= 2 * sum(lengths)


@pytest.mark.parametrize("cp", SIZES[1:])
def test_the_bound_holds_for_a_document_of_any_length_in_any_turn(cp):
    lengths = np.repeat(np.arange(1, 12 * cp), 2 * cp)
    turns = np.tile(np.arange(2 * cp), 12 * cp - 1)
    for length, turn in zip(lengths.tolist(), turns.tolist(), strict=True):
        work = _pairs_of_documents([turn, length, -(turn + length) % (2 * cp)], cp)[1]
        assert np.ptp(work) < 2 * length


def _pairs_of_documents(lengths, cp: int) -> np.ndarray:
    """[documents, cp]: the number of pairs of a query on a rank and a key that it attends to."""
    borders = document_chunks(lengths, cp)
    pairs = np.diff(borders * (borders + 1) // 2)
    return np.stack([pairs[:, zigzag(cp, rank)].sum(1) for rank in range(cp)], 1)


@pytest.mark.parametrize(("cp", "documents"), list(product(SIZES[1:], (4, 64, 512))))
def test_zigzag_stays_balanced_with_equal_documents(cp, documents):
    length = 6 * 8192
    starts = range(0, length, length // documents)
    assert imbalance(length, cp, "zigzag", starts) <= 1.02


def busiest_over_mean(mix: str, length: int, cp: int, count: int) -> tuple[list[float], list[float]]:
    """Attention pairs of the busiest rank over the mean, for each of `count` sequences: with chunks of the sequence,
    which cut documents anywhere, and with chunks of each document."""
    by_sequence, by_document = list[float](), list[float]()
    for row in rows_of(mix, length, count, seed=0):
        starts = (np.cumsum(row) - row).tolist()
        keys = document_positions(starts, length) + 1
        for found, begins in ((by_sequence, (0,)), (by_document, starts)):
            work = [keys[positions(length, cp, rank, "zigzag", begins)].sum() for rank in range(cp)]
            found.append(max(work) / fmean(work))
    return by_sequence, by_document


@pytest.mark.parametrize("cp", SIZES[1:])
@pytest.mark.parametrize("mix", MIXES)
def test_ranks_are_as_busy_with_documents_of_stated_and_real_lengths(mix, cp):
    by_sequence, by_document = busiest_over_mean(mix, 98_304, cp, 8)
    assert max(by_document) < 1.001 and fmean(by_sequence) > 1.1


@pytest.mark.slow
@pytest.mark.parametrize("cp", [2, 4, 8])
@pytest.mark.parametrize("mix", MIXES)
def test_the_page_has_how_busy_ranks_are(mix, cp):
    by_sequence, by_document = busiest_over_mean(mix, 2**18, cp, 16)
    cells = [f"{fmean(by_sequence):.2f}", f"{max(by_sequence):.2f}", f"{max(by_document):.4f}"]
    assert f"| {mix} | {cp} | {' | '.join(cells)} |" in (ROOT / "docs" / "parallelism.md").read_text()


@given(data=st.data(), cp=st.sampled_from(SIZES), placement=st.sampled_from(BOTH))
def test_the_work_of_all_ranks_adds_up_to_that_of_the_sequence(data, cp, placement):
    length, starts = data.draw(rows(2 * cp))
    ends = [*starts[1:], length]
    total = sum((end - start) * (end - start + 1) // 2 for start, end in zip(starts, ends, strict=True))
    assert sum(attention_pairs(length, cp, rank, placement, starts) for rank in range(cp)) == total


@given(data=st.data())
def test_positions_are_counted_from_the_start_of_a_document(data):
    length, starts = data.draw(rows(1))
    found = document_positions(starts, length)
    assert [p for p in range(length) if found[p] == 0] == list(starts)
    assert all(found[p] in (0, found[p - 1] + 1) for p in range(1, length))


@given(data=st.data(), cp=st.sampled_from(SIZES), method=st.sampled_from(tuple(CP_LAYOUTS)))
def test_blocks_cover_every_visible_pair_exactly_once(data, cp, method):
    length, starts = data.draw(rows(2 * cp))
    distance = document_positions(starts, length)
    for rank in range(cp):
        mine = positions(length, cp, rank, "zigzag", starts) if method != "ulysses" else np.arange(length)
        seen = np.zeros((len(mine), length), dtype=int)
        for step, blocks in enumerate(plan_steps(method, cp, rank, length, [starts])):
            source = positions(length, cp, (rank - step) % cp, "zigzag", starts)
            keys = source if method != "ulysses" and cp > 1 else np.arange(length)
            for at in blocks:
                visible = _visible(at, len(mine), len(keys))
                seen[:, keys] += visible
        expected = (np.arange(length) <= mine[:, None]) & (np.arange(length) >= (mine - distance[mine])[:, None])
        assert (seen == expected).all()


def _visible(at: Block, queries: int, keys: int) -> np.ndarray:
    """[queries, keys]: 1 for the pairs that a block computes and does not mask."""
    found = np.zeros((queries, keys), dtype=int)
    rows, columns = range(queries)[at.queries], range(keys)[at.keys]
    lengths = at.lengths
    starts = lengths.cu_seqlens_q.tolist() if lengths else [0, len(rows)]
    befores = lengths.cu_seqlens_k.tolist() if lengths else [0, len(columns)]
    for q0, q1, k0, k1 in zip(starts, starts[1:], befores, befores[1:], strict=False):
        for i in range(q0, q1 if k1 > k0 else q0):
            last = k1 - (q1 - i) + 1 if at.causal else k1
            found[rows[i], columns[k0] : columns[k0] + last - k0] = 1
    return found


@pytest.mark.parametrize("cp", SIZES[1:])
def test_each_step_of_a_ring_computes_half_of_its_pairs(cp):
    for rank in range(cp):
        steps = plan_steps("ring", cp, rank, 16 * cp, [(0,)])
        assert len(steps) == cp
        for (at,) in steps[1:]:
            assert not at.causal
            assert len(range(16)[at.queries]) * len(range(16)[at.keys]) == 16 * 16 // 2


def test_there_is_no_block_between_chunks_without_a_pair():
    for rank in range(4):
        assert [len(blocks) for blocks in plan_steps("ring", 4, rank, 32, [range(32)])] == [1, 0, 0, 0]


@pytest.mark.parametrize(
    ("length", "heads", "kv_heads", "cp", "method", "tp", "message"),
    [
        (36, 4, 4, 4, "ring", 1, "batch.sequence_length is 36: expected a multiple of 2 x mesh.cp = 8"),
        (36, 8, 8, 8, "ulysses", 1, "batch.sequence_length is 36: expected a multiple of mesh.cp = 8"),
        (32, 6, 2, 4, "ulysses", 1, "model.heads is 6: expected a multiple of mesh.cp x mesh.tp = 4"),
        (32, 4, 4, 4, "ulysses", 2, "model.heads is 4: expected a multiple of mesh.cp x mesh.tp = 8"),
        (32, 12, 3, 4, "ulysses", 1, "model.kv_heads is 3: expected a multiple or a divisor of mesh.cp x mesh.tp = 4"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(length, heads, kv_heads, cp, method: CpMethod, tp, message):
    with pytest.raises(PentadError, match=message):
        check_context_parallel(length, heads, kv_heads, cp, method, tp)


@pytest.mark.parametrize(("kv_heads", "method"), [(1, "ulysses"), (4, "ulysses"), (8, "ulysses"), (3, "ring")])
def test_sizes_that_divide_are_accepted(kv_heads, method: CpMethod):
    check_context_parallel(32, 8 * kv_heads, kv_heads, 4, method, 2)
