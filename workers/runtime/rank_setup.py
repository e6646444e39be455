"""Set-up of one rank from its plan: device, stages, data, lanes, transport and optimizer step."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

import torch
import torch.distributed as dist

from pentad.kernels import backend
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import instructions_of
from pentad.schedules.passes.post_validation import has_post_validation
from pentad.schedules.spec.plan import ParamShard, Plan
from pentad.schedules.spec.row_slots import ROW_SLOTS, row_slot_elements
from pentad.schedules.spec.zero_layout import inbox_elements, outbox_elements
from pentad.workers.checkpoint.snapshot import Files, Snapshots
from pentad.workers.cuda_streams import stream_of
from pentad.workers.custom.stage import CustomStage
from pentad.workers.data.batch_loader import BatchLoader
from pentad.workers.data.sources import open_dataset, open_eval_data
from pentad.workers.evaluation.eval_loader import EvalLoader
from pentad.workers.evaluation.loss_totals import LossTotals
from pentad.workers.host_memory import HostMemory, Reservation
from pentad.workers.lanes.progress_file import ProgressFile
from pentad.workers.lanes.step_graphs import CudaGraphMemory, StepGraphs
from pentad.workers.lanes.streams import Check, CudaStreams, HostStreams, Lanes
from pentad.workers.linear.amax_history import AmaxHistory
from pentad.workers.model.base_stage import BaseStage
from pentad.workers.model.stage import Stage
from pentad.workers.parallel.process_groups import ProcessGroups, first_stage_ranks, join_store
from pentad.workers.params.frozen import FrozenWeights
from pentad.workers.params.param_buffers import WeightBuffer, make_param_buffers
from pentad.workers.params.parameters import DTYPES, Parameters
from pentad.workers.params.spike_filter import SpikeFilter
from pentad.workers.replication.replicator import Replicator
from pentad.workers.runtime.activation_offload import ActivationOffload
from pentad.workers.runtime.executor import Executor
from pentad.workers.runtime.optimizer_step import BarrierStep, OptimizerStep, PostValidatedStep, StepContext
from pentad.workers.runtime.zero import Collectives, ZeroShards
from pentad.workers.transport import p2p_ipc, peer_collectives, peer_rows
from pentad.workers.transport.copy_lane import CudaLane
from pentad.workers.transport.first_launches import launch_reductions
from pentad.workers.transport.group_collectives import GroupCollectives
from pentad.workers.transport.norm_reducer import NormReducer
from pentad.workers.transport.p2p import P2PTransport
from pentad.workers.transport.p2p_ipc import IpcTransport
from pentad.workers.transport.peer_collectives import PeerCollectives
from pentad.workers.transport.peer_memory import PeerMemory
from pentad.workers.transport.peer_rows import PeerRows
from pentad.workers.transport.stream_flags import StreamFlags

SWITCH_SECONDS = 2e-4


def init_cuda() -> None:
    """Initializes the CUDA driver in this process, without a context or memory of a GPU."""
    # A waiting lane blocks every lane on its hardware queue, and a program has more lanes than the default of 8 queues.
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
    torch.cuda.init()


def warm_up() -> None:
    """Imports what a rank on a GPU would import in its first generation and initializes the CUDA driver."""
    backend.import_twins()
    # torch imports it at the first operation on a tensor subclass, such as SplitFloat32, which takes seconds.
    importlib.import_module("torch.distributed.tensor")
    init_cuda()


def prepare_device(kind: str, gpu: int, *, graphs: bool = False) -> torch.device:
    """The device of this process: GPU `gpu` of its host, or the CPU with one thread. With `graphs`, this thread leaves
    the default stream, which cannot be captured."""
    # By default a thread waits 5 ms for the GIL, and does so several times a step: while this thread issues
    # instructions, those that read data pass the GIL among themselves.
    sys.setswitchinterval(SWITCH_SECONDS)
    if kind == "cpu":
        torch.set_num_threads(1)
        return torch.device("cpu")
    # The driver detects lost ranks. By default torch would end the process or, with several hosts, hold on to a
    # communicator for a minute to dump its last operations, and with it the thread that releases it.
    for name in ("ASYNC_ERROR_HANDLING", "DUMP_ON_TIMEOUT", "ENABLE_MONITORING"):
        os.environ[f"TORCH_NCCL_{name}"] = "0"
    os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = "1"
    init_cuda()
    device = torch.device(kind, gpu)
    torch.cuda.set_device(device)
    if graphs:
        torch.cuda.set_stream(stream_of(device, "compute"))
    return device


def use_kernels(plan: Plan) -> None:
    """Selects the plan's kernels in this process. Raises PentadError if a library that they need is missing."""
    kernels = plan.kernels
    if kernels.cudnn_frontend and not backend.is_frontend_installed():
        missing = "nvidia-cudnn-frontend is not installed on this rank, but where the plan was made"
        raise PentadError(f"{missing}: expected it on all nodes, or precision.kernels = triton")
    backend.use_kernels(backend.KernelsInUse(kernels.name, dict(kernels.measured), kernels.cudnn_frontend))


def reserve(
    plan: Plan,
    device: torch.device,
    snapshots: Snapshots,
    replicator: Replicator,
    files: Files,
    earlier: Reservation | None,
) -> HostMemory:
    """Reserves host memory for snapshots and copies of these files, reusing that of an `earlier` generation if it fits;
    returns the memory for snapshots. From any thread."""
    if device.type == "cuda":
        torch.cuda.set_device(device)  # for this thread
    if earlier is not None and earlier.exception() is None:
        snapshots.memory = earlier.result()
    memory = snapshots.reserve(files)
    if plan.replicate_every:
        replicator.reserve(files)
    return memory


def make_stages(
    plan: Plan,
    rank: int,
    parameters: dict[ParamShard, Parameters],
    frozen: FrozenWeights,
    histories: Mapping[int, AmaxHistory],
) -> dict[int, BaseStage]:
    stages: dict[int, BaseStage] = {}
    for stage in plan.stages_of(rank):
        buffers = make_param_buffers(plan, rank, stage, parameters)
        if plan.model.custom is None:
            weights = [WeightBuffer(each) for shard, each in frozen.items() if shard.stage == stage]
            stages[stage] = Stage(plan, stage, buffers, rank, weights, histories.get(stage))
        else:
            stages[stage] = CustomStage(plan, stage, buffers, rank)
    return stages


def make_batch_loader(plan: Plan, rank: int, device: torch.device) -> BatchLoader:
    return BatchLoader(plan, rank, open_dataset(plan.data, plan.batch, plan.model.vocab, plan.seed), device)


def make_eval_loader(plan: Plan, loader: BatchLoader) -> EvalLoader | None:
    """None if the plan has no evaluation."""
    if plan.eval is None:
        return None
    sizes = plan.model.vocab, plan.batch.sequence_length, plan.data.cache
    return EvalLoader(plan, [open_eval_data(each, *sizes) for each in plan.eval.data_sets], loader)


def make_lanes(plan: Plan, rank: int, device: torch.device) -> Lanes:
    if device.type == "cpu":
        return HostStreams()
    pp = plan.mesh.coordinates(rank).pp
    streams = chain.from_iterable(instructions_of(program.streams[pp]) for program in plan.programs)
    return CudaStreams(device, {part.lane for part in streams})


def make_graphs(plan: Plan) -> StepGraphs | None:
    return StepGraphs(CudaGraphMemory()) if plan.cuda_graphs and plan.device == "cuda" else None


def make_flags(plan: Plan, rank: int, store: dist.Store, generation: int) -> StreamFlags | None:
    """The flags of transfers and collectives between the ranks of this rank's host; None without peer copies."""
    if plan.transport != "peer":
        return None
    ranks = plan.ranks_beside(rank)
    counters = dict.fromkeys([*p2p_ipc.flag_names(plan, ranks), *peer_collectives.flag_names(plan, ranks)], 0)
    return StreamFlags(store, rank, ranks, counters | peer_rows.flags_of(plan, ranks), generation)


def with_peer_rows(
    plan: Plan, groups: ProcessGroups, store: dist.Store, device: torch.device, flags: StreamFlags | None
) -> ProcessGroups:
    """The groups of a rank, exchanging rows inside its layers by copy engines along each axis where that is
    possible."""
    if flags is None:
        return groups
    rank, layers = groups.rank, groups.layers
    for axis in peer_rows.axes_of(plan):
        ranks, elements = plan.mesh.group((axis,), rank), row_slot_elements(plan, axis)
        slots = torch.empty(ROW_SLOTS[axis], elements, dtype=DTYPES[plan.dtype], device=device).view(torch.uint8)
        memory = PeerMemory(store, f"rows/{axis}", rank, {axis: slots}, [peer for peer in ranks if peer != rank])
        rows = PeerRows(axis, ranks, rank, flags, memory, slots, CudaLane(stream_of(device, f"rows/{axis}")))
        layers = layers.with_rows(axis, rows)
    return replace(groups, layers=layers)


def make_transport(
    plan: Plan, groups: ProcessGroups, store: dist.TCPStore, device: torch.device, flags: StreamFlags | None
) -> P2PTransport | IpcTransport:
    shape, dtype = (plan.sequence_parallel_tokens, plan.model.hidden), DTYPES[plan.dtype]
    if flags is None or plan.transport_along("pp") != "peer":
        return P2PTransport(groups, plan.mesh, shape, dtype, device, flags)
    return IpcTransport(plan, groups.rank, shape, dtype, device, store, flags)


def make_collectives(
    plan: Plan, groups: ProcessGroups, store: dist.TCPStore, shards: ZeroShards, flags: StreamFlags | None
) -> Collectives:
    """The collectives of ZeRO."""
    shards.join(groups)
    rank, gradient = groups.rank, next(iter(shards.stages.values())).param_buffers[0].parameters.gradient
    launch_reductions(plan, rank, gradient)
    if flags is None or plan.transport_along("dp") != "peer":
        return GroupCollectives(groups, plan.bf16_reduce)
    shared = shards.shared()
    dtype, sizes = gradient.dtype, (inbox_elements(plan, rank), outbox_elements(plan, rank))
    inbox, outbox = (gradient.new_empty(each, dtype=torch.bfloat16 if plan.bf16_reduce else dtype) for each in sizes)
    if outbox.numel():
        shared[peer_collectives.OUTBOX] = outbox
    memory = PeerMemory(store, "zero", rank, shared, peer_collectives.peers_of(plan, rank))
    lane = CudaLane(stream_of(gradient.device, "reductions"))
    return PeerCollectives(plan, rank, flags, memory, lane, inbox, outbox)


def make_optimizer_step(
    plan: Plan,
    groups: ProcessGroups,
    stages: dict[int, BaseStage],
    spikes: SpikeFilter | None,
    snapshots: Sequence[Snapshots],
    flags: StreamFlags | None,
    address: str,
    timeout_seconds: float,
) -> OptimizerStep:
    """A BarrierStep, or a PostValidatedStep whose reducer of norms has its own connection to the store at
    'HOST:PORT'."""
    own = torch.zeros((), dtype=torch.float64, pin_memory=plan.device == "cuda")
    cancelled = own if flags is None else flags.cancelled
    context = StepContext(plan, groups, stages, spikes, snapshots, cancelled)
    if not has_post_validation(plan.program):
        return BarrierStep(context)
    mesh, first_ranks = plan.mesh, first_stage_ranks(plan.mesh)
    pipeline = first_ranks.index(mesh.move(groups.rank, pp=0))
    store = join_store(address, mesh.size, timeout_seconds)
    reducer = NormReducer(store, pipeline, mesh.coordinates(groups.rank).pp, len(first_ranks), mesh.pp, cancelled)
    return PostValidatedStep(context, reducer)


def make_executor(
    plan: Plan,
    groups: ProcessGroups,
    stages: dict[int, BaseStage],
    shards: ZeroShards,
    progress: ProgressFile,
    end: OptimizerStep,
    check: Check,
    store: dist.TCPStore,
    device: torch.device,
    flags: StreamFlags | None,
) -> Executor:
    """The executor of a rank that is connected to the others through the store."""
    lanes, transport = make_lanes(plan, groups.rank, device), make_transport(plan, groups, store, device, flags)
    collectives = make_collectives(plan, groups, store, shards, flags)
    losses = LossTotals(plan, groups.rank, stages, groups.world)
    given = stages, groups, transport, lanes, progress, end, losses, shards, collectives
    return Executor(*given, ActivationOffload.of(plan, groups.rank, lanes, device), check, make_graphs(plan))
