"""OFFLOAD and RELOAD: keep activations in host memory while the device's is needed for others.

Storages are moved, not tensors: a storage is emptied and later refilled beneath the tensors that view it, some of which
only an autograd graph refers to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from math import inf
from typing import NamedTuple

import torch

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import Key, Op
from pentad.schedules.passes.offload_arena import Arena, arena
from pentad.schedules.passes.offload_cut import cut
from pentad.schedules.spec.plan import Plan
from pentad.workers.data.batch_loader import Tokens
from pentad.workers.host_memory import HostMemory
from pentad.workers.lanes.streams import CudaStreams, Lanes

Slice = tuple[int, int]  # stage and microbatch, or a slice of one


class Offloaded(NamedTuple):
    """A storage of `size` bytes: the leading ones are in `host`, the remainder, if any, in `rest`."""

    storage: torch.UntypedStorage
    size: int
    host: torch.Tensor
    rest: torch.Tensor | None


class ActivationOffload:
    """The offloaded activations of one rank. `offload` and `reload` are called on the lanes of OFFLOAD and RELOAD,
    `release` on the compute lane once it has waited for such an instruction.

    `arenas[program]` says where the copies lie. With uneven microbatches of up to `capacity` tokens, tensors may differ
    from the planned ones; one that would leave more on the device than there is room for is then not cut. Copies within
    the device run on the compute lane because they take SMs: on another lane they would wait for a long kernel to leave
    some free. Storages are resized on the compute lane, so a RELOAD may reuse what the compute before it has freed. On
    a CPU the copies are real, but both sides are the same memory.
    """

    def __init__(
        self,
        arenas: Sequence[Arena],
        slots: Sequence[tuple[int, int]],
        fractions: Sequence[float],
        lanes: Lanes,
        device: torch.device,
        *,
        capacity: int = 0,
    ) -> None:
        self.arenas, self.slots, self.fractions, self.device = arenas, slots, fractions, device
        self.capacity = capacity
        self.compute = lanes.compute if isinstance(lanes, CudaStreams) else None
        self.arena, self.rests = arenas[0], torch.empty(0, dtype=torch.uint8)
        self.memory: HostMemory | None = None
        self.is_expanding = False
        self.offloaded: dict[Slice, list[Offloaded]] = {}

    @staticmethod
    def of(plan: Plan, rank: int, lanes: Lanes, device: torch.device) -> ActivationOffload:
        """The offload of a rank of the mesh."""
        pp = plan.mesh.coordinates(rank).pp
        arenas = [arena(program, pp, plan.offload_slots) for program in plan.trained_programs]
        fractions = plan.offload or (1.0,) * plan.program.stages
        return ActivationOffload(arenas, plan.offload_slots, fractions, lanes, device, capacity=plan.batch.capacity)

    def reserve(self, memory: HostMemory | None = None) -> HostMemory:
        """Allocates memory for activations and their copies before the first step. Returns the host memory: that of an
        earlier generation, if its size fits. Raises PentadError if the host cannot pin enough."""
        if self.memory is not None:
            return self.memory
        host, rests = (max(each.bytes[side] for each in self.arenas) for side in (0, 1))
        if memory is not None and memory.buffer.numel() != host:
            memory.close()
            memory = None  # freed first
        self.memory = memory or HostMemory(host, self.device, "memory.offload_fraction needs")
        self._expand_segments(on=True)
        self.rests = torch.empty(rests, dtype=torch.uint8, device=self.device)
        return self.memory

    def close(self) -> None:
        """Makes allocations shareable with peers again."""
        self._expand_segments(on=False)

    def _expand_segments(self, *, on: bool) -> None:
        """Tensors of many sizes that come and go leave holes in torch's segments that the next large one does not fit
        into: 20 GiB of holes were measured beside 112 GiB of tensors. Expandable segments give back the pages of holes,
        but cannot be shared, so what peers map is allocated before."""
        if self.device.type == "cuda" and on != self.is_expanding:
            torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{on}")
            self.is_expanding = on

    def begin(self, program: int) -> None:
        """Prepares for a step of this program of the plan."""
        self.arena = self.arenas[program]

    def stays(self, unit: int, tokens: int) -> bool:
        """Whether a microbatch with so few tokens stays on the device: it takes no more than the part that stays of a
        microbatch with `capacity` tokens."""
        return tokens <= (1 - self.fractions[unit]) * self.capacity

    def offload(self, key: Slice, storages: list[torch.UntypedStorage], tokens: Tokens | None = None) -> None:
        """OFFLOAD: copies the unit's share of the storages' bytes; the lane has waited for the forward. With data-aware
        groups, nothing is copied if neither this rank nor those that send tokens to its experts have many tokens.

        Raises PentadError if the share exceeds the room that was planned.
        """
        assert self.memory is not None
        at, rest_at = self.arena.offsets[key]
        if tokens is not None and tokens.share is not None and self.stays(key[0], max(tokens.share.expert_tokens)):
            storages = []
        sizes = [storage.nbytes() for storage in storages]
        slot = self.slots[key[0]]
        found = cut(sizes, self.fractions[key[0]], slot[1] if self.capacity else inf)
        if found.bytes > slot[0] or found.rest > slot[1]:
            text = f"unit {key[0]} offloads {found.bytes} bytes and keeps {found.rest} of a tensor"
            raise PentadError(f"{text}: expected at most {slot[0]} and {slot[1]}, as planned")
        self.offloaded[key] = []
        for storage, size, moved in zip(storages, sizes, found.moved, strict=True):
            if not moved:
                continue
            source, host, rest = _bytes(storage), self.memory.buffer[at : at + moved], None
            host.copy_(source[:moved], non_blocking=True)
            if moved < size:
                rest = self.rests[rest_at : rest_at + size - moved]
                with self._on_compute_lane():
                    rest.copy_(source[moved:])
            self.offloaded[key].append(Offloaded(storage, size, host, rest))
            at += moved

    def reload(self, key: Slice) -> None:
        """RELOAD: refills the storages."""
        with self._on_compute_lane():
            for each in self.offloaded[key]:
                each.storage.resize_(each.size)
        for storage, _, host, _ in self.offloaded[key]:
            _bytes(storage)[: host.nbytes].copy_(host, non_blocking=True)

    def release(self, waits: Iterable[Key]) -> None:
        """Called when a compute instruction has waited for `waits`: frees the storages that OFFLOADs among them have
        copied, and completes those that RELOADs have brought back."""
        for op, stage, microbatch in waits:
            if op is Op.OFFLOAD:
                for each in self.offloaded[stage, microbatch]:
                    each.storage.resize_(0)
            elif op is Op.RELOAD:
                for storage, _, host, rest in self.offloaded.pop((stage, microbatch)):
                    if rest is not None:
                        _bytes(storage)[host.nbytes :].copy_(rest)

    def _on_compute_lane(self) -> torch.cuda.StreamContext | nullcontext[None]:
        return torch.cuda.stream(self.compute) if self.compute is not None else nullcontext()

    def discard(self) -> None:
        """Forgets everything offloaded; all copies must have ended."""
        self.offloaded.clear()


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """A new tensor on a storage, whose changes autograd does not see."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
