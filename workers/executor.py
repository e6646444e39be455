"""Runs one rank's stream: a loop over instructions with one `match`."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from pentad.schedules.instruction import Instruction, Key, Op
from pentad.schedules.plan import Plan
from pentad.schedules.program import Stream
from pentad.workers import optimizer
from pentad.workers.board import Board
from pentad.workers.feed import Tokens
from pentad.workers.fence import Fenced
from pentad.workers.groups import Groups
from pentad.workers.lanes import Lanes
from pentad.workers.peer_copy import PeerCopy
from pentad.workers.stage import Stage
from pentad.workers.transport import Transport


class Executor:
    """A rank's stages, communicators and lanes; `run` takes them through one step.

    After a step, `norm` is the global gradient norm before clipping (a float64 scalar on the device), `losses`
    [replicas x microbatches] are the loss sums of the whole mesh, and `host_seconds` is what issuing the stream took.
    `version` (on the device) counts the steps that are in the weights; `ready` says that only the global norm lacks
    for one more.

    Another thread may end the epoch: it sets `fenced`, which the host sees before the next instruction, and makes
    `fence` (on the host) nan, which a GPU that runs behind its host sees at NORM: the step then changes no weight.
    """

    def __init__(
        self,
        plan: Plan,
        stream: Stream,
        stages: dict[int, Stage],
        groups: Groups,
        transport: Transport | PeerCopy,
        lanes: Lanes,
        board: Board,
    ) -> None:
        self.plan, self.stream, self.stages = plan, stream, stages
        self.groups, self.transport, self.lanes, self.board = groups, transport, lanes, board
        first = next(iter(stages.values())).parameters
        self.dtype = first.master.dtype
        device, count = first.master.device, plan.program.stages + plan.mesh.dp * plan.batch.microbatches
        self.sums = torch.zeros(count, dtype=torch.float64, device=device)  # squares by stage, losses by microbatch
        self.norm = self.scale = self.losses = torch.zeros(1)
        self.fence = torch.zeros((), dtype=torch.float64, pin_memory=device.type == "cuda")
        self.version = torch.zeros((), dtype=torch.int64, device=device)
        self.fenced = self.ready = False
        self.results: dict[Key, torch.Tensor | None] = {}
        self.step, self.host_seconds = 0, 0.0

    def run(self, step: int, tokens: dict[int, Tokens]) -> None:
        """`tokens[piece]` are inputs and targets [T] of the pieces that this rank embeds or ends."""
        self.step, self.tokens = step, tokens
        self.lanes.begin()
        started = time.monotonic()
        for counter, unit in enumerate(self.stream):
            self.board.write(step, counter)
            self.refuse_if_fenced()
            self.lanes.near(self.refuse_if_fenced)
            for part in unit.parts:
                with self.lanes.on(part):
                    self._execute(part)
        self.transport.settle()
        self.host_seconds = time.monotonic() - started
        self.board.write(step, -1)

    def _execute(self, part: Instruction) -> None:
        _, stage, mb, *_ = part
        match part.op:
            case Op.F:
                received = self._input(part, Op.RECV_F, (Op.F,), stage - 1)
                found = self.tokens.get(mb)
                inputs = found.inputs if found and stage == 0 else None
                targets = found.targets if found and self.stages[stage].last else None
                self.results[part.key] = self.stages[stage].forward(mb, received, inputs, targets)
            case Op.B | Op.BW:
                dy = self._input(part, Op.RECV_B, (Op.B, Op.BW), stage + 1)
                self.results[part.key] = self.stages[stage].backward_input(mb, dy)
                if part.op is Op.BW:
                    self.stages[stage].backward_weight(mb)
            case Op.W:
                self.stages[stage].backward_weight(mb)
            case Op.SEND_F | Op.SEND_B:
                result = self.results.pop(part.waits[0])
                assert result is not None
                self.transport.send(part, result)
            case Op.RECV_F | Op.RECV_B:
                self.results[part.key], work = self.transport.receive(part)
                if work is not None:
                    self.lanes.finish_with(part, work)
            case Op.ALL_REDUCE:
                work = dist.all_reduce(
                    self.stages[stage].parameters.gradient, group=self.groups.holders[stage], async_op=True
                )
                self.lanes.finish_with(part, work)
            case Op.NORM:
                self._norm()
            case Op.STEP:
                self.apply()
            case _:
                raise AssertionError(f"no worker runs {part.op}")

    def _input(self, part: Instruction, receive: Op, ops: tuple[Op, ...], stage: int) -> torch.Tensor | None:
        """What F or B reads: from a slot, or this rank's own result of the neighbouring stage; none at the ends."""
        mb = part.microbatch
        keys = (Key(receive, part.stage, mb), *(Key(op, stage, mb) for op in ops))
        return next((self.results.pop(key) for key in keys if key in self.results), None)

    def apply(self) -> None:
        """Takes the step whose gradients are whole, scaled as NORM says; a step after the fence counts for nothing."""
        for held in self.stages.values():
            optimizer.step(held.parameters, self.plan.optimizer, self.step, self.scale)
        self.version = torch.where(self.open, self.step + 1, self.version)
        self.ready = False

    def advance(self, norm: float) -> None:
        """Takes the step that lacked its global norm only: another rank has heard it before the epoch ended."""
        self.norm = torch.tensor(norm, dtype=torch.float64, device=self.sums.device)
        self.scale = optimizer.clip(self.norm, self.plan.optimizer.clip_norm, self.dtype)
        self.open = torch.ones((), dtype=torch.bool, device=self.sums.device)
        self.apply()

    def _norm(self) -> None:
        """Every stage's square and every loss is given by one rank only, so the sums are exact in any order.

        All ranks of the mesh meet here: when one has the norm, every rank's gradients are whole. The losses travel
        along, so that a committed step's loss outlives the rank that computed it.
        """
        self.ready = self.sums.device.type == "cpu"  # on a GPU later instructions may already run on the gradients
        self.sums.zero_()
        stages, count = self.plan.program.stages, self.plan.batch.microbatches
        first = stages + count * self.plan.mesh.coordinates(self.groups.rank).dp
        for index, stage in self.stages.items():
            if self.plan.owner(index) == self.groups.rank:
                self.sums[index] = optimizer.square_sum(stage.parameters)
            if stage.last:
                self.sums[first : first + count] += stage.loss_sums
                stage.loss_sums.zero_()
        if self.groups.everyone is not None:
            dist.all_reduce(self.sums, group=self.groups.everyone)
        self.refuse_if_fenced()
        self.open = self.fence.to(self.sums.device, non_blocking=True) == 0
        self.norm = torch.where(self.open, self.sums[:stages].sum().sqrt(), torch.nan)
        self.losses = self.sums[stages:].clone()
        self.scale = optimizer.clip(self.norm, self.plan.optimizer.clip_norm, self.dtype)

    def refuse_if_fenced(self) -> None:
        if self.fenced:
            raise Fenced
