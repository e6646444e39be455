"""Ranks on GPUs that lose a partner: the others are freed, and the run ends with the bits of one without a loss."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from gpus import RANKS_A_GPU, on_gpu, two_gpus
from plans import plan_of
from small_models import WIDE, WIDE_MOE
from worker_processes import check_recovery

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120 * RANKS_A_GPU),
    two_gpus,
]
STEPS = 24
Case = tuple[str, dict[str, Any]]
PIPELINES: list[Case] = [("1f1b", {"dp": 2, "pp": 2}), ("zb-h2", {"dp": 2, "pp": 2}), ("dualpipe", {"pp": 4})]
PAIRS: list[Case] = [("1f1b", {"dp": 2}), ("1f1b", {"cp": 2, "model": WIDE})]
SHARED_LAYERS: list[Case] = [
    ("1f1b", {"dp": 2, "tp": 2, "model": WIDE}),
    ("1f1b", {"dp": 2, "ep": 2, "model": WIDE_MOE}),
    ("dualpipe", {"pp": 2, "ep": 2, "model": WIDE_MOE}),
    ("1f1b", {"cp": 4, "model": WIDE}),
]


@pytest.mark.parametrize(
    ("name", "axes", "transport", "fault"),
    [(*case, "peer", fault) for case in PAIRS for fault in (signal.SIGKILL, None)]
    + [(*case, transport, signal.SIGKILL) for case in PIPELINES for transport in ("peer", "nccl")]
    + [(*PIPELINES[0], "peer", None), (*PIPELINES[1], "nccl", None)]
    + [(*case, "peer", signal.SIGKILL) for case in SHARED_LAYERS],
)
def test_a_run_that_loses_a_rank_ends_with_the_same_bits(workers, corpus, name, axes, transport, fault):
    plan = plan_of(**{"name": name, "dp": 1, "pp": 1, "microbatches": 8, "data": corpus, "dtype": "float32", **axes})
    check_recovery(workers, on_gpu(plan, transport), STEPS, fault)
