"""How the driver handles a fault: the run continues from the newest surviving state, or ends and says why."""

from __future__ import annotations

import time
from collections.abc import Mapping

from pentad.orchestrator.cluster.copies import GroupCopies
from pentad.orchestrator.cluster.faults import Superseded, WorkerError, unresponsive
from pentad.orchestrator.cluster.group import WorkerGroup
from pentad.orchestrator.cluster.placement import drain, draining
from pentad.orchestrator.cluster.rank_status import Status
from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.monitoring.event_bus import EventBus
from pentad.orchestrator.monitoring.run_state import ControlRequests
from pentad.orchestrator.recovery.evictions import Evictions
from pentad.orchestrator.recovery.fence import CannotRecover, RecoveryState, fence, is_recordable
from pentad.orchestrator.recovery.rebalance import Rebalance
from pentad.orchestrator.recovery.regroup import Regroup
from pentad.orchestrator.recovery.replan import Replan
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.plan import Plan
from pentad.workers.checkpoint.checkpoint import Start

ATTEMPTS = 5  # faults during one recovery
MAX_FAULTS_WITHOUT_PROGRESS = 3
CHECK_SECONDS = 2.0  # between two checks for draining nodes and for room to grow
# How long before its end a draining node is left: enough for a checkpoint, or for a copy in memory. Until then its
# ranks train.
LEAVE_SECONDS, LEAVE_SECONDS_BY_COPY = 15.0, 5.0
DONE = {
    "repair": "repaired",
    "copies": "repaired from copies in memory",
    "checkpoint": "repaired from a checkpoint",
    "shrink": "shrunk",
    "grow": "grown back",
    "rebalance": "rebalanced",
    "replan": "re-planned",
    "adopt": "adopted",
}


class Recovery:
    """The recovery of one run. `recover` and `regroup` regroup the ranks of `group` and return the state that has
    survived: the run continues from its step `version`."""

    def __init__(
        self,
        config: RunConfig,
        group: WorkerGroup,
        bus: EventBus,
        requests: ControlRequests,
        start: Start,
        copies: GroupCopies,
        full: Plan | None = None,
    ) -> None:
        """`full` is the plan of the full mesh, if not that of the group."""
        self.elastic, self.group, self.bus, self.first = config.elastic, group, bus, start.step
        self.ranks = Regroup(config, group, bus, requests, start, copies, full or group.plan)
        self.evictions, self.rebalance = Evictions(config.elastic, group, bus), Rebalance(config, group, bus)
        self.replan = Replan(config, group, bus)
        self.faults = self.faults_without_progress = 0
        self.furthest, self.checked = -1, time.monotonic()
        self.leaving: tuple[int, ...] = ()  # ranks that are about to end, or to move
        self.announced: set[str] = set()  # nodes whose end has been announced
        self.wrong: set[tuple[bool, int, str, int]] = set()  # (was replaced, rank, node, GPU) of corrupt ranks
        self.fault = self.reason = ""  # why ranks leave, for the journal and in words
        self.drain_seconds = 0.0  # until draining nodes are gone: Ray moves their bundles no earlier

    def recover(self, fault: WorkerError, done: int) -> RecoveryState:
        """Recovers from a fault, with the results of `done` steps recorded. Raises the fault if the run cannot or
        should not continue."""
        self.faults += 1
        # A fault arrives before the results of the call in flight, so progress shows one fault later.
        self.faults_without_progress = self.faults_without_progress + 1 if done <= self.furthest else 1
        self.furthest = max(self.furthest, done)
        self.evictions.cancel()  # lost ranks need the room first
        self.rebalance.cancel()
        is_stuck = self.faults_without_progress > MAX_FAULTS_WITHOUT_PROGRESS
        if is_stuck or self.faults > self.elastic.max_failures or isinstance(fault, CannotRecover):
            raise fault
        self._require_new_place(fault)
        self.bus.display.note(f"{fault}; recovering")
        return self._attempt(fault, done)

    def adopt(self, lost: Mapping[int, str], done: int) -> RecoveryState:
        """Takes over the ranks that a former driver left, with `done` steps recorded; replaces the `lost` ones."""
        for rank, cause in lost.items():
            facts = {"fault": "killed", "detector": "adoption", "cause": cause}
            self.bus.record("lost", generation=self.group.generation, rank=rank, **facts)
        return self._attempt(None, done, RecoveryState(lost=dict(lost)), adopts=True)

    def regroup(self, done: int) -> RecoveryState:
        """At a step boundary: replaces ranks that are about to end or to move, whose state is in a checkpoint or a copy
        in memory; or moves layers, changes the compute order, or grows back to the full mesh."""
        if not self.leaving:
            return self._attempt(None, done)
        text = f"{', '.join(map(self.group.label, self.leaving))} {self.reason}"
        moves = self.fault == "slow"
        if moves:
            self.evictions.move(done)
        fault = WorkerError(text, self.leaving[0], "", self.leaving, self.fault, "times" if moves else "notice")
        self.leaving = ()
        self.faults -= 1  # not a failure: it was announced
        return self.recover(fault, done)

    def end_generation(self) -> RecoveryState:
        """Fences the ranks, none of which is lost, when a run ends because one of them failed; returns their state."""
        state = RecoveryState()
        fence(self.group, state, self.bus.record)
        return state

    def should_regroup(self, statuses: Mapping[int, Status]) -> tuple[int, ...] | None:
        """The ranks that are about to end, by their status or because their node is draining, or that move because they
        are slow. Empty if no rank leaves but a shrunk mesh can grow back, or layers or the order are to change. None if
        everything can stay as it is."""
        now = time.monotonic()
        if told := [rank for rank, status in statuses.items() if status.leaving]:
            self.leaving, self.drain_seconds = tuple(told), 0.0
            self.fault, self.reason = "terminated", statuses[told[0]].leaving
            return self.leaving
        if now < self.checked + CHECK_SECONDS:
            return None
        self.checked = now
        self.ranks.spares.keep()
        self._drain_announced(statuses)
        before = LEAVE_SECONDS_BY_COPY if self.elastic.replicate_every else LEAVE_SECONDS
        left = {node: deadline / 1000 - time.time() for node, deadline in draining().items() if deadline}
        leaving = {
            rank: left[at.node] for rank, at in enumerate(self.group.places) if left.get(at.node, before) < before
        }
        self.leaving, self.drain_seconds = tuple(leaving), max(0.0, *leaving.values(), 0.0)
        self.fault, self.reason = "drain", "on a draining node"
        if not leaving and self.ranks.is_full and (moving := self.evictions.due()):
            self.leaving, self.fault, self.reason = moving, "slow", f"to be moved: {self.evictions.reason}"
        if self.leaving or self.ranks.can_grow():
            return self.leaving
        return () if self.ranks.is_full and self._plan_changes() else None

    def _plan_changes(self) -> bool:
        plan = self.group.plan
        return bool(self.replan.due(plan, self.ranks.config) or self.rebalance.due(plan))

    def _drain_announced(self, statuses: Mapping[int, Status]) -> None:
        """Drains each node whose end elastic.notice announces, once."""
        for rank, status in statuses.items():
            node = self.group.places[rank].node
            if not status.node_leaving or node in self.announced:
                continue
            self.announced.add(node)
            accepted = drain(node, self.elastic.notice_seconds, status.node_leaving)
            facts = {"generation": self.group.generation, "rank": rank, "node": node, "drains": accepted}
            self.bus.record("notice", **facts, cause=status.node_leaving)
            rest = "" if accepted else ", but Ray does not drain it: its loss is found when it happens"
            self.bus.display.note(f"the node of {self.group.label(rank)} is about to end ({status.node_leaving}){rest}")

    def _attempt(
        self, fault: WorkerError | None, done: int, state: RecoveryState | None = None, *, adopts: bool = False
    ) -> RecoveryState:
        """Recovers; a further fault meanwhile adds to the lost ranks and starts over. Without a `fault`, this driver
        `adopts` the ranks or makes a planned change."""
        began, state = time.monotonic(), state or RecoveryState()
        state.seconds["detect"] = fault.stalled_seconds if fault else 0.0
        self.bus.set_state("recovering")
        if fault is not None:
            self._record_lost(state, fault)
        for _ in range(ATTEMPTS):
            try:
                self.ranks.spares.begin(state.lost)
                fence(self.group, state, self.bus.record)
                if len(state.lost) == len(self.group.actors) and done <= self.first:
                    raise self._hopeless(state, fault)
                if state.corrupt:  # steps since the last check may have used wrong data
                    state.current = ()
                    self.ranks.copies.forget()
                if adopts:
                    how = self._repair_adopted(state, done)
                elif fault is None and not state.lost:
                    how = self._change(state)
                else:
                    wait, self.drain_seconds = self.elastic.wait_seconds + self.drain_seconds, 0.0
                    how = self.ranks.repair(state, wait)
                break
            except (CannotRecover, Superseded):
                raise
            except PentadError as error:
                fault = as_worker_error(self.group, error)
                self._record_lost(state, fault)
        else:
            assert fault is not None
            raise fault
        self.ranks.spares.end_begun()
        self.ranks.end_former()
        mesh = str(self.group.plan.mesh)
        self.bus.record(
            "recovered",
            generation=self.group.generation,
            step=state.version,
            how=how,
            mesh=mesh,
            seconds={phase: round(took, 3) for phase, took in state.seconds.items()},
            spares=state.spares,
            steps_replayed=max(0, done - state.version),
        )
        self.checked = time.monotonic()  # run the first step before starting new spares
        seconds = self.checked - began
        self.bus.display.note(f"{DONE[how]} after {seconds:.1f} s on {mesh}: continuing from step {state.version}")
        return state

    def _hopeless(self, state: RecoveryState, fault: WorkerError | None) -> CannotRecover:
        """The error if all ranks are lost before a step is complete: new ones would most likely end the same way."""
        cause = next(iter(state.lost.values()))
        text = f"{cause}; all ranks were lost before a step was complete"
        detail = fault.detail if fault else text
        return CannotRecover(text, min(state.lost), detail, fault=fault.fault if fault else "")

    def _change(self, state: RecoveryState) -> str:
        """Makes the planned change for `regroup` when no rank leaves; returns its name in the journal."""
        if (order := self.replan.take(self.group.plan)) is not None:
            self.rebalance.cancel()
            self.rebalance.config = order.found.config
            return self.ranks.change_order(state, order)
        if (layers := self.rebalance.take()) is not None:
            return self.ranks.move_layers(state, layers)
        return self.ranks.grow(state)

    def _repair_adopted(self, state: RecoveryState, done: int) -> str:
        if not is_recordable(state, done):  # the folder is not as the former driver left it
            state.current = ()
        is_full = not state.lost
        how = self.ranks.repair(state, self.elastic.wait_seconds)
        return "adopt" if is_full and how == "repair" else how

    def _require_new_place(self, fault: WorkerError) -> None:
        """Raises the fault of a corrupt rank if the same remedy has already failed in the same place."""
        if fault.fault != "corrupt":
            return
        replaces, ranks = bool(fault.lost), fault.lost or (fault.rank,)
        places = {(replaces, rank, self.group.places[rank].node, self.group.places[rank].gpu) for rank in ranks}
        if places & self.wrong:
            text = f"{fault}; in the same place, this happened before"
            raise WorkerError(text, fault.rank, fault.detail, fault.lost, fault.fault, fault.detector)
        self.wrong |= places

    def _record_lost(self, state: RecoveryState, fault: WorkerError) -> None:
        state.corrupt |= fault.fault == "corrupt"
        for rank in fault.lost:
            state.lost.setdefault(rank, str(fault))
            facts = {"fault": fault.fault, "detector": fault.detector, "cause": str(fault)}
            self.bus.record("lost", generation=self.group.generation, rank=rank, **facts)
            self.bus.rank_lost(rank)


def as_worker_error(group: WorkerGroup, error: PentadError) -> WorkerError:
    """The error of a failed recovery, with the ranks that do not answer as lost. Raises it if all answer."""
    if isinstance(error, WorkerError):
        return error
    silent, _ = unresponsive(group)
    if not silent:
        raise error
    return WorkerError(str(error), silent[0], str(error), silent, "node", "heartbeat")
