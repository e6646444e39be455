"""One rank of `fake_ray`, and the handle through which it is called."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ray.exceptions import ActorDiedError, RayTaskError
from small_checkpoint import problem_of, save_small

from pentad.orchestrator.cluster.rank_status import Status
from pentad.orchestrator.cluster.worker import StaleGeneration, WorkerPlace
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.simulate.timeline import Span
from pentad.schedules.spec.batch import batch_of
from pentad.schedules.spec.plan import Plan
from pentad.workers.abort import Aborted
from pentad.workers.checkpoint.checkpoint import committed, fingerprint
from pentad.workers.checkpoint.location import location
from pentad.workers.replication.parts import CopyKey, HeldPart
from pentad.workers.replication.replicator import SentPart
from pentad.workers.replication.source import CopySource
from pentad.workers.runtime.results import (
    Committed,
    EvalResult,
    Evaluation,
    LossSum,
    RankSnapshot,
    StepResult,
    WrittenShards,
)

if TYPE_CHECKING:
    from fake_ray import FakeRay

STEP_SECONDS = 0.3


class Blocked(Exception):
    """The call waits in a collective that nobody else joins."""


class Hangs(Blocked):
    """The call waits for storage, which may respond later."""


class Rank:
    """One rank's process: the methods of a Worker and of its Runner, which `call` finds by name. Its weights have
    `version` steps (-1: it has none). While it `hangs`, nothing in it responds."""

    def __init__(self, fake: FakeRay, at: int | str) -> None:
        """In a bundle, or on a node outside of any bundle."""
        self.fake = fake
        self.bundle, self.node = (at, fake.nodes[at]) if isinstance(at, int) else (-1, at)
        self.number, self.pid, self.generation, self.version = -1, 10_000_000 + len(fake.ranks), 0, -1
        self.is_alive, self.hangs, self.ready, self.copied, self.copied_to_peers = True, False, False, -1, -1
        self.hanging = False  # in a write
        self.leaving = self.node_leaving = ""  # why it, or its node, is about to end
        self.losses = (1.0,)  # of the newest step; empty if unknown to the rank
        self.results: list[StepResult] = []
        self.open: list[StepResult] = []
        self.evaluations: list[Evaluation] = []
        self.held: dict[tuple[CopyKey, int], bool] = {}  # parts, and whether they count
        self.copy_problem: PentadError | None = None  # why it cannot read copies

    def place(self) -> WorkerPlace:
        return WorkerPlace(self.node, f"10.0.0.{self.node[-1]}", -1, self.pid, f"/nowhere/{self.pid}")

    def warm(self, device: str) -> WorkerPlace:
        return self.place()

    def take(self, pid: int, gpu: int) -> WorkerPlace:
        return self.place()._replace(gpu=gpu)

    def begin(self, pid: int, gpu: int, generation: int, plan: Plan, number: int, bundles: tuple[int, ...]) -> str:
        assert self.version < 0, "a spare has no state"
        return self.start(generation, plan, number, bundles, keep=False)

    def status(self) -> Status:
        return Status(self.generation, self.version, "", 0.0, leaving=self.leaving, node_leaving=self.node_leaving)

    def clock(self) -> float:
        return self.fake.now

    def start(self, generation: int, plan: Plan, number: int, bundles: tuple[int, ...], keep: bool) -> str:
        self.generation, self.plan, self.number, self.ready, self.open = generation, plan, number, False, []
        self.hanging = False  # from now on it takes other snapshots
        if not keep:
            self.version, self.results = -1, []
        return ""

    def call(self, generation: int, method: str, *arguments: Any) -> Any:
        assert generation == self.generation, "a call of an earlier generation"
        return getattr(self, method)(*arguments)

    def serve(self, host: str, seconds: float) -> str:
        return f"{host}:1"

    def connect(self, address: str, seconds: float) -> None:
        members = self.fake.members() if self.fake.group else self.fake.ranks  # all others are gone
        started = [rank for rank in members if rank.is_alive]
        assert {rank.generation for rank in started} == {self.generation}

    def restore(self, folder: str | None, step: int, optimizer: bool) -> PentadError | None:
        assert (int(location(folder).name[5:]) if folder else 0) == step
        if folder is not None and (problem := problem_of(location(folder))) is not None:
            return problem
        self.version = step
        return None

    def receive(self, sources: dict[Any, int], step: int) -> None:
        members = self.fake.members()
        if not all(rank.is_alive and not rank.hangs for rank in members):
            raise Blocked
        assert all(members[source].version == step for source in sources.values()), "a source without the state"
        if self.version != step:
            assert set(self.plan.param_shards_of(self.number)) <= {shard for shard, _ in sources}
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
        self.evaluations.append(Evaluation(step, tuple(results)))
        return self.evaluations[-1]

    def snapshot(self, step: int) -> None:
        if self.hanging:
            self.fake.overwritten.add(step)
        if self.fake.is_broken(self.generation) and self.version != step:
            raise Blocked
        assert self.version == step
        self.copied = step

    def reserved(self, generation: int) -> None:
        if self.generation in self.fake.pinning:
            raise Blocked

    def write(self, generation: int, folder: str, step: int) -> WrittenShards | str:
        is_stuck = (step, self.number) == self.fake.writing
        if generation != self.generation:
            raise Hangs if is_stuck else Aborted
        if self.copied != step:
            raise Blocked
        self.hanging = is_stuck
        if is_stuck:
            raise Hangs
        if step in self.fake.full:
            return "folder checkpoints cannot be written (No space left on device): expected room"
        shards = self.plan.param_shards_of(self.number)
        self.fake.written.setdefault(step, []).extend(shards)
        return WrittenShards([{"bytes": 1}] * len(shards))

    def give_up_save(self, generation: int, step: int) -> None:
        assert generation == self.generation
        self.fake.given_up.add(step)

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

    def hand_over(
        self, generation: int, key: CopyKey, parts: dict[int, Any], neighbours: int, host: str, token: bytes
    ) -> str | None:
        assert generation == self.generation == key.generation and self.version == key.step and neighbours > 0
        assert set(parts.values()) <= set(self.plan.param_shards_of(self.number))
        if self.fake.full_memory:
            return "the state needs 1 byte of host memory: expected up to 0"
        self.held |= {(key, number): True for number in parts}
        return None

    def forget_copies(self, key: CopyKey | None = None) -> None:
        self.held = {each: counts for each, counts in self.held.items() if key not in (None, each[0])}

    def held_copies(self) -> tuple[str, list[HeldPart]]:
        return str(self.pid), [HeldPart(key, owner, 1, counts, {}) for (key, owner), counts in self.held.items()]

    def begin_reading(self, source: CopySource) -> None:
        assert self.version == -1, "it has a state"

    def restore_copy(self, source: CopySource) -> PentadError | None:
        assert {each.address for each in source.parts} <= {str(rank.pid) for rank in self.fake.ranks if rank.is_alive}
        problems = [rank.copy_problem for rank in self.fake.ranks if rank.is_alive]
        self.version = -1 if any(problems) else source.key.step
        return self.copy_problem

    def save(self, folder: str, step: int, shards: Any) -> list[dict[str, Any]]:
        assert self.version == step
        self.fake.written.setdefault(step, []).extend(shards)
        return [{"bytes": 1}] * len(shards)

    def commit(self, generation: int, folder: str, step: int, shards: Any, meta: Any) -> Committed:
        path = location(folder)
        if generation == self.generation:
            save_small(path, step, meta)
        if step in self.fake.committing:
            raise Hangs
        assert generation == self.generation
        return Committed(fingerprint(path), list(committed(path.parent)))

    def prune(self, generation: int, folder: str, keep: int, pinned: tuple[int, ...]) -> str:
        assert generation == self.generation
        return ""

    def discard(self, generation: int, folder: str) -> None:
        assert generation == self.generation

    def fence(self, generation: int) -> None:
        if generation <= self.generation:
            raise StaleGeneration(f"it is {self.generation} now")
        self.generation = generation

    def abort(self, generation: int) -> None:
        assert generation == self.generation

    def leave(self, generation: int) -> RankSnapshot:
        return RankSnapshot(self.version, self.ready, 1.0, tuple(self.results), self.losses, tuple(self.evaluations))

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
        self.rank, self.call = rank, partial(method, *arguments)
        self.value: Any = None
        self.error: Exception | None = None
        self.is_ready, self.waits_for_storage = rank.is_alive and not rank.hangs, False
        if self.is_ready:
            self._call()

    def _call(self) -> None:
        self.is_ready, self.waits_for_storage = True, False
        try:
            self.value = self.call()
        except Blocked as blocked:
            self.is_ready, self.waits_for_storage = False, isinstance(blocked, Hangs)
        except Exception as error:
            self.error = RayTaskError("call", "traceback", error)

    def look(self) -> bool:
        """Whether the answer is there, now that someone checks."""
        if self.waits_for_storage and self.rank.is_alive:
            self._call()
        return self.is_ready

    def get(self) -> Any:
        if not self.is_ready:
            raise ActorDiedError
        if self.error:
            raise self.error
        return self.value


class Actor:
    """A handle: `actor.METHOD.remote(...)` calls `fake.on_call`, then immediately the rank."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any) -> Ref:
            self.rank.fake.on_call(self.rank, arguments[1] if name == "call" else name)
            return Ref(self.rank, getattr(self.rank, name), arguments)

        method = SimpleNamespace(remote=remote)
        method.options = lambda **_: method
        return method
