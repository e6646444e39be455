"""SEND and RECV inside a host by peer copies over CUDA IPC, without a kernel that waits.

The sender copies into the receiver's slot with a copy engine, then sets a flag; both sides wait with stream memory
operations (cuStreamWaitValue32), which occupy no SM. A RECV grants its slot and then waits for the arrival, a SEND
waits for the grant. The program orders the transfers of a channel, so a count tells which transfer a flag is for.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable
from itertools import chain

import torch
import torch.distributed as dist

from pentad.schedules.ir.instruction import RECEIVES, Instruction, Op, instructions_of
from pentad.schedules.spec.plan import Plan
from pentad.workers.parallel.process_groups import Channel, channel_of, first_stage_ranks, transfer_edges
from pentad.workers.transport.peer_memory import PeerMemory
from pentad.workers.transport.stream_flags import FLAG_STRIDE, StreamFlags


class IpcTransport:
    """Transfers of one rank; same interface as `P2PTransport`. All ranks of a pipeline must be on one host.

    A rank's buffer holds its receive slots, those of activations before those of gradients; the ranks that send to it
    map the buffer. Every channel has two flags: 'granted', written by the receiver, and 'arrived', written by the
    sender.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        store: dist.Store,
        flags: StreamFlags,
    ) -> None:
        self.plan, self.rank, self.shape, self.dtype, self.flags = plan, rank, shape, dtype, flags
        self.pp = plan.mesh.coordinates(rank).pp
        self.slot_bytes = -(-shape[0] * shape[1] * dtype.itemsize // FLAG_STRIDE) * FLAG_STRIDE
        counts = [slot_counts(plan, pp) for pp in range(plan.mesh.pp)]
        self.program = 0  # of the current step
        self.first_gradient = [count[Op.RECV_F] for count in counts]
        size = max(1, counts[self.pp].total()) * self.slot_bytes
        self.buffer = torch.empty(size, dtype=torch.uint8, device=device)
        self.target_slots = self._target_slots()
        receivers = sorted({channel[2] for slots in self.target_slots for channel in slots})
        self.memory = PeerMemory(store, "slots", rank, {"slots": self.buffer}, receivers)
        self.transfers: Counter[Channel] = Counter()  # since the start
        self.step_sends: Counter[Channel] = Counter()  # in this step

    def begin_step(self, program: int) -> None:
        """The transfers that follow are those of this program of the plan."""
        self.program = program
        self.step_sends.clear()

    def send(self, part: Instruction, tensor: torch.Tensor) -> None:
        """On the lane: waits for the grant, copies [T, H] into the slot, notifies the receiver. The tensor must not
        change until the transfer has ended."""
        channel = channel_of(part, self.rank, self._peer(part))
        slot = self.target_slots[self.program][channel][self.step_sends[channel]]
        self.transfers[channel] += 1
        self.step_sends[channel] += 1
        self.flags.wait(("granted", channel), self.transfers[channel])
        tensor = tensor.contiguous()
        self.memory.write(channel[2], "slots", slot * self.slot_bytes, tensor)
        self.flags.write(("arrived", channel), self.transfers[channel])

    def leave_out(self, part: Instruction) -> None:
        """Skips a transfer of the program, as the peer does."""
        self.step_sends[channel_of(part, self.rank, self._peer(part))] += 1

    def receive(self, part: Instruction, rows: int | None = None) -> tuple[torch.Tensor, None]:
        """On the lane: grants the slot and waits until its first `rows` (None: all) are filled."""
        channel = channel_of(part, self.rank, self._peer(part))
        self.transfers[channel] += 1
        self.flags.write(("granted", channel), self.transfers[channel])
        self.flags.wait(("arrived", channel), self.transfers[channel])
        start = self._slot_index(self.pp, part) * self.slot_bytes
        size = self.shape[0] * self.shape[1] * self.dtype.itemsize
        return self.buffer[start : start + size].view(self.dtype).view(self.shape)[:rows], None

    def finish_sends(self) -> None:
        """Nothing to wait for: the lanes keep the order."""

    def release(self) -> None:
        """Ends all waits for ranks of this host, now and later. From any thread."""
        self.flags.release()

    def close(self) -> None:
        """Call after this rank's last copy is done; a second call does nothing."""
        self.memory.close()
        self.flags.close()

    def _slot_index(self, pp: int, part: Instruction) -> int:
        return part.slot + (self.first_gradient[pp] if part.op is Op.RECV_B else 0)

    def _peer(self, part: Instruction) -> int:
        return self.plan.mesh.move(self.rank, pp=part.peer)

    def _target_slots(self) -> list[dict[Channel, list[int]]]:
        """By program, for every channel this rank sends on: the slots its receiver grants in one step, in order."""
        found: list[dict[Channel, list[int]]] = [defaultdict(list) for _ in self.plan.programs]
        for slots, program in zip(found, self.plan.programs, strict=True):
            for pp, stream in enumerate(program.streams):
                for part in instructions_of(stream):
                    if part.op in RECEIVES and part.peer == self.pp:
                        target = self.plan.mesh.move(self.rank, pp=pp)
                        slots[RECEIVES[part.op], self.rank, target].append(self._slot_index(pp, part))
        return found


def slot_counts(plan: Plan, pp: int) -> Counter[Op]:
    """The number of receive slots that a pipeline rank needs for all programs, which share them, by kind of receive."""
    counts: Counter[Op] = Counter()
    for part in chain.from_iterable(instructions_of(program.streams[pp]) for program in plan.programs):
        if part.op in RECEIVES:
            counts[part.op] = max(counts[part.op], part.slot + 1)
    return counts


def flag_names(plan: Plan, ranks: Collection[int]) -> list[Hashable]:
    """The two flags of every channel between the ranks of a host, in the same order on each."""
    mesh = plan.mesh
    if plan.transport_along("pp") != "peer":
        return []
    channels = (
        (kind, mesh.move(first, pp=source), mesh.move(first, pp=target))
        for first in first_stage_ranks(mesh)
        if first in ranks
        for kind, source, target in transfer_edges(plan)
    )
    return [(event, channel) for channel in channels for event in ("granted", "arrived")]
