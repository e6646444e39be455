"""Flipped bits on GPUs: ranks without a fault agree, a check changes no bit of the run, and a flip is found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from gpus import RANKS_A_GPU, on_gpu
from plans import plan_of
from rank_checks import assert_a_check_changes_nothing, verdict_after
from small_models import MOE
from worker_processes import WorkerProcess

from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.schedule_spec import MemoryOptions

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150 * RANKS_A_GPU)]
CASES: dict[str, Any] = {
    "dp2": ("1f1b", {"dp": 2}, 0, "bfloat16"),
    "ZeRO-1": ("1f1b", {"dp": 2}, 1, "bfloat16"),
    "ZeRO-3": ("1f1b", {"dp": 2, "unit_layers": 1}, 3, "bfloat16"),
    "zb-h2": ("zb-h2", {"pp": 2, "post_validation": True}, 0, "float32"),
    "tp2": ("1f1b", {"tp": 2}, 0, "bfloat16"),
    "cp2": ("1f1b", {"cp": 2}, 0, "bfloat16"),
    "ep2": ("1f1b", {"ep": 2, "model": replace(MOE, layers=4)}, 0, "bfloat16"),
}


def plan_for(case: str, corpus: str, transport: str) -> Plan:
    name, axes, zero, dtype = CASES[case]
    options = MemoryOptions(zero=zero)
    given = {"dp": 1, "pp": 1, "microbatches": 8, "dtype": dtype, "memory_options": options, **axes}
    return on_gpu(plan_of(name, data=corpus, **given), transport, memory_options=options)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("transport", ["peer", "nccl"])
@pytest.mark.parametrize("case", CASES)
def test_ranks_without_a_fault_agree_and_a_check_changes_no_bit(
    workers: list[WorkerProcess], corpus: str, case: str, transport: str
) -> None:
    assert_a_check_changes_nothing(workers, plan_for(case, corpus, transport), 6)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("case", "where", "kind", "ranks"),
    [
        ("dp2", "master", "data", (0, 1)),
        ("dp2", "v", "data", (0, 1)),
        ("dp2", "compute", "data", (0, 1)),
        ("tp2", "m", "data", (0, 1)),  # of a norm, which both ranks hold
        ("dp2", "W once", "hardware", (1,)),
        ("ZeRO-3", "W once", "hardware", (1,)),
        ("dp2", "W", "software", (0, 1)),
    ],
)
def test_a_flipped_bit_is_found(
    workers: list[WorkerProcess], corpus: str, case: str, where: str, kind: str, ranks: tuple[int, ...]
) -> None:
    verdict = verdict_after(workers, plan_for(case, corpus, "peer"), 1, where)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == (kind, ranks)
