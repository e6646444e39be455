"""Copies between the ranks of a host on CPUs: the real flags and rows, over a CUDA driver that waits, writes and copies
immediately, in memory that the processes share."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

WAIT_SECONDS = 40.0


class Driver:
    """What StreamFlags calls. A wait or a write is done when the call returns."""

    CUstreamWaitValue_flags = SimpleNamespace(CU_STREAM_WAIT_VALUE_GEQ=0, CU_STREAM_WAIT_VALUE_AND=2)
    CUstreamBatchMemOpType = SimpleNamespace(CU_STREAM_MEM_OP_WRITE_VALUE_32=1, CU_STREAM_MEM_OP_WAIT_VALUE_32=2)
    OK = (0,)

    @staticmethod
    def CUstreamBatchMemOpParams() -> SimpleNamespace:
        return SimpleNamespace(operation=0, writeValue=SimpleNamespace(), waitValue=SimpleNamespace())

    def cuMemHostRegister(self, *_: Any) -> tuple[int]:
        return self.OK

    def cuMemHostUnregister(self, *_: Any) -> tuple[int]:
        return self.OK

    def cuStreamWriteValue32(self, _: Any, address: int, value: int, flags: int) -> tuple[int]:
        word_at(address).value = value
        return self.OK

    def cuStreamWaitValue32(self, _: Any, address: int, value: int, kind: int) -> tuple[int]:
        word, deadline = word_at(address), time.monotonic() + WAIT_SECONDS
        while not (word.value & value if kind else word.value >= value):
            assert time.monotonic() < deadline, "a flag was not written in time"
            time.sleep(1e-5)
        return self.OK

    def cuStreamBatchMemOp(self, stream: Any, count: int, steps: list[Any], _: int) -> tuple[int]:
        assert len(steps) == count
        for step in steps:
            if step.operation == self.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WRITE_VALUE_32:
                self.cuStreamWriteValue32(stream, step.writeValue.address, step.writeValue.value, 0)
            else:
                wait = step.waitValue
                self.cuStreamWaitValue32(stream, wait.address, wait.value, wait.flags)
        return self.OK


class SharedMemory:
    """Tensors that ranks share by name; same interface as `PeerMemory`. Their storage moves to memory that other
    processes can map."""

    def __init__(
        self, store: dist.Store, key: str, rank: int, shared: Mapping[str, torch.Tensor], peers: Iterable[int]
    ) -> None:
        self.peers = list(peers)
        store.set(f"{key}/{rank}", json.dumps({name: _export(tensor) for name, tensor in shared.items()}))
        found = {peer: json.loads(store.get(f"{key}/{peer}")) for peer in self.peers}
        self.maps = {peer: {name: _mapped(*each) for name, each in names.items()} for peer, names in found.items()}

    def read(self, peer: int, name: str, start: int, target: torch.Tensor, stream: None = None) -> None:
        source = self.maps[peer][name].view(target.dtype)
        target.view(-1).copy_(source[start : start + target.numel()])

    def close(self) -> None:
        self.maps.clear()


class EagerLane:
    """A lane on which everything runs as soon as it is enqueued."""

    handle = None

    def follow(self) -> None:
        pass

    def end(self) -> EagerLane:
        return self

    def wait(self) -> None:
        pass


@cache
def copy_on_cpus() -> None:
    """From now on, CPU ranks of this process exchange by peer copies where plans say so: tp ranks beside products of
    any number of rows, and experts as on a GPU."""
    from pentad.workers.parallel import tensor_parallel
    from pentad.workers.runtime import rank_setup, runner
    from pentad.workers.transport import p2p_ipc, stream_flags

    sys.modules["cuda.bindings"] = SimpleNamespace(driver=Driver())  # type: ignore[assignment]
    patched: Any = rank_setup
    patched.CudaLane, patched.stream_of = lambda _: EagerLane(), lambda *_: None
    patched.PeerMemory = p2p_ipc.PeerMemory = SharedMemory  # type: ignore[misc, assignment]
    stream_flags.handle_of = lambda stream: 0
    tensor_parallel.SPLIT_ROWS = 1
    of_runner: Any = runner
    connect = of_runner.connect

    def connect_like_gpus(plan: Any, *arguments: Any) -> Any:
        groups = connect(plan, *arguments)
        if plan.transport != "peer":
            return groups
        return replace(groups, layers=groups.layers._replace(ep=replace(groups.layers.ep, mode="all_gather")))

    of_runner.connect = connect_like_gpus


def word_at(address: int) -> ctypes.c_int32:
    return ctypes.c_int32.from_address(address)


def _export(tensor: torch.Tensor) -> tuple[str, int, int]:
    """The file of a tensor's storage, and the tensor's offset and size in it, in bytes."""
    descriptor, _ = tensor.untyped_storage()._share_fd_cpu_()
    start = int(tensor.storage_offset()) * tensor.element_size()
    return f"/proc/{os.getpid()}/fd/{descriptor}", start, tensor.numel() * tensor.element_size()


def _mapped(path: str, start: int, size: int) -> torch.Tensor:
    descriptor = os.open(path, os.O_RDWR)
    memory = mmap.mmap(descriptor, start + size)
    os.close(descriptor)
    return torch.frombuffer(memory, dtype=torch.uint8)[start:]
