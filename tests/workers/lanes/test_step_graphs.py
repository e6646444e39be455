"""Steps launched as an earlier one was captured have the bits of issued steps, as long as nothing that a graph refers
to has moved or changed since."""

from __future__ import annotations

import threading
import time
import weakref
from dataclasses import replace
from typing import Any, cast
from unittest.mock import Mock, patch

import pytest
import torch
from bits import same_bits
from plans import SHALLOW, plan_of
from recorded_graphs import RecordedMemory

from pentad.schedules.spec.schedule_spec import MemoryOptions
from pentad.workers.lanes.step_graphs import CudaGraphMemory, StepGraphs
from pentad.workers.runtime import runner as runner_module
from pentad.workers.runtime.runner import Runner

pytestmark = pytest.mark.timeout(180)
slow = pytest.mark.slow
ZERO_3 = MemoryOptions(zero=3)
STEPS = 9  # for each of two buffers one is issued and one captured; the others are launched
CASES: list[Any] = [
    pytest.param("1f1b", {"pp": 2, "microbatches": 4}, marks=slow),
    ("zb-h2", {"dp": 2, "pp": 2, "microbatches": 2}),
    pytest.param("zb-h2", {"pp": 2, "microbatches": 4, "post_validation": True}, marks=slow),
    pytest.param("zb-v", {"pp": 2, "microbatches": 6}, marks=slow),
    pytest.param("dualpipe", {"pp": 4, "microbatches": 8}, marks=slow),
    pytest.param("seq-1f1b", {"pp": 2, "microbatches": 2, "slices": 2}, marks=slow),
    pytest.param("1f1b", {"pp": 2, "microbatches": 3, "unit_layers": 1, "recompute": "attention"}, marks=slow),
    pytest.param("1f1b", {"pp": 2, "microbatches": 3, "unit_layers": 1, "recompute": "full"}, marks=slow),
    pytest.param("1f1b", {"dp": 2, "pp": 2, "microbatches": 4, "memory_options": ZERO_3}, marks=slow),
    pytest.param("1f1b", {"pp": 1, "tp": 2, "microbatches": 2}, marks=slow),
    pytest.param("zb-h2", {"pp": 2, "tp": 2, "microbatches": 4, "logit_rows": 5}, marks=slow),
    pytest.param("zb-v", {"dp": 2, "pp": 2, "microbatches": 4, "logit_rows": 5, "memory_options": ZERO_3}, marks=slow),
    pytest.param("dualpipev", {"pp": 2, "tp": 2, "microbatches": 4}, marks=slow),
    pytest.param("1f1b", {"pp": 1, "cp": 2, "microbatches": 2, "cp_method": "all_gather"}, marks=slow),
]


@pytest.mark.parametrize(("name", "sizes"), CASES)
def test_launched_steps_have_the_bits_of_issued_ones(fleet, corpus, name: str, sizes: dict[str, Any]) -> None:
    plan = plan_of(**{"name": name, "dp": 1, "data": corpus, "dtype": "float32", "model": SHALLOW, **sizes})
    calls = [(0, 5), (5, STEPS - 5)]
    issued = fleet.run(plan, calls)
    launched = fleet.run(replace(plan, cuda_graphs=True), calls)
    for a, b in zip(issued, launched, strict=True):
        assert [(r.losses, r.grad_norm) for r in a.results] == [(r.losses, r.grad_norm) for r in b.results]
        assert same_bits(a.state, b.state)


def test_graphs_are_freed_before_communicators_are_closed(corpus, tmp_path) -> None:
    """NCCL waits for graphs that contain its kernels."""
    runner, memory = Runner(plan_of("1f1b", 1, 1, 2, corpus), 0, tmp_path / "progress"), RecordedMemory()
    try:
        runner.connect(runner.serve("127.0.0.1", 30), 30)
        runner._connected.graphs = StepGraphs(memory)
        runner.restore(None)
        runner.run(0, STEPS)
        graphs, found = [weakref.ref(graph) for graph in memory.graphs], list[bool]()

        def destroy_groups(*, beside: bool) -> None:
            found.append(any(graph() is not None for graph in graphs))

        with patch.object(runner_module, "destroy_groups", destroy_groups):
            runner.close()
    finally:
        runner.close()
    assert graphs and found == [False]


class FakeGraph:
    """A torch graph whose `replay` takes until `finish`; torch calls it and `reset` without the GIL."""

    def __init__(self) -> None:
        self.calls, self.finish = list[str](), threading.Event()

    def replay(self) -> None:
        assert "reset" not in self.calls
        self.finish.wait(10)
        self.calls.append("replay")

    def reset(self) -> None:
        self.calls.append("reset")


def test_graphs_are_freed_after_the_launch_under_way_and_captured_no_more() -> None:
    """They are freed by torch's `reset`: its destructor would hold the GIL while it waits for kernels that end only
    once another thread has aborted their communicator."""
    with patch.multiple(torch.cuda, MemPool=Mock, CUDAGraph=FakeGraph):
        memory = CudaGraphMemory()
        graph, late = memory.graph(), memory.graph()
    fake, late_fake = cast(FakeGraph, graph.graph), cast(FakeGraph, late.graph)
    launch, release = threading.Thread(target=graph.launch), threading.Thread(target=memory.release)
    launch.start()
    while not graph.in_use.locked():
        time.sleep(0.001)
    release.start()
    time.sleep(0.05)
    assert fake.calls == []
    fake.finish.set()
    for thread in (launch, release):
        thread.join(10)
    assert fake.calls == ["replay", "reset"]
    assert late_fake.calls == ["reset"]
    with pytest.raises(RuntimeError, match="ended"):
        late.capture(lambda: None)
