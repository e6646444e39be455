"""Moves ranks that stay slow to other GPUs or nodes (elastic.slow_rank: evict), or says why they stay."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from ray.util.placement_group import PlacementGroup

from pentad.orchestrator.cluster.group import WorkerGroup
from pentad.orchestrator.cluster.placement import all_but, node_names, node_of
from pentad.orchestrator.config.recovery_sections import ElasticSection
from pentad.orchestrator.diagnosis.slow_ranks import sentence
from pentad.orchestrator.monitoring.event_bus import EventBus
from pentad.schedules.diagnosis.slow_ranks import SlowRank
from pentad.schedules.spec.mesh import ORDER, Axis
from pentad.schedules.spec.plan import Plan
from pentad.schedules.spec.zero_layout import zero_group

AGAIN = 1000  # steps before a rank may move again
BESIDE_SECONDS = 5.0  # for Ray to find another GPU on the same node


class Asked(NamedTuple):
    """Room requested from Ray at the monotonic second `since` for `ranks`, because of the `slow` ones; `beside`: on
    their present node."""

    slow: tuple[SlowRank, ...]
    ranks: tuple[int, ...]
    room: PlacementGroup
    since: float
    beside: bool


class Evictions:
    """The evictions of one run. Room for a slow rank is reserved while training continues; then the rank is replaced
    there like a lost one. Without room it stays."""

    def __init__(self, elastic: ElasticSection, group: WorkerGroup, bus: EventBus) -> None:
        self.elastic, self.group, self.bus = elastic, group, bus
        self.moved: dict[int, int] = {}  # the step after which a rank last moved
        self.left: set[str] = set()  # nodes that slow ranks have left
        self.stays: set[tuple[int, ...]] = set()  # ranks already reported as staying
        self.asked: Asked | None = None

    def due(self) -> tuple[int, ...]:
        """The ranks to move now, for which there is room elsewhere. Requests that room; never waits."""
        slow = tuple(each for each in self._slow() if self._may_move(each))
        if not slow:
            self.cancel()
            return ()
        asked = self._ask(slow, beside=self.group.plan.device == "cuda") if self.asked is None else self.asked
        if node_of(asked.room):
            return asked.ranks
        waited, may_leave = time.monotonic() - asked.since, may_leave_node(self.group.plan)
        if asked.beside and may_leave and waited > BESIDE_SECONDS:
            self.cancel()
            self._ask(slow, beside=False)
        elif waited > self.elastic.wait_seconds and asked.beside is not may_leave:  # and keeps asking
            where = "no other node had room" if may_leave else "no other GPU of its node was free"
            for each in asked.slow:
                self._stay(each, f"{where} within elastic.wait_seconds = {self.elastic.wait_seconds:g}")
        return ()

    @property
    def reason(self) -> str:
        """Why the ranks that are due move."""
        return "; ".join(map(self._sentence, self.asked.slow)) if self.asked else ""

    def move(self, step: int) -> None:
        """Assigns the ranks that are due to their new places after `step` steps; the caller starts them there."""
        assert self.asked is not None
        asked, target = self.asked, node_of(self.asked.room)
        group, names, self.asked = self.group, node_names(), None
        for each in asked.slow:
            place = group.places[each.ranks[0]]
            facts = {"ranks": each.ranks, "since": each.since, "excess": each.excess, "evidence": each.evidence}
            at = {"node": names.get(place.node, place.ip), "gpu": place.gpu, "target": names.get(target, target)}
            text = self._sentence(each)
            self.bus.record(
                "evicted", generation=group.generation, step=step, **facts, **at, moved=asked.ranks, sentence=text
            )
        group.placement.move([group.bundles[rank] for rank in asked.ranks], asked.room)
        self.moved |= dict.fromkeys(asked.ranks, step)
        self.left |= set() if asked.beside else {group.places[asked.ranks[0]].node}

    def cancel(self) -> None:
        """Gives up the requested room."""
        if self.asked is not None:
            self.group.placement.give_up(self.asked.room)
            self.asked = None

    def _slow(self) -> tuple[SlowRank, ...]:
        return self.bus.lasting_slow_ranks if self.elastic.slow_rank == "evict" else ()

    def _may_move(self, slow: SlowRank) -> bool:
        if reason := reason_to_stay(slow, self.moved):
            self._stay(slow, reason)
        return not reason

    def _stay(self, slow: SlowRank, reason: str) -> None:
        """Reports that ranks stay where they are, once."""
        if slow.ranks in self.stays:
            return
        self.stays.add(slow.ranks)
        text = f"{self._sentence(slow)}; it stays where it is: {reason}"
        facts = {"generation": self.group.generation, "step": slow.step, "ranks": slow.ranks, "cause": reason}
        self.bus.record("not evicted", **facts, sentence=text)
        self.bus.display.note(text)

    def _ask(self, slow: Sequence[SlowRank], *, beside: bool) -> Asked:
        group, plan = self.group, self.group.plan
        nodes = [place.node for place in group.places]
        there = [each for each in slow if nodes[each.ranks[0]] == nodes[slow[0].ranks[0]]]
        ranks = tuple(each.ranks[0] for each in there)
        if not beside:
            ranks = with_ranks_beside(ranks, plan)
        node = nodes[ranks[0]]
        selected = node if beside else all_but({*self.left, node})
        room = group.placement.reserve_elsewhere([group.bundles[rank] for rank in ranks], plan.device, selected)
        self.asked = Asked(tuple(there), ranks, room, time.monotonic(), beside)
        return self.asked

    def _sentence(self, slow: SlowRank) -> str:
        return sentence(slow, self.bus.view.ranks, self.bus.gpus)


def reason_to_stay(slow: SlowRank, moved: Mapping[int, int]) -> str:
    """Why a slow rank does not move; '' if it does. `moved` has, by rank, the step after which it last moved."""
    if len(slow.ranks) > 1:
        return "which of these ranks is slow is not known"
    step = moved.get(slow.ranks[0])
    if step is not None and slow.step < step + AGAIN:
        return f"it moved after step {step}, and is slow in its new place, too"
    return ""


def may_leave_node(plan: Plan) -> bool:
    """Whether ranks can move to another node. Not if all exchange by peer copies: then all would have to move, and no
    rank would be left that holds their state."""
    return plan.transport != "peer" or bool(plan.hosts)


def with_ranks_beside(ranks: Iterable[int], plan: Plan) -> tuple[int, ...]:
    """The ranks and all that must share their node: along tp, and along axes that exchange by peer copies."""
    copied: set[Axis] = {axis for axis in ORDER if plan.transport_along(axis) == "peer"}
    axes: tuple[Axis, ...] = tuple((copied - {"dp"}) | (set() if plan.tp_across_nodes else {"tp"}))
    found, new = set[int](), set(ranks)
    while new:
        found |= new
        beside = {other for rank in new for other in plan.mesh.group(axes, rank)}
        if "dp" in copied:
            parts = ((shard, rank) for rank in new for shard in plan.param_shards_of(rank))
            beside.update(chain.from_iterable(zero_group(plan, shard, rank) for shard, rank in parts))
        new = beside - found
    return tuple(sorted(found))
