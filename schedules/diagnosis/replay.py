"""A measured step as a graph of events over all ranks of the mesh, to find how long it takes if a part takes less.

Each rank's instructions last as long as they did, without their waits; a transfer lasts as long as the shortest on its
link, and a collective from the last start among its members to the first end. Ranks that share layers (tp, cp, ep) run
compute actions together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product

import numpy as np

from pentad.schedules.diagnosis.attribution import STARVED, LayerWait, Measured, Starved, part_of
from pentad.schedules.diagnosis.step_view import BETWEEN_STAGES, COPIES, HOST, PARAMETERS, StepView
from pentad.schedules.ir.columns import Array, op_mask
from pentad.schedules.ir.instruction import COLLECTIVES, COMPUTE, OF_ALL_RANKS, RECEIVES, Op
from pentad.schedules.simulate.events import Events, events_of
from pentad.schedules.simulate.toposort import Graph, earliest_times, topological_levels

RECOMPUTE = "recompute"
NAMES = ("compute", RECOMPUTE, "inside layers", STARVED, "optimizer", "data", HOST, BETWEEN_STAGES, PARAMETERS, COPIES)
Seconds = dict[str, Array]  # by part, and by action of the mesh


class Replay:
    """`parts[part]` has the seconds of every action of every rank; `rank` has the rank of each action.

    `begins` are the nanoseconds at which the ranks began the step.
    """

    def __init__(self, view: StepView, begins: Mapping[int, int], measured: Measured, *, blocking_host: bool) -> None:
        self.view, program, mesh = view, view.program, view.mesh
        counts = [len(view.stream(rank)) for rank in range(mesh.size)]
        self.first = np.concatenate(([0], np.cumsum(counts)))
        self.rank = np.repeat(np.arange(mesh.size), counts)
        self.peer = np.full(self.first[-1], -1)  # mesh rank of the sender, for receives
        self.parts: Seconds = {name: np.zeros(self.first[-1]) for name in NAMES}
        for rank in range(mesh.size):
            self._add_compute(rank, begins.get(rank, 0), measured)
            self._add_communication(rank)
        self._shortest_by_link()
        self.node, self.graph = _mesh_graph(view, events_of(program, blocking_host=blocking_host), self.first)
        self.levels = topological_levels(self.graph)

    def makespan(self, change: Callable[[Seconds], Seconds] = dict) -> float:
        """Seconds from the first begin to the last end, with the parts that `change` returns for a copy of `parts`."""
        total = sum(change(dict(self.parts)).values())
        seconds = np.zeros(self.graph.events)
        np.maximum.at(seconds, self.node, total)
        _, ends = earliest_times(self.graph, self.levels, seconds, np.zeros_like(seconds))
        return float(ends.max())

    def scaled(self, part: str, factor: float = 0.0, where: Array | None = None) -> float:
        """`makespan` with a part at `factor` of its time, on the actions `where`."""
        mask = np.ones_like(self.rank, bool) if where is None else where

        def change(parts: Seconds) -> Seconds:
            return parts | {part: np.where(mask, parts[part] * factor, parts[part])}

        return self.makespan(change)

    def _add_compute(self, rank: int, begin: int, measured: Measured) -> None:
        parts, places = self.parts, self.view.program.positions[self.view.coordinates[rank].pp]
        wait, work = measured.layers.get(rank, LayerWait()), list[tuple[int, float]]()
        data, starved = measured.data.get(rank, 0.0), measured.starved.get(rank, Starved())
        for number, busy in enumerate(self.view.busy(rank, begin)):
            at = self.first[rank] + places[busy.action.key]
            host, seconds = busy.idle.get(HOST, 0) / 1e9, (busy.end - busy.start) / 1e9
            if number == 0:
                parts["data"][at] = min(host, data)
                host -= min(host, data)
            parts[HOST][at] = host
            if busy.action.key.op in COMPUTE:
                work.append((at, seconds))
            elif busy.action.key.op is Op.RECOMPUTE:
                parts[RECOMPUTE][at] = seconds
            elif busy.action.key.op is not Op.LOSS:
                parts[part_of(busy.action.parts[0])][at] = seconds
        total, own = max(1e-12, sum(seconds for _, seconds in work)), self.rank == rank
        share = min(1.0, wait.seconds / total)
        exposed = share * (1 - wait.late / wait.seconds if wait.seconds else 0.0)
        taken = min(1.0 - share, starved.compute / total)
        for at, seconds in work:
            parts["compute"][at], parts["inside layers"][at] = seconds * (1 - share - taken), seconds * exposed
            parts[STARVED][at] = seconds * taken
        between = min(1.0, starved.between / max(1e-12, float(parts[HOST][own].sum())))
        parts[STARVED][own] += between * parts[HOST][own]
        parts[HOST][own] *= 1 - between

    def _add_communication(self, rank: int) -> None:
        view = self.view
        for at, action in enumerate(view.stream(rank), self.first[rank]):
            key = action.key
            if key.op in RECEIVES:
                self.peer[at] = view.sender(rank, key)[0]
                self.parts[BETWEEN_STAGES][at] = max(0, view.times(rank, key)[1] - view.available(rank, key)) / 1e9
            elif key.op in COLLECTIVES:
                members = view.members(rank, key) if view.instruction(rank, key).group else (rank,)
                end = min(view.times(other, key)[1] for other in members)
                self.parts[PARAMETERS][at] = max(0, end - view.available(rank, key)) / 1e9
            elif key.op in (Op.OFFLOAD, Op.RELOAD):
                start, end = view.times(rank, key)
                self.parts[COPIES][at] = (end - start) / 1e9

    def _shortest_by_link(self) -> None:
        seconds, received = self.parts[BETWEEN_STAGES], np.flatnonzero(self.peer >= 0)
        link = self.peer[received] * self.view.mesh.size + self.rank[received]
        shortest = np.full(self.view.mesh.size**2, np.inf)
        np.minimum.at(shortest, link, seconds[received])
        seconds[received] = shortest[link]


def _mesh_graph(view: StepView, events: Events, first: Array) -> tuple[Array, Graph]:
    """The node of every action of the mesh, and the graph of these nodes."""
    mesh, columns, count = view.mesh, view.program.columns, events.graph.events
    sizes = product(range(mesh.dp), range(mesh.cp), range(mesh.tp), range(mesh.ep))
    replicas = [mesh.coordinates(0)._replace(dp=dp, cp=cp, tp=tp, ep=ep) for dp, cp, tp, ep in sizes]
    number = {at: index for index, at in enumerate(replicas)}
    op = columns.op[columns.action_row[events.action]]
    grouped = columns.group[columns.action_row[events.action]]
    has_group = np.array([name != "" for name in columns.groups], bool)[grouped]
    everyone, collective = op_mask(OF_ALL_RANKS)[op] & has_group, op_mask(COLLECTIVES)[op] & has_group
    shared = op_mask(COMPUTE | {Op.RECOMPUTE})[op]
    base = np.arange(count)
    label = np.empty((len(replicas), count), int)
    for index, at in enumerate(replicas):
        label[index] = base + index * count
        for mask, leader in (
            (shared, at._replace(cp=0, tp=0, ep=0)),
            (collective, at._replace(dp=0, cp=0, ep=0)),
            (everyone, replicas[0]),
        ):
            label[index, mask] = base[mask] + number[leader] * count
    ids, flat = np.unique(label, return_inverse=True)
    label = flat.reshape(label.shape)
    edges = np.stack((label[:, events.graph.source].ravel(), label[:, events.graph.target].ravel()))
    source, target = np.unique(edges, axis=1)
    node = np.empty(first[-1], int)
    for rank, at in enumerate(view.coordinates):
        own = events.event[columns.action_offsets[at.pp] : columns.action_offsets[at.pp + 1]]
        node[first[rank] : first[rank + 1]] = label[number[at._replace(pp=0)], own]
    return node, Graph(len(ids), source, target, view.program.ranks * len(replicas))
