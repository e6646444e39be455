"""Spares (elastic.spares): processes that wait, with all imports done, to take the place of a lost rank.

A spare waits on a node of the ranks, or on one with room for another node's ranks. It reserves no resources: it gets
those of the rank that it replaces, such as its GPU. Until then it holds host memory but no GPU memory. If its node is
lost, so is the spare.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError

from pentad.orchestrator.cluster.group import WorkerGroup
from pentad.orchestrator.cluster.placement import free_rooms
from pentad.orchestrator.cluster.worker import WorkerPlace
from pentad.orchestrator.monitoring.event_bus import EventBus

MOST_FAILURES = 3  # spares in a row that end before they are ready


class Spare(NamedTuple):
    """A spare on a node: its actor, the pending answer of its last call, its place once it is ready (None before), and
    the bundle as whose rank it loads, or -1."""

    node: str
    actor: Any
    answer: Any
    place: WorkerPlace | None = None
    bundle: int = -1


class Spares:
    """The spares of one run: `count` of them on the nodes of the ranks or, if None, as many as the largest node has
    ranks, on other nodes with room for them. Some may not be ready."""

    def __init__(self, count: int | None, group: WorkerGroup, bus: EventBus) -> None:
        self.count, self.group, self.bus = count, group, bus
        self.waiting: list[Spare] = []
        self.number = self.failures = 0

    def keep(self) -> None:
        """Starts missing spares, notes which are ready or gone, and ends those on nodes that ranks have left. Never
        waits."""
        if self.count == 0:
            return
        self.waiting = [each for spare in self.waiting if (each := self._heard(spare)) is not None]
        missing = self._nodes()
        if missing is None:
            return
        for spare in list(self.waiting):
            if missing[spare.node]:
                missing[spare.node] -= 1
            else:
                self._remove(spare)
                ray.kill(spare.actor)
        for node in missing.elements() if self.failures < MOST_FAILURES else ():
            self._start(node)
        self._show()

    def begin(self, lost: Iterable[int]) -> None:
        """Has ready spares load as the lost ranks of their nodes while the other ranks are still being fenced."""
        group, begun = self.group, {spare.bundle for spare in self.waiting}
        for rank, bundle in ((rank, group.bundles[rank]) for rank in lost):
            gone = None if bundle in begun else self._rank_in(bundle)
            if gone is None or (spare := self._ready(gone.node)) is None:
                continue
            if group.plan.device == "cpu" or gone.gpu >= 0:
                what = group.generation + 1, group.plan, rank, tuple(group.bundles)
                self.bus.record("spare taken", generation=what[0], rank=rank)  # first, so that no number is reused
                group.begun[spare.actor] = what, spare.actor.begin.remote(gone.pid, gone.gpu, *what)
                self.waiting = [each._replace(bundle=bundle) if each is spare else each for each in self.waiting]

    def end_begun(self) -> None:
        """Ends spares that have loaded as a rank but did not become one: they may hold a GPU that another process
        gets."""
        for spare in [each for each in self.waiting if each.bundle >= 0]:
            self._remove(spare)
            ray.kill(spare.actor)
        self.group.begun.clear()

    def take(self, bundle: int, node: str) -> Spare | None:
        """A spare that becomes the rank in a bundle, which is now on this node; its answer will be its place. A ready
        one, else one that is still importing, as that is ahead of a new process. None if there is none or the bundle's
        GPU is unknown."""
        gone = self._rank_in(bundle)
        if self.group.plan.device == "cuda" and (gone is None or gone.node != node or gone.gpu < 0):
            return None
        here = [spare for spare in self.waiting if spare.node == node]
        begun = next((spare for spare in here if spare.bundle == bundle), None)
        starting = next((spare for spare in here if spare.place is None), None)
        if (spare := begun or self._ready(node) or starting) is None:
            return None
        self._remove(spare)
        self._show()
        pid, gpu = (gone.pid, gone.gpu) if gone else (0, -1)
        return spare._replace(answer=spare.actor.take.remote(pid, gpu))

    def _ready(self, node: str) -> Spare | None:
        free = [each for each in self.waiting if each.node == node and each.place is not None and each.bundle < 0]
        return next(filter(_has_answered, free), None)

    def _rank_in(self, bundle: int) -> WorkerPlace | None:
        """The place of the rank that was started in this bundle, if the bundle has not moved since."""
        group = self.group
        if bundle not in group.bundles:
            return None
        rank = group.bundles.index(bundle)
        return group.places[rank] if group.rooms[rank] == group.placement.find(bundle) else None

    def _nodes(self) -> Counter[str] | None:
        """How many spares each node gets; None if that is unknown at present."""
        nodes = [place.node for place in self.group.places]
        if self.count is not None:
            return spare_nodes(self.count, nodes)
        if self.group.plan.device == "cuda":  # it would be unknown which GPU they get
            return Counter()
        rooms = free_rooms(self.group.plan.device)
        return None if rooms is None else standby_nodes(nodes, rooms)

    def _start(self, node: str) -> None:
        self.number += 1
        actor = self.group.create_spare(node, self.number)
        self.waiting.append(Spare(node, actor, actor.warm.remote(self.group.plan.device)))

    def _heard(self, spare: Spare) -> Spare | None:
        """The spare as it is now; None if it is gone."""
        if not _has_answered(spare):
            return spare
        generation = self.group.generation
        try:
            answer = ray.get(spare.answer)
        except RayError as error:
            self._remove(spare)
            ray.kill(spare.actor)
            self.failures += spare.place is None
            cause = str(error).strip().partition("\n")[0]
            self.bus.record("spare lost", generation=generation, was_ready=spare.place is not None, cause=cause)
            if self.failures == MOST_FAILURES:
                self.bus.display.note(f"no more spares are started: {MOST_FAILURES} ended before they were ready")
            return None
        if spare.place is None:
            self.failures = 0
            spare = spare._replace(place=answer)
            self.bus.record("spare ready", generation=generation, node=answer.ip, pid=answer.pid)
        return spare._replace(answer=spare.actor.clock.remote())

    def _remove(self, spare: Spare) -> None:
        self.waiting = [each for each in self.waiting if each is not spare]
        self.group.spares = [each for each in self.group.spares if each is not spare.actor]

    def _show(self) -> None:
        ready = sum(spare.place is not None for spare in self.waiting)
        if ready != self.bus.view.spares:
            self.bus.update(spares=ready)


def spare_nodes(count: int, nodes: Sequence[str]) -> Counter[str]:
    """How many of `count` spares each node gets, given the `nodes` of the ranks: each goes to the node with the most
    ranks per spare."""
    ranks, found = Counter(nodes), Counter[str]()
    for _ in range(count):
        found[min(ranks, key=lambda node: (-ranks[node] / (found[node] + 1), node))] += 1
    return found


def standby_nodes(nodes: Sequence[str], rooms: Mapping[str, int]) -> Counter[str]:
    """How many spares wait on each other node: in all as many as the largest of the ranks' `nodes` has ranks, on as few
    nodes as their `rooms` allow."""
    left, found = max(Counter(nodes).values()), Counter[str]()
    for node in sorted(rooms.keys() - set(nodes), key=lambda node: (-rooms[node], node)):
        found[node] = min(left, rooms[node])
        left -= found[node]
    return +found


def _has_answered(spare: Spare) -> bool:
    return bool(ray.wait([spare.answer], timeout=0)[0])
