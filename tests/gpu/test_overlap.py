"""Overlapped pairs on GPUs, where communication runs beside kernels: one process's numbers, unoverlapped bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from exactness import with_tied_copies
from fleet import assemble
from gpus import RANKS_A_GPU, on_gpu, two_gpus
from plans import is_close, plan_of, reference, without_overlap
from small_models import HEADS, MOE

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(90 * RANKS_A_GPU), two_gpus]


@pytest.mark.parametrize("sizes", [{"ep": 2}, {"tp": 2}, {"cp": 2}])
@pytest.mark.parametrize(
    ("name", "pp", "transport"), [("dualpipev", 1, "nccl"), ("dualpipev", 2, "peer"), ("dualpipe", 2, "nccl")]
)
def test_overlap_changes_no_bit_and_equals_one_process(gpus, corpus, name, pp, transport, sizes) -> None:
    plan = on_gpu(plan_of(name, 1, pp, 4, corpus, model=MOE if "ep" in sizes else HEADS, **sizes), transport)
    _, gradients, _, weights = reference(plan)
    found = assemble([outcome.gradients[0] for outcome in gpus.run(plan, [(0, 1)])], with_tied_copies(weights))
    assert all(is_close(gradient, gradients[0][key]) for key, gradient in found.items())
    narrow = replace(plan, dtype="bfloat16")
    for one, other in zip(gpus.run(narrow, [(0, 1)]), gpus.run(without_overlap(narrow), [(0, 1)]), strict=True):
        for key, value in one.gradients[0].items():
            assert torch.isfinite(value).all() and torch.equal(value, other.gradients[0][key]), key
