"""How a GPU's time is told apart: every moment belongs to one kind, and no kernel counts twice."""

from itertools import pairwise

from busy import length, merged, shares
from hypothesis import given
from hypothesis import strategies as st

times = st.integers(0, 60)


def test_shares_of_two_kernels_and_a_message():
    found = shares([("gemm(x)", 0, 4), ("gemm(y)", 10, 12), ("ncclDevKernel(z)", 3, 6)])
    expected = {"step": 12, "compute": 6, "messages": 3, "both": 1, "waits": 4}
    assert {name: found[name] * 1e6 for name in expected} == expected
    assert found["longest"] == {"gemm": [6e-6, 2], "ncclDevKernel": [3e-6, 1]}


@given(st.lists(st.tuples(times, times)).map(lambda pairs: [(min(p), max(p)) for p in pairs]))
def test_merged_intervals_are_apart_and_cover_the_same(intervals):
    found = merged(intervals)
    assert all(a[1] < b[0] for a, b in pairwise(found))
    assert {n for a, b in found for n in range(a, b)} == {n for a, b in intervals for n in range(a, b)}
    assert length(found) == len({n for a, b in intervals for n in range(a, b)})
