"""Regroups the ranks after a fence: replaces the lost ones, or shrinks the mesh, which later grows back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import ray

from pentad.orchestrator.cluster.copies import GroupCopies
from pentad.orchestrator.cluster.gone_nodes import forget_gone_nodes
from pentad.orchestrator.cluster.group import Member, Tick, WorkerGroup
from pentad.orchestrator.cluster.placement import Place, living_bundles, order_places
from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.monitoring.event_bus import EventBus
from pentad.orchestrator.monitoring.run_state import ControlRequests
from pentad.orchestrator.recovery.fence import (
    CannotRecover,
    RecoveryState,
    end_processes,
    handed_over,
    is_complete,
    owned,
    sources,
)
from pentad.orchestrator.recovery.hang_detection import check_answers
from pentad.orchestrator.recovery.newest_checkpoint import NewestIntact
from pentad.orchestrator.recovery.placed_plans import on_hosts, shrunk_plan
from pentad.orchestrator.recovery.rebalance import LayerChange
from pentad.orchestrator.recovery.replan import OrderChange
from pentad.orchestrator.recovery.retention import kept_steps, looked_up, newest_recorded
from pentad.orchestrator.recovery.spares import Spares
from pentad.orchestrator.search.replanned_order import EVENT
from pentad.schedules.spec.mesh import numbered
from pentad.schedules.spec.plan import Plan
from pentad.workers.checkpoint.checkpoint import Start, Unreadable, complete_folders
from pentad.workers.checkpoint.checksums import Damaged
from pentad.workers.replication.source import CopySource

CREATE_SECONDS = 30.0
RETRY_SECONDS = 0.05
READS = 2  # attempts to read copies in memory before a checkpoint is read


class Regroup:
    """Regroups the ranks of one run. `group` changes only once all its new ranks exist."""

    def __init__(
        self,
        config: RunConfig,
        group: WorkerGroup,
        bus: EventBus,
        requests: ControlRequests,
        start: Start,
        copies: GroupCopies,
        full: Plan,
    ) -> None:
        self.config, self.group, self.bus, self.requests = config, group, bus, requests
        self.full, self.start, self.copies = full, start, copies
        self.spares = Spares(config.elastic.spares, group, bus)
        self.record: Callable[[RecoveryState], None] = lambda state: None  # records steps unknown to the driver
        self.former: list[Member] = []  # no longer ranks since the mesh shrank, but may hold parts of the state

    @property
    def is_full(self) -> bool:
        """Whether the mesh has its configured size."""
        return self.group.plan.mesh.size == self.full.mesh.size

    def can_grow(self) -> bool:
        """Whether the mesh has shrunk and there is room for the full one again."""
        return not self.is_full and len(living_bundles(self.group.placement)) >= self.full.mesh.size

    def repair(self, state: RecoveryState, wait_seconds: float) -> str:
        """Replaces the lost ranks, or shrinks the mesh if there is no room for them within `wait_seconds`. Returns the
        remedy's name in the journal."""
        group = self.group
        with state.timed("place"):
            members = self._members(group.plan, group.bundles, state, wait_seconds)
        if members is None:
            self._shrink(state)
            return "shrink"
        if is_complete(group.plan, state):
            self._start(group.plan, group.bundles, members, state, keep=True)
            self._receive(state)
            return "repair"
        copy = self._find_copy(state)
        self._start(group.plan, group.bundles, members, state, copy)
        return self._restore(state, copy)

    def grow(self, state: RecoveryState) -> str:
        """Grows back to the full mesh; repairs the present one if a node has left again."""
        group, plan, members = self.group, self.full, None
        nodes = living_bundles(group.placement)
        if len(nodes) >= plan.mesh.size:
            gpus = {bundle: place.gpu for bundle, place in zip(group.bundles, group.places, strict=True)}
            places = [Place(bundle, node, gpus.get(bundle, -1)) for bundle, node in sorted(nodes.items())]
            bundles = order_places(places, plan.mesh, tensor_across_nodes=plan.tp_across_nodes)
            members = self._members(plan, bundles, state, self.config.elastic.wait_seconds)
        if members is None:
            return self.repair(state, 0.0)
        copy = self._moving(state)
        self._start(plan, bundles, members, state, copy)
        self._restore(state, copy)
        return "grow"

    def move_layers(self, state: RecoveryState, change: LayerChange) -> str:
        """Gives the same ranks other layers."""
        self._change_plan(state, "rebalanced", change.config, change.plan, change.facts, keep=False)
        return "rebalance"

    def change_order(self, state: RecoveryState, change: OrderChange) -> str:
        """Gives the same ranks another compute order; they keep their state."""
        self.bus.folder.save_order(change.found.order)
        given = change.found.config, change.found.plan, change.facts
        self._change_plan(state, EVENT, *given, keep=is_complete(self.group.plan, state))
        return "replan"

    def _change_plan(
        self, state: RecoveryState, event: str, config: RunConfig, plan: Plan, facts: dict[str, Any], *, keep: bool
    ) -> None:
        group = self.group
        members = list(zip(group.actors, group.places, strict=True))
        copy = None if keep else self._moving(state)
        self.config, self.full = config, plan
        self.bus.record(event, step=state.version, **facts)
        self.bus.display.note(facts["sentence"])
        self._start(plan, group.bundles, members, state, copy, keep=keep)
        if keep:
            self._receive(state)
        else:
            self._restore(state, copy)

    def _shrink(self, state: RecoveryState) -> None:
        """Puts the living ranks into a smaller mesh. Raises CannotRecover if elastic.min_ranks allows none."""
        group, lost = self.group, state.lost
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
        copy = self._moving(state)
        members = [(group.actors[rank], group.places[rank]) for rank in living]
        ranks, former = living[: plan.mesh.size], members[plan.mesh.size :]
        self.former += former
        group.spares += [actor for actor, _ in former]
        self._start(plan, [group.bundles[rank] for rank in ranks], members[: len(ranks)], state, copy)
        self._restore(state, copy)

    def end_former(self) -> None:
        """Ends the ranks that the mesh has lost by shrinking, once all others have a state."""
        end_processes(self.former)
        ended = [actor for actor, _ in self.former]
        self.group.spares, self.former = [each for each in self.group.spares if each not in ended], []

    def _members(self, plan: Plan, bundles: Sequence[int], state: RecoveryState, seconds: float) -> list[Member] | None:
        """The ranks of `plan`: in each bundle the living rank, else a spare or a new one on the bundle's node, to which
        Ray may have moved it. None if not all bundles are on living nodes within `seconds`."""
        group, deadline = self.group, time.monotonic() + seconds
        ranks = enumerate(zip(group.bundles, group.actors, group.places, strict=True))
        found = {bundle: (actor, place) for rank, (bundle, actor, place) in ranks if rank not in state.lost}
        missing = {rank: bundle for rank, bundle in enumerate(bundles) if bundle not in found}
        forget_gone_nodes({group.places[rank].node for rank in state.lost})
        while missing:
            nodes = living_bundles(group.placement)
            if set(missing.values()) <= nodes.keys():
                spares = {rank: self.spares.take(bundle, nodes[bundle]) for rank, bundle in missing.items()}
                actors, refs = dict[int, Any](), dict[int, Any]()
                for rank, spare in spares.items():
                    actors[rank] = group.create_actor(plan, rank, missing[rank]) if spare is None else spare.actor
                    refs[rank] = actors[rank].place.remote() if spare is None else spare.answer
                places, failed = group.gather(refs, CREATE_SECONDS)
                if not failed:
                    state.spares += tuple(rank for rank, spare in spares.items() if spare is not None)
                    found |= {missing[rank]: (actor, places[rank]) for rank, actor in actors.items()}
                    break
                for actor in actors.values():
                    ray.kill(actor)
            if time.monotonic() >= deadline:
                if not group.placement.move_back(missing.values()):
                    return None
                text = "no rank starts in its new place: back to the one that it had"
                self.bus.record("moved back", generation=group.generation, ranks=sorted(missing), cause=text)
                deadline = time.monotonic() + seconds
            self._wait_for_node()
        return [found[bundle] for bundle in bundles]

    def _wait_for_node(self) -> None:
        if self.requests.stopping or self.requests.aborted:
            raise CannotRecover("the run was asked to stop while it waited for a node to join", 0, "")
        time.sleep(RETRY_SECONDS)

    def _start(
        self,
        plan: Plan,
        bundles: Sequence[int],
        members: Iterable[Member],
        state: RecoveryState,
        copy: CopySource | None = None,
        *,
        keep: bool = False,
    ) -> None:
        """Starts a generation of these ranks, some of which may be on new hosts. They `keep` their state, or have none
        yet and begin to read the `copy`, if any."""
        group, members = self.group, list(members)
        plan = on_hosts(self.config, plan, numbered(place.node for _, place in members))
        if plan is not group.plan:
            self.bus.folder.replan(plan)
        group.adopt(plan, bundles, members)
        state.lost.clear()
        deadline = time.monotonic() + self.config.cluster.start_timeout_seconds
        with state.timed("load"):
            group.load(deadline, keep=keep)
            if copy is not None:
                self.copies.begin_reading(copy, deadline)
        with state.timed("connect"):
            group.connect(deadline)

    def _receive(self, state: RecoveryState) -> None:
        """Has current ranks send the others their state."""
        with state.timed("state"):
            self.group.receive(sources(self.group.plan, state.current), state.version, tick=self._check_answers())

    def _restore(self, state: RecoveryState, copy: CopySource | None) -> str:
        """Restores the newest intact state on all ranks: this copy in memory, else a checkpoint, else what the run
        started from. Returns 'copies' or 'checkpoint', for the journal."""
        with state.timed("state"):
            newest, reads = self._newest(restart=copy is not None), 0
            while True:
                found = newest.find() if copy is None or copy.key.step < self._newest_step() else None
                if copy is not None and (found is None or found.step <= copy.key.step):
                    if self._has_restored(copy, state):
                        return "copies"
                    reads += 1
                    copy = self._find_copy(state) if reads < READS else None
                    newest = self._newest(restart=copy is not None)
                    continue
                if found is None:
                    self.bus.display.note("there is no checkpoint: back to what the run started from")
                start = Start(found.folder, found.step) if found else self.start
                state.version = start.step
                if newest.restore(self.group, start, self._check_answers()):
                    return "checkpoint"

    def _has_restored(self, copy: CopySource, state: RecoveryState) -> bool:
        """Restores a copy on all ranks. If it cannot be read, reports why and returns False."""
        state.version = copy.key.step
        try:
            self.copies.restore(copy, tick=self._check_answers())
        except (Damaged, Unreadable) as error:
            self.bus.record("copies unread", generation=self.group.generation, step=state.version, cause=str(error))
            self.bus.display.note(f"the copy of step {state.version} cannot be read: {error}")
            return False
        if not self.config.elastic.replicate_every:  # otherwise it stays until the next copy
            self.copies.drop(copy.key)
        return True

    def _moving(self, state: RecoveryState) -> CopySource | None:
        """The copy in memory from which ranks on another mesh, or with other layers, read their state: a new one if the
        ranks hold all of the newest state. None if they must read a checkpoint."""
        if not is_complete(self.group.plan, state):
            return self._find_copy(state)
        with state.timed("state"):
            parts = handed_over(self.group.plan, state.current)
            found = self.copies.hand_over(parts, state.version, self._check_answers())
            if found is None:
                self.bus.display.note("there is no memory for a copy of the state: it goes through a checkpoint")
                self.save(state)
        return found

    def _find_copy(self, state: RecoveryState) -> CopySource | None:
        """The newest copy in memory that is complete on the living ranks. Reports if there is none."""
        if state.corrupt:
            return None
        living = [actor for rank, actor in enumerate(self.group.actors) if rank not in state.lost]
        found = self.copies.found([*living, *(actor for actor, _ in self.former)])
        if found is None and self.config.elastic.replicate_every:
            text = "no complete copy of the state is left in memory"
            self.bus.record("copies lost", generation=self.group.generation, ranks=sorted(state.lost), cause=text)
            self.bus.display.note(text)
        return found

    def _newest_step(self) -> int:
        """The step of the newest checkpoint, which may be damaged; -1 without one. Taken from the journal if storage
        does not answer or has none: going back beyond that step would undo steps that are safe."""
        with suppress(Unreadable):
            if listed := looked_up(partial(complete_folders, self.bus.folder.checkpoints)):
                return max(listed)
        return newest_recorded(self.bus.folder.journal())

    def _check_answers(self) -> Tick:
        return check_answers(self.group, self.config.elastic.hang_seconds)

    def _newest(self, *, restart: bool) -> NewestIntact:
        return NewestIntact(self.bus, self.config.cluster.start_timeout_seconds, restart=restart)

    def save(self, state: RecoveryState) -> None:
        """Writes a checkpoint of the newest state, each part by one current rank, unless there is an intact one. It is
        committed once the records of its steps are durable. Raises PentadError."""
        began, group, path = time.monotonic(), self.group, self.bus.folder.checkpoint(state.version)
        newest = self._newest(restart=True)
        if state.version in newest.saved():
            if newest.is_intact(path):
                return
            newest.find()
        saved = owned(group.plan, state.current)
        refs, tick = group.submit_save_of(saved, path, state.version), newest.moving(self._check_answers())
        shards = [shard for its in group.collect(refs, tick=tick) for shard in its]
        self.record(state)
        self.bus.keep_records()
        (committed,) = group.collect(group.submit_commit(path, state.version, shards, min(saved)), tick=tick)
        seconds, size = round(time.monotonic() - began, 3), sum(shard["bytes"] for shard in shards)
        facts = {"seconds": seconds, "manifest": committed.manifest, "bytes": size}
        self.bus.record("checkpoint", generation=group.generation, step=state.version, **facts)
        kept = kept_steps(self.config, committed.saved, self.bus.folder.evaluations())
        prune = group.submit_beside("prune", path, self.config.checkpoint.keep, kept, rank=min(saved))
        group.collect(prune, tick=tick)
