"""When the memory of a sent result may be reused: a copy may read it until the receiver is known to have it.

Compute never waits for a SEND. But what it does wait for often implies that one has ended: the gradient that answers an
activation, or anything else that the receiver has done since. So memory is freed in program order, not whenever a copy
happens to end, and its next user gets the same address in every step.
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
    """For each action of a rank's compute lane, by key: the SENDs of the rank that are known to have ended when it
    starts, but not when the action before it starts. SENDs that are only known to have ended at the end of the step are
    left out."""
    columns, events = program.columns, acyclic_events(program)
    actions = list(enumerate(program.streams[rank], int(columns.action_offsets[rank])))
    sent: dict[str, list[Key]] = defaultdict(list)  # by lane, in the order of sending
    for _, action in actions:
        if action.parts[0].op in SENDS:
            sent[action.lane].append(action.key)
    places = {key: (lane, number) for lane, keys in enumerate(sent.values()) for number, key in enumerate(keys, 1)}
    sends = {int(events.event[number]): places[action.key] for number, action in actions if action.key in places}

    # Gathers by peer copies do not synchronize ranks: what one has done says nothing about another.
    gathers = set(events.event[columns.action[columns.rows_of(op_mask({Op.ALL_GATHER}))]].tolist())
    by_target, bounds = grouped(events.graph.target, events.graph.events)
    sources = events.graph.source[by_target]
    counts = np.zeros((events.graph.events, len(sent)), int)  # by event: how many SENDs of each lane have ended
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
