"""Process groups of two ranks in one process: the other rank sends the same data as this one, and it arrives when
awaited."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import Mock, patch

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from pentad.schedules.spec.plan import Plan
from pentad.workers.model.stage import Stage
from pentad.workers.parallel import async_ops, tensor_parallel
from pentad.workers.parallel.async_ops import Task
from pentad.workers.parallel.context_parallel import ContextParallelGroup
from pentad.workers.parallel.expert_parallel import DispatchMode, ExpertParallelGroup
from pentad.workers.parallel.process_groups import LayerGroups
from pentad.workers.parallel.tensor_parallel import TensorParallelGroup
from pentad.workers.params.param_buffers import make_param_buffers
from pentad.workers.params.parameters import create_parameters

COMPUTE = {"mm", "bmm", "addmm_", "mul", "exp"}  # at least one of these is between any two operations


class FakeGroup:
    """Stands for a process group."""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0


class Event(NamedTuple):
    task: str
    what: str  # 'starts', 'waits' or 'computes'
    operation: int  # its number, -1 for compute


class Log(TorchDispatchMode):
    """The operations of the tasks, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.task, self.events, self.started = "", list[Event](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in COMPUTE or "attention" in name:
            self.events.append(Event(self.task, "computes", -1))
        return func(*args, **(kwargs or {}))

    def start(self, output: torch.Tensor, arrive: Callable[[], object]) -> FakeWork:
        self.started += 1
        self.events.append(Event(self.task, "starts", self.started))
        if output.is_floating_point():
            output.fill_(torch.nan)
        return FakeWork(self, self.started, arrive)

    def of(self, name: str, task: Task[None]) -> Task[None]:
        """The task, logged under `name`."""
        while True:
            self.task = name
            if next(task, "ended"):
                return
            yield


class FakeWork:
    """The handle of an operation in flight."""

    def __init__(self, log: Log, number: int, arrive: Callable[[], object]) -> None:
        self.log, self.number, self.arrive = log, number, arrive

    def wait(self) -> None:
        self.log.events.append(Event(self.log.task, "waits", self.number))
        self.arrive()


@contextmanager
def fake_communication(log: Log) -> Iterator[None]:
    """Replaces all communication, and logs it."""

    def all_gather(full: torch.Tensor, part: torch.Tensor, **_: Any) -> FakeWork:
        return log.start(full, lambda: full.view(2, -1).copy_(part.reshape(1, -1)))

    def reduce_scatter(own: torch.Tensor, parts: torch.Tensor, **_: Any) -> FakeWork:
        return log.start(own, lambda: own.copy_(parts.view(2, *own.shape)[0] * 2))

    def all_to_all(received: torch.Tensor, sent: torch.Tensor, *_: Any, **__: Any) -> FakeWork:
        return log.start(received, lambda: received.copy_(sent))

    def all_reduce(values: torch.Tensor, **_: Any) -> FakeWork:
        return log.start(values[:0], lambda: values.mul_(2))

    under_way = list[torch.Tensor]()

    def isend(sent: torch.Tensor, **_: Any) -> Mock:
        under_way.append(sent)
        return Mock()

    def irecv(received: torch.Tensor, **_: Any) -> FakeWork:
        sent = under_way.pop()
        return log.start(received, lambda: received.copy_(sent))

    with (
        patch.object(dist, "isend", isend),
        patch.object(dist, "irecv", irecv),
        patch.object(dist, "all_to_all_single", all_to_all),
        patch.object(dist, "all_reduce", all_reduce),
        patch.object(async_ops, "all_gather", all_gather),
        patch.object(async_ops, "reduce_scatter", reduce_scatter),
        patch.object(tensor_parallel, "reduce_scatter", reduce_scatter),
        log,
    ):
        yield


def stage_of(plan: Plan, mode: DispatchMode) -> Stage:
    """The middle of three stages, on the first rank of the mesh that holds it."""
    cpu, mesh, group = torch.device("cpu"), plan.mesh, FakeGroup()
    rank = mesh.move(0, pp=1)
    parameters = {shard: create_parameters(plan, shard, cpu) for shard in plan.param_shards_of(rank)}
    stage = Stage(plan, 1, make_param_buffers(plan, rank, 1, parameters), rank)

    def of(size: int) -> Any:
        return group if size > 1 else None

    tp, ep = TensorParallelGroup(of(mesh.tp), mesh.tp), ExpertParallelGroup(of(mesh.ep), mesh.ep, 0, mode=mode)
    stage.join(LayerGroups(tp, ContextParallelGroup(of(mesh.cp), mesh.cp, 0, method=plan.cp_method), ep))
    return stage
