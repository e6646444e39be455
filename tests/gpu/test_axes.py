"""Laws 1 and 4 on GPUs for tensor, context and expert ranks: one process's numbers, and the same bits twice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from axes_cases import FAMILIES, HEADS, MIXED, assert_equals_one_process, plan_on_mesh
from fleet import Fleet
from gpu_axes_cases import WIDE, WIDE_MIXED
from gpus import num_places

from pentad.schedules.compiler import compile_program
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.schedule_spec import MemoryOptions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed"),
]
CASES: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("1f1b", {"tp": 2}, {}),
    ("1f1b", {"tp": 4}, {}),
    ("zb-h2", {"tp": 2, "pp": 2}, {}),
    ("1f1b", {"cp": 4}, {"model": HEADS}),
    ("1f1b", {"cp": 2}, {"model": HEADS, "context": "all_gather"}),
    ("gpipe", {"cp": 2, "tp": 2}, {"model": HEADS, "context": "ulysses"}),
    ("1f1b", {"cp": 2}, {"model": HEADS, "packed": True}),
    ("1f1b", {"ep": 2}, {"model": MIXED}),
    ("1f1b", {"ep": 4}, {"model": MIXED}),
    ("dualpipe", {"ep": 2, "pp": 2}, {"model": MIXED}),
    ("1f1b", {"ep": 2, "dp": 2}, {"model": MIXED, "memory_options": MemoryOptions(zero=3)}),
    ("zb-h2", {"tp": 2, "pp": 2}, {"model": FAMILIES["deepseek-v3"]}),
    ("zb-v", {"tp": 2, "pp": 2}, {"model": replace(FAMILIES["deepseek-v3"], mtp_layers=1, tie_word_embeddings=True)}),
    ("1f1b", {"tp": 2, "dp": 2}, {"model": FAMILIES["qwen3"], "memory_options": MemoryOptions(zero=1)}),
]
TWICE: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("zb-h2", {"tp": 2, "pp": 2}, {"model": WIDE}),
    ("1f1b", {"cp": 2}, {"model": WIDE}),
    ("1f1b", {"cp": 2}, {"model": WIDE, "context": "ulysses"}),
    ("1f1b", {"ep": 2}, {"model": WIDE_MIXED}),
    ("dualpipe", {"ep": 2, "pp": 2}, {"model": WIDE_MIXED}),
]


@pytest.fixture(scope="module")
def gpus():
    found = Fleet(min(4, num_places()))
    yield found
    found.stop()


def on_gpu(plan: Plan, dtype: str, memory_options: MemoryOptions) -> Plan:
    if plan.mesh.size > num_places():
        pytest.skip(f"{plan.mesh.size} GPUs are needed")
    copies = plan.mesh.dp * plan.mesh.cp * plan.mesh.ep
    program = compile_program(
        plan.program.name, plan.mesh.pp, plan.batch.microbatches, replicas=copies, memory_options=memory_options
    )
    return replace(plan, device="cuda", transport="peer", dtype=dtype, program=program)


@pytest.mark.parametrize(("name", "sizes", "more"), CASES)
def test_ranks_that_share_layers_equal_one_process(gpus, corpus, name, sizes, more):
    memory_options = more.get("memory_options", MemoryOptions())
    assert_equals_one_process(gpus, on_gpu(plan_on_mesh(corpus, name, sizes, **more), "float64", memory_options))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("name", "sizes", "more"), TWICE)
def test_two_runs_have_the_same_bits_and_the_wide_ones_losses(gpus, corpus, name, sizes, more, dtype):
    plan = on_gpu(plan_on_mesh(corpus, name, sizes, **more), dtype, MemoryOptions())
    one, two = (gpus.run(plan, [(0, 3)]) for _ in range(2))
    for first, second in zip(one, two, strict=True):
        assert first.state.keys() == second.state.keys()
        for key, value in first.state.items():
            assert torch.equal(value, second.state[key]), key
    wide = gpus.run(replace(plan, dtype="float64"), [(0, 3)])
    for outcome, expected in zip(one, wide, strict=True):
        for found, exact in zip(outcome.results, expected.results, strict=True):
            for microbatch, loss in exact.losses.items():
                assert found.losses[microbatch] == pytest.approx(loss, rel=2e-2 if dtype == "bfloat16" else 1e-4)
