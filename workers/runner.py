"""One rank from its plan to its results: builds the stages, joins the world, runs steps, saves."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist

from pentad.schedules.instruction import units_of
from pentad.schedules.plan import Plan
from pentad.schedules.timeline import Span
from pentad.workers import checkpoint
from pentad.workers.board import Board
from pentad.workers.executor import Executor
from pentad.workers.feed import Feed
from pentad.workers.groups import connect
from pentad.workers.lanes import CudaLanes, HostLanes, Times
from pentad.workers.parameters import DTYPES, Parameters, create
from pentad.workers.peer_copy import PeerCopy
from pentad.workers.results import StepResult
from pentad.workers.source import open_data
from pentad.workers.stage import Stage
from pentad.workers.transport import Transport


class Runner:
    """The worker's side of the driver's calls, in the order __init__, connect, restore, run..., save, close.

    A rank computes on GPU number `gpu` of its host, or on one CPU thread.
    """

    def __init__(self, plan: Plan, rank: int, board: Path, epoch: int = 1, gpu: int = 0) -> None:
        self.plan, self.rank, self.at = plan, rank, plan.mesh.coordinates(rank)
        self.device = torch.device(plan.device, gpu) if plan.device == "cuda" else torch.device("cpu")
        if plan.device == "cpu":
            torch.set_num_threads(1)
        else:
            # A lane that waits must not share a hardware queue with another one, or that waits too: a program has
            # more lanes than the 8 queues of the default.
            os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
            torch.cuda.set_device(self.device)
        self.board = Board(board, epoch)
        self.parameters: dict[int, Parameters] = {s: create(plan, s, self.device) for s in plan.stages_of(rank)}
        self.stages = {s: Stage(plan, s, held) for s, held in self.parameters.items()}
        length, fingerprint = plan.batch.length, plan.fingerprint
        corpus = open_data(plan.data, plan.model.vocab, length, plan.cache, fingerprint=fingerprint)
        self.feed = Feed(plan, rank, corpus, self.device)

    def connect(self, address: str, timeout_seconds: float) -> None:
        """Joins the other ranks at 'tcp://host:port'; rank 0 serves it."""
        plan, batch = self.plan, self.plan.batch
        groups = connect(plan, self.rank, address, timeout_seconds, self.device)
        stream = plan.program.streams[self.at.pp]
        lanes = {part.lane for part in units_of(stream)}
        self.lanes = CudaLanes(self.device, lanes) if self.device.type == "cuda" else HostLanes()
        shape, dtype = (batch.rows * batch.length, plan.model.hidden), DTYPES[plan.dtype]
        transport: Transport | PeerCopy
        if plan.transport == "peer":
            transport = PeerCopy(plan, self.rank, shape, dtype, self.device)
        else:
            transport = Transport(groups, plan.mesh, shape, dtype, self.device)
        self.executor = Executor(plan, stream, self.stages, groups, transport, self.lanes, self.board)

    def restore(self, folder: str | None) -> None:
        """Fills weights and optimizer state from a checkpoint; without one the first values stay."""
        if folder is None:
            return
        found = checkpoint.open_checkpoint(Path(folder))
        for held in self.parameters.values():
            state = held.state()
            for name, value in checkpoint.read(found, state).items():
                state[name].copy_(value)
            held.refresh()

    def run(self, first_step: int, count: int) -> list[StepResult]:
        """Runs steps `first_step` to `first_step + count - 1`."""
        pending = []
        for step in range(first_step, first_step + count):
            self.executor.run(step, self.feed(step))
            pending.append((step, self._losses(), self.executor.norm, self.executor.host_seconds))
        times = self.lanes.collect()
        results = []
        for (step, losses, norm, seconds), spans in zip(pending, times, strict=True):
            sums = {number: float(loss) for number, loss in losses.items()}
            value = float(norm)
            results.append(
                StepResult(
                    step=step,
                    losses=sums,
                    grad_norm=value,
                    learning_rate=self.plan.optimizer.rate(step),
                    skipped=value - value != 0.0,
                    spans=self._spans(step, spans),
                    host_seconds=seconds,
                    instructions=len(spans),
                    peak_bytes=torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0,
                )
            )
        return results

    def save(self, folder: str, step: int) -> list[dict]:
        """Writes the stages that this rank owns; the driver commits the manifest. `step` steps are done."""
        shards = []
        for stage, held in self.parameters.items():
            if self.plan.owner(stage) == self.rank:
                file = f"stage-{stage:03d}.safetensors"
                shards.append(checkpoint.write_shard(Path(folder), file, held.state()).plain())
        return shards

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def _losses(self) -> dict[int, torch.Tensor]:
        """Loss sums of the step by the microbatch's number in the whole mesh."""
        first = self.at.dp * self.plan.batch.microbatches
        stages = [stage for stage in self.stages.values() if stage.last]
        found = {first + mb: loss for stage in stages for mb, loss in stage.loss_sums.items()}
        for stage in stages:
            stage.loss_sums = {}
        return found

    def _spans(self, step: int, times: Times) -> tuple[Span, ...]:
        spans = []
        for part, start, end in times:
            peer = self.plan.mesh.move(self.rank, pp=part.peer) if part.peer >= 0 else -1
            where = (part.op.value, part.stage, part.microbatch, peer)
            spans.append(Span(step, self.rank, part.lane, str(part.key), *where, start, end))
        return tuple(spans)
