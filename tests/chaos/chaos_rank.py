"""The runner of one simulated rank: what a Runner does for its Worker, in generators, in virtual time."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from chaos_cluster import Process
from chaos_copies import read_copy
from chaos_fabric import (
    INITIAL,
    Fabric,
    Meeting,
    Snapshot,
    State,
    digest,
    members_of,
    next_state,
    parts_of,
    read_state,
    write_state,
)

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import COLLECTIVES, RECEIVES, SENDS, Op
from pentad.schedules.passes.post_validation import has_post_validation
from pentad.schedules.simulate.timeline import Span
from pentad.schedules.spec.batch import batch_of
from pentad.schedules.spec.plan import ParamShard, Plan, ShardPart
from pentad.schedules.spec.zero_layout import replicas
from pentad.workers.abort import Aborted, Fence
from pentad.workers.checkpoint.checkpoint import Unreadable
from pentad.workers.checkpoint.checksums import Damaged
from pentad.workers.checkpoint.location import location
from pentad.workers.lanes.progress_file import Progress
from pentad.workers.replication.parts import CopyKey, CopyPart, HostCopies
from pentad.workers.replication.replicator import SentPart
from pentad.workers.replication.source import CopySource
from pentad.workers.runtime.results import EvalResult, Evaluation, LossSum, RankSnapshot, StepResult, WrittenShards

if TYPE_CHECKING:
    from chaos_history import Simulation

WRITE_SECONDS = (0.02, 0.3)


class SimRunner:
    """What a Runner does for its Worker, in generators."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        progress: Process,
        generation: int = 1,
        gpu: int = 0,
        previous: SimRunner | None = None,
        *,
        copies: HostCopies,
    ) -> None:
        self.plan, self.rank, self.process, self.generation, self.copies = plan, rank, progress, generation, copies
        self.simulation: Simulation = progress.worker.simulation
        self.world = self.simulation.world
        progress.rank, self.restores = rank, 0
        self.begun: tuple[CopySource, tuple[set[State], PentadError | None]] | None = None
        self.fence_flag = Fence()
        self.at = plan.mesh.coordinates(rank)
        self.inner = plan.mesh.group(("tp", "cp", "ep"), rank)
        self.actions = self.simulation.actions(plan, self.at.pp)
        self.post_validated = has_post_validation(plan.program)
        self.everyone = range(plan.mesh.size)
        self.peers = [plan.mesh.rank(self.at._replace(pp=pp)) for pp in range(plan.mesh.pp)]
        self.parts = parts_of(plan, rank)
        self.members: dict[int, tuple[int, ...]] = {}  # stage -> ranks that reduce its gradients
        kept: dict[Any, State] = previous.state if previous is not None and previous.plan.layers == plan.layers else {}
        complete = previous is not None and set(kept) >= set(self.parts)
        self.state: dict[Any, State] = {part: kept.get(part, State(0, INITIAL)) for part in self.parts}
        self.version: int = previous.version if previous is not None and complete else -1
        self.fabric: Fabric | None = None
        self.doing = -1, -1, self.world.now  # step, counter and since when
        self.norm: tuple[int, int, Meeting] | None = None  # step, batch and NORM of the uncommitted step
        self.ready_step = -1  # whose gradients are complete
        self.counted = 0
        self.newest: tuple[float, ...] = ()  # the digest of the newest committed step
        self.committed: list[StepResult] = []
        self.unreported: list[StepResult] = []
        self.recent: deque[list[StepResult]] = deque(maxlen=4)
        self.evaluations: deque[Evaluation] = deque(previous.evaluations if previous is not None else (), maxlen=4)
        self.began = self.world.now
        self.snapshots: dict[str, dict[int, Snapshot]] = {"checkpoint": {}, "copy": {}}
        self.simulation.reached("loading", progress)

    # -- set-up

    def serve(self, host: str, seconds: float) -> str:
        return f"{host}:1"

    def connect(self, address: str, seconds: float) -> Generator[Any, None, None]:
        self.simulation.reached("connecting", self.process)
        with self.fence_flag.guard():
            self.fabric = self.simulation.fabric(self.generation, self.rank, self.process)
            meeting = self.fabric.meeting(-1, "connect", self.everyone)
            self.fabric.come(meeting, self.rank)
            self.world.at(seconds, partial(meeting.fail, RuntimeError("gloo: timed out")))
            yield from self.fabric.wait(meeting)

    def restore(self, folder: str | None, step: int, optimizer: bool) -> Generator[Any, None, PentadError | None]:
        self.simulation.reached("restoring", self.process)
        yield self.world.random.uniform(*WRITE_SECONDS)
        state, problem = State(0, INITIAL), None
        if folder is not None:
            try:
                state = read_state(location(folder))
            except (Damaged, Unreadable) as error:
                problem = error
        assert problem or state.steps == step, f"a checkpoint of {state.steps} steps restored as one of {step}"
        return (yield from self._load_if_all_have(problem, state))

    def begin_reading(self, source: CopySource) -> None:
        self.begun = source, read_copy(self.simulation.cluster, self.copies, source)

    def restore_copy(self, source: CopySource) -> Generator[Any, None, PentadError | None]:
        self.simulation.reached("restoring", self.process)
        begun, self.begun = self.begun, None
        if begun is None or begun[0] != source:
            begun = source, read_copy(self.simulation.cluster, self.copies, source)
        found, problem = begun[1]
        assert problem or [state.steps for state in found] == [source.key.step]
        return (yield from self._load_if_all_have(problem, *found))

    def _load_if_all_have(self, problem: PentadError | None, *found: State) -> Generator[Any, None, PentadError | None]:
        self.restores += 1
        meeting = yield from self._all_meet(("restore", self.restores), int(problem is not None))
        if not meeting.total:
            self._load(found[0])
        return problem

    def _all_meet(self, key: Any, brings: int = 0) -> Generator[Any, None, Meeting]:
        assert self.fabric is not None
        with self.fence_flag.guard():
            meeting = self.fabric.meeting(-1, key, self.everyone)
            self.fabric.come(meeting, self.rank, brings)
            yield from self.fabric.wait(meeting)
        return meeting

    def _load(self, state: State) -> None:
        self.state = dict.fromkeys(self.parts, state)
        self.version = state.steps
        while self.evaluations and self.evaluations[-1].step > self.version:
            self.evaluations.pop()
        self.simulation.check_state(self)

    def receive(self, sources: dict[ShardPart, int], step: int) -> Generator[Any, None, None]:
        self.simulation.reached("restoring", self.process)
        assert self.fabric is not None
        current, self.version = self.version, self.version if self.version == step else -1
        with self.fence_flag.guard():
            for part in sorted(part for part in self.parts if part[:2] in sources):
                shard, source = part[0], sources[part[:2]]
                meeting = self.fabric.meeting(-1, ("receive", *part), replicas(self.plan, shard, self.rank))
                if source == self.rank:
                    assert current == step, "a rank that is not current was named as a source"
                self.fabric.come(meeting, self.rank, value=self.state[part])
                yield from self.fabric.wait(meeting)
                self.state[part] = meeting.brought[source]
        self.version = step
        self.simulation.check_state(self)

    # -- steps

    def run(
        self, first: int, count: int, more: bool = False, skipped: Sequence[tuple[int, int]] = ()
    ) -> Generator[Any, None, list[StepResult]]:
        with self.fence_flag.guard():
            for step in range(first, first + count):
                yield from self._run_step(step, batch_of(step, skipped))
            if not more and self.post_validated:
                yield from self._validate()
            keep_open = 1 if more and not self.post_validated and self.committed else 0
            done = self.committed[: len(self.committed) - keep_open]
            self.unreported += done
            del self.committed[: len(done)]
            results, self.unreported = self.unreported, []
            self.recent.append(results)
            return results

    def evaluate(self, step: int) -> Generator[Any, None, Evaluation]:
        """The loss is the state's value."""
        with self.fence_flag.guard():
            assert self.version == step and not self.committed, "an evaluation is of a state that is complete"
        yield from self._all_meet(("evaluate", step))
        yield self.world.random.uniform(*WRITE_SECONDS)
        self.fence_flag.check()
        self.evaluations.append(Evaluation(step, (EvalResult("holdout", float(self.simulation.values[step]), 1, 1),)))
        return self.evaluations[-1]

    def _run_step(self, step: int, batch: int) -> Generator[Any, None, None]:
        fabric, simulation, world, rank = self.fabric, self.simulation, self.world, self.rank
        faults = simulation.faults
        assert fabric is not None
        pending: dict[Any, Meeting] = {}
        began = world.now
        if not self.post_validated:
            assert self.version == step, f"step {step} runs on the weights of {self.version} steps"
        self.counted = 0
        for counter, action in enumerate(self.actions):
            self.fence_flag.check()
            self.doing = step, counter, world.now
            for key in action.waits:
                meeting = pending.get(key)
                if meeting is not None and meeting.absent:
                    yield from fabric.wait(meeting)
            if action.before in faults.points:
                simulation.reached(action.before, self.process, step)
            if action.seconds:
                if action.meets and len(self.inner) > 1:
                    meeting = fabric.meeting(step, (self.at.pp, self.at.dp, counter), self.inner)
                    fabric.come(meeting, rank)
                    yield from fabric.wait(meeting)
                if action.within in faults.points:
                    simulation.reached(action.within, self.process, step, within=action.seconds)
                yield action.seconds
                self.fence_flag.check()
            for part, key in action.parts:
                if (waits := self._execute(part, key, step, batch, pending, began)) is not None:
                    yield from waits
            if action.after in faults.points:
                simulation.reached(action.after, self.process, step)
        self.doing = step, -1, world.now

    @property
    def position(self) -> Progress:
        return Progress(self.generation, *self.doing)

    def _execute(
        self, part: Any, key: Any, step: int, batch: int, pending: dict[Any, Meeting], began: float
    ) -> Generator[Any, None, None] | None:
        """Runs a part; returns what the rank then has to wait for, if anything."""
        fabric, op = self.fabric, part.op
        assert fabric is not None
        if op is Op.F:
            if self.at.tp == 0 and self.at.cp == 0:
                replica = self.at.dp * self.plan.mesh.ep + self.at.ep
                self.counted += digest(batch, replica * self.plan.program.microbatches + part.microbatch)
        elif op in SENDS:
            received, target = SENDS[op], self.peers[part.peer]
            stage = part.stage + (1 if op is Op.SEND_F else -1)
            meeting = fabric.meeting(step, (received, stage, part.microbatch, target), (self.rank,))
            self.simulation.transfer(partial(fabric.come, meeting, self.rank), self.process, step)
        elif op in RECEIVES:
            source = self.peers[part.peer]
            pending[key] = fabric.meeting(step, (op, part.stage, part.microbatch, self.rank), (source,))
        elif op is Op.NORM:
            meeting = fabric.meeting(step, "NORM", self.everyone)
            self.ready_step, self.norm, self.began = step, (step, batch, meeting), began
            fabric.come(meeting, self.rank, self.counted)
            return None if self.post_validated else self._wait_for_norm(meeting)
        elif op in COLLECTIVES:
            group = self.at._replace(dp=0, ep=0, cp=0, pp=0)
            if part.stage not in self.members:
                self.members[part.stage] = members_of(self.plan, self.at, part.stage)
            members = self.members[part.stage]
            meeting = pending[key] = fabric.meeting(step, (key, group), members)
            fabric.come(meeting, self.rank)
        elif op is Op.STEP and not self.post_validated:
            self._commit(step, batch, self._total())
        elif op is Op.VALIDATE:
            return self._validate()
        return None

    def _wait_for_norm(self, meeting: Meeting) -> Generator[Any, None, None]:
        assert self.fabric is not None
        yield from self.fabric.wait(meeting)
        self.fence_flag.check()

    def _total(self) -> int:
        assert self.norm is not None and not self.norm[2].absent
        return self.norm[2].total % 2**40

    def _validate(self) -> Generator[Any, None, None]:
        if self.norm is not None and self.fabric is not None:
            step, batch, meeting = self.norm
            if meeting.absent:
                yield from self.fabric.wait(meeting)
            self.fence_flag.check()
            self._commit(step, batch, self._total())

    def _commit(self, step: int, batch: int, samples: int) -> None:
        assert self.version == step, f"step {step} is committed on the weights of {self.version} steps"
        self.simulation.check_acts(self.generation, self.process, f"committed step {step}")
        self.state = {
            part: State(its.steps + 1, next_state(its.value, batch, samples)) for part, its in self.state.items()
        }
        self.version, self.norm, self.newest = step + 1, None, (float(samples),)
        self.simulation.check_state(self)
        end = self.world.now
        begin = min(self.began, end - 1e-3)
        spans = (Span(step, self.rank, "compute", f"{self.at.pp}F0", "F", self.at.pp, 0, -1, begin, end),)
        self.committed.append(
            StepResult(
                step, {self.rank: 1.0}, (LossSum(1.0, 1),), 1.0, 0.1, False, spans, 0.0, 0.0, 1, 0, samples=samples
            )
        )
        for by_step in self.snapshots.values():
            if (snapshot := by_step.get(step + 1)) is not None and snapshot.requested:
                snapshot.take(self.state)

    # -- copies of the state

    def snapshot(self, step: int) -> None:
        self._request("checkpoint", step)

    def copy(self, step: int) -> None:
        self._request("copy", step)

    def _request(self, kind: str, step: int) -> None:
        snapshot = self.snapshots[kind].setdefault(step, Snapshot())
        snapshot.requested = True
        if self.version == step:
            snapshot.take(self.state)

    def write(self, folder: str, step: int) -> Generator[Any, None, WrittenShards | str]:
        try:
            state = yield from self._taken("checkpoint", step)
            yield self.world.random.uniform(*WRITE_SECONDS)
            self.simulation.reached("saving", self.process)
            self.fence_flag.check()
            self.simulation.may_write(self.process)
            entry = write_state(location(folder), self.plan, self.rank, state, self.fence_flag.publishing)
            self.simulation.check_acts(self.generation, self.process, f"wrote a file of checkpoint {step}")
            yield self.world.random.uniform(*WRITE_SECONDS)
            return WrittenShards([entry], 0.0)
        except PentadError as error:
            return str(error)

    def replicate(self, key: CopyKey, address: str, token: bytes) -> Generator[Any, None, Any]:
        state = yield from self._taken("copy", key.step)
        (only,) = set(state.values())
        data = np.array(only, np.int64).view(np.uint8)
        self.copies.put(key, self.rank, CopyPart({}, data, None, lambda memory: None))
        holder = next(p for p in self.simulation.cluster.processes if str(p.pid) == address)
        yield self.world.random.uniform(*WRITE_SECONDS)
        self.fence_flag.check()
        if not holder.is_alive:
            return "connection refused"
        if holder.stopped or holder.node.cut_off or self.process.node.cut_off:
            yield self.simulation.never  # until the generation ends
        holder.worker.copies.put(key, self.rank, CopyPart({}, data, None, lambda memory: None))
        return SentPart(16, 0.0, 0.0)

    def hand_over(self, key: CopyKey, parts: dict[int, ParamShard], neighbours: int) -> None:
        self.simulation.reached("saving", self.process)
        assert self.version == key.step, "a rank hands over what is not the newest state"
        for number, shard in parts.items():
            (only,) = {its for part, its in self.state.items() if part[0] == shard}
            data = np.array(only, np.int64).view(np.uint8)
            self.copies.hand_over(key, number, CopyPart({}, data, None, lambda memory: None))
        self.simulation.handed_over += 1

    def _taken(self, kind: str, step: int) -> Generator[Any, None, dict[Any, State]]:
        snapshot = self.snapshots[kind].setdefault(step, Snapshot())
        self.fence_flag.check()
        yield snapshot
        assert snapshot.state is not None
        return snapshot.state

    def save(self, folder: str, step: int, shards: tuple[ParamShard, ...]) -> list[dict[str, Any]]:
        self.simulation.reached("saving", self.process)
        assert self.version == step
        state = {part: its for part, its in self.state.items() if part[0] in shards}
        return [write_state(location(folder), self.plan, self.rank, state)]

    # -- the end of a generation

    def fence(self) -> None:
        self.simulation.reached("recovering", self.process)
        self.fence_flag.set()
        self.process.interrupt(Aborted)

    def leave(self) -> RankSnapshot:
        self.unreported += self.committed
        self.committed.clear()
        known = [result for call in (*self.recent, self.unreported) for result in call]
        self.simulation.reached("recovering", self.process)
        ready = self.norm is not None and self.norm[0] == self.version
        results = tuple(result for result in known if result.step < self.version)
        return RankSnapshot(self.version, ready, 1.0, results, self.newest, tuple(self.evaluations))

    def advance(self, norm: float, losses: tuple[float, ...]) -> None:
        assert self.norm is not None
        self._commit(self.version, self.norm[1], int(losses[0]))

    def close(self) -> None:
        self.fence_flag.set()
