"""Moves tensors between ranks as SEND and RECV say: gloo on CPU, NCCL on GPU."""

from __future__ import annotations

from collections import defaultdict

import torch
import torch.distributed as dist

from pentad.schedules.ir.instruction import RECEIVES, SENDS, Instruction, Op
from pentad.schedules.spec.mesh import Mesh
from pentad.workers.parallel.groups import Groups, channel

_KINDS = (Op.SEND_F, Op.SEND_B)


class Transport:
    """Transfers of one rank.

    A RECV fills the slot its instruction names; slots are made once and refilled when the program says so.
    """

    def __init__(
        self,
        groups: Groups,
        mesh: Mesh,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.groups, self.mesh, self.shape, self.dtype, self.device = groups, mesh, shape, dtype, device
        self.slots: dict[Op, dict[int, torch.Tensor]] = defaultdict(dict)
        self.sent: list[tuple[dist.Work, torch.Tensor]] = []

    def begin(self) -> None:
        """Before the first transfer of a step: tags say which is which."""

    def send(self, part: Instruction, tensor: torch.Tensor) -> None:
        """Starts a transfer [T, H]; the tensor is kept until `settle` (on GPU: until the lane has read it)."""
        peer = self.mesh.move(self.groups.rank, pp=part.peer)
        group = self.groups.channels[channel(part, self.groups.rank, peer)]
        tensor = tensor.contiguous()
        work = dist.isend(tensor, peer, group=group, tag=self._tag(part))
        assert work is not None
        if tensor.is_cuda:
            work.wait()  # the lane's stream waits, not the host
            tensor.record_stream(torch.cuda.current_stream())
        else:
            self.sent.append((work, tensor))

    def receive(self, part: Instruction) -> tuple[torch.Tensor, dist.Work]:
        """Starts to fill the slot and returns it; it may be read when the work is done."""
        slot = self.slots[part.op].get(part.slot)
        if slot is None:
            slot = self.slots[part.op][part.slot] = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        peer = self.mesh.move(self.groups.rank, pp=part.peer)
        group = self.groups.channels[channel(part, self.groups.rank, peer)]
        work = dist.irecv(slot, peer, group=group, tag=self._tag(part))
        assert work is not None
        return slot, work

    def close(self) -> None:
        """Nothing to give up but the communicators, which are not its own."""

    def settle(self) -> None:
        """Waits until every send of the step has left."""
        for work, _ in self.sent:
            work.wait()
        self.sent.clear()

    def _tag(self, part: Instruction) -> int:
        """The same number at both ends: the receiving stage, the microbatch and the kind."""
        if part.op in SENDS:
            kind, stage = part.op, part.stage + (1 if part.op is Op.SEND_F else -1)
        else:
            kind, stage = RECEIVES[part.op], part.stage
        return (stage << 21) | (part.microbatch << 1) | _KINDS.index(kind)
