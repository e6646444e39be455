"""Moves the state of a rank: from a checkpoint on disk or in the memory of ranks, and to where others can read it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from functools import partial

import torch
import torch.distributed as dist

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.plan import ParamShard, ShardPart
from pentad.schedules.spec.zero_layout import replicas
from pentad.workers.background import awaited, in_background
from pentad.workers.checkpoint.checkpoint import Checkpoint, Unreadable, open_checked
from pentad.workers.checkpoint.checksums import Damaged
from pentad.workers.checkpoint.location import location
from pentad.workers.checkpoint.snapshot import copy_to, layout, snapshot_bytes
from pentad.workers.host_memory import available_bytes
from pentad.workers.parallel.process_groups import ProcessGroups
from pentad.workers.rank_waits import rank_waits
from pentad.workers.replication.parts import CopyKey, CopyPart, HostCopies
from pentad.workers.replication.source import CopySource, checkpoint_in_memory
from pentad.workers.runtime.rank_state import RankState

Problem = Damaged | Unreadable | None


class StateReader:
    """Reads the state of a rank. Where several ranks hold the same part, only the first reads it, and `share` sends it
    to the others. The methods return why reading failed, if it did."""

    def __init__(self, state: RankState, copies: HostCopies, check: Callable[[], None]) -> None:
        self.state, self.copies, self.check = state, copies, check
        self.begun: tuple[CopySource, Future[Problem]] | None = None

    def read(self, folder: str, *, optimizer: bool) -> Problem:
        """Reads a checkpoint (without `optimizer`, only its weights)."""
        return self._read(partial(open_checked, location(folder)), optimizer=optimizer)

    def begin(self, source: CopySource) -> None:
        """Starts reading a copy in the memory of ranks in the background."""
        self.begun = source, in_background(partial(self._read_copy, source))

    def read_copy(self, source: CopySource) -> Problem:
        """Reads a copy; if it has begun, waits for it."""
        if self.begun is None or self.begun[0] != source:
            self.end()
            return self._read_copy(source)
        try:
            return awaited(self.begun[1], self.check)
        finally:
            self.end()

    def end(self) -> None:
        """Waits until nothing is being written to the state."""
        if self.begun is not None:
            wait([self.begun[1]])
            self.begun = None

    def _read_copy(self, source: CopySource) -> Problem:
        if self.state.device.type == "cuda":
            torch.cuda.set_device(self.state.device)  # for this thread
        return self._read(partial(checkpoint_in_memory, source, self.copies, self.check))

    def _read(self, open_: Callable[[], Checkpoint], *, optimizer: bool = True) -> Problem:
        state, senders = self.state, _senders(self.state)
        elsewhere = {shard for (shard, _), rank in senders.items() if rank != state.rank}
        own = state.parameters.keys() - elsewhere
        try:
            state.read(open_(), optimizer=optimizer, shards=own)
        except (Damaged, Unreadable) as error:
            return error
        return None


def share(state: RankState, groups: ProcessGroups, *, has_read: bool) -> bool:
    """Called once all ranks have tried to read. Returns whether all have succeeded; every rank then has all that it
    holds."""
    if not _all_agree(has_read, groups.world, state.device):
        return False
    state.receive(groups, _senders(state))
    return True


def _senders(state: RankState) -> dict[ShardPart, int]:
    """The first of the ranks that hold the same part, for each part of this rank that others hold, too."""
    found = dict[ShardPart, int]()
    for shard, parameters in state.parameters.items():
        first, *others = replicas(state.plan, shard, state.rank)
        if others:
            found[shard, parameters.layout.shard_index] = first
    return found


def _all_agree(agrees: bool, world: dist.ProcessGroup | None, device: torch.device) -> bool:
    against = torch.tensor([int(not agrees)], device=device)
    if world is not None:
        with rank_waits.abandonable():
            dist.all_reduce(against, dist.ReduceOp.MAX, group=world)
    return not int(against)


def hand_over(
    state: RankState, copies: HostCopies, key: CopyKey, parts: Mapping[int, ParamShard], num_neighbours: int
) -> None:
    """Synchronously copies what this rank holds of these parameter shards to `copies`, under the part numbers in
    `parts`, while `num_neighbours` ranks of the host do the same. Raises PentadError if host memory does not
    suffice."""
    files = {number: state.files((shard,)) for number, shard in parts.items()}
    size, room = sum(map(snapshot_bytes, files.values())), available_bytes() // num_neighbours
    if size > room:
        raise PentadError(f"the state of rank {state.rank} needs {size} bytes of host memory: expected up to {room}")
    for number, its in files.items():
        data = copies.room(snapshot_bytes(its))
        copy_to(torch.from_numpy(data), its)
        copies.hand_over(key, number, CopyPart(layout(its), data, None, lambda memory: None))
