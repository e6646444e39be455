"""The breakdown of a GPU's time: every moment has one kind, and overlapping kernels are counted once."""

from itertools import pairwise

from busy import breakdown, length, merge
from hypothesis import given
from hypothesis import strategies as st

times = st.integers(0, 60)


def test_breakdown_of_two_compute_kernels_and_an_nccl_kernel():
    found = breakdown([("gemm(x)", 0, 4), ("gemm(y)", 10, 12), ("ncclDevKernel(z)", 3, 6)])
    expected = {"step": 12, "compute": 6, "communication": 3, "overlap": 1, "idle": 4}
    assert {name: found[name] * 1e6 for name in expected} == expected
    assert found["longest"] == {"gemm": [6e-6, 2], "ncclDevKernel": [3e-6, 1]}


@given(st.lists(st.tuples(times, times)).map(lambda pairs: [(min(p), max(p)) for p in pairs]))
def test_merged_intervals_are_disjoint_and_cover_the_same_time(intervals):
    merged = merge(intervals)
    covered = {n for a, b in intervals for n in range(a, b)}
    assert all(a[1] < b[0] for a, b in pairwise(merged))
    assert {n for a, b in merged for n in range(a, b)} == covered
    assert length(merged) == len(covered)
