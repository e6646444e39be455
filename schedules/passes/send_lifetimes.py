"""When the memory of a sent result is free again: a copy may read it until the receiver is known to have it.

Compute never waits for a SEND. But much of what it waits for comes later than one: the gradient that answers an
activation, or anything else that the receiver has done since. So memory is free in the order of the program, not
whenever a copy happens to end, and what takes it next lies in the same place in every step.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from pentad.schedules.ir.columns import op_mask
from pentad.schedules.ir.instruction import SENDS, Key, Op
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.events import acyclic_events
from pentad.schedules.simulate.toposort import grouped


def ended_sends(program: Program, rank: int) -> dict[Key, tuple[Key, ...]]:
    """By the key of an action of a rank's compute lane: the SENDs of the rank that have ended when it starts, and had
    not when the one before it started. Those that only the end of the step comes after are not among them."""
    columns, events = program.columns, acyclic_events(program)
    actions = list(enumerate(program.streams[rank], int(columns.action_offsets[rank])))
    sent: dict[str, list[Key]] = defaultdict(list)  # by lane, which sends one after another
    for _, action in actions:
        if action.parts[0].op in SENDS:
            sent[action.lane].append(action.key)
    places = {key: (lane, number) for lane, keys in enumerate(sent.values()) for number, key in enumerate(keys, 1)}
    sends = {int(events.event[number]): places[action.key] for number, action in actions if action.key in places}

    # Ranks that gather by peer copies do not meet: what one has done says nothing of another.
    gathers = set(events.event[columns.action[columns.rows_of(op_mask({Op.ALL_GATHER}))]].tolist())
    by_target, bounds = grouped(events.graph.target, events.graph.events)
    sources = events.graph.source[by_target]
    counts = np.zeros((events.graph.events, len(sent)), int)  # of the SENDs of each lane that have ended with an event
    for event in events.order.tolist():
        if event in gathers:
            continue
        counts[sources[bounds[event] : bounds[event + 1]]].max(0, initial=0, out=counts[event])
        if event in sends:
            lane, number = sends[event]
            counts[event, lane] = number

    found: dict[Key, tuple[Key, ...]] = {}
    before = np.zeros(len(sent), int)
    for number, action in actions:
        if action.lane == "compute":
            now = np.maximum(before, counts[events.event[number]])
            spans = zip(sent.values(), before, now, strict=True)
            found[action.key] = tuple(key for keys, start, end in spans for key in keys[start:end])
            before = now
    return {key: keys for key, keys in found.items() if keys}
