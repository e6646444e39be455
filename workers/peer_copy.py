"""Transfers inside a host without a waiting kernel: the sender copies into the receiver's slot and sets a flag.

Both sides wait with stream memory operations (cuStreamWaitValue32), which occupy no SM; the copy is made by the copy
engine. A RECV grants its slot to the sender and then waits for the arrival; a SEND waits for the grant. The order of a
channel's transfers is the program's, so a count says which transfer a flag belongs to.
"""

from __future__ import annotations

from collections import Counter, defaultdict

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

from pentad.schedules.instruction import RECEIVES, Instruction, Op, units_of
from pentad.schedules.plan import Plan
from pentad.workers.groups import Channel, channel, edges

_PAST_ALL = 2**30 - 1  # a count that no channel reaches; flags are compared in a circle of 2^32
_LINE = 128  # bytes between flags, so that no two share a cache line


def slot_counts(plan: Plan, pipeline_rank: int) -> Counter[Op]:
    """How many slots a pipeline rank's program names, by kind of receive."""
    counts: Counter[Op] = Counter()
    for part in units_of(plan.program.streams[pipeline_rank]):
        if part.op in RECEIVES:
            counts[part.op] = max(counts[part.op], part.slot + 1)
    return counts


class PeerCopy:
    """Transfers of one rank; the same calls as `Transport`. All ranks of the mesh must be on one host.

    One symmetric buffer a rank: its slots (activations first, then gradients), then two flags a channel of the mesh:
    'granted', written by the receiver into the sender's buffer, and 'arrived', written by the sender.
    """

    def __init__(self, plan: Plan, rank: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
        from cuda.bindings import driver

        self.driver, self.plan, self.rank, self.shape, self.dtype = driver, plan, rank, shape, dtype
        self.at = plan.mesh.coordinates(rank)
        self.slot_bytes = -(-shape[0] * shape[1] * dtype.itemsize // _LINE) * _LINE
        counts = [slot_counts(plan, pp) for pp in range(plan.mesh.pp)]
        self.first_gradient = [count[Op.RECV_F] for count in counts]
        self.flags_at = self.slot_bytes * max(count.total() for count in counts)
        self.channels = self._channels()
        size = self.flags_at + 2 * _LINE * len(self.channels)
        self.buffer = symmetric.empty(size, dtype=torch.uint8, device=device)
        self.buffer.zero_()
        assert dist.group.WORLD is not None
        self.handle = symmetric.rendezvous(self.buffer, dist.group.WORLD)
        torch.cuda.synchronize(device)
        dist.barrier(device_ids=[device.index])
        self.slots: dict[tuple[int, int], torch.Tensor] = {}
        self.targets = self._targets()
        self.count: Counter[Channel] = Counter()

    def send(self, part: Instruction, tensor: torch.Tensor) -> None:
        """Waits on the lane for the slot to be granted, copies [T, H] into it, tells the receiver."""
        name = channel(part, self.rank, self._peer(part))
        place = self.targets[name][self.count[name] % len(self.targets[name])]
        self.count[name] += 1
        self._wait(name, 0)
        self._slot(name[2], place).copy_(tensor)
        tensor.record_stream(torch.cuda.current_stream())
        self._write(name[2], name, 1)

    def receive(self, part: Instruction) -> tuple[torch.Tensor, None]:
        """Grants the slot and lets the lane wait until it is filled."""
        name = channel(part, self.rank, self._peer(part))
        self.count[name] += 1
        self._write(name[1], name, 0)
        self._wait(name, 1)
        return self._slot(self.rank, self._place(self.at.pp, part)), None

    def release(self) -> None:
        """Lets every wait of this rank pass, whatever it waits for; on the current stream, from any thread."""
        self.buffer[self.flags_at :].view(torch.int32).fill_(_PAST_ALL)

    def settle(self) -> None:
        """Nothing to wait for: the lanes keep the order."""

    def _write(self, owner: int, name: Channel, which: int) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        address = self.handle.buffer_ptrs[owner] + self._flag(name, which)
        _checked(self.driver.cuStreamWriteValue32(stream, address, self.count[name] & 0xFFFFFFFF, 0))

    def _wait(self, name: Channel, which: int) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        address = self.handle.buffer_ptrs[self.rank] + self._flag(name, which)
        at_least = self.driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        _checked(self.driver.cuStreamWaitValue32(stream, address, self.count[name] & 0xFFFFFFFF, at_least))

    def _flag(self, name: Channel, which: int) -> int:
        return self.flags_at + (2 * self.channels[name] + which) * _LINE

    def _slot(self, owner: int, place: int) -> torch.Tensor:
        if (owner, place) not in self.slots:
            offset = place * self.slot_bytes // self.dtype.itemsize
            self.slots[owner, place] = self.handle.get_buffer(owner, self.shape, self.dtype, offset)
        return self.slots[owner, place]

    def _place(self, pipeline_rank: int, part: Instruction) -> int:
        return part.slot + (self.first_gradient[pipeline_rank] if part.op is Op.RECV_B else 0)

    def _peer(self, part: Instruction) -> int:
        return self.plan.mesh.move(self.rank, pp=part.peer)

    def _channels(self) -> dict[Channel, int]:
        mesh = self.plan.mesh
        ends = [
            (kind, mesh.move(0, dp=dp, pp=source), mesh.move(0, dp=dp, pp=target))
            for dp in range(mesh.dp)
            for kind, source, target in edges(self.plan)
        ]
        return {name: number for number, name in enumerate(ends)}

    def _targets(self) -> dict[Channel, list[int]]:
        """For every channel that this rank sends on, the slots its receiver grants in one step, in order."""
        found: dict[Channel, list[int]] = defaultdict(list)
        for pp, stream in enumerate(self.plan.program.streams):
            for part in units_of(stream):
                if part.op in RECEIVES and part.peer == self.at.pp:
                    target = self.plan.mesh.move(self.rank, pp=pp)
                    found[RECEIVES[part.op], self.rank, target].append(self._place(pp, part))
        return found


def _checked(result: tuple) -> None:
    code = result[0]
    if int(code) != 0:
        raise RuntimeError(f"a CUDA stream memory operation failed: {code!r}")
