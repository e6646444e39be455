"""A program's dependency graph over all ranks, lanes and communicators.

Transfers and collectives have rendezvous semantics: no buffering is assumed, so a SEND and its RECV (and the members
of a collective) are one event that starts when the last of them is reached.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from typing import NamedTuple

from pentad.schedules.ir.instruction import COLLECTIVES, RECEIVES, SENDS, Action
from pentad.schedules.ir.program import Program
from pentad.schedules.passes.post_validation import NORM, has_post_validation


class Node(NamedTuple):
    """An action: the `at`-th of its rank's stream."""

    rank: int
    at: int


@dataclass(frozen=True)
class Graph:
    """`members[event]` are the nodes that run as one event, `before[event]` the events that must end before it
    starts."""

    nodes: tuple[Node, ...]
    event: dict[Node, int]
    members: tuple[tuple[Node, ...], ...]
    before: tuple[tuple[int, ...], ...]


def meetings(program: Program) -> dict[tuple, dict[int, list[Node]]]:
    """Communicator -> rank (or side of a transfer) -> its operations there, in order. The k-th operations of all ranks
    match. A transfer's communicator is (kind, source, target), that of a collective (lane, ranks).
    """
    found: dict[tuple, dict[int, list[Node]]] = defaultdict(lambda: defaultdict(list))
    for rank, stream in enumerate(program.streams):
        for index, action in enumerate(stream):
            op, node = action.parts[0].op, Node(rank, index)
            if op in SENDS:
                found[op, rank, action.parts[0].peer][rank].append(node)
            elif op in RECEIVES:
                found[RECEIVES[op], action.parts[0].peer, rank][rank].append(node)
            elif op in COLLECTIVES and action.parts[0].group:
                found[action.lane, ranks_of(program, action)][rank].append(node)
    return found


def ranks_of(program: Program, action: Action) -> tuple[int, ...]:
    """Pipeline ranks that participate in a collective."""
    part = action.parts[0]
    return tuple(range(program.ranks)) if part.group == "pp" else program.holders(part.stage)


def build(program: Program, *, issued: bool = False) -> Graph:
    """The graph of a program whose transfers and collectives match (see `check`).

    With `issued`, the host blocks at every compute action, as on CPUs, so later actions of the stream start after it
    has ended; otherwise only lanes and waits impose an order.
    """
    nodes = tuple(Node(r, i) for r, stream in enumerate(program.streams) for i in range(len(stream)))
    together = [nodes for sides in meetings(program).values() for nodes in zip(*sides.values(), strict=True)]
    event = {node: number for number, group in enumerate(together) for node in group}
    members = list(map(tuple, together))
    for node in nodes:
        if node not in event:
            event[node] = len(members)
            members.append((node,))
    before: list[set[int]] = [set() for _ in members]
    for rank, stream in enumerate(program.streams):
        position = program.positions[rank]
        last: dict[str, int] = {}
        for index, action in enumerate(stream):
            here = before[event[Node(rank, index)]]
            here.update(event[Node(rank, position[key])] for key in action.waits)
            if action.lane in last:
                here.add(event[Node(rank, last[action.lane])])
            if issued and "compute" in last:
                here.add(event[Node(rank, last["compute"])])
            last[action.lane] = index
    for rank, position in enumerate(program.positions):
        if rank and has_post_validation(program):
            before[event[Node(rank, position[NORM])]].add(event[Node(rank - 1, program.positions[rank - 1][NORM])])
    return Graph(nodes, event, tuple(members), tuple(map(tuple, before)))


def ordered(graph: Graph) -> list[int]:
    """Events in topological order; incomplete if there is a cycle."""
    after: list[list[int]] = [[] for _ in graph.members]
    left = [len(events) for events in graph.before]
    for event, events in enumerate(graph.before):
        for earlier in events:
            after[earlier].append(event)
    ready = deque(event for event, count in enumerate(left) if not count)
    done = []
    while ready:
        event = ready.popleft()
        done.append(event)
        for later in after[event]:
            left[later] -= 1
            if not left[later]:
                ready.append(later)
    return done


def cycle(graph: Graph) -> tuple[int, ...]:
    """The events of one cycle, each waiting for the next; empty if there is none."""
    done = set(ordered(graph))
    stuck = [event for event in range(len(graph.members)) if event not in done]
    if not stuck:
        return ()
    path: list[int] = []
    seen: dict[int, int] = {}
    event = stuck[0]
    while event not in seen:
        seen[event] = len(path)
        path.append(event)
        event = next(earlier for earlier in graph.before[event] if earlier not in done)
    return tuple(path[seen[event] :])
