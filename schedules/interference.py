"""Compute that shares its rank with transfers: both use the memory and the processors of the device."""

from __future__ import annotations

import heapq
from collections import defaultdict

from pentad.schedules.events import NONE, Events
from pentad.schedules.instruction import COLLECTIVES, COMPUTE, RECEIVES, SENDS
from pentad.schedules.program import Program

MOVES = COLLECTIVES | SENDS.keys() | RECEIVES.keys()


class Clock:
    """All ranks at one moment, moved from one start or end to the next.

    While at least one transfer or collective runs on a rank (from when its ends have met, not while one waits for the
    other), a compute instruction there advances 1 / (1 + `overlap`) as fast as alone. Nothing slows the transfers.
    `alone` and `second` are the seconds of every event by itself and of the second half of an overlapped pair.
    """

    def __init__(
        self, program: Program, events: Events, alone: list[float], second: dict[int, float], overlap: float
    ) -> None:
        self.alone, self.second, self.stretch = alone, second, 1 + overlap
        self.starts, self.ends, self.middles = [0.0] * len(alone), [0.0] * len(alone), dict[int, float]()
        self.left = [len(earlier) - earlier.count(NONE) for earlier in events.before]
        self.after: dict[int, list[int]] = defaultdict(list)
        for event in events.order:
            for earlier in events.before[event]:
                self.after[earlier].append(event)
        self.home: dict[int, int] = {}  # compute -> its rank
        self.ends_of: dict[int, list[int]] = defaultdict(list)  # transfer or collective -> its ranks
        for rank, stream in enumerate(program.streams):
            for number, unit in enumerate(stream, events.first[rank]):
                if unit.parts[0].op in COMPUTE:
                    self.home[number] = rank
                elif unit.parts[0].op in MOVES:
                    self.ends_of[events.event[number]].append(rank)
        self.moving = [0] * program.ranks  # transfers that run now
        self.running = [NONE] * program.ranks  # compute that runs now
        self.work = [0.0] * program.ranks  # seconds that are left of it, alone
        self.since = [0.0] * program.ranks  # when that was so
        self.pace = [1.0] * program.ranks  # seconds it takes for one of those
        self.due: list[tuple[float, int]] = []
        self.planned: dict[int, float] = {}  # when an event ends, as things are

    def run(self, order: list[int]) -> tuple[list[float], list[float], dict[int, float]]:
        """Starts, ends and middles (where a pair turns from F to B) of every event."""
        for event in order:
            if not self.left[event]:
                self._start(event, 0.0)
        while self.due:
            now, event = heapq.heappop(self.due)
            if self.planned.get(event) != now:  # planned anew since
                continue
            if event in self.second and event not in self.middles:
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
            self.running[self.home[event]] = NONE
        for rank in self.ends_of.get(event, ()):
            self.moving[rank] -= 1
            self._retime(rank, now)
        for later in self.after[event]:
            self.left[later] -= 1
            if not self.left[later]:
                self._start(later, now)

    def _retime(self, rank: int, now: float) -> None:
        """What runs on a rank goes on at another pace, where that has changed."""
        if self.running[rank] != NONE and self.pace[rank] != (self.stretch if self.moving[rank] else 1.0):
            done = (now - self.since[rank]) / self.pace[rank]
            self._compute(rank, max(self.work[rank] - done, 0.0), now)

    def _compute(self, rank: int, work: float, now: float) -> None:
        self.work[rank], self.since[rank] = work, now
        self.pace[rank] = self.stretch if self.moving[rank] else 1.0
        self._plan(self.running[rank], now + work * self.pace[rank])

    def _plan(self, event: int, end: float) -> None:
        self.planned[event] = end
        heapq.heappush(self.due, (end, event))
