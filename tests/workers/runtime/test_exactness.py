"""Law 1: any schedule on any mesh gives the loss, the gradients and the weights of one process."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from exactness_cases import equals_one_process
from plans import plan_of

MESHES = [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4)]


def cases() -> list[Any]:
    """(schedule, dp, pp, microbatches), odd ones and fewer than stages where the schedule allows them."""
    found: list[Any] = []
    for dp, pp in MESHES:
        for name in ("gpipe", "1f1b", "zb-h1", "zb-h2", "zb-v"):
            often = [pytest.mark.slow] if dp > 1 and name not in ("1f1b", "zb-h2") else []
            found += [pytest.param(name, dp, pp, m, marks=often) for m in ((1, 3, 8) if pp > 1 else (1, 3))]
        for name in ("zb-1p", "zb-2p", "v-half", "v-min", "1f1b-eager", "interleaved", "looped-bfs", "interleaved-zb"):
            often = [pytest.mark.slow] if dp > 1 else []  # what dp does is the same for all
            found += [pytest.param(name, dp, pp, m, marks=often) for m in (3, 8) if pp > 1]
        found += [("dualpipev", dp, pp, m) for m in (2 * pp, 2 * pp + 1)]
        if pp % 2 == 0:
            found += [("dualpipe", dp, pp, m) for m in (2 * pp, 2 * pp + 2)]
    return found


def sliced() -> list[Any]:
    """(dp, pp, microbatches, slices) of sequences of 8 tokens."""
    always = [(1, 2, 3, 4), (1, 4, 3, 2)]
    sizes = product([mesh for mesh in MESHES if mesh[1] > 1], (1, 3, 8), (2, 4))
    found = [(*mesh, m, slices) for mesh, m, slices in sizes]
    return [pytest.param(*size, marks=[] if size in always else [pytest.mark.slow]) for size in found]


@pytest.mark.parametrize(("name", "dp", "pp", "microbatches"), cases())
def test_any_schedule_on_any_mesh_equals_one_process(fleet, corpus, name, dp, pp, microbatches):
    equals_one_process(fleet, plan_of(name, dp, pp, microbatches, corpus))


@pytest.mark.parametrize(("dp", "pp", "microbatches", "slices"), sliced())
def test_sequences_in_slices_equal_one_process(fleet, corpus, dp, pp, microbatches, slices):
    equals_one_process(fleet, plan_of("seq-1f1b", dp, pp, microbatches, corpus, slices=slices))
