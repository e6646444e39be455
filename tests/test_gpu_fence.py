"""On GPUs too: ranks that lose a partner are freed without harm to it all, and end with the bits of a run without."""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from cells import Cell, join, outcome, repair, together
from gpus import RANKS_A_GPU, room
from plans import plan_of
from test_gpu_axes import WIDE, WIDE_MIXED

from pentad.schedules.compiler import compile_program
from pentad.workers.fence import Fenced

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120 * RANKS_A_GPU),
    pytest.mark.skipif(room() < 4, reason="four GPUs are needed"),
]
STEPS = 40


@pytest.fixture(scope="module")
def cells():
    made = [Cell() for _ in range(4)]
    yield made
    for cell in made:
        cell.stop()


PIPELINES: list[tuple[str, dict[str, Any]]] = [
    ("1f1b", {"dp": 2, "pp": 2}),
    ("zb-h2", {"dp": 2, "pp": 2}),
    ("dualpipe", {"pp": 4}),
]
INNER: list[tuple[str, dict[str, Any]]] = [
    ("1f1b", {"dp": 2, "tp": 2, "model": WIDE}),
    ("1f1b", {"dp": 2, "ep": 2, "model": WIDE_MIXED}),
    ("dualpipe", {"pp": 2, "ep": 2, "model": WIDE_MIXED}),
    ("1f1b", {"cp": 4, "model": WIDE}),
]


@pytest.mark.parametrize(
    ("name", "axes", "transport", "fault"),
    [(*case, transport, "kill") for case in PIPELINES for transport in ("peer", "nccl")]
    + [(*PIPELINES[0], "peer", "error"), (*PIPELINES[1], "nccl", "error")]
    + [(*case, "peer", "kill") for case in INNER],
)
def test_a_run_with_a_lost_rank_ends_with_the_bits_of_one_without(cells, corpus, name, axes, transport, fault):
    plan = plan_of(**{"name": name, "dp": 1, "pp": 1, "microbatches": 8, "data": corpus, "dtype": "float32", **axes})
    replicas = plan.mesh.dp * plan.mesh.cp * plan.mesh.ep
    program = compile_program(name, plan.mesh.pp, 8, gated=transport == "nccl", replicas=replicas)
    plan = replace(plan, device="cuda", transport=transport, program=program)
    join(cells, plan, 1)
    together(cells, "restore", None, 0)
    wanted = outcome(cells, together(cells, "run", 0, STEPS), 0)
    together(cells, "close")

    join(cells, plan, 1)
    together(cells, "restore", None, 0)
    if fault == "error":
        cells[1].answer(cells[1].call("lose_touch", 4))
    asked = [[cell.call("run", step, 10, True) for step in range(0, STEPS, 10)] for cell in cells]
    if fault == "kill":
        cells[1].wait_for(3)
        cells[1].signal(signal.SIGKILL)
        time.sleep(0.3)
    else:
        with pytest.raises(RuntimeError, match="closed by peer"):
            cells[1].answer(asked[1][0])
        with pytest.raises(Fenced):  # it must not go on in the middle of what the others are at
            cells[1].answer(asked[1][1])
    began = time.monotonic()
    version, stands = repair(cells, [1], plan, 2)
    print(f"{name} {transport}: lost by {fault} at step {version}, repaired after {time.monotonic() - began:.1f} s")
    assert version < STEPS
    known = [list(stand.results) for stand in stands.values()]
    losses, state = outcome(cells, known + together(cells, "run", version, STEPS - version), 0)
    together(cells, "close")
    assert all(torch.equal(state[key], value) for key, value in wanted[1].items())
    assert losses == wanted[0]
