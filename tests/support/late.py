"""Groups of two ranks of which the other one sends what this one does, and nothing before it is awaited."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from pentad.schedules.spec.plan import Plan
from pentad.workers.model.stage import Stage
from pentad.workers.parallel import cp_all_gather, expert_parallel, tensor_parallel
from pentad.workers.parallel.async_ops import Turns
from pentad.workers.parallel.context_parallel import Context
from pentad.workers.parallel.expert_parallel import DispatchMode, ExpertParallelGroup
from pentad.workers.parallel.process_groups import Inner
from pentad.workers.parallel.tensor_parallel import TensorRanks
from pentad.workers.params.param_buffers import buffers_of
from pentad.workers.params.parameters import create

COMPUTES = {"mm", "bmm", "addmm_", "mul", "exp"}  # one of which is in all that stands between two operations


class Group:
    """Stands for a process group."""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0


class Event(NamedTuple):
    who: str
    what: str  # 'starts', 'waits' or 'computes'
    number: int  # of the operation


class Log(TorchDispatchMode):
    """What `who` does, in order: set before each turn."""

    def __init__(self) -> None:
        super().__init__()
        self.who, self.events, self.started = "", list[Event](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in COMPUTES or "attention" in name:
            self.events.append(Event(self.who, "computes", -1))
        return func(*args, **(kwargs or {}))

    def start(self, room: torch.Tensor, arrive: Callable[[], object]) -> Late:
        self.started += 1
        self.events.append(Event(self.who, "starts", self.started))
        if room.is_floating_point():
            room.fill_(torch.nan)
        return Late(self, self.started, arrive)

    def of(self, who: str, turns: Turns[None]) -> Turns[None]:
        """The same turns, with their name."""
        while True:
            self.who = who
            if next(turns, "ended"):
                return
            yield


class Late:
    """A handle."""

    def __init__(self, log: Log, number: int, arrive: Callable[[], object]) -> None:
        self.log, self.number, self.arrive = log, number, arrive

    def wait(self) -> None:
        self.log.events.append(Event(self.log.who, "waits", self.number))
        self.arrive()


@contextmanager
def late(log: Log) -> Iterator[None]:
    """Every operation between ranks is one of these."""

    def gather(whole: torch.Tensor, part: torch.Tensor, **_: Any) -> Late:
        return log.start(whole, lambda: whole.view(2, -1).copy_(part.reshape(1, -1)))

    def scatter(own: torch.Tensor, parts: torch.Tensor, **_: Any) -> Late:
        return log.start(own, lambda: own.copy_(parts.view(2, *own.shape)[0] * 2))

    def exchange(came: torch.Tensor, sent: torch.Tensor, *_: Any, **__: Any) -> Late:
        return log.start(came, lambda: came.copy_(sent))

    def added(values: torch.Tensor, **_: Any) -> Late:
        return log.start(values[:0], lambda: values.mul_(2))

    with (
        patch.object(dist, "get_world_size", lambda group: 2),
        patch.object(dist, "all_to_all_single", exchange),
        patch.object(dist, "all_reduce", added),
        patch.object(expert_parallel, "_gather", gather),
        patch.object(expert_parallel, "_scatter", scatter),
        patch.object(tensor_parallel, "gather_all", gather),
        patch.object(tensor_parallel, "scatter_sum", scatter),
        patch.object(cp_all_gather, "_gather", gather),
        patch.object(cp_all_gather, "_scatter", scatter),
        log,
    ):
        yield


def stage_of(plan: Plan, way: DispatchMode) -> Stage:
    """The middle one of three stages, on the first rank of the mesh that has it."""
    cpu, mesh, group = torch.device("cpu"), plan.mesh, Group()
    rank = mesh.move(0, pp=1)
    held = {share: create(plan, share, cpu) for share in plan.shares_of(rank)}
    stage = Stage(plan, 1, buffers_of(plan, rank, 1, held), rank)

    def of(size: int) -> Any:
        return group if size > 1 else None

    tensor, experts = TensorRanks(of(mesh.tp), mesh.tp), ExpertParallelGroup(of(mesh.ep), 0, way)
    stage.join(Inner(tensor, Context(of(mesh.cp), mesh.cp, 0, plan.cp_method), experts))
    return stage
