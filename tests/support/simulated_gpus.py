"""GPUs of several ranks in one process: what a host enqueues on a lane runs later, in any order that the lanes, the
events between them and the flags between ranks allow."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pentad.workers.transport.stream_flags import FlagWait, FlagWrite

Condition = Callable[[], bool]
Lane = tuple[int, str]  # rank and name
CHANGES = 0.05  # probability that another order of preference takes over


class Task(NamedTuple):
    run: Callable[[], object]
    ready: Condition


class Lanes(TorchDispatchMode):
    """The lanes of all ranks. While entered, a copy between tensors is enqueued on the current lane."""

    def __init__(self) -> None:
        super().__init__()
        self.queues: dict[Lane, deque[Task]] = defaultdict(deque)
        self.current: Lane = (0, "compute")

    @contextmanager
    def on(self, lane: Lane) -> Iterator[None]:
        self.current = lane
        with self:
            yield

    @contextmanager
    def moved_to(self, lane: Lane | None) -> Iterator[None]:
        """Within the block, work is enqueued on this lane; None: on the current one."""
        before, self.current = self.current, self.current if lane is None else lane
        yield
        self.current = before

    def enqueue(self, run: Callable[[], object] = lambda: None, ready: Condition = lambda: True) -> None:
        self.queues[self.current].append(Task(run, ready))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.enqueue(lambda: func(*args))
            return args[0]
        return func(*args, **(kwargs or {}))


class SimulatedFlags:
    """Flags of one rank or of all, with initial `values`; same interface as `StreamFlags`. Waits for what is `ignored`,
    an event or a bit, end immediately."""

    def __init__(self, lanes: Lanes, ignored: str | int = "", values: Mapping[Hashable, int] | None = None) -> None:
        self.lanes, self.values, self.ignored = lanes, Counter[Hashable](values), ignored

    def write(self, flag: Hashable, value: int, stream: Lane | None = None) -> None:
        with self.lanes.moved_to(stream):
            self.lanes.enqueue(lambda: self.values.update({flag: value - self.values[flag]}))

    def wait(self, flag: Hashable, value: int, stream: Lane | None = None) -> None:
        if flag[0] != self.ignored:  # type: ignore[index]
            with self.lanes.moved_to(stream):
                self.lanes.enqueue(ready=lambda: self.values[flag] >= value)

    def batch(self, steps: Sequence[FlagWrite | FlagWait]) -> Sequence[FlagWrite | FlagWait]:
        return steps

    def run(self, batch: Sequence[FlagWrite | FlagWait], stream: Lane | None = None) -> None:
        for step in batch:
            if isinstance(step, FlagWrite):
                self.write(*step, stream)
            elif step.bit != self.ignored:
                with self.lanes.moved_to(stream):
                    self.lanes.enqueue(ready=partial(self._has, *step))

    def _has(self, flag: Hashable, bit: int) -> bool:
        return self.values[flag] & bit != 0


class SimulatedLane:
    """A lane and its events; same interface as `CudaLane`."""

    def __init__(self, lanes: Lanes, lane: Lane) -> None:
        self.lanes, self.handle = lanes, lane

    def follow(self) -> None:
        before = SimulatedEvent(self.lanes)
        with self.lanes.moved_to(self.handle):
            before.wait()

    def end(self) -> SimulatedEvent:
        with self.lanes.moved_to(self.handle):
            return SimulatedEvent(self.lanes)


class SimulatedEvent:
    def __init__(self, lanes: Lanes) -> None:
        self.lanes, self.passed = lanes, False
        lanes.enqueue(lambda: setattr(self, "passed", True))

    def wait(self) -> None:
        self.lanes.enqueue(ready=lambda: self.passed)


class SimulatedMemory:
    """Tensors of all ranks by name; same interface as `PeerMemory`."""

    def __init__(self, shared: dict[int, dict[str, torch.Tensor]], lanes: Lanes | None = None) -> None:
        self.shared, self.lanes = shared, lanes or Lanes()

    def read(self, peer: int, name: str, start: int, target: torch.Tensor, stream: Lane | None = None) -> None:
        with self.lanes.moved_to(stream):
            source = self.shared[peer][name].view(target.dtype)
            target.view(-1).copy_(source[start : start + target.numel()])

    def close(self) -> None:
        pass


class SimulatedAllReduce:
    """NCCL's all-reduce of each group of ranks: it ends on none before it has begun on all; the k-th call on one rank
    matches the k-th on every other one."""

    def __init__(self, lanes: Lanes) -> None:
        self.lanes, self.counts = lanes, Counter[tuple[int, tuple[int, ...]]]()
        self.brought: dict[tuple[int, tuple[int, ...]], dict[int, torch.Tensor]] = defaultdict(dict)

    def __call__(self, values: torch.Tensor, group: tuple[int, ...], *, bf16: bool) -> list[Any]:
        rank = self.lanes.current[0]
        self.counts[rank, group] += 1
        brought = self.brought[self.counts[rank, group], group]
        self.lanes.enqueue(lambda: brought.update({rank: values.clone()}))
        terms = map(brought.__getitem__, group)
        self.lanes.enqueue(lambda: values.copy_(sum(terms, start=torch.zeros(()))), lambda: len(brought) == len(group))
        return []


def run_in_some_order(lanes: Lanes, hosts: Iterable[Iterator[Condition]], random: Random) -> None:
    """Runs hosts, which yield the condition that they wait for, and lanes until all are done; fails if none can
    continue. Some run for as long as they can while others stand still."""
    waiting: dict[int, tuple[Iterator[Condition], Condition]] = {
        number: (host, lambda: True) for number, host in enumerate(hosts)
    }
    rank_of: dict[Hashable, float] = {}
    while waiting or any(lanes.queues.values()):
        able: list[Hashable] = [number for number, (_, condition) in waiting.items() if condition()]
        able += [lane for lane, queue in lanes.queues.items() if queue and queue[0].ready()]
        assert able, f"deadlock: hosts {list(waiting)} and lanes {[lane for lane, q in lanes.queues.items() if q]}"
        if random.random() < CHANGES:
            rank_of.clear()
        chosen = max(able, key=lambda actor: rank_of.setdefault(actor, random.random()))
        if isinstance(chosen, int):
            host, _ = waiting.pop(chosen)
            if (condition := next(host, None)) is not None:
                waiting[chosen] = host, condition
        else:
            lanes.queues[chosen].popleft().run()  # type: ignore[index]
