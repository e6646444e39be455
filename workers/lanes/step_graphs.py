"""CUDA graphs of what the compute lane repeats in every step: the host launches an instruction instead of its kernels.

The parts of a step are captured one by one in program order, with one memory pool: later parts reuse what earlier ones
free, as when the host issues them, and in every later step each part finds its inputs where they were in the captured
step. So a step can be launched only if everything that the host decides is as in the captured one: the program, the
numbers of tokens, and which of two buffers sums go to. Such steps have the same `key`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, suppress
from typing import Any, Literal, Protocol, TypeVar

import torch

from pentad.schedules.ir.gc_pause import gc_paused
from pentad.schedules.ir.instruction import COMPUTE, Op

T = TypeVar("T")
REPEATED = COMPUTE | {Op.RECOMPUTE}  # the instructions of a step that are captured
MOST_KEYS = 8  # captured or remembered: there are two buffers, and steps that count more than others


class Graph(Protocol):
    def capture(self, work: Callable[[], None]) -> None:
        """Records what `work` enqueues on the current stream and on those that join it; runs nothing."""

    def launch(self) -> None:
        """Enqueues what was captured on the current stream."""


class GraphMemory(Protocol):
    """Graphs that allocate from one pool."""

    def graph(self) -> Graph: ...

    def allocating(self) -> AbstractContextManager[Any]:
        """Allocations within, outside a capture, come from the pool."""

    def address(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor on the same memory that does not keep it alive."""

    def release(self) -> None:
        """Frees the graphs."""


class StepGraphs:
    """The graphs of a rank's steps. `run` and `made` must be called in the same order, with the same places, in all
    steps of a key.

    The first step of a key is issued, so that kernels are compiled and libraries loaded outside a graph; the second is
    captured; all others are launched.
    """

    def __init__(self, memory: GraphMemory) -> None:
        self.memory = memory
        self.key: Hashable = None
        self.issued: deque[Hashable] = deque(maxlen=MOST_KEYS)  # keys
        self.captured: dict[Hashable, dict[Hashable, Any]] = {}  # by key and place: a graph, or what was made
        self.complete: set[Hashable] = set()  # keys with a completely captured step
        self.mode: Literal["issue", "capture", "launch"] = "issue"

    def begin(self, key: Hashable) -> None:
        """Begins a step of this key; None: it is like no other."""
        self.key = key
        if key in self.complete:
            self.mode = "launch"
        elif key in self.issued and len(self.complete) < MOST_KEYS:
            self.mode, self.captured[key] = "capture", {}
        else:
            self.mode = "issue"

    def end(self) -> None:
        """Called when all of the step has been issued."""
        if self.mode == "capture":
            self.complete.add(self.key)
        elif self.mode == "issue" and self.key is not None:
            self.issued.append(self.key)

    def release(self) -> None:
        """Frees all graphs, after the last step that may be committed. From any thread. NCCL neither closes nor aborts
        a communicator while graphs hold its kernels."""
        self.captured.clear()
        self.memory.release()

    def run(self, place: Hashable, work: Callable[[], None]) -> None:
        """In a captured or launched step: launches what `work` enqueues."""
        if self.mode == "capture":
            graph = self.captured[self.key][place] = self.memory.graph()
            graph.capture(work)
        self.captured[self.key][place].launch()

    def made(self, place: Hashable, make: Callable[[], T]) -> T:
        """What `make` returns or, in a launched step, what it returned in the captured one."""
        if self.mode == "launch":
            return self.captured[self.key][place]
        found = make()
        if self.mode == "capture":
            self.captured[self.key][place] = found
        return found


class CudaGraph:
    def __init__(self, pool: Any) -> None:
        self.graph, self.pool = torch.cuda.CUDAGraph(), pool
        self.in_use, self.is_freed = threading.Lock(), False

    def capture(self, work: Callable[[], None]) -> None:
        with self.in_use, gc_paused():  # collecting garbage, such as old pinned memory, may end the capture
            if self.is_freed:
                raise RuntimeError("the generation of this graph has ended")
            # Meanwhile other threads may allocate, or query their events.
            self.graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with suppress(RuntimeError):  # says that the capture failed, but not why
                    self.graph.capture_end()
                raise
            self.graph.capture_end()

    def launch(self) -> None:
        """Raises RuntimeError once the graph has been freed."""
        with self.in_use:
            self.graph.replay()

    def free(self) -> None:
        """Unlike the destructor, releases the GIL while it waits for a launch in progress."""
        with self.in_use:
            self.is_freed = True
            self.graph.reset()


class CudaGraphMemory:
    def __init__(self) -> None:
        self.pool = torch.cuda.MemPool()
        self.graphs: list[CudaGraph] = []  # once the last is deleted, torch accepts no new ones in the pool

    def graph(self) -> CudaGraph:
        self.graphs.append(CudaGraph(self.pool.id))
        return self.graphs[-1]

    def allocating(self) -> AbstractContextManager[None]:
        return torch.cuda.use_mem_pool(self.pool)

    def release(self) -> None:
        for graph in self.graphs:
            graph.free()
        self.graphs.clear()

    def address(self, tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.is_contiguous()
        return torch.as_tensor(_Memory(tensor), device=tensor.device).view(tensor.dtype).view(tensor.shape)


class _Memory:
    """The bytes of a contiguous tensor, from which torch makes another tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }
