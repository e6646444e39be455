"""The placed set of workers: started together, called together, and stopped as soon as one of them fails."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pentad.orchestrator.cluster.faults import Failure, WorkerError, patience
from pentad.orchestrator.cluster.placement import Place, bundle_places, order_places, release
from pentad.orchestrator.cluster.worker import RUNNER, Actor, Status, Where, read_status
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.plan import ParamShard, Plan
from pentad.workers.runtime.results import StepResult

Refs = Sequence[Any]  # one pending answer a rank
Tick = Callable[[dict[int, Status]], None]

PING_SECONDS = 1.5
POLL_SECONDS = 0.1  # Ray lets no signal through while it waits
STATUS_SECONDS = 0.5
LAST_WORD_SECONDS = 2.0
CLOSE_SECONDS = 5.0
LOG_CHARACTERS = 10_000


class WorkerGroup:
    """Workers by rank. Every call goes to all of them and is answered by all of them, or raises WorkerError."""

    def __init__(self, plan: Plan, placement: PlacementGroup, generation: int = 1, runner: str = RUNNER) -> None:
        self.plan, self.placement, self.generation, self.runner = plan, placement, generation, runner
        self.actors: list[Any] = []
        self.bundles: list[int] = []  # where each rank sits in the placement group
        self.places: tuple[Where, ...] = ()
        self.offsets: tuple[float, ...] = ()
        self.device_name = ""
        self._asked: dict[int, Any] = {}
        self._known: dict[int, Status] = {}
        self.heard: dict[int, float] = {}  # when each rank last answered, monotonic
        self._looked = time.monotonic()
        self._failed = self._stopped = False

    @staticmethod
    def start(
        plan: Plan, placement: PlacementGroup, timeout_seconds: float, *, generation: int = 1, runner: str = RUNNER
    ) -> WorkerGroup:
        """Creates and connects a worker a rank in the places reserved for them, which are the group's from now on.

        Raises PentadError, with nothing left, when that fails or takes longer.
        """
        deadline = time.monotonic() + timeout_seconds
        group = WorkerGroup(plan, placement, generation, runner)
        try:
            group._create(deadline)
            group.begin(deadline, keep=False)
        except BaseException:
            group.stop(kill=True)
            raise
        return group

    def begin(self, deadline: float, *, keep: bool) -> None:
        """Makes a runner on every rank for this plan and generation (which may `keep` what one before holds), and joins
        them. Raises WorkerError, or PentadError when it takes until after the monotonic second `deadline`."""
        shared = ray.put(self.plan)
        calls = [actor.start.remote(self.generation, shared, rank, keep) for rank, actor in enumerate(self.actors)]
        self.device_name = self._collect(calls, deadline)[0]
        self.offsets = tuple(map(self._offset, range(self.plan.mesh.size)))
        left = max(0.1, deadline - time.monotonic())
        (address,) = self._collect(
            [self.actors[0].do.remote(self.generation, "serve", self.places[0].ip, left)], deadline
        )
        self._collect(self._do("connect", address, left), deadline)

    def check_folder(self, folder: Path) -> None:
        """Raises PentadError when a rank's node does not have the run's folder: all write and read there."""
        for rank, there in enumerate(self._collect(self._call("sees", str(folder)))):
            if not there:
                raise PentadError(
                    f"run.folder has {folder}, which {self.label(rank)} does not see: expected storage that all share"
                )

    def restore(self, folder: Path | None, step: int = 0, tick: Tick | None = None) -> None:
        """Fills every rank's state from a checkpoint of `step` steps; None leaves the first values."""
        self._collect(self._do("restore", str(folder) if folder else None, step), tick=tick)

    def receive(self, sources: dict[ParamShard, int], step: int, tick: Tick | None = None) -> None:
        """Has the ranks `sources[share]` give their state of `step` steps to all holders of a share."""
        self._collect(self._do("receive", sources, step), tick=tick)

    def ping(self, tick: Tick | None = None) -> None:
        """Waits for a word of every rank; raises WorkerError when one is gone."""
        self._collect(self._call("clock"), tick=tick)

    def run(self, first_step: int, count: int) -> list[list[StepResult]]:
        """Runs `count` steps; results by rank, times on this host's monotonic clock where ranks share it."""
        return self.collect(self.submit_run(first_step, count))

    def save(self, folder: Path, step: int) -> list[dict[str, Any]]:
        """Has all shards of a checkpoint written; `step` steps are done."""
        return [shard for shards in self.collect(self.submit_save(folder, step)) for shard in shards]

    def submit_run(self, first_step: int, count: int, *, more: bool = False) -> Refs:
        """Queues a `run` behind what the ranks are doing; they go from call to call with no pause.

        With `more` the newest step stays open, so that no rank waits at its end: another `run` must follow, maybe of
        no step, and has its results.
        """
        return self._do("run", first_step, count, more)

    def submit_save(self, folder: Path, step: int) -> Refs:
        return self._do("save", str(folder), step)

    def save_shares(self, folder: Path, step: int, shares: dict[int, tuple[ParamShard, ...]]) -> list[dict[str, Any]]:
        """Has each rank of `shares` write these; for a generation that some ranks have not survived."""
        refs = {
            r: self.actors[r].do.remote(self.generation, "save", str(folder), step, its) for r, its in shares.items()
        }
        return [shard for rank, ref in refs.items() for shard in self.answer(rank, ref)]

    def submit_commit(self, folder: Path, step: int, shards: list[dict[str, Any]], keep: int, rank: int = 0) -> Refs:
        """Has a rank commit a checkpoint and discard older ones, beside the training."""
        plan = self.plan
        meta = {
            "run": plan.name,
            "generation": self.generation,
            "program": plan.program.hash,
            "mesh": asdict(plan.mesh),
        }
        meta["data"] = plan.fingerprint
        return [self.actors[rank].commit.remote(str(folder), step, shards, meta, keep)]

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
                    self.heard[rank] = time.monotonic()
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

    def _create(self, deadline: float) -> None:
        """Creates actors in the order of their nodes, then, if their GPUs ask for another order, once more in that."""
        mesh, across = self.plan.mesh, self.plan.tp_across_nodes
        order = order_places(bundle_places(self.placement), mesh, tensor_across_nodes=across)
        for _ in range(2):
            self.bundles = list(order)
            self.actors = [self.hire(rank) for rank in range(len(order))]
            self.places = tuple(self._collect(self._call("where"), deadline))
            places = [Place(bundle, at.node, at.gpu) for bundle, at in zip(order, self.places, strict=True)]
            better = order_places(places, mesh, tensor_across_nodes=across)
            if better == order:
                return
            self._kill()
            order, self.places = better, ()
        raise AssertionError("a bundle of a placement group did not keep its GPU")

    def peek(self, rank: int) -> Status | None:
        """What a rank that does not answer is at, from its board, where a process of its node can read that."""
        at, stream = self.places[rank], self.plan.program.streams[self.plan.mesh.coordinates(rank).pp]
        if self.plan.device == "cuda":
            return None  # the board of a GPU's rank says what its host has issued
        if at.node == ray.get_runtime_context().get_node_id():
            with suppress(OSError, struct.error):
                return read_status(Path(at.board), stream)
        near = [r for r, place in enumerate(self.places) if place.node == at.node and r != rank]
        answers, _ = self.gather({r: self.actors[r].peek.remote(at.board, stream) for r in near}, LAST_WORD_SECONDS)
        return next(iter(answers.values()), None)

    def seat(self, rank: int, actor: Any, where: Where) -> None:
        """Gives a rank's place to another actor."""
        self.actors[rank] = actor
        self.places = (*self.places[:rank], where, *self.places[rank + 1 :])
        self._asked.pop(rank, None)
        self._known.pop(rank, None)
        self.heard[rank] = time.monotonic()

    def hire(self, rank: int) -> Any:
        """A new actor for a rank, in its place; it may take a while until it answers."""
        at, bundle = self.plan.mesh.coordinates(rank), self.bundles[rank]
        again = f"-{self.generation}" if self.places else ""  # the name of one that is gone may not be free yet
        kind = Actor.options(
            name=f"pentad/{self.plan.name}/{str(at).replace(' ', '-')}{again}",
            num_gpus=1 if self.plan.device == "cuda" else 0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self.placement, placement_group_bundle_index=bundle),
        )
        since = f", since generation {self.generation}" if self.places else ""
        return kind.remote(f"{self.plan.name} {at}{since}", self.runner)

    def _call(self, method: str, *arguments: Any) -> Refs:
        return [getattr(actor, method).remote(*arguments) for actor in self.actors]

    def _do(self, method: str, *arguments: Any) -> Refs:
        do = f"{method}{arguments} in generation {self.generation}"  # what the actor's page shows it at
        return [actor.do.options(name=do).remote(self.generation, method, *arguments) for actor in self.actors]

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
                until = min(until, time.monotonic() + patience(failures))
            elif time.monotonic() > self._looked + STATUS_SECONDS:
                self._looked = time.monotonic()
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
        if all(failure.victim for failure in failures) and (silent := self.silent()):
            return self._lost(silent)
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
        detail = f"{culprit.error}\n{self._log(culprit.rank)}"
        lost = tuple(failure.rank for failure in failures if not failure.victim)
        how = ("killed", "ray") if culprit.died else ("peer", "peer") if culprit.victim else ("error", "ray")
        return WorkerError(message, culprit.rank, detail, lost, *how)

    def answer(self, rank: int, ref: Any, seconds: float | None = None) -> Any:
        """One rank's answer; raises WorkerError when it fails, or does not come in time."""
        try:
            return ray.get(ref, timeout=seconds)
        except RayError as error:
            raise self._told([Failure(rank, error)]) from None

    def silent(self, seconds: float = PING_SECONDS) -> tuple[int, ...]:
        """Ranks that do not answer within seconds."""
        answers, _ = self.gather({rank: actor.clock.remote() for rank, actor in enumerate(self.actors)}, seconds)
        return tuple(rank for rank in range(len(self.actors)) if rank not in answers)

    def gather(self, refs: dict[int, Any], seconds: float) -> tuple[dict[int, Any], dict[int, str]]:
        """Answers by rank, and why there is none; never raises, and takes no longer than that."""
        ranks = {ref: rank for rank, ref in refs.items()}
        ready, late = ray.wait(list(ranks), num_returns=len(ranks), timeout=seconds) if ranks else ([], [])
        answers, missing = {}, {ranks[ref]: f"no answer within {seconds:g} s" for ref in late}
        for ref in ready:
            try:
                answers[ranks[ref]] = ray.get(ref)
            except RayError as error:
                missing[ranks[ref]] = Failure(ranks[ref], error).cause
        return answers, missing

    def _lost(self, ranks: tuple[int, ...]) -> WorkerError:
        self._failed = True
        names = ", ".join(map(self.label, ranks))
        text = f"{names} {'do' if len(ranks) > 1 else 'does'} not answer, after partners lost touch"
        return WorkerError(text, ranks[0], text, ranks, "node", "peer")

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
            there = self.answer(rank, self.actors[rank].clock.remote(), 10 * PING_SECONDS)
            heard = time.monotonic()
            found.append((heard - asked, (asked + heard) / 2 - there))
        return min(found)[1]

    def _kill(self) -> None:
        """Ends the processes and waits until Ray knows them dead: their calls fail then."""
        for actor in self.actors:
            ray.kill(actor)
        ray.wait(self._call("clock"), num_returns=max(1, len(self.actors)), timeout=CLOSE_SECONDS)
        self.actors = []
