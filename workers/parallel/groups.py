"""Communicators of a rank, all made at the start and in one order on every rank."""

from __future__ import annotations

import socket
import threading
from dataclasses import dataclass
from datetime import timedelta
from itertools import product

import torch
import torch.distributed as dist

from pentad.schedules.ir.instruction import RECEIVES, SENDS, Instruction, Op, units_of
from pentad.schedules.spec.mesh import Axis, Mesh
from pentad.schedules.spec.plan import ParamShard, Plan
from pentad.workers.parallel.context_parallel import Context
from pentad.workers.parallel.expert_parallel import ExpertParallelGroup
from pentad.workers.parallel.process_groups import Inner
from pentad.workers.parallel.tensor_parallel import TensorRanks

INNER: tuple[Axis, ...] = ("tp", "cp", "ep")  # whose operations run inside layers
PATIENCE = timedelta(hours=1)
Channel = tuple[Op, int, int]  # kind of send, source and target rank of the mesh


@dataclass(frozen=True)
class Groups:
    """Of one rank.

    `channels[kind, source, target]` carries the transfers of one direction between two ranks (with gloo all share one
    group and are told apart by tag; peer copies need none). `holders[stage]` are this rank's partners in the gradients
    of a stage and in those of its experts, if it has any (None where it is the only one), `gatherers[stage]` the same
    ranks where they gather its weights (ZeRO), and `everyone` all ranks of the mesh (None when this is the only one).
    `inner` are those that share its layers, `tied` those that have the embedding where it is the head too.
    """

    rank: int
    channels: dict[Channel, dist.ProcessGroup | None]
    holders: dict[int, list[dist.ProcessGroup | None]]
    gatherers: dict[int, list[dist.ProcessGroup | None]]
    everyone: dist.ProcessGroup | None
    inner: Inner
    tied: dist.ProcessGroup | None


def connect(
    plan: Plan, rank: int, store: dist.TCPStore, timeout_seconds: float, device: torch.device, generation: int
) -> Groups:
    """Joins the world that meets at `store` and makes every group that this rank is in."""
    # Symmetric memory remembers groups by name for ever: names must not come again in a later generation.
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
    channels = {}
    everyone = _joined(tuple(range(plan.mesh.size))) if plan.mesh.size > 1 else None
    for column, (kind, source, target) in product(columns(plan.mesh), edges(plan)):
        ends = plan.mesh.move(column, pp=source), plan.mesh.move(column, pp=target)
        group = everyone if plan.transport == "gloo" else _group(ends) if plan.transport == "nccl" else None
        if rank in ends:
            channels[kind, *ends] = group
            if plan.transport == "nccl":
                _join_ends(rank, *ends, group, device)
    holders = _sharing(plan, rank)
    # Gathers run beside reductions, on a lane of their own.
    gatherers = _sharing(plan, rank) if plan.zero else {}
    at = plan.mesh.coordinates(rank)
    tied = [_joined(ranks) for ranks in _ends(plan)]
    return Groups(rank, channels, holders, gatherers, everyone, _inner(plan, rank), tied[at.tp] if tied else None)


def serve(host: str, size: int, timeout_seconds: float) -> dist.TCPStore:
    """A store at one IP address of this machine, at a free port.

    It listens before anyone knows the port: who dials a port that nobody holds yet may get it as his own end, and so
    meets himself.
    """
    timeout = timedelta(seconds=timeout_seconds)
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(host, port, size, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach())


def meet(address: str, size: int, timeout_seconds: float) -> dist.TCPStore:
    """The store that rank 0 serves at 'HOST:PORT'."""
    host, _, port = address.rpartition(":")
    return dist.TCPStore(host, int(port), size, False, timedelta(seconds=timeout_seconds))


def _sharing(plan: Plan, rank: int) -> dict[int, list[dist.ProcessGroup | None]]:
    """New groups of the holders of each stage, and of its experts, for the stages of a rank; None where that is alone.
    Every rank makes all of them, in one order."""
    made = {ranks: _joined(ranks) for ranks in dict.fromkeys(map(plan.holders, plan.shares)) if len(ranks) > 1}
    found: dict[int, list[dist.ProcessGroup | None]] = {stage: [] for stage in plan.stages_of(rank)}
    for share in plan.shares_of(rank):
        found[share.stage].append(made.get(plan.holders(share)))
    return found


def _ends(plan: Plan) -> list[tuple[int, ...]]:
    """By tensor coordinate the ranks of a model's two ends, where these have copies of one tensor: one rank alone also
    has a group, as several stages may be its own."""
    if not plan.is_tied:
        return []
    last = plan.program.stages - 1
    both = [[plan.holders(ParamShard(stage, tp)) for stage in (0, last)] for tp in range(plan.mesh.tp)]
    return [tuple(sorted({*first, *end})) for first, end in both]


def _inner(plan: Plan, rank: int) -> Inner:
    mesh, at, model = plan.mesh, plan.mesh.coordinates(rank), plan.model
    tensor, context, experts = (_along(mesh, axis, rank) for axis in INNER)
    return Inner(
        TensorRanks(tensor, mesh.tp, at.tp),
        Context(context, mesh.cp, at.cp, plan.cp_method, model.softmax_scale),
        # a GPU's host is not to wait for what tokens have chosen
        ExpertParallelGroup(experts, at.ep, "all_gather" if plan.device == "cuda" else "all_to_all"),
    )


def _along(mesh: Mesh, axis: Axis, rank: int) -> dist.ProcessGroup | None:
    """A new group of the ranks that differ from this one along an axis only; every rank makes all of them."""
    all_ranks = dict.fromkeys(mesh.group((axis,), other) for other in range(mesh.size))
    made = {ranks: _joined(ranks) for ranks in all_ranks if len(ranks) > 1}
    return made.get(mesh.group((axis,), rank))


def columns(mesh: Mesh) -> list[int]:
    """A rank of each pipeline of the mesh."""
    return [rank for rank in range(mesh.size) if mesh.coordinates(rank).pp == 0]


def _group(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """Its operations may wait long: that a partner is gone is for the driver to find out, and soon."""
    return dist.new_group(list(ranks), timeout=PATIENCE)


def _joined(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """A new group whose ranks have met.

    A process's first operation of NCCL was seen to hold its host until the GPU is through with all it was given. In the
    middle of a step that may be a wait for a transfer which another host, held as well, has yet to issue.
    """
    group = _group(ranks)
    if dist.get_backend() == "nccl" and dist.get_rank() in ranks:
        dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
    return group


def _join_ends(rank: int, source: int, target: int, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """NCCL holds both hosts at their first transfer until they have met: done here, where both are ready."""
    token = torch.zeros(1, device=device)
    if rank == source:
        dist.send(token, target, group=group)
    else:
        dist.recv(token, source, group=group)


def edges(plan: Plan) -> list[tuple[Op, int, int]]:
    """Every (kind of send, source, target) of the program, in one order for all ranks."""
    found = set()
    for rank, stream in enumerate(plan.program.streams):
        for part in units_of(stream):
            if part.op in SENDS:
                found.add((part.op, rank, part.peer))
    return sorted(found)


def channel(part: Instruction, rank: int, peer: int) -> Channel:
    """The channel of a transfer as this rank (a rank of the mesh) sees it; `peer` is the mesh rank at its other end."""
    return (part.op, rank, peer) if part.op in SENDS else (RECEIVES[part.op], peer, rank)


def abort_all() -> None:
    """Ends every NCCL communicator of this process, at once: each one's end waits for the whole device, and so for the
    kernels of the others. From any thread."""
    threads = [threading.Thread(target=group.abort) for group in list(dist.distributed_c10d._world.pg_map)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    dist.distributed_c10d._abort_process_group()
