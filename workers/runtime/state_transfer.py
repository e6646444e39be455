"""Moves the state of a rank: from a checkpoint, on a disk or in the memory of ranks, and to where others read it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.plan import ParamShard
from pentad.workers.checkpoint.checkpoint import Checkpoint, Unreadable
from pentad.workers.checkpoint.checksums import Damaged
from pentad.workers.checkpoint.snapshot import copy_to, layout, snapshot_bytes
from pentad.workers.host_memory import available_bytes
from pentad.workers.parallel.process_groups import ProcessGroups
from pentad.workers.rank_waits import rank_waits
from pentad.workers.replication.parts import CopyKey, CopyPart, HostCopies
from pentad.workers.runtime.rank_state import RankState


def read_shared(
    state: RankState, groups: ProcessGroups, open_: Callable[[], Checkpoint], *, optimizer: bool
) -> tuple[bool, PentadError | None]:
    """Reads what this rank holds. Where ranks hold the same, one of them reads and sends it to the others, once all
    have read their parts. Returns whether they have, and why this rank could not. All ranks must call it."""
    holders = {shard: state.plan.holders(shard) for shard in state.parameters}
    sent = {s: its[0] for s, its in holders.items() if len(its) > 1 and state.plan.num_zero_shards(s) == 1}
    own = [shard for shard in holders if sent.get(shard, state.rank) == state.rank]
    problem: PentadError | None = None
    try:
        state.read(open_(), optimizer=optimizer, shards=own)
    except (Damaged, Unreadable) as error:
        problem = error
    if not (is_read := _all_agree(problem is None, groups.world, state.device)):
        return False, problem
    state.receive(groups, sent)
    return is_read, None


def _all_agree(agrees: bool, world: dist.ProcessGroup | None, device: torch.device) -> bool:
    against = torch.tensor([int(not agrees)], device=device)
    if world is not None:
        with rank_waits.abandonable():
            dist.all_reduce(against, dist.ReduceOp.MAX, group=world)
    return not int(against)


def hand_over(
    state: RankState, copies: HostCopies, key: CopyKey, parts: Mapping[int, ParamShard], num_neighbours: int
) -> None:
    """Copies, at once, what this rank holds of these parameter shards to `copies`, as parts of these numbers; this many
    ranks of the host do the same. Raises PentadError if there is no host memory for that."""
    files = {number: state.files((shard,)) for number, shard in parts.items()}
    size, room = sum(map(snapshot_bytes, files.values())), available_bytes() // num_neighbours
    if size > room:
        raise PentadError(f"the state of rank {state.rank} needs {size} bytes of host memory: expected up to {room}")
    for number, its in files.items():
        data = copies.room(snapshot_bytes(its))
        copy_to(torch.from_numpy(data), its)
        copies.hand_over(key, number, CopyPart(layout(its), data, None, lambda memory: None))
