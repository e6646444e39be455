"""Transfers inside a host without a waiting kernel: the sender copies into the receiver's slot and sets a flag.

Both sides wait with stream memory operations (cuStreamWaitValue32), which occupy no SM; the copy is made by the copy
engine. A RECV grants its slot to the sender and then waits for the arrival; a SEND waits for the grant. The order of a
channel's transfers is the program's, so a count says which transfer a flag belongs to.
"""

from __future__ import annotations

from collections import Counter, defaultdict

import torch
import torch.distributed as dist

from pentad.schedules.ir.instruction import RECEIVES, Instruction, Op, units_of
from pentad.schedules.spec.plan import Plan
from pentad.workers.parallel.groups import Channel, channel, columns, edges
from pentad.workers.transport.ipc import Opened, offer
from pentad.workers.transport.stream_flags import LINE, StreamFlags


def slot_counts(plan: Plan, pipeline_rank: int) -> Counter[Op]:
    """How many slots a pipeline rank's program names, by kind of receive."""
    counts: Counter[Op] = Counter()
    for part in units_of(plan.program.streams[pipeline_rank]):
        if part.op in RECEIVES:
            counts[part.op] = max(counts[part.op], part.slot + 1)
    return counts


def channels(plan: Plan) -> dict[Channel, int]:
    """A number for every channel of the mesh, the same on all ranks."""
    mesh = plan.mesh
    ends = [
        (kind, mesh.move(column, pp=source), mesh.move(column, pp=target))
        for column in columns(mesh)
        for kind, source, target in edges(plan)
    ]
    return {name: number for number, name in enumerate(ends)}


class IpcTransport:
    """Transfers of one rank; the same calls as `Transport`. All ranks of the mesh must be on one host.

    A rank's buffer holds its slots, activations first, then gradients; those who send to it have it mapped. A channel
    of the mesh has two signals: 'granted', written by the receiver, and 'arrived', written by the sender.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        store: dist.Store,
        signals: StreamFlags,
    ) -> None:
        self.plan, self.rank, self.shape, self.dtype, self.signals = plan, rank, shape, dtype, signals
        self.at = plan.mesh.coordinates(rank)
        self.slot_bytes = -(-shape[0] * shape[1] * dtype.itemsize // LINE) * LINE
        counts = [slot_counts(plan, pp) for pp in range(plan.mesh.pp)]
        self.first_gradient = [count[Op.RECV_F] for count in counts]
        self.channels = channels(plan)
        size = max(1, counts[self.at.pp].total()) * self.slot_bytes
        self.buffer = torch.empty(size, dtype=torch.uint8, device=device)
        store.set(f"slots/{rank}", offer(self.buffer).hex())
        self.targets = self._targets()
        receivers = sorted({name[2] for name in self.targets})
        self.opened = {peer: Opened(bytes.fromhex(store.get(f"slots/{peer}").decode())) for peer in receivers}
        self.count: Counter[Channel] = Counter()  # transfers so far
        self.place: Counter[Channel] = Counter()  # of this step

    def begin(self) -> None:
        """Before the first transfer of a step."""
        self.place.clear()

    def send(self, part: Instruction, tensor: torch.Tensor) -> None:
        """Waits on the lane for the slot to be granted, copies [T, H] into it, tells the receiver."""
        name = channel(part, self.rank, self._peer(part))
        place = self.targets[name][self.place[name]]
        self.count[name] += 1
        self.place[name] += 1
        self._wait(name, 0)
        tensor = tensor.contiguous()
        self.opened[name[2]].fill(place * self.slot_bytes, tensor)
        tensor.record_stream(torch.cuda.current_stream())
        self._write(name, 1)

    def receive(self, part: Instruction) -> tuple[torch.Tensor, None]:
        """Grants the slot and lets the lane wait until it is filled."""
        name = channel(part, self.rank, self._peer(part))
        self.count[name] += 1
        self._write(name, 0)
        self._wait(name, 1)
        return self._slot(self._place(self.at.pp, part)), None

    def settle(self) -> None:
        """Nothing to wait for: the lanes keep the order."""

    def close(self) -> None:
        """After the last copy of this rank is done."""
        for opened in self.opened.values():
            opened.close()
        self.signals.close()

    def _write(self, name: Channel, which: int) -> None:
        self.signals.write(2 * self.channels[name] + which, self.count[name])

    def _wait(self, name: Channel, which: int) -> None:
        self.signals.wait(2 * self.channels[name] + which, self.count[name])

    def _slot(self, place: int) -> torch.Tensor:
        start, size = place * self.slot_bytes, self.shape[0] * self.shape[1] * self.dtype.itemsize
        return self.buffer[start : start + size].view(self.dtype).view(self.shape)

    def _place(self, pipeline_rank: int, part: Instruction) -> int:
        return part.slot + (self.first_gradient[pipeline_rank] if part.op is Op.RECV_B else 0)

    def _peer(self, part: Instruction) -> int:
        return self.plan.mesh.move(self.rank, pp=part.peer)

    def _targets(self) -> dict[Channel, list[int]]:
        """For every channel that this rank sends on, the slots its receiver grants in one step, in order."""
        found: dict[Channel, list[int]] = defaultdict(list)
        for pp, stream in enumerate(self.plan.program.streams):
            for part in units_of(stream):
                if part.op in RECEIVES and part.peer == self.at.pp:
                    target = self.plan.mesh.move(self.rank, pp=pp)
                    found[RECEIVES[part.op], self.rank, target].append(self._place(pp, part))
        return found
