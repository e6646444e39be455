"""Set-up of one rank: device, stages, and the connection to the other ranks."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pentad.schedules.ir.instruction import instructions_of
from pentad.schedules.passes.validation import has_post_validation
from pentad.schedules.spec.plan import ParamShard, Plan
from pentad.workers.custom.stage import CustomStage
from pentad.workers.data.batch_loader import BatchLoader
from pentad.workers.data.sources import open_data
from pentad.workers.model.stage import Stage
from pentad.workers.model.stage_protocol import StageProtocol
from pentad.workers.parallel.process_groups import ProcessGroups, connect, first_stage_ranks, join_store
from pentad.workers.params.param_buffers import make_param_buffers
from pentad.workers.params.parameters import DTYPES, Parameters
from pentad.workers.runtime.abort import Fence, SocketRegistry
from pentad.workers.runtime.executor import Executor
from pentad.workers.runtime.optimizer_step import BarrierStep, PostValidatedStep
from pentad.workers.runtime.progress_file import ProgressFile
from pentad.workers.runtime.streams import CudaStreams, HostStreams, Lanes
from pentad.workers.runtime.zero import ZeroShards
from pentad.workers.transport.norm_reducer import NormReducer
from pentad.workers.transport.p2p import P2PTransport
from pentad.workers.transport.p2p_ipc import IpcTransport, channel_numbers
from pentad.workers.transport.stream_flags import StreamFlags


def prepare_device(kind: str, gpu: int) -> torch.device:
    """The device of this process: GPU number `gpu` of its host, or the CPU with one thread."""
    if kind == "cpu":
        torch.set_num_threads(1)
        return torch.device("cpu")
    # A lane that waits blocks every lane on its hardware queue; a program has more lanes than the default of 8 queues.
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
    # The driver detects lost ranks. By default torch would end the process, or hold on to a communicator of several
    # hosts for a minute to dump its last operations, and with it the thread that releases it.
    for name in ("ASYNC_ERROR_HANDLING", "DUMP_ON_TIMEOUT", "ENABLE_MONITORING"):
        os.environ[f"TORCH_NCCL_{name}"] = "0"
    os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = "1"
    device = torch.device(kind, gpu)
    torch.cuda.set_device(device)
    return device


def make_stages(plan: Plan, rank: int, parameters: dict[ParamShard, Parameters]) -> dict[int, StageProtocol]:
    kind = Stage if plan.model.custom is None else CustomStage
    return {
        stage: kind(plan, stage, make_param_buffers(plan, rank, stage, parameters), rank)
        for stage in plan.stages_of(rank)
    }


def make_batch_loader(plan: Plan, rank: int, device: torch.device) -> BatchLoader:
    length, fingerprint = plan.batch.sequence_length, plan.fingerprint
    corpus = open_data(plan.data, plan.model.vocab, length, plan.cache, fingerprint=fingerprint)
    return BatchLoader(plan, rank, corpus, device)


@dataclass
class Connection:
    """What a rank has while it is connected to the others."""

    groups: ProcessGroups
    lanes: Lanes
    transport: P2PTransport | IpcTransport
    flags: StreamFlags | None  # of the peer-copy transport
    executor: Executor
    is_closed: bool = False

    @property
    def optimizer_step(self) -> BarrierStep | PostValidatedStep:
        return self.executor.optimizer_step

    def close(self) -> None:
        self.optimizer_step.close()
        if not self.is_closed:
            self.transport.close()
        self.is_closed = True


@dataclass(frozen=True)
class LocalRank:
    """A rank before it is connected: its stages, their ZeRO buffers, and what tells others about it."""

    plan: Plan
    rank: int
    device: torch.device
    stages: dict[int, StageProtocol]
    shards: ZeroShards
    progress: ProgressFile
    fence: Fence

    def connect(
        self,
        address: str,
        store: dist.TCPStore | None,
        sockets: SocketRegistry | None,
        generation: int,
        timeout_seconds: float,
    ) -> Connection:
        """Connects to the other ranks through the store at 'HOST:PORT', which rank 0 passes."""
        plan, size = self.plan, self.plan.mesh.size
        store = store or join_store(address, size, timeout_seconds)
        groups = connect(plan, self.rank, store, timeout_seconds, self.device, generation)
        for stage in self.stages.values():
            stage.join(groups.layers)
        optimizer_step = self._optimizer_step(groups, address, timeout_seconds)
        if sockets is not None:
            sockets.exchange(store, self.rank, size)
        stream = plan.program.streams[plan.mesh.coordinates(self.rank).pp]
        used = {part.lane for part in instructions_of(stream)}
        lanes = CudaStreams(self.device, used) if self.device.type == "cuda" else HostStreams()
        shape, dtype, flags = (plan.sequence_parallel_tokens, plan.model.hidden), DTYPES[plan.dtype], None
        transport: P2PTransport | IpcTransport
        if plan.transport == "peer":
            flags = StreamFlags(store, self.rank, size, 2 * len(channel_numbers(plan)), generation)
            transport = IpcTransport(plan, self.rank, shape, dtype, self.device, store, flags)
        else:
            transport = P2PTransport(groups, plan.mesh, shape, dtype, self.device)
        executor = Executor(
            stream, self.stages, groups, transport, lanes, self.progress, optimizer_step, self.shards, self.fence
        )
        return Connection(groups, lanes, transport, flags, executor)

    def _optimizer_step(
        self, groups: ProcessGroups, address: str, timeout_seconds: float
    ) -> BarrierStep | PostValidatedStep:
        if not has_post_validation(self.plan.program):
            return BarrierStep(self.plan, groups, self.stages)
        mesh, first_ranks = self.plan.mesh, first_stage_ranks(self.plan.mesh)
        pipeline = first_ranks.index(mesh.move(self.rank, pp=0))
        store = join_store(address, mesh.size, timeout_seconds)  # a connection of its own
        pp = mesh.coordinates(self.rank).pp
        reducer = NormReducer(store, pipeline, pp, len(first_ranks), mesh.pp)
        return PostValidatedStep(self.plan, self.rank, self.stages, reducer)
