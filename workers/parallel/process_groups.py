"""Process groups of a rank. All are created at start-up, in the same order on every rank."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import chain, product
from typing import NamedTuple

import torch
import torch.distributed as dist

from pentad.schedules.ir.instruction import RECEIVES, SENDS, Instruction, Op, instructions_of
from pentad.schedules.spec.mesh import Axis, Mesh
from pentad.schedules.spec.plan import ParamShard, Plan
from pentad.schedules.spec.zero_layout import replica_groups, zero_groups
from pentad.workers.parallel.context_parallel import ContextParallelGroup
from pentad.workers.parallel.expert_parallel import ExpertParallelGroup, ExpertSlots
from pentad.workers.parallel.point_to_point import batching
from pentad.workers.parallel.row_exchange import Rows
from pentad.workers.parallel.tensor_parallel import TensorParallelGroup

COLLECTIVE_TIMEOUT = timedelta(hours=1)  # the driver detects lost ranks much sooner
RELEASE_SECONDS = 0.1
BATCH_SECONDS = 1.0  # at most, to post a batch of messages
Channel = tuple[Op, int, int]  # kind of send, source and target rank of the mesh
GroupsByStage = dict[int, list[dist.ProcessGroup | None]]


class LayerGroups(NamedTuple):
    """The groups whose operations run inside F, B and W."""

    tp: TensorParallelGroup
    cp: ContextParallelGroup
    ep: ExpertParallelGroup
    pool: dist.ProcessGroup | None = None  # the dp x ep x cp ranks that share documents in groups

    @property
    def is_local(self) -> bool:
        """Whether layers need no communication."""
        return self.tp.size == 1 and self.cp.size == 1 and self.ep.group is None and self.pool is None

    @property
    def rows(self) -> list[Rows]:
        """The row exchanges of this rank, one for each axis that has one."""
        return [group.rows for group in (self.tp, self.cp, self.ep) if group.rows is not None]

    def with_rows(self, axis: Axis, rows: Rows) -> LayerGroups:
        """These groups, with `rows` as the row exchange along an axis."""
        return self._replace(**{axis: replace(getattr(self, axis), rows=rows)})


@dataclass(frozen=True)
class ProcessGroups:
    """All groups of one rank; None stands for a group of one.

    `channels[kind, source, target]` carries the transfers of one direction between two ranks (gloo has one group for
    all and distinguishes them by tag; peer copies need none). `gradients[stage]` are the holders of a stage and of its
    experts, if it has any; `zero` are those among which ZeRO divides their state, and `replicas` those that have the
    same part of it. `weights` are the groups that ZeRO gathers weights from, with communicators of their own because
    all-gathers run beside reductions (with peer copies, only those of frozen weights, for searches for flipped bits).
    `matrices[stage]` are the ranks that hold parts of the same matrices, for Muon. `world` is all ranks of the mesh,
    `tied` the holders of the embedding if the head shares it.
    """

    rank: int
    channels: dict[Channel, dist.ProcessGroup | None]
    gradients: GroupsByStage
    zero: GroupsByStage
    replicas: GroupsByStage
    weights: dict[ParamShard, dist.ProcessGroup]
    matrices: GroupsByStage
    world: dist.ProcessGroup | None
    layers: LayerGroups
    tied: dist.ProcessGroup | None


def start_store(host: str, size: int, timeout_seconds: float) -> dist.TCPStore:
    """A store at an IP address of this machine and a free port, which listens before the port is announced.

    A client that dials a port nobody listens on may be assigned that very port itself and connect to itself.
    """
    timeout = timedelta(seconds=timeout_seconds)
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(host, port, size, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach())


def join_store(address: str, size: int, timeout_seconds: float) -> dist.TCPStore:
    """The store of rank 0 at 'HOST:PORT'."""
    host, _, port = address.rpartition(":")
    return dist.TCPStore(host, int(port), size, False, timedelta(seconds=timeout_seconds))


def connect(
    plan: Plan, rank: int, store: dist.TCPStore, timeout_seconds: float, device: torch.device, generation: int
) -> ProcessGroups:
    """Initializes torch.distributed through the store and creates every group of this rank."""
    # Symmetric memory remembers groups by name forever, so later generations must not reuse names.
    dist.distributed_c10d._world.group_count = 1000 * generation
    cuda = device.type == "cuda"
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=store,
        rank=rank,
        world_size=plan.mesh.size,
        timeout=timedelta(seconds=timeout_seconds),
        device_id=device if cuda else None,
    )
    world = _connected_group(tuple(range(plan.mesh.size))) if plan.mesh.size > 1 else None
    channels = _channels(plan, rank, world, device)
    is_copied = plan.transport_along("dp") == "peer"
    gradients = _groups_by_stage(
        plan, rank, _alone(plan.holders), exchanges=plan.bf16_reduce and not is_copied and not plan.zero_shards
    )
    zero, replicas = _zero_groups(plan, rank, gradients, exchanges=plan.bf16_reduce and not is_copied)
    weights = _weight_groups(plan, rank, only_frozen=is_copied)
    matrices = _groups_by_stage(plan, rank, _alone(plan.tp_holders)) if plan.optimizer.name == "muon" else {}
    tied = [_connected_group(ranks) for ranks in _embedding_ranks(plan)]
    tied_group = tied[plan.mesh.coordinates(rank).tp] if tied else None
    reduced = gradients, zero, replicas
    return ProcessGroups(rank, channels, *reduced, weights, matrices, world, _layer_groups(plan, rank), tied_group)


def first_stage_ranks(mesh: Mesh) -> list[int]:
    """The pp 0 rank of every pipeline of the mesh."""
    return [rank for rank in range(mesh.size) if mesh.coordinates(rank).pp == 0]


def transfer_edges(plan: Plan) -> list[tuple[Op, int, int]]:
    """Every (kind of send, source, target) in the programs, in pipeline ranks; sorted, and so the same on all ranks."""
    streams = chain.from_iterable(enumerate(program.streams) for program in plan.programs)
    parts = ((rank, part) for rank, stream in streams for part in instructions_of(stream))
    return sorted({(part.op, rank, part.peer) for rank, part in parts if part.op in SENDS})


def channel_of(part: Instruction, rank: int, peer: int) -> Channel:
    """The channel of a SEND or RECV of `rank`; both are ranks of the mesh."""
    return (part.op, rank, peer) if part.op in SENDS else (RECEIVES[part.op], peer, rank)


def abort_nccl(release_graphs: Callable[[], None]) -> None:
    """Aborts every NCCL communicator of this process, in parallel: each abort waits for the device, and thus for the
    kernels of the others, and for the graphs that contain its own. From any thread."""
    is_between = batching.acquire(timeout=BATCH_SECONDS)
    threads = [threading.Thread(target=group.abort) for group in list(dist.distributed_c10d._world.pg_map)]
    for thread in threads:
        thread.start()
    release_graphs()  # only now, as the driver may wait for kernels that an abort ends
    for thread in threads:
        thread.join()
    dist.distributed_c10d._abort_process_group()
    if is_between:
        batching.release()


def destroy_groups(*, beside: bool) -> None:
    """Destroys every group of this process. With `beside`, another thread does so for each group once nothing else
    refers to it.

    The destructor of a gloo group joins gloo's threads, and after an abort one of them may wait for a lost rank until
    the group times out.
    """
    groups = list(dist.distributed_c10d._world.pg_map) if beside else ()
    dist.destroy_process_group()
    for group in groups:
        threading.Thread(target=_give_up, args=([group],), daemon=True).start()


def _give_up(held: list[dist.ProcessGroup]) -> None:
    while sys.getrefcount(held[0]) > 2:  # the list and the argument
        time.sleep(RELEASE_SECONDS)
    held.clear()


def _channels(
    plan: Plan, rank: int, world: dist.ProcessGroup | None, device: torch.device
) -> dict[Channel, dist.ProcessGroup | None]:
    channels, transport = {}, plan.transport_along("pp")
    for first, (kind, source, target) in product(first_stage_ranks(plan.mesh), transfer_edges(plan)):
        ends = plan.mesh.move(first, pp=source), plan.mesh.move(first, pp=target)
        group = world if transport == "gloo" else _new_group(ends) if transport == "nccl" else None
        if rank in ends:
            channels[kind, *ends] = group
            if transport == "nccl":
                _first_transfer(rank, *ends, group, device)
    return channels


def _alone(ranks_of: Callable[[ParamShard], tuple[int, ...]]) -> Callable[[ParamShard], list[tuple[int, ...]]]:
    return lambda shard: [ranks_of(shard)]


def _groups_by_stage(
    plan: Plan, rank: int, groups_of: Callable[[ParamShard], list[tuple[int, ...]]], *, exchanges: bool = False
) -> GroupsByStage:
    """Creates groups of ranks for each parameter shard; returns those of this rank's stages that contain this rank.
    With `exchanges`, all pairs are connected."""
    made = _new_groups(chain.from_iterable(map(groups_of, plan.param_shards)))
    for ranks, group in made.items() if exchanges else ():
        if rank in ranks:
            _connected_pairs(group, plan)
    found: GroupsByStage = {stage: [] for stage in plan.stages_of(rank)}
    for shard in plan.param_shards_of(rank):
        found[shard.stage].append(made.get(next(ranks for ranks in groups_of(shard) if rank in ranks)))
    return found


def _zero_groups(
    plan: Plan, rank: int, gradients: GroupsByStage, *, exchanges: bool
) -> tuple[GroupsByStage, GroupsByStage]:
    """`zero` and `replicas` of ProcessGroups. Between replicas, bfloat16 terms are always exchanged."""
    if plan.zero_shards:
        zero = _groups_by_stage(plan, rank, partial(zero_groups, plan), exchanges=exchanges)
        return zero, _groups_by_stage(plan, rank, partial(replica_groups, plan), exchanges=plan.bf16_reduce)
    alone: GroupsByStage = {stage: [None] * len(groups) for stage, groups in gradients.items()}
    return (gradients, alone) if plan.zero else (alone, gradients)


def _weight_groups(plan: Plan, rank: int, *, only_frozen: bool) -> dict[ParamShard, dist.ProcessGroup]:
    """New groups of the ranks among which ZeRO divides each shard of this rank's weights, or only each frozen one."""
    held = chain.from_iterable((*plan.param_shards_of(of), *plan.frozen_shards_of(of)) for of in range(plan.mesh.size))
    found = dict.fromkeys(shard for shard in held if shard.frozen or not only_frozen)
    cut = [shard for shard in found if plan.num_zero_shards(shard) > 1]
    groups = {shard: zero_groups(plan, shard) for shard in cut}
    made = _new_groups(chain.from_iterable(groups.values()))
    return {shard: made[ranks] for shard in cut for ranks in groups[shard] if rank in ranks}


def _embedding_ranks(plan: Plan) -> list[tuple[int, ...]]:
    """By tp coordinate, the ranks of the first and last stage if both have the embedding. A single rank gets a group,
    too, as it may hold both."""
    if not plan.is_tied:
        return []
    last = plan.program.stages - 1
    both = [[plan.holders(ParamShard(stage, tp)) for stage in (0, last)] for tp in range(plan.mesh.tp)]
    return [tuple(sorted({*first, *end})) for first, end in both]


def _layer_groups(plan: Plan, rank: int) -> LayerGroups:
    mesh, at = plan.mesh, plan.mesh.coordinates(rank)

    def along(*axes: Axis) -> dist.ProcessGroup | None:
        """A new group of the ranks along the axes through this rank."""
        ranks_of_groups = (mesh.group(axes, other) for other in range(mesh.size))
        return _new_groups(ranks_of_groups, " x ".join(axes)).get(mesh.group(axes, rank))

    def exchanging(axis: Axis, *, pairs: bool) -> dist.ProcessGroup | None:
        """The same along one axis, with `pairs` connected if they exchange through NCCL."""
        group = along(axis)
        return _connected_pairs(group, plan) if pairs and plan.transport_along(axis) == "nccl" else group

    return LayerGroups(
        TensorParallelGroup(along("tp"), mesh.tp, at.tp),
        ContextParallelGroup(
            exchanging("cp", pairs=plan.cp_method == "ulysses"), mesh.cp, at.cp, method=plan.cp_method
        ),
        # A GPU's host must not wait for the routing.
        ExpertParallelGroup(
            exchanging("ep", pairs=plan.batch.capacity > 0 or plan.expert_slots > 0),
            mesh.ep,
            at.ep,
            mode="all_gather" if plan.device == "cuda" else "all_to_all",
            slots=ExpertSlots(plan.expert_slots, plan.device) if plan.expert_slots else None,
        ),
        _connected_pairs(along("dp", "ep", "cp"), plan) if plan.batch.capacity else None,
    )


def _connected_pairs(group: dist.ProcessGroup | None, plan: Plan) -> dist.ProcessGroup | None:
    """The group, in which every rank has now sent to every other one: with NCCL the first message between two ranks
    connects them, and may block their hosts like a first operation (see `_connected_group`)."""
    if group is not None and plan.device == "cuda":
        sent = torch.zeros(group.size(), device="cuda")
        dist.all_to_all_single(torch.empty_like(sent), sent, group=group)
    return group


def _new_groups(
    ranks_of_groups: Iterable[tuple[int, ...]], description: str | None = None
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """New groups by their ranks, except groups of one. Every rank of the mesh must create all of them."""
    return {ranks: _connected_group(ranks, description) for ranks in dict.fromkeys(ranks_of_groups) if len(ranks) > 1}


def _new_group(ranks: tuple[int, ...], description: str | None = None) -> dist.ProcessGroup:
    return dist.new_group(list(ranks), timeout=COLLECTIVE_TIMEOUT, group_desc=description)


def _connected_group(ranks: tuple[int, ...], description: str | None = None) -> dist.ProcessGroup:
    """A new group that has run its first operation.

    NCCL's first operation on a communicator can block the host until the GPU has done everything it was given. In the
    middle of a step that may include waiting for a transfer that another host, blocked likewise, has yet to issue: a
    deadlock.
    """
    group = _new_group(ranks, description)
    if dist.get_backend() == "nccl" and dist.get_rank() in ranks:
        dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
    return group


def _first_transfer(rank: int, source: int, target: int, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """The first transfer of an NCCL channel, which blocks both hosts until they have connected."""
    token = torch.zeros(1, device=device)
    if rank == source:
        dist.send(token, target, group=group)
    else:
        dist.recv(token, source, group=group)
