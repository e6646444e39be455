"""ZeRO (arXiv 1910.02054) gives the result of one process, in buffers of the planned sizes."""

from __future__ import annotations

import pytest
from exactness import assert_equals_one_process
from plans import plan_of

from pentad.schedules.spec.schedule_spec import MemoryOptions

slow = pytest.mark.slow
MESHES = [("1f1b", 2, 2, 3), ("zb-h2", 2, 2, 4), ("zb-v", 2, 2, 5), ("dualpipe", 1, 2, 4), ("dualpipe", 1, 4, 8)]
MESHES += [("dualpipe", 2, 2, 4), ("dualpipev", 2, 2, 5), ("1f1b", 4, 1, 3), ("1f1b", 2, 1, 2), ("zb-v", 2, 1, 3)]
ALWAYS = [("zb-h2", 2, 2, 4, 1), ("1f1b", 4, 1, 3, 2), ("dualpipe", 1, 4, 8, 3)]
CHUNKED = [("interleaved", 2, 2, 4, 4, 1), ("looped-bfs", 2, 2, 3, 4, 1), ("looped-bfs", 2, 1, 3, 4, 2),
           ("interleaved", 2, 2, 4, 2, 1), ("interleaved-zb", 2, 2, 4, 2, 2)]  # fmt: skip


def cases() -> list:
    found = [(*mesh, zero) for mesh in MESHES for zero in (1, 2, 3)]
    return [pytest.param(*case, marks=[] if case in ALWAYS else [slow]) for case in found]


def chunked_cases() -> list:
    found = [(*case, zero) for case in CHUNKED for zero in (2, 3)]
    return [pytest.param(*case, marks=[slow] if index > 1 else []) for index, case in enumerate(found)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "dp", "pp", "m", "zero"), cases())
def test_zero_equals_one_process(fleet, corpus, name, dp, pp, m, zero):
    plan = plan_of(name, dp, pp, m, corpus, memory_options=MemoryOptions(zero=zero))
    assert_equals_one_process(fleet, plan, check_bytes=True)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "dp", "pp", "m", "chunks", "max_gathered", "zero"), chunked_cases())
def test_stages_that_share_buffers_equal_one_process(fleet, corpus, name, dp, pp, m, chunks, max_gathered, zero):
    options = MemoryOptions(zero=zero, max_gathered=max_gathered if zero == 3 else None)
    plan = plan_of(name, dp, pp, m, corpus, chunks=chunks, memory_options=options)
    assert_equals_one_process(fleet, plan, check_bytes=True)
