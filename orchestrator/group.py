"""The placed set of workers: started together, called together, and stopped as soon as one of them fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pentad.orchestrator.placement import Place, bundle_places, order_places, release
from pentad.orchestrator.worker import RUNNER, Actor, Status, Where, read_status
from pentad.schedules.errors import PentadError
from pentad.schedules.plan import Plan
from pentad.workers.results import StepResult

Refs = Sequence[Any]  # one pending answer a rank
Tick = Callable[[dict[int, Status]], None]

# Seconds to wait for a better culprit: a rank that lost its peers usually reports before the peer's death is known.
GRACE, GRACE_OF_VICTIM = 0.5, 5.0
VICTIM = ("connection closed", "connection reset", "connection refused", "socket closed", "broken pipe", "nccl", "gloo")
POLL_SECONDS = 0.1  # Ray lets no signal through while it waits
STATUS_SECONDS = 1.0
LAST_WORD_SECONDS = 2.0
CLOSE_SECONDS = 5.0
LOG_CHARACTERS = 10_000


class WorkerError(PentadError):
    """A rank failed. `detail` is the whole account: a traceback, or what Ray knows of a death."""

    def __init__(self, message: str, rank: int, detail: str) -> None:
        super().__init__(message)
        self.rank, self.detail = rank, detail


@dataclass(frozen=True)
class Failure:
    """One rank's error as it arrived."""

    rank: int
    error: RayError

    @property
    def died(self) -> bool:
        return not isinstance(self.error, RayTaskError)

    @property
    def victim(self) -> bool:
        """Whether this only tells that another rank is gone."""
        return not self.died and any(sign in str(self.error).lower() for sign in VICTIM)

    @property
    def cause(self) -> str:
        """One line."""
        if not self.died:
            error = getattr(self.error, "cause", self.error)
            return f"{type(error).__name__}: {' '.join(str(error).split())}"
        lines = str(self.error).strip().splitlines()
        told = " ".join(lines).partition("exit detail: ")[2] or lines[-1]
        if "connection error code 2" in told:  # Ray's word for an end without a word
            return "its process was killed or crashed"
        return " ".join(told.split()).rstrip(".")


class WorkerGroup:
    """Workers by rank. Every call goes to all of them and is answered by all of them, or raises WorkerError."""

    def __init__(self, plan: Plan, placement: PlacementGroup) -> None:
        self.plan, self.placement = plan, placement
        self.actors: list[Any] = []
        self.places: tuple[Where, ...] = ()
        self.offsets: tuple[float, ...] = ()
        self.device_name = ""
        self._asked: dict[int, Any] = {}
        self._known: dict[int, Status] = {}
        self._heard = time.monotonic()
        self._failed = self._stopped = False

    @staticmethod
    def start(
        plan: Plan, placement: PlacementGroup, timeout_seconds: float, *, epoch: int = 1, runner: str = RUNNER
    ) -> WorkerGroup:
        """Creates and connects a worker a rank in the places reserved for them, which are the group's from now on.

        Raises PentadError, with nothing left, when that fails or takes longer.
        """
        deadline = time.monotonic() + timeout_seconds
        group = WorkerGroup(plan, placement)
        try:
            group._create(runner, deadline)
            shared = ray.put(plan)
            calls = [actor.start.remote(shared, rank, epoch) for rank, actor in enumerate(group.actors)]
            group.device_name = group._collect(calls, deadline)[0]
            group.offsets = tuple(map(group._offset, range(plan.mesh.size)))
            (port,) = group._collect([group.actors[0].free_port.remote()], deadline)
            left = max(0.1, deadline - time.monotonic())
            group._collect(group._call("connect", f"{group.places[0].ip}:{port}", left), deadline)
        except BaseException:
            group.stop(kill=True)
            raise
        return group

    def check_folder(self, folder: Path) -> None:
        """Raises PentadError when a rank's node does not have the run's folder: all write and read there."""
        for rank, there in enumerate(self._collect(self._call("sees", str(folder)))):
            if not there:
                raise PentadError(
                    f"run.folder has {folder}, which {self.label(rank)} does not see, wanted storage that all share"
                )

    def restore(self, folder: Path | None) -> None:
        """Fills every rank's state from a checkpoint; None leaves the first values."""
        self._collect(self._call("restore", str(folder) if folder else None))

    def run(self, first_step: int, count: int) -> list[list[StepResult]]:
        """Runs `count` steps; results by rank, times on this host's monotonic clock where ranks share it."""
        return self.collect(self.submit_run(first_step, count))

    def save(self, folder: Path, step: int) -> list[dict[str, Any]]:
        """Has all shards of a checkpoint written; `step` steps are done."""
        return [shard for shards in self.collect(self.submit_save(folder, step)) for shard in shards]

    def submit_run(self, first_step: int, count: int) -> Refs:
        """Queues a `run` behind what the ranks are doing; they go from call to call with no pause."""
        return self._call("run", first_step, count)

    def submit_save(self, folder: Path, step: int) -> Refs:
        return self._call("save", str(folder), step)

    def submit_commit(
        self, folder: Path, step: int, shards: list[dict[str, Any]], meta: dict[str, Any], keep: int
    ) -> Refs:
        """Has rank 0 commit a checkpoint and discard older ones, beside the training."""
        return [self.actors[0].commit.remote(str(folder), step, shards, meta, keep)]

    def ready(self, refs: Refs) -> bool:
        """Whether `collect` would return at once."""
        return len(ray.wait(list(refs), num_returns=len(refs), timeout=0)[0]) == len(refs)

    def collect(self, refs: Refs, *, tick: Tick | None = None) -> list[Any]:
        """Waits for a call; answers by rank. `tick` is told the statuses once a second meanwhile.

        Raises WorkerError within seconds of the first rank's failure.
        """
        return self._collect(refs, tick=tick)

    def statuses(self) -> dict[int, Status]:
        """What each rank last said it does, asking again those that have answered; never waits."""
        for rank, actor in enumerate(self.actors):
            asked = self._asked.get(rank)
            if asked is not None:
                if not ray.wait([asked], timeout=0)[0]:
                    continue
                with suppress(RayError):  # a rank that has not begun has no state
                    self._known[rank] = ray.get(asked)
            self._asked[rank] = actor.status.remote()
        return dict(self._known)

    def stop(self, *, kill: bool = False) -> None:
        """Closes the ranks, kills those that do not within seconds (all of them after a failure), frees the places."""
        if self._stopped:
            return
        self._stopped = True
        if not (kill or self._failed):
            ray.wait(self._call("close"), num_returns=len(self.actors), timeout=CLOSE_SECONDS)
        self._kill()
        release(self.placement)

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.stop(kill=kind is not None)

    def label(self, rank: int) -> str:
        """'rank 1 (dp0 pp1, node 10.0.0.2, pid 4711)'"""
        place = f", node {self.places[rank].ip}, pid {self.places[rank].pid}" if self.places else ""
        return f"rank {rank} ({self.plan.mesh.coordinates(rank)}{place})"

    def _create(self, runner: str, deadline: float) -> None:
        """Creates actors in the order of their nodes, then, if their GPUs ask for another order, once more in that."""
        order = order_places(bundle_places(self.placement), self.plan.mesh)
        for _ in range(2):
            self.actors = [self._actor(rank, bundle, runner) for rank, bundle in enumerate(order)]
            self.places = tuple(self._collect(self._call("where"), deadline))
            places = [Place(bundle, at.node, at.gpu) for bundle, at in zip(order, self.places, strict=True)]
            better = order_places(places, self.plan.mesh)
            if better == order:
                return
            self._kill()
            order, self.places = better, ()
        raise AssertionError("a bundle of a placement group did not keep its GPU")

    def _actor(self, rank: int, bundle: int, runner: str) -> Any:
        at = self.plan.mesh.coordinates(rank)
        kind = Actor.options(
            name=f"pentad/{self.plan.name}/{str(at).replace(' ', '-')}",
            num_gpus=1 if self.plan.device == "cuda" else 0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self.placement, placement_group_bundle_index=bundle),
        )
        return kind.remote(f"{self.plan.name} {at}", runner)

    def _call(self, method: str, *arguments: Any) -> Refs:
        return [getattr(actor, method).remote(*arguments) for actor in self.actors]

    def _collect(self, refs: Refs, deadline: float = float("inf"), tick: Tick | None = None) -> list[Any]:
        pending = {ref: rank for rank, ref in enumerate(refs)}
        values: dict[int, Any] = {}
        failures: list[Failure] = []
        until = deadline
        while pending and time.monotonic() < until:
            ready, _ = ray.wait(list(pending), timeout=max(0.0, min(POLL_SECONDS, until - time.monotonic())))
            for ref in ready:
                rank = pending.pop(ref)
                try:
                    values[rank] = ray.get(ref)
                except RayError as error:
                    failures.append(Failure(rank, error))
            if failures:
                until = min(until, time.monotonic() + _patience(failures))
            elif time.monotonic() > self._heard + STATUS_SECONDS:
                self._heard = time.monotonic()
                statuses = self.statuses()
                if tick:
                    tick(statuses)
        if failures:
            raise self._told(failures)
        if pending:
            late = ", ".join(self.label(rank) for rank in sorted(pending.values()))
            raise PentadError(f"cluster.start_timeout_seconds was not enough: {late} did not start within it")
        return [values[rank] for rank in range(len(refs))]

    def _told(self, failures: list[Failure]) -> PentadError:
        """What to raise: the worker's own sentence when the user is wrong, else who failed, where and why."""
        culprit = min(failures, key=lambda f: (not f.died, f.victim))  # the first of the most telling kind
        error = getattr(culprit.error, "cause", None)
        if isinstance(error, PentadError):
            return PentadError(str(error))
        self._failed = True
        state = self._last_status(culprit)
        at = f" at step {state.step}" if state and state.step >= 0 else ""
        doing = f" in {state.instruction}" if state and state.instruction else ""
        verb = "died" if culprit.died else "failed"
        message = f"{self.label(culprit.rank)} {verb}{at}{doing}: {culprit.cause}"
        return WorkerError(message, culprit.rank, f"{culprit.error}\n{self._log(culprit.rank)}")

    def _log(self, rank: int) -> str:
        """The end of what a rank printed, if Ray's logs are here: a crash leaves its trace there."""
        if not self.places:
            return ""
        at = self.places[rank]
        found = sorted(Path(at.board).parent.glob(f"logs/worker-*-{at.pid}.*"))
        return "\n".join(f"{path.name}:\n{path.read_text(errors='replace')[-LOG_CHARACTERS:]}" for path in found)

    def _last_status(self, culprit: Failure) -> Status | None:
        """What the culprit was doing: from itself if it lives, from its board if that is here, or its last word."""
        rank = culprit.rank
        try:
            if not culprit.died:
                return ray.get(self.actors[rank].status.remote(), timeout=LAST_WORD_SECONDS)
            if self.places and self.places[rank].node == ray.get_runtime_context().get_node_id():
                stream = self.plan.program.streams[self.plan.mesh.coordinates(rank).pp]
                return read_status(Path(self.places[rank].board), stream)
        except (RayError, GetTimeoutError, OSError):
            pass
        return self._known.get(rank)

    def _offset(self, rank: int) -> float:
        """Seconds from a rank's monotonic clock to this process's: 0 on the same node, else by the quickest answer."""
        if self.places[rank].node == ray.get_runtime_context().get_node_id():
            return 0.0
        found = []
        for _ in range(8):
            asked = time.monotonic()
            there = ray.get(self.actors[rank].clock.remote())
            heard = time.monotonic()
            found.append((heard - asked, (asked + heard) / 2 - there))
        return min(found)[1]

    def _kill(self) -> None:
        """Ends the processes and waits until Ray knows them dead: their calls fail then."""
        for actor in self.actors:
            ray.kill(actor)
        ray.wait(self._call("clock"), num_returns=max(1, len(self.actors)), timeout=CLOSE_SECONDS)
        self.actors = []


def _patience(failures: list[Failure]) -> float:
    """Seconds to wait for better news than these."""
    if any(failure.died for failure in failures):
        return 0.0
    return GRACE_OF_VICTIM if all(failure.victim for failure in failures) else GRACE
