"""Compute that shares its rank with transfers: both use the memory and the processors of the device."""

from __future__ import annotations

import heapq
from collections import defaultdict
from math import isnan, nan

import numpy as np

from pentad.schedules.ir.columns import Array
from pentad.schedules.ir.lookup import IS_COMPUTE, IS_RECEIVE, IS_SEND
from pentad.schedules.ir.program import Program
from pentad.schedules.simulate.events import IS_COLLECTIVE, Events

_NONE = -1
_MOVES = IS_SEND | IS_RECEIVE | IS_COLLECTIVE


class Clock:
    """All ranks at one moment, moved from one start or end to the next.

    While at least one transfer or collective runs on a rank (from when its ends have met, not while one waits for the
    other), a compute instruction there advances 1 / (1 + `overlap`) as fast as alone. Nothing slows the transfers.
    `alone` and `second` are the seconds of every event by itself and of the second half of an overlapped pair.
    """

    def __init__(self, program: Program, events: Events, alone: Array, second: Array, overlap: float) -> None:
        self.alone, self.second, self.stretch = alone.tolist(), second.tolist(), 1 + overlap
        count = events.graph.events
        self.order = events.order.tolist()
        self.starts, self.ends, self.middles = np.zeros(count), np.zeros(count), np.full(count, nan)
        self.left = np.bincount(events.graph.later, minlength=count).tolist()
        self.after: dict[int, list[int]] = defaultdict(list)
        for earlier, later in zip(events.graph.earlier.tolist(), events.graph.later.tolist(), strict=True):
            self.after[earlier].append(later)
        columns = program.columns
        rows = columns.unit_row
        op, rank = columns.op[rows], columns.rank[rows]
        mine, moves = IS_COMPUTE[op], _MOVES[op]
        self.home = dict(zip(events.event[mine].tolist(), rank[mine].tolist(), strict=True))  # compute -> its rank
        self.ends_of: dict[int, list[int]] = defaultdict(list)  # transfer or collective -> its ranks
        for event, end in zip(events.event[moves].tolist(), rank[moves].tolist(), strict=True):
            self.ends_of[event].append(end)
        self.moving = [0] * program.ranks  # transfers that run now
        self.running = [_NONE] * program.ranks  # compute that runs now
        self.work = [0.0] * program.ranks  # seconds that are left of it, alone
        self.since = [0.0] * program.ranks  # when that was so
        self.pace = [1.0] * program.ranks  # seconds it takes for one of those
        self.due: list[tuple[float, int]] = []
        self.planned: dict[int, float] = {}  # when an event ends, as things are

    def run(self) -> tuple[Array, Array, Array]:
        """Starts, ends and middles (where a pair turns from F to B, nan elsewhere) of every event."""
        for event in self.order:
            if not self.left[event]:
                self._start(event, 0.0)
        while self.due:
            now, event = heapq.heappop(self.due)
            if self.planned.get(event) != now:  # planned anew since
                continue
            if self.second[event] and isnan(self.middles[event]):
                self.middles[event] = now
                self._compute(self.home[event], self.second[event], now)
            else:
                self._end(event, now)
        return self.starts, self.ends, self.middles

    def _start(self, event: int, now: float) -> None:
        self.starts[event] = now
        if event in self.home:
            self.running[self.home[event]] = event
            self._compute(self.home[event], self.alone[event], now)
            return
        self._plan(event, now + self.alone[event])
        for rank in self.ends_of.get(event, ()):
            self.moving[rank] += 1
            self._retime(rank, now)

    def _end(self, event: int, now: float) -> None:
        self.ends[event] = now
        del self.planned[event]
        if event in self.home:
            self.running[self.home[event]] = _NONE
        for rank in self.ends_of.get(event, ()):
            self.moving[rank] -= 1
            self._retime(rank, now)
        for later in self.after[event]:
            self.left[later] -= 1
            if not self.left[later]:
                self._start(later, now)

    def _retime(self, rank: int, now: float) -> None:
        """What runs on a rank goes on at another pace, where that has changed."""
        if self.running[rank] != _NONE and self.pace[rank] != (self.stretch if self.moving[rank] else 1.0):
            done = (now - self.since[rank]) / self.pace[rank]
            self._compute(rank, max(self.work[rank] - done, 0.0), now)

    def _compute(self, rank: int, work: float, now: float) -> None:
        self.work[rank], self.since[rank] = work, now
        self.pace[rank] = self.stretch if self.moving[rank] else 1.0
        self._plan(self.running[rank], now + work * self.pace[rank])

    def _plan(self, event: int, end: float) -> None:
        self.planned[event] = end
        heapq.heappush(self.due, (end, event))
