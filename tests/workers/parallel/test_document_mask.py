"""Runs of packed segments: what they hold, and that attention run by run equals attention of all segments at once."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from dense_attention import dense_attention
from hypothesis import given
from hypothesis import strategies as st

from pentad.kernels.attention.attention_partial import partial_attention, partial_attention_backward
from pentad.kernels.attention.attention_reference import AttentionOptions
from pentad.workers.parallel import document_mask
from pentad.workers.parallel.document_mask import BLOCK, CALL_BLOCKS, packed_lengths, similar_neighbours

SEGMENT = st.tuples(st.integers(0, 40_000), st.integers(0, 40_000)).filter(any)
SHORT = st.tuples(st.integers(0, 3), st.integers(0, 3)).filter(any)
SEGMENTS = st.lists(st.one_of(SEGMENT, st.lists(SHORT, min_size=1, max_size=300)), min_size=1, max_size=30)


@given(drawn=SEGMENTS)
def test_runs_are_cut_only_where_another_call_is_cheaper(drawn):
    segments = [each for some in drawn for each in (some if isinstance(some, list) else [some])]
    queries, keys = np.array(segments, np.int64).T
    runs = similar_neighbours(queries, keys)
    assert [end for _, end in runs[:-1]] == [first for first, _ in runs[1:]]
    assert (runs[0][0], runs[-1][1]) == (0, len(segments))
    if len(runs) > 1:
        assert all(each[first:end].any() for each in (queries, keys) for first, end in runs)

    def launched(first: int, end: int) -> int:
        return (end - first) * -(-int(max(queries[first:end].max(), keys[first:end].max())) // BLOCK)

    for (first, middle), (_, end) in pairwise(runs):
        assert launched(first, end) - launched(first, middle) - launched(middle, end) > CALL_BLOCKS


def test_documents_of_one_length_are_one_call():
    assert similar_neighbours(np.full(10_000, 6), np.full(10_000, 6)) == [(0, 10_000)]


def test_a_long_document_among_short_ones_has_a_call_of_its_own():
    lengths = np.array([1] * 5000 + [55_536] + [1] * 5000)
    assert similar_neighbours(lengths, lengths) == [(0, 5000), (5000, 5001), (5001, 10_001)]


@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("rows", [[(0, 1, 2, 40, 41)], [(0, 30, 31, 32), (0, 5, 9), (0,)]])
def test_attention_run_by_run_is_that_of_every_document(monkeypatch, rows, window):
    monkeypatch.setattr(document_mask, "BLOCK", 4)
    monkeypatch.setattr(document_mask, "CALL_BLOCKS", 8)
    length, heads, groups, width = 48, 4, 2, 8
    ends = torch.tensor([number * length + start for number, starts in enumerate(rows) for start in starts][1:])
    sizes = np.diff([0, *ends.tolist(), len(rows) * length])
    lengths = packed_lengths(np.stack([sizes, sizes]), "cpu")
    assert len(lengths.runs) > 1
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(len(rows), length, n, width, dtype=torch.float64, generator=generator).transpose(1, 2)
        for n in (heads, groups, groups, heads)
    )
    options = AttentionOptions(True, 0.3, True, lengths).within(window)
    out, lse = partial_attention(q, k, v, options)
    found = partial_attention_backward(dout, q, k, v, out, lse, options)
    documents = torch.searchsorted(ends, torch.arange(len(rows) * length), right=True).view(len(rows), length)
    leaves = tuple(x.requires_grad_() for x in (q, k, v))
    expected = dense_attention(q, k, v, 0.3, documents, window)
    gradients = torch.autograd.grad(expected, leaves, dout)
    torch.testing.assert_close(out, expected.detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(list(found), list(gradients), rtol=1e-10, atol=1e-12)
    whole = options._replace(lengths=lengths._replace(runs=()))
    torch.testing.assert_close((out, lse), partial_attention(q, k, v, whole), rtol=1e-12, atol=1e-12)
