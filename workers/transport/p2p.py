"""SEND and RECV over torch.distributed: gloo on CPU, NCCL on GPU."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pentad.schedules.ir.instruction import RECEIVES, SENDS, Instruction, Op
from pentad.schedules.spec.mesh import Mesh
from pentad.workers.parallel.process_groups import ProcessGroups, channel_of
from pentad.workers.rank_waits import rank_waits
from pentad.workers.transport.stream_flags import StreamFlags

_KINDS = (Op.SEND_F, Op.SEND_B)


@dataclass(eq=False)
class P2PTransport:
    """Transfers of one rank. A RECV fills the slot that its instruction names; slots are reused from step to step."""

    groups: ProcessGroups
    mesh: Mesh
    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    flags: StreamFlags | None = None  # of this host's ranks, which copy inside layers or for ZeRO

    def __post_init__(self) -> None:
        self.slots: dict[Op, dict[int, torch.Tensor]] = defaultdict(dict)
        self.sends: list[tuple[dist.Work, torch.Tensor]] = []

    def begin_step(self, program: int) -> None:
        """Nothing to do: tags tell transfers apart."""

    def send(self, part: Instruction, tensor: torch.Tensor) -> None:
        """Starts a transfer [T, H] of a tensor that does not change until the transfer has ended."""
        peer = self.mesh.move(self.groups.rank, pp=part.peer)
        group = self.groups.channels[channel_of(part, self.groups.rank, peer)]
        tensor = tensor.contiguous()
        work = dist.isend(tensor, peer, group=group, tag=_tag(part))
        assert work is not None
        if tensor.is_cuda:
            work.wait()  # makes the lane's stream wait, not the host
        else:
            self.sends.append((work, tensor))

    def leave_out(self, part: Instruction) -> None:
        """Nothing to do: tags tell transfers apart."""

    def receive(self, part: Instruction, rows: int | None = None) -> tuple[torch.Tensor, dist.Work]:
        """Starts filling the first `rows` (None: all) of a slot and returns them; they may be read once the work is
        done."""
        slot = self.slots[part.op].get(part.slot)
        if slot is None:
            slot = self.slots[part.op][part.slot] = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        slot, peer = slot[:rows], self.mesh.move(self.groups.rank, pp=part.peer)
        group = self.groups.channels[channel_of(part, self.groups.rank, peer)]
        work = dist.irecv(slot, peer, group=group, tag=_tag(part))
        assert work is not None
        return slot, work

    def finish_sends(self) -> None:
        """Waits for every send of the step."""
        with rank_waits.abandonable():
            for work, _ in self.sends:
                work.wait()
        self.sends.clear()

    def release(self) -> None:
        """Ends all waits for ranks of this host, now and later. From any thread. Transfers end when the process groups
        are aborted."""
        if self.flags is not None:
            self.flags.release()

    def close(self) -> None:
        """Call after this rank's last copy is done. The process groups have another owner."""
        if self.flags is not None:
            self.flags.close()


def _tag(part: Instruction) -> int:
    """The same number at both ends: receiving stage, microbatch and kind."""
    if part.op in SENDS:
        kind, stage = part.op, part.stage + (1 if part.op is Op.SEND_F else -1)
    else:
        kind, stage = RECEIVES[part.op], part.stage
    return (stage << 21) | (part.microbatch << 1) | _KINDS.index(kind)
