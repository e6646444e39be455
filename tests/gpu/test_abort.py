"""On GPUs too: ranks that lose a partner are freed without harm to it all, and end with the bits of a run without."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest
from cells import WorkerProcess, check_recovery
from gpu_axes_cases import WIDE, WIDE_MIXED
from gpus import RANKS_A_GPU, num_places
from plans import plan_of

from pentad.schedules.compiler import compile_program

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120 * RANKS_A_GPU),
    pytest.mark.skipif(num_places() < 2, reason="two GPUs are needed"),
]
STEPS = 24


@pytest.fixture(scope="module")
def cells():
    made = [WorkerProcess() for _ in range(4)]
    yield made
    for cell in made:
        cell.stop()


PIPELINES: list[tuple[str, dict[str, Any]]] = [
    ("1f1b", {"dp": 2, "pp": 2}),
    ("zb-h2", {"dp": 2, "pp": 2}),
    ("dualpipe", {"pp": 4}),
]
PAIRS: list[tuple[str, dict[str, Any]]] = [("1f1b", {"dp": 2}), ("1f1b", {"cp": 2, "model": WIDE})]
INNER: list[tuple[str, dict[str, Any]]] = [
    ("1f1b", {"dp": 2, "tp": 2, "model": WIDE}),
    ("1f1b", {"dp": 2, "ep": 2, "model": WIDE_MIXED}),
    ("dualpipe", {"pp": 2, "ep": 2, "model": WIDE_MIXED}),
    ("1f1b", {"cp": 4, "model": WIDE}),
]


@pytest.mark.parametrize(
    ("name", "axes", "transport", "fault"),
    [(*case, "peer", fault) for case in PAIRS for fault in (signal.SIGKILL, None)]
    + [(*case, transport, signal.SIGKILL) for case in PIPELINES for transport in ("peer", "nccl")]
    + [(*PIPELINES[0], "peer", None), (*PIPELINES[1], "nccl", None)]
    + [(*case, "peer", signal.SIGKILL) for case in INNER],
)
def test_a_run_with_a_lost_rank_ends_with_the_bits_of_one_without(cells, corpus, name, axes, transport, fault):
    plan = plan_of(**{"name": name, "dp": 1, "pp": 1, "microbatches": 8, "data": corpus, "dtype": "float32", **axes})
    if plan.mesh.size > num_places():
        pytest.skip(f"{plan.mesh.size} GPUs are needed")
    replicas = plan.mesh.dp * plan.mesh.cp * plan.mesh.ep
    program = compile_program(name, plan.mesh.pp, 8, gated=transport == "nccl", replicas=replicas)
    plan = replace(plan, device="cuda", transport=transport, program=program)
    check_recovery(cells, plan, STEPS, fault)
