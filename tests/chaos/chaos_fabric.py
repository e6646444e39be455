"""What simulated ranks compute and send each other: their streams, their states, and their collectives.

The state of a parameter shard after `n` steps is one number, which depends on the batches of these steps and on the
samples that were counted: two ranks have the same state only if they have counted the same.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import safetensors.numpy
from chaos_cluster import Process
from chaos_world import Signal

from pentad.schedules.ir.instruction import COLLECTIVES, RECEIVES, Op
from pentad.schedules.spec.mesh import Coordinates
from pentad.schedules.spec.plan import ParamShard, Plan
from pentad.schedules.spec.zero_layout import zero_group
from pentad.workers.checkpoint.checkpoint import open_checked, read_manifest, unreadable
from pentad.workers.checkpoint.manifest import Shard
from pentad.workers.checkpoint.storage import storage_errors, storage_of

if TYPE_CHECKING:
    from chaos_history import Simulation

UNIT_SECONDS = 0.02  # each of F, B and W of a whole rank
NUMBER = 2**62
INITIAL = 1


def next_state(state: int, batch: int, samples: int) -> int:
    return hash((state, batch, samples)) % NUMBER


def digest(batch: int, microbatch: int) -> int:
    """The digest of the samples in a microbatch of a global batch."""
    return hash((batch, microbatch, 77)) % 2**40


class State(NamedTuple):
    """The state of one part of a parameter shard: steps done, and a value."""

    steps: int
    value: int


class Action(NamedTuple):
    """An instruction or overlapped pair, as a rank runs it. `before`, `within` and `after` are points for faults.
    `parts` are those that send, count or commit something, each with its key."""

    before: str
    within: str
    after: str
    waits: tuple[Any, ...]  # keys of receives and collectives
    parts: tuple[tuple[Any, Any], ...]
    seconds: float
    meets: bool  # whether ranks that share its layers meet in it


def compiled(plan: Plan, pp: int) -> tuple[Action, ...]:
    program, found = plan.program, list[Action]()
    seconds = {Op.F: 1.0, Op.B: 1.0, Op.W: 1.0, Op.BW: 2.0}
    scale = UNIT_SECONDS / max(1, program.chunks)
    for action in program.streams[pp]:
        waits = tuple(k for k in action.waits if k.op in RECEIVES or k.op in COLLECTIVES)
        took = scale * sum(seconds.get(part.op, 0.0) for part in action.parts)
        first = action.parts[0].op
        meets = any(part.op in (Op.F, Op.B, Op.BW) for part in action.parts)
        parts = tuple((part, part.key) for part in action.parts if _acts(part, program.stages))
        found.append(Action(f"before {first}", f"within {first}", f"after {first}", waits, parts, took, meets))
    return tuple(found)


def _acts(part: Any, stages: int) -> bool:
    """Whether an instruction does more than take time: an F of the last stage counts samples."""
    return part.stage == stages - 1 if part.op is Op.F else part.op not in (Op.B, Op.W, Op.BW)


class Meeting(Signal):
    """A collective, over once all of `absent` have come. `total` adds up what they bring."""

    def __init__(self, members: Sequence[int]) -> None:
        super().__init__()
        self.absent, self.total = set(members), 0
        self.brought: dict[int, Any] = {}


class Snapshot(Signal):
    """Fires with the state after some step."""

    def __init__(self) -> None:
        super().__init__()
        self.requested = False
        self.state: dict[Any, State] | None = None

    def take(self, state: dict[Any, State]) -> None:
        if self.state is None:
            self.state = dict(state)
            self.fire()


class Fabric:
    """What the ranks of one generation send each other."""

    def __init__(self, simulation: Simulation, processes: dict[int, Process]) -> None:
        self.simulation, self.world, self.processes = simulation, simulation.world, processes
        self.meetings: dict[int, dict[Any, Meeting]] = {}  # by step
        self.dead: set[int] = set()

    def meeting(self, step: int, key: Any, members: Sequence[int]) -> Meeting:
        by_key = self.meetings.setdefault(step, {})
        if (found := by_key.get(key)) is None:
            found = by_key[key] = Meeting(members)
            self.meetings.pop(step - 3, None)
        return found

    def come(self, meeting: Meeting, rank: int, brings: int = 0, value: Any = None) -> None:
        """A rank joins a meeting, once its node can be reached."""
        if rank not in meeting.absent:
            return
        process = self.processes.get(rank)
        if process is not None and process.node.cut_off:
            process.node.pending.append(partial(self.come, meeting, rank, brings, value))
            return
        meeting.total += brings
        meeting.brought[rank] = value
        meeting.absent.discard(rank)
        if not meeting.absent:
            meeting.fire()

    def wait(self, meeting: Meeting) -> Generator[Any, None, None]:
        if meeting.absent & self.dead:
            yield self.world.random.uniform(0.05, 0.3)
            raise RuntimeError("Connection closed by peer")
        yield meeting

    def lose(self, rank: int) -> None:
        self.dead.add(rank)
        for by_key in self.meetings.values():
            for meeting in by_key.values():
                if rank in meeting.absent and meeting.waiting:
                    self.world.at(self.world.random.uniform(0.05, 0.3), partial(self._break, meeting))

    @staticmethod
    def _break(meeting: Meeting) -> None:
        meeting.fail(RuntimeError("Connection closed by peer"))


def parts_of(plan: Plan, rank: int) -> tuple[tuple[ParamShard, int, int], ...]:
    """The parts of parameter shards that a rank holds: (shard, index, count)."""
    found = []
    for shard in plan.param_shards_of(rank):
        group = zero_group(plan, shard, rank)
        found.append((shard, group.index(rank), len(group)))
    return tuple(found)


def members_of(plan: Plan, at: Coordinates, stage: int) -> tuple[int, ...]:
    """The ranks that reduce the gradients of a stage together with the one at these coordinates."""
    mesh = plan.mesh
    places = [
        Coordinates(dp=dp, pp=pp, cp=cp, tp=at.tp, ep=ep)
        for dp in range(mesh.dp)
        for pp in plan.program.holders(stage)
        for cp in range(mesh.cp)
        for ep in range(mesh.ep)
    ]
    return tuple(map(mesh.rank, places))


def read_state(folder: Any) -> State:
    """The state in a checkpoint, as a rank reads it. All parts must exist and agree. Raises Damaged and Unreadable."""
    found, counts, opened = set[State](), dict[str, set[int]](), open_checked(folder).opened
    assert opened is not None
    for shard in read_manifest(folder).shards:
        try:
            with opened(shard.file) as file:
                content = file.read(shard.bytes)
        except OSError as error:
            raise unreadable(shard.file, error) from error
        else:
            for name, value in safetensors.numpy.load(content).items():
                found.add(State(*map(int, value)))
                first, _, count = name.rpartition("of")
                which, _, index = first.rpartition(".")
                counts.setdefault(f"{which}/{count}", set()).add(int(index))
    assert all(len(indices) == int(which.rpartition("/")[2]) for which, indices in counts.items()), "parts are missing"
    assert len(found) == 1, f"a checkpoint of several states: {found}"
    return found.pop()


def write_state(
    folder: Any, plan: Plan, rank: int, state: Mapping[tuple[ParamShard, int, int], State], *publishing: Any
) -> dict[str, Any]:
    """Writes a rank's file of a checkpoint; returns its entry for the manifest."""
    file = f"rank-{rank:03}-of-{plan.mesh.size:03}.safetensors"
    names = {part: _name_of(plan, rank, part, whole=not publishing) for part in state}
    content = safetensors.numpy.save({names[part]: np.array(its, np.int64) for part, its in state.items()})
    specs: Any = {name: {"dtype": "I64", "shape": [2]} for name in names.values()}
    with storage_errors(folder, len(content)):
        storage_of(folder).make_folder(folder)
        written = storage_of(folder).write(folder / file, [memoryview(content)], *publishing)
    return Shard(file, written.bytes, written.sha256, specs, written.crc32).plain()


def _name_of(plan: Plan, rank: int, part: tuple[ParamShard, int, int], *, whole: bool) -> str:
    """The name of a part in a checkpoint. Replicas write equal shares of it, or one of them the `whole`."""
    shard, index, count = part
    if not whole:
        holders = plan.holders(shard)
        index, count = holders.index(rank), len(holders)
    return f"{shard.stage}.{shard.tp}.{int(shard.experts)}.{shard.ep}.{index}of{count}"
