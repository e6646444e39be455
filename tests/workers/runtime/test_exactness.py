"""Law 1: any schedule on any dp x pp mesh gives the loss, the gradients and the weights of one process."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from exactness import assert_equals_one_process
from plans import MODEL, SHALLOW, plan_of

MESHES = [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4)]
SCHEDULES = ("gpipe", "1f1b", "zb-h1", "zb-h2", "zb-v")
PIPELINES = ("zb-1p", "zb-2p", "v-half", "v-min", "1f1b-eager", "interleaved", "looped-bfs", "interleaved-zb")
SEVERAL_CHUNKS = ("zb-v", "v-half", "v-min", "interleaved", "looped-bfs", "interleaved-zb", "dualpipev")
# Always run: every schedule on four pipeline ranks, some with dp.
ALWAYS = {
    *((name, 1, 4, 8) for name in (*SCHEDULES, *PIPELINES, "dualpipe", "dualpipev")),
    *(("1f1b", 2, 1, 3), ("zb-h2", 2, 2, 1), ("dualpipev", 2, 2, 5)),
}


def cases() -> list[Any]:
    """(schedule, dp, pp, microbatches), with odd numbers and fewer than stages where the schedule allows them."""
    found: list[tuple[str, int, int, int]] = []
    for dp, pp in MESHES:
        found += [(name, dp, pp, m) for name in SCHEDULES for m in ((1, 3, 8) if pp > 1 else (1, 3))]
        found += [(name, dp, pp, m) for name in PIPELINES for m in (3, 8) if pp > 1]
        found += [("dualpipev", dp, pp, m) for m in (2 * pp, 2 * pp + 1)]
        found += [("dualpipe", dp, pp, m) for m in (2 * pp, 2 * pp + 2) if pp % 2 == 0]
    assert set(found) >= ALWAYS
    return [pytest.param(*case, marks=[] if case in ALWAYS else [pytest.mark.slow]) for case in found]


def sliced_cases() -> list[Any]:
    """(dp, pp, microbatches, slices) for sequences of 8 tokens."""
    always = [(1, 4, 3, 2)]
    sizes = product([mesh for mesh in MESHES if mesh[1] > 1], (1, 3, 8), (2, 4))
    found = [(*mesh, m, slices) for mesh, m, slices in sizes]
    return [pytest.param(*size, marks=[] if size in always else [pytest.mark.slow]) for size in found]


@pytest.mark.parametrize(("name", "dp", "pp", "microbatches"), cases())
def test_schedule_equals_one_process(fleet, corpus, name, dp, pp, microbatches):
    model = MODEL if pp == 4 and name in SEVERAL_CHUNKS else SHALLOW  # a layer for each stage
    assert_equals_one_process(fleet, plan_of(name, dp, pp, microbatches, corpus, model=model))


@pytest.mark.parametrize(("dp", "pp", "microbatches", "slices"), sliced_cases())
def test_sliced_sequences_equal_one_process(fleet, corpus, dp, pp, microbatches, slices):
    assert_equals_one_process(fleet, plan_of("seq-1f1b", dp, pp, microbatches, corpus, slices=slices, model=SHALLOW))
