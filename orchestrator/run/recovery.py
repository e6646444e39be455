"""What the driver does about a fault: the run continues from the newest surviving state, or ends and says why."""

from __future__ import annotations

import time
from collections.abc import Callable

from pentad.orchestrator.cluster.faults import WorkerError
from pentad.orchestrator.cluster.group import Tick, WorkerGroup
from pentad.orchestrator.cluster.placement import Place, draining, living_bundles, order_places
from pentad.orchestrator.cluster.worker import Status
from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.monitoring.event_bus import EventBus
from pentad.orchestrator.planning.planning import shrunk_plan
from pentad.orchestrator.run import regroup
from pentad.orchestrator.run.regroup import RecoveryState
from pentad.schedules.ir.errors import PentadError

ATTEMPTS = 5  # faults during one recovery
MAX_FAULTS_WITHOUT_PROGRESS = 3
CHECK_SECONDS = 2.0  # between two checks for draining nodes and for room to grow
NOTICE_SECONDS = 15.0  # a draining node is left so long before its end; until then its ranks train
DONE = {
    "repair": "repaired",
    "checkpoint": "repaired from a checkpoint",
    "shrink": "shrunk",
    "grow": "grown back",
}


class CannotRecover(WorkerError):
    """No recovery is possible."""


class Recovery:
    """Of one run. `recover` and `regroup` put the ranks of `group` together again and return what has survived: the run
    continues from step `version` of it."""

    def __init__(
        self, config: RunConfig, group: WorkerGroup, bus: EventBus, stop_requested: Callable[[], bool]
    ) -> None:
        self.config, self.group, self.bus, self.stop_requested = config, group, bus, stop_requested
        self.full = group.plan
        self.faults = self.faults_without_progress = 0
        self.furthest, self.checked = -1, time.monotonic()
        self.leaving: tuple[int, ...] = ()  # ranks on draining nodes
        self.drain_seconds = 0.0  # until those nodes are gone: Ray moves their bundles no earlier

    def recover(self, fault: WorkerError, done: int) -> RecoveryState:
        """After a fault, with the results of `done` steps recorded. Raises the fault when the run cannot or should not
        continue."""
        self.faults += 1
        # A fault arrives before the results of the call in flight, so progress shows one fault later.
        self.faults_without_progress = self.faults_without_progress + 1 if done <= self.furthest else 1
        self.furthest = max(self.furthest, done)
        exhausted = (
            self.faults > self.config.elastic.max_failures or self.faults_without_progress > MAX_FAULTS_WITHOUT_PROGRESS
        )
        if exhausted or isinstance(fault, CannotRecover):
            raise fault
        self.bus.display.note(f"{fault}; recovering")
        lost = dict.fromkeys(fault.lost, str(fault))
        for rank in lost:
            self._record_lost(rank, fault)
        return self._attempt(lost, fault, done)

    def regroup(self, done: int) -> RecoveryState:
        """At a step boundary, with its checkpoint committed: leaves draining nodes, or grows back to the full mesh."""
        if self.leaving:
            names = ", ".join(map(self.group.label, self.leaving))
            fault = WorkerError(
                f"the node of {names} is draining", self.leaving[0], "", self.leaving, "drain", "notice"
            )
            self.leaving = ()
            self.faults -= 1  # not a failure: it was announced
            return self.recover(fault, done)
        return self._attempt({}, None, done)

    def should_regroup(self) -> bool:
        """Whether a node with ranks is draining, or a shrunk mesh has room to grow back."""
        now = time.monotonic()
        if now < self.checked + CHECK_SECONDS:
            return False
        self.checked = now
        left = {node: deadline / 1000 - time.time() for node, deadline in draining().items() if deadline}
        going = {node: seconds for node, seconds in left.items() if seconds < NOTICE_SECONDS}
        self.leaving = tuple(rank for rank, at in enumerate(self.group.places) if at.node in going)
        self.drain_seconds = max(0.0, *(going[self.group.places[rank].node] for rank in self.leaving), 0.0)
        is_short = self.group.plan.mesh.size < self.full.mesh.size
        return bool(self.leaving) or (is_short and len(living_bundles(self.group.placement)) >= self.full.mesh.size)

    def _attempt(self, lost: dict[int, str], fault: WorkerError | None, done: int) -> RecoveryState:
        """Recovers; a fault meanwhile adds its ranks to `lost` and starts over."""
        began = time.monotonic()
        state = RecoveryState(seconds={"detect": fault.stalled_seconds if fault else 0.0})
        self.bus.set_state("recovering")
        for _ in range(ATTEMPTS):
            try:
                regroup.fence(self.group, lost, state, self.bus.record)
                how = self._grow(state) if fault is None and not lost else self._repair(lost, state)
                break
            except CannotRecover:
                raise
            except PentadError as error:
                fault = regroup.as_worker_error(self.group, error)
                for rank in fault.lost:
                    lost.setdefault(rank, str(fault))
                    self._record_lost(rank, fault)
        else:
            assert fault is not None
            raise fault
        mesh = str(self.group.plan.mesh)
        self.bus.record(
            "recovered",
            generation=self.group.generation,
            step=state.version,
            how=how,
            mesh=mesh,
            seconds={phase: round(took, 3) for phase, took in state.seconds.items()},
            steps_replayed=max(0, done - state.version),
        )
        seconds = time.monotonic() - began
        self.bus.display.note(f"{DONE[how]} after {seconds:.1f} s on {mesh}: continuing from step {state.version}")
        return state

    def _record_lost(self, rank: int, fault: WorkerError) -> None:
        facts = {"fault": fault.fault, "detector": fault.detector, "cause": str(fault)}
        self.bus.record("lost", generation=self.group.generation, rank=rank, **facts)
        self.bus.rank_lost(rank)

    def _repair(self, lost: dict[int, str], state: RecoveryState) -> str:
        """Replaces the lost ranks, or else shrinks the mesh; returns which, as the journal has it."""
        group, complete = self.group, regroup.is_complete(self.group.plan, state)
        began = time.monotonic()
        wait, self.drain_seconds = self.config.elastic.wait_seconds + self.drain_seconds, 0.0
        bundles = {rank: group.bundles[rank] for rank in lost}
        created = regroup.create_actors(group, group.plan, bundles, wait, self._sleep) if lost else {}
        for rank, (actor, place) in (created or {}).items():
            group.replace_actor(rank, actor, place)
        state.add_seconds("place", began)
        if created is None:
            return self._shrink(lost, state, complete)
        lost.clear()
        self._start_generation(state, keep=complete)
        if not complete:
            self._restore(state)
            return "checkpoint"
        began = time.monotonic()
        group.receive(regroup.sources(group.plan, state.current), state.version, tick=self._hang_detector())
        state.add_seconds("state", began)
        return "repair"

    def _shrink(self, lost: dict[int, str], state: RecoveryState, complete: bool) -> str:
        """Lays a smaller mesh on the living ranks, from a checkpoint of the newest state if they hold all of it."""
        group = self.group
        living = [rank for rank in range(len(group.actors)) if rank not in lost]
        plan = shrunk_plan(self.config, self.full, len(living))
        if plan is None:
            least = self.config.elastic.min_ranks or self.full.mesh.size
            raise CannotRecover(
                f"{next(iter(lost.values()))}; no node with room for it joined within elastic.wait_seconds = "
                f"{self.config.elastic.wait_seconds:g}, and {len(living)} ranks make no mesh of elastic.min_ranks = "
                f"{least} or more",
                min(lost),
                "",
            )
        began = time.monotonic()
        if complete:
            self._save(state)
        members, spare = living[: plan.mesh.size], living[plan.mesh.size :]
        regroup.kill(group, spare)
        group.adopt(
            plan,
            [group.bundles[rank] for rank in members],
            [group.actors[rank] for rank in members],
            [group.places[rank] for rank in members],
        )
        self.bus.folder.replan(plan)
        state.add_seconds("state", began)
        lost.clear()
        self._start_generation(state, keep=False)
        self._restore(state)
        return "shrink"

    def _grow(self, state: RecoveryState) -> str:
        """Back to the full mesh, from the checkpoint of this step boundary."""
        group, plan = self.group, self.full
        nodes = living_bundles(group.placement)
        if len(nodes) < plan.mesh.size:  # a node has left again
            return self._repair({}, state)
        current = dict(zip(group.bundles, zip(group.actors, group.places, strict=True), strict=True))
        gpus = {bundle: place.gpu for bundle, (_, place) in current.items()}
        places = [Place(bundle, node, gpus.get(bundle, -1)) for bundle, node in sorted(nodes.items())]
        order = order_places(places, plan.mesh, tensor_across_nodes=plan.tp_across_nodes)
        missing = {rank: bundle for rank, bundle in enumerate(order) if bundle not in current}
        created = regroup.create_actors(group, plan, missing, self.config.elastic.wait_seconds, self._sleep)
        if created is None:
            return self._repair({}, state)
        ranks = [created[rank] if rank in created else current[bundle] for rank, bundle in enumerate(order)]
        group.adopt(plan, order, [actor for actor, _ in ranks], [place for _, place in ranks])
        self.bus.folder.replan(plan)
        self._start_generation(state, keep=False)
        self._restore(state)
        return "grow"

    def _start_generation(self, state: RecoveryState, *, keep: bool) -> None:
        began = time.monotonic()
        self.group.start_generation(began + self.config.cluster.start_timeout_seconds, keep=keep)
        state.add_seconds("connect", began)

    def _save(self, state: RecoveryState) -> None:
        """Writes a checkpoint of the newest state, each parameter shard by one of its current holders."""
        began, group, path = time.monotonic(), self.group, self.bus.folder.checkpoint(state.version)
        if max(self.bus.folder.saved(), default=0) == state.version:
            return
        plan, current = group.plan, set(state.current)
        owners = {shard: min(current.intersection(plan.holders(shard))) for shard in plan.param_shards}
        owned = {
            rank: tuple(shard for shard, owner in owners.items() if owner == rank) for rank in set(owners.values())
        }
        shards = group.save_shards(path, state.version, owned)
        writer = min(owned)
        (commit,) = group.submit_commit(path, state.version, shards, self.config.checkpoint.keep, writer)
        group.answer(writer, commit)
        seconds, size = round(time.monotonic() - began, 3), sum(shard["bytes"] for shard in shards)
        self.bus.record("checkpoint", generation=group.generation, step=state.version, seconds=seconds, bytes=size)

    def _restore(self, state: RecoveryState) -> None:
        from pentad.workers.checkpoint.checkpoint import (
            newest,  # imports torch, which a run without faults does not need
        )

        began = time.monotonic()
        found = newest(self.bus.folder.checkpoints).checkpoint
        state.version = found.step if found else 0
        self.group.restore(found.folder if found else None, state.version, tick=self._hang_detector())
        state.add_seconds("state", began)

    def _hang_detector(self) -> Tick:
        """A tick that raises WorkerError for ranks that stop answering while state is transferred: no deadline ends
        that otherwise."""
        began = time.monotonic()

        def check(statuses: dict[int, Status]) -> None:
            limit = time.monotonic() - self.config.elastic.hang_seconds
            last = self.group.last_heard
            silent = tuple(r for r in range(len(self.group.actors)) if max(began, last.get(r, began)) < limit)
            if silent:
                text = f"{', '.join(map(self.group.label, silent))} stopped answering during a recovery"
                raise WorkerError(text, silent[0], text, silent, "hang", "heartbeat")

        return check

    def _sleep(self, seconds: float) -> None:
        """Waits for a node to join, unless the run is asked to stop."""
        if self.stop_requested():
            raise CannotRecover("the run was asked to stop while it waited for a node to join", 0, "")
        time.sleep(seconds)
