"""Steps that are launched as CUDA graphs have the bits of steps whose kernels the host launches."""

from __future__ import annotations

import gc
import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import same_bits
from gpus import RANKS_A_GPU, on_gpu, two_gpus
from plans import SHALLOW, plan_of
from small_models import MOE

from pentad.schedules.compiler import NO_MEMORY_OPTIONS
from pentad.schedules.simulate.rates import KernelChoice
from pentad.schedules.spec.model import ModelSpec
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.schedule_spec import MemoryOptions
from pentad.workers.lanes.step_graphs import CudaGraphMemory
from pentad.workers.runtime.runner import Runner

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(90 * RANKS_A_GPU)]
STEPS = 9
WIDE_HEADS = ModelSpec(layers=2, hidden=512, heads=4, kv_heads=2, ffn=512, vocab=300)
SIZES: list[tuple[str, dict[str, Any]]] = [
    ("1f1b", {"pp": 2, "microbatches": 4}),
    ("zb-h2", {"pp": 2, "microbatches": 4, "post_validation": True}),
    ("zb-v", {"pp": 2, "microbatches": 6}),
    ("dualpipev", {"pp": 2, "microbatches": 4}),
    ("1f1b", {"dp": 2, "microbatches": 2, "memory_options": MemoryOptions(zero=3)}),
    ("1f1b", {"tp": 2, "microbatches": 2}),
    *(("1f1b", {"cp": 2, "microbatches": 2, "cp_method": method}) for method in ("ring", "all_gather", "ulysses")),
    ("1f1b", {"ep": 2, "microbatches": 2, "model": MOE}),
    ("dualpipev", {"tp": 2, "pp": 2, "microbatches": 4}),
]


@two_gpus
@pytest.mark.parametrize("transport", ["peer", "nccl"])
@pytest.mark.parametrize(("name", "sizes"), SIZES)
def test_launched_steps_have_the_bits_of_issued_ones(gpus, corpus, name, sizes, transport):
    plan = plan_of(**{"name": name, "dp": 1, "pp": 1, "data": corpus, "model": SHALLOW, **sizes})
    options = sizes.get("memory_options", NO_MEMORY_OPTIONS)
    plan, calls = on_gpu(plan, transport, "bfloat16", options), [(0, 5), (5, STEPS - 5)]
    issued, launched = gpus.run(plan, calls), gpus.run(replace(plan, cuda_graphs=True), calls)
    for a, b in zip(issued, launched, strict=True):
        assert [(r.losses, r.grad_norm) for r in a.results] == [(r.losses, r.grad_norm) for r in b.results]
        assert same_bits(a.state, b.state)


@pytest.mark.skipif(importlib.util.find_spec("cudnn") is None, reason="needs nvidia-cudnn-frontend")
def test_launched_steps_with_cudnn_s_own_backward_have_the_bits_of_issued_ones(gpus, corpus):
    plan = on_gpu(plan_of("1f1b", 1, 1, 2, corpus, model=WIDE_HEADS), "nccl", "bfloat16")
    batch = replace(plan.batch, sequence_length=256)
    plan, calls = replace(plan, batch=batch, kernels=KernelChoice(cudnn_frontend=True)), [(0, 5), (5, STEPS - 5)]
    issued, launched, ours = (
        gpus.run(each, calls)[0]
        for each in (plan, replace(plan, cuda_graphs=True), replace(plan, kernels=KernelChoice("triton")))
    )
    assert [(r.losses, r.grad_norm) for r in issued.results] == [(r.losses, r.grad_norm) for r in launched.results]
    assert same_bits(issued.state, launched.state) and not same_bits(issued.state, ours.state)


def test_nothing_is_collected_while_a_graph_is_captured():
    """Finalizers of an earlier generation unpin memory and the like, which may end a capture."""
    captured = list[bool]()

    class Cycle:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            captured.append(torch.cuda.is_current_stream_capturing())

    def work() -> None:
        x.add_(1)
        for _ in range(10 * gc.get_threshold()[0]):
            Cycle()

    memory, x = CudaGraphMemory(), torch.zeros(1, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        graph = memory.graph()
        graph.capture(work)
        graph.launch()
    torch.cuda.synchronize()
    gc.collect()
    assert captured and not any(captured) and x.item() == 1


@pytest.mark.parametrize("name", ["1f1b", "zb-h2"])
def test_a_launched_step_allocates_nothing_for_compute(corpus, tmp_path, name):
    """It allocates as much with 8 microbatches as with 4: only for the end of the step."""
    four, eight = (
        allocations_of_a_launched_step(on_gpu(plan_of(name, 1, 1, count, corpus), "nccl", "bfloat16"), tmp_path)
        for count in (4, 8)
    )
    assert four == eight


def allocations_of_a_launched_step(plan: Plan, tmp_path: Path) -> int:
    runner = Runner(replace(plan, cuda_graphs=True), 0, tmp_path / "progress")
    try:
        runner.connect(runner.serve("127.0.0.1", 30), 30)
        runner.restore(None)
        runner.run(0, 5)
        assert runner.executor is not None and runner.executor.graphs is not None
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        runner.run(5, 1)
        assert runner.executor.graphs.mode == "launch"
        return torch.cuda.memory_stats()["allocation.all.allocated"] - before
    finally:
        runner.close()
        torch.cuda.set_stream(torch.cuda.default_stream())
