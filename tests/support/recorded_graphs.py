"""CUDA graphs on a CPU: what a step enqueues is recorded, and replayed on the same tensors with the same constants.

As on a GPU, a graph's memory may be reused: what the host has released before a graph is captured is filled with NaN at
every launch of that graph, so that whoever reads it later gets wrong values.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from pentad.workers.lanes.step_graphs import StepGraphs
from pentad.workers.model.base_stage import storage_id
from pentad.workers.parallel.async_ops import LayerWork, host_waits
from pentad.workers.runtime.runner import Runner

HOST_READS = {torch.ops.aten._local_scalar_dense.default}


def record_graphs(runner: Runner) -> None:
    """Lets a connected rank on a CPU launch steps as its plan says."""
    if runner.plan.cuda_graphs and runner.plan.device == "cpu":
        assert runner.executor is not None
        runner.executor.graphs = StepGraphs(RecordedMemory())


class Call(NamedTuple):
    """`results` are those in new memory, by their index in what the function returns."""

    function: Any
    args: Any
    kwargs: Any
    results: dict[int, Tensor]

    def tensors(self) -> Iterator[Tensor]:
        yield from (each for each in tree_leaves((self.args, self.kwargs)) if isinstance(each, Tensor))
        yield from self.results.values()


class Recorder(TorchDispatchMode):
    """Records calls, and runs them."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Otherwise each rank imports torch._dynamo, which takes seconds."""
        return False

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function not in HOST_READS, "the host cannot read what a graph computes"
        kwargs = kwargs or {}
        given = {storage_id(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        found = function(*args, **kwargs)
        results = {n: each for n, each in enumerate(tree_leaves(found)) if isinstance(each, Tensor)}
        new = {number: each.detach() for number, each in results.items() if storage_id(each) not in given}
        if new or not results or function._schema.is_mutable or function.namespace == "c10d":  # not a view
            args, kwargs = tree_map_only(Tensor, Tensor.detach, (args, kwargs))
            self.calls.append(Call(function, args, kwargs, new))
        return found


class RecordedGraph:
    """Its first launch does nothing, as everything already ran while being recorded."""

    def __init__(self, memory: RecordedMemory) -> None:
        self.memory, self.calls, self.is_new = memory, list[Call](), True
        self.stale: list[Tensor] = []

    def capture(self, work: Callable[[], None]) -> None:
        self.stale = self.memory.take_stale()
        with unrecorded_waits(), Recorder() as recorder:
            work()
        self.calls = recorder.calls
        self.memory.add(self.calls)

    def launch(self) -> None:
        if self.is_new:
            self.is_new = False
            return
        for tensor in self.stale:
            tensor.fill_(math.nan)
        for function, args, kwargs, results in self.calls:
            found = tree_leaves(function(*args, **kwargs))
            for each in found:
                if hasattr(each, "wait"):  # communication
                    each.wait()
            for number, result in results.items():
                result.copy_(found[number])


class RecordedMemory:
    """What all graphs of a rank have allocated, and how many of their tensors share it."""

    def __init__(self) -> None:
        self.tensors: dict[int, Tensor] = {}
        self.recorded: Counter[int] = Counter()
        self.graphs: list[RecordedGraph] = []  # kept alive, so that no new tensor gets the id of one that is gone

    def graph(self) -> RecordedGraph:
        self.graphs.append(RecordedGraph(self))
        return self.graphs[-1]

    def allocating(self) -> AbstractContextManager[None]:
        return nullcontext()

    def address(self, tensor: Tensor) -> Tensor:
        self.recorded[storage_id(tensor)] += 1
        return tensor.detach()

    def release(self) -> None:
        self.graphs.clear()

    def add(self, calls: list[Call]) -> None:
        self.tensors |= {storage_id(each): each for call in calls for each in call.results.values()}
        self.recorded.update(storage_id(each) for call in calls for each in call.tensors())

    def take_stale(self) -> list[Tensor]:
        """Tensors that now only graphs refer to, and that were not yet returned."""
        counts = {key: torch._C._storage_Use_Count(key) - 1 for key in self.tensors}  # not counting Python's own object
        stale = [key for key, count in counts.items() if count == self.recorded[key]]
        return [found for found in map(self.tensors.pop, stale) if found.is_floating_point()]


@contextmanager
def unrecorded_waits() -> Iterator[None]:
    """gloo copies some results from its own memory when they are awaited; such waits are not recorded."""
    real = host_waits.wait

    def wait(works: Sequence[LayerWork]) -> None:
        with _disable_current_modes():
            real(works)

    with patch.object(host_waits, "wait", wait):
        yield
