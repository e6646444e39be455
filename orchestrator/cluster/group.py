"""The placed set of workers: started together, called together, and stopped as soon as one of them fails."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from pentad.orchestrator.cluster.faults import Failure, WorkerError, error_of, grace_seconds
from pentad.orchestrator.cluster.held_lease import HeldLease
from pentad.orchestrator.cluster.placement import (
    Place,
    Placement,
    bundle_places,
    order_places,
    release,
    strategy_of,
    strategy_on,
)
from pentad.orchestrator.cluster.rank_status import Status, read_status, streams_of
from pentad.orchestrator.cluster.worker import Actor, StaleGeneration, WorkerPlace
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.batch import batch_of
from pentad.schedules.spec.plan import ParamShard, Plan, ShardPart
from pentad.workers.checkpoint.checkpoint import Start, Unreadable
from pentad.workers.checkpoint.location import Location
from pentad.workers.data.mixture import drawn_by

Refs = dict[int, Any]  # pending answers by rank
Member = tuple[Any, WorkerPlace]  # a rank's actor, and where it runs
Tick = Callable[[dict[int, Status]], None]

POLL_SECONDS = 0.1  # no signal is handled while Ray waits
STATUS_SECONDS = 0.5
LAST_STATUS_SECONDS = 2.0
CLOSE_SECONDS = 5.0


class WorkerGroup(AbstractContextManager["WorkerGroup"]):
    """Workers by rank. A call goes to all of them and returns all answers by rank, or raises WorkerError."""

    def __init__(
        self, plan: Plan, placement: Placement, generation: int, runner: str, lease: HeldLease | None = None
    ) -> None:
        """With a `lease` the workers outlive this driver."""
        self.plan, self.placement, self.generation, self.runner = plan, placement, generation, runner
        self.lease = lease
        self.actors: list[Any] = []
        self.bundles: list[int] = []  # bundles of the placement group, by rank
        self.rooms: list[Any] = []  # where the bundles were when their ranks were started
        self.spares: list[Any] = []  # actors that are not ranks; they end with the group
        self.places: tuple[WorkerPlace, ...] = ()
        self.offsets: tuple[float, ...] = ()
        self.device_name = ""
        self.skipped_batches: tuple[tuple[int, int], ...] = ()  # see `batch_of`
        self._requested: dict[int, Any] = {}  # pending status calls
        self._statuses: dict[int, Status] = {}
        self.last_heard: dict[int, float] = {}  # monotonic second of each rank's last answer
        self._polled = time.monotonic()
        self.storing: Refs = {}  # the last commit or discard of a checkpoint, which a fence waits for
        self.begun: dict[Any, tuple[Any, Any]] = {}  # spares already loading: their arguments and pending answers
        self._failed = self._stopped = False
        self.superseded = False  # whether a rank refused a fence because another driver has fenced it

    @staticmethod
    def start(
        plan: Plan,
        placement: Placement,
        timeout_seconds: float,
        *,
        runner: str,
        generation: int = 1,
        lease: HeldLease | None = None,
        progress: Callable[[str], None] = lambda phase: None,
        placed: Callable[[WorkerGroup, Callable[[str], None]], None] = lambda group, progress: None,
    ) -> WorkerGroup:
        """Creates and connects one worker per rank in `placement`, which the group then owns, and reports each phase to
        `progress`; `placed` is called before the ranks load. Raises PentadError, leaving nothing behind, if any of that
        fails or takes more than `timeout_seconds`."""
        deadline = time.monotonic() + timeout_seconds
        group = WorkerGroup(plan, placement, generation, runner, lease)
        try:
            group._create(deadline)
            placed(group, progress)
            progress("loading the ranks")
            group.load(deadline, keep=False)
            progress("connecting the ranks")
            group.connect(deadline)
        except BaseException:
            group.stop(kill=True)
            raise
        return group

    def load(self, deadline: float, *, keep: bool) -> None:
        """Creates a runner on every rank for this plan and generation; with `keep` it inherits the previous runner's
        state. Raises WorkerError, or PentadError if it is not done by the monotonic second `deadline`."""
        plan, bundles, calls = ray.put(self.plan), tuple(self.bundles), dict[int, Any]()
        for rank, actor in enumerate(self.actors):
            begun, answer = self.begun.pop(actor, (None, None))
            is_begun = begun == (self.generation, self.plan, rank, bundles)
            calls[rank] = answer if is_begun else actor.start.remote(self.generation, plan, rank, bundles, keep)
        self.device_name = self.collect(calls, deadline=deadline)[0]

    def connect(self, deadline: float) -> None:
        """Connects the runners. Raises as `load` does."""
        self.offsets = tuple(self._clock_offset(rank, deadline) for rank in range(self.plan.mesh.size))
        left = max(0.1, deadline - time.monotonic())
        (address,) = self.collect({0: self.call_runner(0, "serve", self.places[0].ip, left)}, deadline=deadline)
        self.collect(self._call_runners("connect", address, left), deadline=deadline)

    def check_folder(self, folder: Location, key: str) -> None:
        """Raises PentadError, naming the configuration's `key`, unless every rank can access the folder of the run's
        checkpoints, which all ranks write and read."""
        for rank, problem in enumerate(self.collect(self._call("folder_problem", str(folder)))):
            if problem is not None:
                where = f"{key} has {folder}, which {self.label(rank)} does not see ({problem})"
                raise PentadError(f"{where}: expected storage that all ranks share")

    def restore(self, start: Start, tick: Tick | None = None) -> None:
        """Loads the state that training starts from on every rank. Raises Damaged or Unreadable if a rank finds the
        checkpoint so; then no rank has a state, and another one can be restored."""
        folder = str(start.folder) if start.folder else None
        raise_worst(self.collect(self._call_runners("restore", folder, start.step, start.optimizer), tick=tick))

    def receive(self, sources: dict[ShardPart, int], step: int, tick: Tick | None = None) -> None:
        """Broadcasts the state of each part after `step` steps from rank `sources[part]` to the part's replicas."""
        self.collect(self._call_runners("receive", sources, step), tick=tick)

    def ping(self, tick: Tick | None = None) -> None:
        """Waits for an answer from every rank. Raises WorkerError if one is gone."""
        self.collect(self._call("clock"), tick=tick)

    def submit_run(self, first_step: int, count: int, *, more: bool = False) -> Refs:
        """Queues `count` steps after the calls in flight; ranks go from one call to the next without a pause. The
        answers are lists of StepResult, with times on each rank's own monotonic clock (see `offsets`).

        With `more` the last step stays open, so that no rank waits at its end: another run, perhaps of no steps, must
        follow and returns its results.
        """
        return self._call_runners("run", first_step, count, more, self.skipped_batches)

    def submit_reserved(self) -> Refs:
        """Has every rank answer once it has memory for snapshots."""
        return self._call("reserved", self.generation)

    def submit_save(self, folder: Location, step: int) -> Refs:
        """Has every rank copy its part of a checkpoint after `step` steps, the last of which may be open, and write it
        while it trains on. Answers are WrittenShards, or a str that says why a rank could not write."""
        self._call_runners("snapshot", step)  # its errors are raised by `write`
        return self._call("write", self.generation, str(folder), step)

    def give_up_save(self, step: int) -> None:
        """Gives up a checkpoint: updates no longer wait until it is written, and no rank finishes it."""
        self.storing = {}  # a fence does not wait for it either
        self._call("give_up_save", self.generation, step)

    def submit_save_of(self, shards: dict[int, tuple[ParamShard, ...]], folder: Location, step: int) -> Refs:
        """Has each rank in `shards` write its part of those shards, in a generation that not all ranks survived."""
        return {rank: self.call_runner(rank, "save", str(folder), step, its) for rank, its in shards.items()}

    def submit_evaluate(self, step: int) -> Refs:
        """Queues the evaluation of the weights after `step` steps, none of which is open. Answers are Evaluation."""
        return self._call_runners("evaluate", step)

    def submit_check(self, step: int) -> Refs:
        """Queues a check for flipped bits after `step` steps, none of which is open. Answers are RankCheck."""
        return self._call_runners("check", step)

    def submit_commit(self, folder: Location, step: int, shards: list[dict[str, Any]], rank: int = 0) -> Refs:
        """Has a rank commit a checkpoint. The answer is a Committed."""
        plan = self.plan
        meta = {
            **{"run": plan.name, "generation": self.generation, "program": plan.program.hash},
            "mesh": asdict(plan.mesh),
            "data": drawn_by(plan.data, plan.batch.sizes, batch_of(step, self.skipped_batches)),
            "lora": None if plan.lora is None else plan.lora.plain,
            "skipped_batches": list(map(list, self.skipped_batches)),
            "moment_offset": plan.optimizer.moment_offset,
        }
        return self.submit_beside("commit", folder, step, shards, meta, rank=rank)

    def submit_beside(self, method: str, folder: Location, *arguments: Any, rank: int = 0) -> Refs:
        """Has a rank `commit`, `prune` or `discard` while training continues. A fence waits for the rank, unless it
        prunes: pruning touches no checkpoint that another generation reads or writes."""
        refs = {rank: getattr(self.actors[rank], method).remote(self.generation, str(folder), *arguments)}
        self.storing = {} if method == "prune" else refs
        return refs

    def is_ready(self, refs: Refs) -> bool:
        """Whether `collect` would return at once."""
        return len(ray.wait(list(refs.values()), num_returns=len(refs), timeout=0)[0]) == len(refs)

    def collect(self, refs: Refs, *, deadline: float = float("inf"), tick: Tick | None = None) -> list[Any]:
        """Waits for a call and returns the answers in the order of `refs`. Meanwhile `tick` gets the statuses about
        twice a second.

        Raises WorkerError or Refusal within seconds of the first failure, and PentadError at the monotonic second
        `deadline`, by which a start must be done.
        """
        pending = {ref: rank for rank, ref in refs.items()}
        values: dict[int, Any] = {}
        failures: list[Failure] = []
        until = deadline
        while pending and time.monotonic() < until:
            if self.lease is not None:
                self.lease.require()
            ready, _ = ray.wait(list(pending), timeout=max(0.0, min(POLL_SECONDS, until - time.monotonic())))
            for ref in ready:
                rank = pending.pop(ref)
                try:
                    values[rank] = ray.get(ref)
                except RayError as error:
                    failures.append(Failure(rank, error))
            if failures:
                until = min(until, time.monotonic() + grace_seconds(failures))
            elif time.monotonic() > self._polled + STATUS_SECONDS:
                self._polled = time.monotonic()
                statuses = self.statuses()
                if tick:
                    tick(statuses)
        if failures:
            fault = error_of(self, failures)
            self._failed |= isinstance(fault, WorkerError)
            raise fault
        if pending:
            late = ", ".join(map(self.label, sorted(pending.values())))
            raise PentadError(f"cluster.start_timeout_seconds was too short: {late} did not start within it")
        return [values[rank] for rank in refs]

    def gather(self, refs: Refs, seconds: float) -> tuple[dict[int, Any], dict[int, str]]:
        """The answers by rank, and the causes of those missing after `seconds`. Never raises."""
        ranks = {ref: rank for rank, ref in refs.items()}
        ready, late = ray.wait(list(ranks), num_returns=len(ranks), timeout=seconds) if ranks else ([], [])
        answers, missing = {}, {ranks[ref]: f"no answer within {seconds:g} s" for ref in late}
        for ref in ready:
            try:
                answers[ranks[ref]] = ray.get(ref)
            except RayError as error:
                missing[ranks[ref]] = Failure(ranks[ref], error).cause
                self.superseded |= isinstance(getattr(error, "cause", None), StaleGeneration)
        return answers, missing

    def statuses(self) -> dict[int, Status]:
        """The last known status of each rank. Never waits; requests a new one from each rank that has answered."""
        for rank, actor in enumerate(self.actors):
            requested = self._requested.get(rank)
            if requested is not None:
                if not ray.wait([requested], timeout=0)[0]:
                    continue
                with suppress(RayError):  # a rank that is gone has no status
                    self._statuses[rank] = ray.get(requested)
                    self.last_heard[rank] = time.monotonic()
            self._requested[rank] = actor.status.remote()
        return dict(self._statuses)

    def stop(self, *, kill: bool = False) -> None:
        """Closes the ranks within CLOSE_SECONDS (not after a failure), kills them, and frees the placement."""
        if self._stopped:
            return
        self._stopped = True
        if self.lease is not None and self.lease.is_lost():
            return  # the ranks are another driver's now
        if not (kill or self._failed):
            self.gather(self._call("close"), CLOSE_SECONDS)
        self._kill()
        release(self.placement)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.stop(kill=kind is not None)

    def label(self, rank: int) -> str:
        """A rank's name, such as 'rank 1 (dp0 pp1, node 10.0.0.2, pid 4711)'."""
        place = f", node {self.places[rank].ip}, pid {self.places[rank].pid}" if self.places else ""
        return f"rank {rank} ({self.plan.mesh.coordinates(rank)}{place})"

    def peek(self, rank: int) -> Status | None:
        """The status of a rank that does not answer, from its progress file, read on its node; None for GPU ranks."""
        if self.plan.device == "cuda":
            return None  # a GPU rank's progress file only says what the host has issued
        if (status := self._read_progress(rank)) is not None:
            return status
        streams, file = streams_of(self.plan, rank), self.places[rank].progress_file
        refs = {other: self.actors[other].read_progress_of.remote(file, streams) for other in self.neighbours(rank)}
        answers, _ = self.gather(refs, LAST_STATUS_SECONDS)
        return next(iter(answers.values()), None)

    def last_status(self, rank: int, *, lives: bool) -> Status | None:
        """What a rank was doing: by its own answer if it lives, else from its progress file if that is on this node,
        else as last known."""
        if not lives:
            return self._read_progress(rank) or self._statuses.get(rank)
        answers, _ = self.gather({rank: self.actors[rank].status.remote()}, LAST_STATUS_SECONDS)
        return answers.get(rank) or self._statuses.get(rank)

    def neighbours(self, rank: int) -> list[int]:
        """The other ranks on a rank's node."""
        node = self.places[rank].node
        return [other for other, place in enumerate(self.places) if place.node == node and other != rank]

    def create_actor(self, plan: Plan, rank: int, bundle: int) -> Any:
        """A new actor for a rank of `plan` in a bundle of the placement; it may take a while to answer."""
        at = plan.mesh.coordinates(rank)
        suffix = f"-{self.generation}" if self.places else ""  # the name of a dead actor may not be free yet
        since = f", since generation {self.generation}" if self.places else ""
        name, label = f"{str(at).replace(' ', '-')}{suffix}", f"{at}{since}"
        where = strategy_of(self.placement, bundle)
        return self._new_actor(name, label, where, num_gpus=1 if plan.device == "cuda" else 0)

    def create_spare(self, node: str, number: int) -> Any:
        """A new actor on a node. It reserves nothing there, so that it can take the place of any of the node's ranks,
        whose resources Ray keeps reserved."""
        name = f"spare-{self.generation}-{number}"
        self.spares.append(self._new_actor(name, name, strategy_on(node), num_cpus=0, num_gpus=0))
        return self.spares[-1]

    def _new_actor(self, name: str, label: str, at: Any, **needs: int) -> Any:
        run = self.plan.name
        lifetime = {"namespace": self.lease.ranks, "lifetime": "detached"} if self.lease else {}
        kind = Actor.options(name=f"pentad/{run}/{name}", scheduling_strategy=at, **needs, **lifetime)
        return kind.remote(f"{run} {label}", self.runner)

    def adopt(self, plan: Plan, bundles: Sequence[int], members: Iterable[Member]) -> None:
        """Replaces all ranks with these, perhaps on another mesh."""
        actors, places = zip(*members, strict=True)
        self.plan, self.bundles, self.actors, self.places = plan, list(bundles), list(actors), places
        self.rooms = list(map(self.placement.find, bundles))
        self._requested.clear()
        self._statuses.clear()
        self.last_heard = dict.fromkeys(range(len(self.actors)), time.monotonic())

    def call_runner(self, rank: int, method: str, *arguments: Any) -> Any:
        """Calls a method of one rank's runner; returns the pending answer."""
        name = f"{method}{arguments} in generation {self.generation}"  # shown on the actor's page in the dashboard
        return self.actors[rank].call.options(name=name).remote(self.generation, method, *arguments)

    def _create(self, deadline: float) -> None:
        """Creates the actors in node order, and once more if their GPUs turn out to be in another order."""
        mesh, across = self.plan.mesh, self.plan.tp_across_nodes
        order = order_places(bundle_places(self.placement), mesh, tensor_across_nodes=across)
        for _ in range(2):
            self.bundles = list(order)
            self.actors = [self.create_actor(self.plan, rank, bundle) for rank, bundle in enumerate(order)]
            self.places = tuple(self.collect(self._call("place"), deadline=deadline))
            places = [Place(bundle, at.node, at.gpu) for bundle, at in zip(order, self.places, strict=True)]
            better = order_places(places, mesh, tensor_across_nodes=across)
            if better == order:
                self.rooms = list(map(self.placement.find, order))
                return
            self._kill()
            order, self.places = better, ()
        raise AssertionError("a bundle of a placement group did not keep its GPU")

    def _call(self, method: str, *arguments: Any) -> Refs:
        return {rank: getattr(actor, method).remote(*arguments) for rank, actor in enumerate(self.actors)}

    def _call_runners(self, method: str, *arguments: Any) -> Refs:
        return {rank: self.call_runner(rank, method, *arguments) for rank in range(len(self.actors))}

    def _read_progress(self, rank: int) -> Status | None:
        """The status in a rank's progress file, if that is on this node: even that of a process that is gone."""
        if not self.places or self.places[rank].node != ray.get_runtime_context().get_node_id():
            return None
        with suppress(OSError, struct.error):
            return read_status(Path(self.places[rank].progress_file), streams_of(self.plan, rank))
        return None

    def _clock_offset(self, rank: int, deadline: float) -> float:
        """Seconds to add to a rank's monotonic clock to get this process's: 0 on the same node, else estimated from the
        fastest of 8 round trips."""
        if self.places[rank].node == ray.get_runtime_context().get_node_id():
            return 0.0
        found = []
        for _ in range(8):
            sent = time.monotonic()
            (clock,) = self.collect({rank: self.actors[rank].clock.remote()}, deadline=deadline)
            received = time.monotonic()
            found.append((received - sent, (sent + received) / 2 - clock))
        return min(found)[1]

    def _kill(self) -> None:
        """Kills the actors and waits until Ray knows that they are dead: then their calls fail."""
        ended, self.actors, self.spares = [*self.actors, *self.spares], [], []
        for actor in ended:
            ray.kill(actor)
        self.gather({number: actor.clock.remote() for number, actor in enumerate(ended)}, CLOSE_SECONDS)


def raise_worst(problems: Iterable[PentadError | None]) -> None:
    """Raises the worst problem that a rank reports with a state, if any: Damaged before Unreadable."""
    for problem in sorted(filter(None, problems), key=lambda each: isinstance(each, Unreadable)):
        raise problem
