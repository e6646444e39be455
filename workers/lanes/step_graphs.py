"""CUDA graphs of what the compute lane repeats in every step: the host launches an instruction instead of its kernels.

The parts of a step are captured one by one in the order of the program, with one pool of memory: what one frees a later
one takes, as when the host issues them, and in every later step each finds what it reads where the captured step had
it. So a step is launched only if it is like the captured one in all that the host decides: its program, its numbers of
tokens, and which of two buffers its sums go to. Such steps have the same `key`.
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
REPEATED = COMPUTE | {Op.RECOMPUTE}  # what is captured of a step
MOST_KEYS = 8  # that are captured or remembered: of two buffers, and steps that count more than others


class Graph(Protocol):
    def capture(self, work: Callable[[], None]) -> None:
        """Records what `work` enqueues on the current stream, and on those that join it; nothing runs."""

    def launch(self) -> None:
        """Enqueues what was captured on the current stream."""


class GraphMemory(Protocol):
    """Graphs that allocate from one pool."""

    def graph(self) -> Graph: ...

    def allocating(self) -> AbstractContextManager[Any]:
        """What is allocated within, outside a capture, is in the pool."""

    def address(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory, which this does not keep from being freed."""

    def release(self) -> None:
        """Frees what it holds of graphs."""


class StepGraphs:
    """The graphs of a rank's steps. `run` and `made` are called in the same order, with the same places, in all steps
    of a key.

    The first step of a key is issued, so that kernels are compiled and libraries loaded outside a graph, the second is
    captured, and the others are launched.
    """

    def __init__(self, memory: GraphMemory) -> None:
        self.memory = memory
        self.key: Hashable = None
        self.issued: deque[Hashable] = deque(maxlen=MOST_KEYS)  # keys
        self.captured: dict[Hashable, dict[Hashable, Any]] = {}  # by key and place: a graph, or what was made
        self.complete: set[Hashable] = set()  # keys of which a step has been captured to its end
        self.mode: Literal["issue", "capture", "launch"] = "issue"

    def begin(self, key: Hashable) -> None:
        """A step of a key follows; None: it is like no other."""
        self.key = key
        if key in self.complete:
            self.mode = "launch"
        elif key in self.issued and len(self.complete) < MOST_KEYS:
            self.mode, self.captured[key] = "capture", {}
        else:
            self.mode = "issue"

    def end(self) -> None:
        """The step has been issued to its end."""
        if self.mode == "capture":
            self.complete.add(self.key)
        elif self.mode == "issue" and self.key is not None:
            self.issued.append(self.key)

    def release(self) -> None:
        """Frees all graphs, once no step counts any more. From any thread. NCCL closes no communicator, nor aborts
        one, before the graphs that have its kernels are gone."""
        self.captured.clear()
        self.memory.release()

    def run(self, place: Hashable, work: Callable[[], None]) -> None:
        """Launches what `work` enqueues, in a step that is captured or launched."""
        if self.mode == "capture":
            graph = self.captured[self.key][place] = self.memory.graph()
            graph.capture(work)
        self.captured[self.key][place].launch()

    def made(self, place: Hashable, make: Callable[[], T]) -> T:
        """What `make` returns, in a step that is launched what it returned in the captured one."""
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
        with self.in_use, gc_paused():  # what is freed of an earlier generation, as pinned memory, may end the capture
            if self.is_freed:
                raise RuntimeError("the generation of this graph has ended")
            # Other threads may allocate meanwhile, or ask for the state of their events.
            self.graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with suppress(RuntimeError):  # that the capture failed, and not why
                    self.graph.capture_end()
                raise
            self.graph.capture_end()

    def launch(self) -> None:
        """Raises RuntimeError once it is freed."""
        with self.in_use:
            self.graph.replay()

    def free(self) -> None:
        """Unlike the destructor, this leaves the GIL to others while it waits for a launch under way."""
        with self.in_use:
            self.is_freed = True
            self.graph.reset()


class CudaGraphMemory:
    def __init__(self) -> None:
        self.pool = torch.cuda.MemPool()
        self.graphs: list[CudaGraph] = []  # torch closes the pool to new ones when the last is deleted

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
    """The bytes of a contiguous tensor, for torch to make another tensor of."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }
