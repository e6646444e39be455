"""Ray without Ray: ranks in this process, nodes that come and go, and a clock that only waiting moves."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError
from rich.console import Console
from small_checkpoint import save_small

from pentad.orchestrator.cluster import copies
from pentad.orchestrator.cluster import group as groups
from pentad.orchestrator.cluster.faults import WorkerError
from pentad.orchestrator.cluster.placement import Place
from pentad.orchestrator.cluster.worker import Status, WorkerPlace
from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.monitoring.display import Display
from pentad.orchestrator.monitoring.event_bus import EventBus
from pentad.orchestrator.monitoring.run_state import ControlRequests
from pentad.orchestrator.monitoring.runfolder import RunFolder
from pentad.orchestrator.records.json_lines import read_lines
from pentad.orchestrator.recovery import fence, hang_detection, recovery, regroup
from pentad.orchestrator.run import step_loop
from pentad.schedules.simulate.timeline import Span
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.spikes import batch_of
from pentad.workers.checkpoint.checkpoint import Start
from pentad.workers.checkpoint.location import location
from pentad.workers.replication.parts import CopyKey, HeldPart
from pentad.workers.replication.replicator import SentPart
from pentad.workers.replication.source import CopySource
from pentad.workers.runtime.results import EvalResult, Evaluation, LossSum, RankSnapshot, StepResult, WrittenShards

DRIVER_NODE = "node0"
STEP_SECONDS = 0.3


class Blocked(Exception):
    """The call waits in a collective that nobody else joins."""


class Rank:
    """One rank's process: the methods of a Worker and of its Runner, which `call` reaches by name. `version` steps are
    in its weights, -1: it has none. While it `hangs`, nothing in it answers."""

    def __init__(self, fake: FakeRay, bundle: int) -> None:
        self.fake, self.bundle, self.node = fake, bundle, fake.nodes[bundle]
        self.number, self.pid, self.generation, self.version = -1, 10_000_000 + len(fake.ranks), 0, -1
        self.is_alive, self.hangs, self.ready, self.copied, self.copied_to_peers = True, False, False, -1, -1
        self.results: list[StepResult] = []
        self.open: list[StepResult] = []
        self.held: dict[tuple[CopyKey, int], bool] = {}  # parts, and whether they count

    def place(self) -> WorkerPlace:
        return WorkerPlace(self.node, f"10.0.0.{self.node[-1]}", -1, self.pid, f"/nowhere/{self.pid}")

    def status(self) -> Status:
        return Status(self.generation, self.version, "", 0.0)

    def clock(self) -> float:
        return self.fake.now

    def start(self, generation: int, plan: Plan, number: int, keep: bool) -> str:
        self.generation, self.plan, self.number, self.ready = generation, plan, number, False
        self.results, self.open = [], []
        if not keep:
            self.version = -1
        return ""

    def call(self, generation: int, method: str, *arguments: Any) -> Any:
        assert generation == self.generation, "a call of an earlier generation"
        return getattr(self, method)(*arguments)

    def serve(self, host: str, seconds: float) -> str:
        return f"{host}:1"

    def connect(self, address: str, seconds: float) -> None:
        assert {rank.generation for rank in self.fake.ranks if rank.is_alive} == {self.generation}

    def restore(self, folder: str | None, step: int, optimizer: bool) -> None:
        assert (int(location(folder).name[5:]) if folder else 0) == step
        self.version = step

    def receive(self, sources: dict[Any, int], step: int) -> None:
        members = self.fake.members()
        if not all(rank.is_alive and not rank.hangs for rank in members):
            raise Blocked
        assert all(members[source].version == step for source in sources.values()), "a source without the state"
        if self.version != step:
            assert set(self.plan.param_shards_of(self.number)) <= set(sources)
        self.version = step

    def run(self, first: int, count: int, more: bool, skipped_batches: tuple = ()) -> list[StepResult]:
        if self.fake.is_broken(self.generation) and self.version != first:
            raise Blocked
        results, self.open = self.open, []
        for step in range(first, first + count):
            assert self.version == step, "steps come in order"
            self.fake.strike(self, step)
            self.fake.trained[step] = batch_of(step, skipped_batches)
            results.append(self._result(step))
            self.version, self.results = step + 1, [*self.results[-9:], results[-1]]
        if more:
            self.open = [results.pop()]
        return results

    def evaluate(self, step: int) -> Evaluation:
        if self.fake.is_broken(self.generation) and self.version != step:
            raise Blocked
        assert self.version == step and not self.open and self.plan.eval is not None
        self.fake.strike_evaluation(self, step)
        results = (EvalResult(each.name, 64.0 * step, 64, 1) for each in self.plan.eval.data_sets)
        return Evaluation(tuple(results), ())

    def snapshot(self, step: int) -> None:
        if self.fake.is_broken(self.generation) and self.version != step:
            raise Blocked
        assert self.version == step
        self.copied = step

    def write(self, generation: int, folder: str, step: int) -> WrittenShards | str:
        assert generation == self.generation
        if self.copied != step or (step, self.number) == self.fake.writing:
            raise Blocked
        if step in self.fake.full:
            return "folder checkpoints cannot be written (No space left on device): expected room"
        shards = self.plan.param_shards_of(self.number)
        self.fake.written.setdefault(step, []).extend(shards)
        return WrittenShards([{"bytes": 1}] * len(shards))

    def serve_copies(self, host: str, token: bytes) -> str:
        return str(self.pid)

    def copy(self, step: int) -> None:
        if self.fake.is_broken(self.generation) and self.version != step:
            raise Blocked
        self.copied_to_peers = step

    def replicate(self, generation: int, key: CopyKey, address: str, token: bytes) -> SentPart | str:
        assert generation == self.generation == key.generation
        holder = next(rank for rank in self.fake.ranks if str(rank.pid) == address)
        if self.copied_to_peers != key.step:
            raise Blocked
        if not holder.is_alive:
            return "connection refused"
        for each in (self, holder):
            each.held[key, self.number] = False
        return SentPart(1, 0.0, 0.0)

    def commit_copy(self, key: CopyKey) -> None:
        self.held = {each: True for each in self.held if each[0] == key}

    def held_copies(self) -> tuple[str, list[HeldPart]]:
        return str(self.pid), [HeldPart(key, owner, 1, counts, {}) for (key, owner), counts in self.held.items()]

    def restore_copy(self, source: CopySource) -> None:
        assert {each.address for each in source.parts} <= {str(rank.pid) for rank in self.fake.ranks if rank.is_alive}
        self.version = source.key.step

    def save(self, folder: str, step: int, shards: Any) -> list[dict[str, Any]]:
        assert self.version == step
        self.fake.written.setdefault(step, []).extend(shards)
        return [{"bytes": 1}] * len(shards)

    def commit(
        self, generation: int, folder: str, step: int, shards: Any, meta: Any, keep: int, pinned: tuple[int, ...]
    ) -> None:
        assert generation == self.generation
        save_small(location(folder), step)

    def fence(self, generation: int) -> None:
        assert generation > self.generation
        self.generation = generation

    def abort(self, generation: int) -> None:
        assert generation == self.generation

    def leave(self, generation: int) -> RankSnapshot:
        return RankSnapshot(self.version, self.ready, 1.0, tuple(self.results))

    def advance(self, norm: float, losses: tuple[float, ...]) -> None:
        assert self.ready
        self.version += 1

    def kill(self, pid: int) -> None:
        self.fake.kill(pid)

    def read_progress_of(self, file: str, stream: Any) -> Status:
        raise FileNotFoundError(file)

    def close(self) -> None:
        self.is_alive = False

    def _result(self, step: int) -> StepResult:
        end = STEP_SECONDS * (step + 1)
        span = Span(step, self.number, "compute", "0F0", "F", 0, 0, -1, end - STEP_SECONDS, end)
        skipped = self.fake.trained[step] in self.fake.spikes
        return StepResult(step, {self.number: 1.0}, (LossSum(1.0, 1),), 1.0, 0.1, skipped, (span,), 0.0, 0.0, 1, 0)


class Ref:
    """A pending answer: ready once it has a value or an error, or its rank is dead."""

    def __init__(self, rank: Rank, method: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.rank, self.is_ready = rank, rank.is_alive and not rank.hangs
        self.value: Any = None
        self.error: Exception | None = None
        if self.is_ready:
            try:
                self.value = method(*arguments)
            except Blocked:
                self.is_ready = False
            except Exception as error:
                self.error = RayTaskError("call", "traceback", error)

    def get(self) -> Any:
        if not self.is_ready:
            raise ActorDiedError
        if self.error:
            raise self.error
        return self.value


class Actor:
    """A handle: `actor.METHOD.remote(...)` calls its rank at once, and first `fake.on_call`."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any) -> Ref:
            self.rank.fake.on_call(self.rank, arguments[1] if name == "call" else name)
            return Ref(self.rank, getattr(self.rank, name), arguments)

        method = SimpleNamespace(remote=remote)
        method.options = lambda **_: method
        return method


class FakeRay:
    """A cluster of `nodes[bundle]`. Replaces, with `patch`, all that a WorkerGroup and a recovery use of Ray.

    `faults[step]` are the ranks that die in a step, or the node that is lost with its ranks; lost nodes return in the
    steps `returns`. `eval_faults[step]` are the ranks that die in the evaluation after so many steps. In a step of
    `commits` one survivor has taken the step by then, and the others lack only the norm.
    The rank in `writing`, (steps, rank), never finishes its part of the checkpoint of so many steps; those of the steps
    `full` find the disk full.
    A step on a batch of `spikes` is skipped; `trained[step]` is the batch that a step trained on last.
    """

    def __init__(self, patch: pytest.MonkeyPatch, *nodes: str) -> None:
        self.now, self.nodes = 100.0, nodes
        self.ranks: list[Rank] = []
        self.lost_nodes: set[str] = set()
        self.draining: dict[str, int] = {}
        self.faults: dict[int, tuple[int, ...] | str] = {}
        self.returns: set[int] = set()
        self.eval_faults: dict[int, tuple[int, ...]] = {}
        self.commits: set[int] = set()
        self.spikes: set[int] = set()
        self.trained: dict[int, int] = {}
        self.written: dict[int, list[Any]] = {}  # shards by the steps of their checkpoint
        self.writing = (-1, -1)
        self.full: set[int] = set()
        self.killed: list[int] = []
        self.on_call: Callable[[Rank, str], None] = lambda rank, method: None
        self.on_sleep: Callable[[], None] = lambda: None
        self.group: groups.WorkerGroup | None = None
        self._broken = (0, 0)  # a generation in which ranks have died, and the step
        self._first: Rank | None = None  # has taken that step
        self._patch(patch)

    def _patch(self, patch: pytest.MonkeyPatch) -> None:
        context = SimpleNamespace(get_node_id=lambda: DRIVER_NODE)
        kill = SimpleNamespace(kill=lambda pid, number: self.kill(pid))
        clock = SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now, sleep=self._sleep)
        fake = SimpleNamespace(
            wait=self._wait,
            get=lambda ref: ref.get(),
            put=lambda value: value,
            kill=lambda actor: self.kill(actor.rank.pid),
            get_runtime_context=lambda: context,
        )
        for module in (groups, copies, fence, regroup):
            patch.setattr(module, "ray", fake)
        for module in (groups, fence, recovery, regroup, hang_detection, step_loop):
            patch.setattr(module, "time", clock)
        patch.setattr(fence, "os", kill)
        patch.setattr(groups, "Actor", SimpleNamespace(options=self._options))
        patch.setattr(groups, "PlacementGroupSchedulingStrategy", lambda group, **bundle: bundle.popitem()[1])
        patch.setattr(groups, "bundle_places", lambda group: tuple(map(Place, range(len(self.nodes)), self.nodes)))
        patch.setattr(groups, "release", lambda group: None)
        patch.setattr(regroup, "living_bundles", lambda group: self.living_bundles())
        patch.setattr(recovery, "draining", lambda: self.draining)

    def members(self) -> list[Rank]:
        assert self.group is not None
        return [actor.rank for actor in self.group.actors]

    def living_bundles(self) -> dict[int, str]:
        gone = self.lost_nodes | set(self.draining)
        return {bundle: node for bundle, node in enumerate(self.nodes) if node not in gone}

    def lose_node(self, node: str) -> None:
        self.lost_nodes.add(node)
        for rank in self.ranks:
            rank.is_alive = rank.is_alive and rank.node != node

    def kill(self, pid: int) -> None:
        self.killed.append(pid)
        for rank in self.ranks:
            rank.is_alive = rank.is_alive and rank.pid != pid

    def strike(self, rank: Rank, step: int) -> None:
        """Kills the ranks that die in this step; blocks those that then wait for them."""
        if rank.number == 0:
            self.now += STEP_SECONDS
        if step in self.returns and not self.is_broken(rank.generation):
            self.lost_nodes.clear()
        if (fault := self.faults.pop(step, None)) is not None:
            self._broken = (rank.generation, step)
            members = self.members()
            if isinstance(fault, str):
                self.lose_node(fault)
            else:
                for number in fault:
                    members[number].is_alive = False
            survivors = [each for each in members if each.is_alive]
            for each in survivors:
                each.ready = step in self.commits
            self._first = survivors[0] if survivors and step in self.commits else None
        has_taken = rank is self._first and step == self._broken[1]
        if self.is_broken(rank.generation) and step >= self._broken[1] and not has_taken:
            raise Blocked

    def strike_evaluation(self, rank: Rank, step: int) -> None:
        if (fault := self.eval_faults.pop(step, None)) is not None:
            self._broken, self._first, members = (rank.generation, step), None, self.members()
            for number in fault:
                members[number].is_alive = False
        if self.is_broken(rank.generation):
            raise Blocked

    def is_broken(self, generation: int) -> bool:
        return self._broken[0] == generation

    def _options(self, *, scheduling_strategy: int, **_: Any) -> Any:
        def remote(label: str, runner: str) -> Actor:
            self.ranks.append(Rank(self, scheduling_strategy))
            return Actor(self.ranks[-1])

        return SimpleNamespace(remote=remote)

    def _wait(self, refs: list[Ref], num_returns: int = 1, timeout: float = 0.0) -> tuple[list[Ref], list[Ref]]:
        ready = [ref for ref in refs if ref.is_ready or not ref.rank.is_alive]
        if len(ready) < num_returns:
            self.now += timeout
        return ready, [ref for ref in refs if ref not in ready]

    def _sleep(self, seconds: float) -> None:
        self.now += seconds
        self.on_sleep()


class FakeRun:
    """A run whose four ranks, of two nodes, have done seven steps."""

    def __init__(self, fake: FakeRay, config: RunConfig, folder: RunFolder, group: groups.WorkerGroup) -> None:
        self.fake, self.config, self.folder, self.group = fake, config, folder, group
        fake.group = group
        display = Display(Console(quiet=True), "run", config.run.steps)
        self.bus, self.requests = EventBus(config, folder, display, 0, None), ControlRequests()
        self.bus.ranks_placed(group)
        self.copies = copies.GroupCopies(group)
        self.recovery = recovery.Recovery(config, group, self.bus, self.requests, Start(), self.copies)
        group.restore(Start())
        group.collect(group.submit_run(0, 7))
        self.before = [actor.rank for actor in group.actors]

    def lose(self, *ranks: int) -> WorkerError:
        """Kills ranks; returns the fault as the driver hears of it."""
        for rank in ranks:
            self.group.actors[rank].rank.is_alive = False
        return WorkerError(f"rank {ranks[0]} died", ranks[0], "", ranks, "killed", "ray")

    def save(self, step: int) -> None:
        """Has a checkpoint of `step` steps."""
        save_small(self.folder.checkpoint(step), step)

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [row for row in read_lines(self.folder.path / "journal.jsonl") if row["event"] == kind]

    def versions(self) -> list[int]:
        assert all(rank.is_alive for rank in self.fake.members())
        return [rank.version for rank in self.fake.members()]
