"""Virtual time: ordered events, and tasks of simulated processes, which wait for seconds or for signals."""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import Any, Protocol

MAX_SECONDS = 3600.0  # of virtual time; a longer history is taken not to end
MAX_IDLE_CALLS = 20_000  # calls while no time passes, after which the driver is in an endless loop


class NoProgress(Exception):
    """The driver waits forever, or is in an endless loop."""


class DriverEnded(BaseException):
    """The driver's process ends here, in the middle of its work."""


class Host(Protocol):
    """What runs tasks: they make no progress while it is `stopped`, and end when it is no longer `is_alive`. Waiting
    takes `slow` times as long."""

    is_alive: bool
    stopped: bool
    slow: float
    deferred: list[Callable[[], None]]


class Signal:
    """Fires once; tasks that wait for it then continue, or get the error."""

    def __init__(self) -> None:
        self.fired, self.error = False, None
        self.waiting: list[tuple[Task, int]] = []

    def fire(self) -> None:
        self.fired = True
        self._release(None)

    def fail(self, error: Exception) -> None:
        """Raises the error in the tasks that wait now, but in no later ones."""
        self._release(error)

    def _release(self, error: Exception | None) -> None:
        waiting, self.waiting = self.waiting, []
        for task, ticket in waiting:
            task.world.at(0.0, partial(task.resume, ticket, error))


class Task:
    """A generator that yields the seconds or the Signal to wait for. `on_end` gets its value or its error."""

    def __init__(
        self,
        world: World,
        host: Host,
        generator: Generator[Any, None, Any],
        on_end: Callable[[Any, Exception | None], None],
    ) -> None:
        self.world, self.host, self.generator, self.on_end = world, host, generator, on_end
        self.ticket, self.waits_for_signal = 0, False

    def resume(self, ticket: int, error: Exception | None = None) -> None:
        if ticket != self.ticket or not self.host.is_alive:
            return
        if self.host.stopped:
            self.host.deferred.append(partial(self.resume, ticket, error))
            return
        self.ticket += 1
        try:
            wait = self.generator.send(None) if error is None else self.generator.throw(error)
        except StopIteration as end:
            self.waits_for_signal = False
            self.on_end(end.value, None)
        except Exception as failure:
            self.waits_for_signal = False
            self.on_end(None, failure)
        else:
            self.waits_for_signal = is_signal = isinstance(wait, Signal)
            if is_signal and not wait.fired:
                wait.waiting.append((self, self.ticket))
            else:
                self.world.at(0.0 if is_signal else wait * self.host.slow, partial(self.resume, self.ticket))

    def interrupt(self, error: Exception) -> None:
        """Raises an error in a task that waits for a signal."""
        if self.waits_for_signal:
            self.world.at(0.0, partial(self.resume, self.ticket, error))


class World:
    """The clock and the events to come. Only `wait` moves the clock: the driver itself takes no time."""

    def __init__(self, seed: int) -> None:
        self.now, self.random = 1000.0, Random(seed)
        self.heap: list[tuple[float, int, Callable[[], None]]] = []
        self.numbers = count()
        self.deadline = self.now + MAX_SECONDS
        self.driver_ends: str | None = None  # the reason, if it ends
        self.broken: Exception | None = None  # a broken promise or a bug in a rank
        self.inside = False  # an event is being handled
        self.idle_calls = 0

    def at(self, seconds: float, do: Callable[[], None]) -> None:
        heappush(self.heap, (self.now + seconds, next(self.numbers), do))

    def wait(self, seconds: float, over: Callable[[], bool] = lambda: False) -> None:
        """Called by the driver: lets time pass for this many seconds, or until `over()`."""
        if self.inside:
            return  # called by a rank, which cannot sleep in the middle of a call
        self.check()
        heap, until, self.inside = self.heap, self.now + seconds, True
        try:
            while heap and heap[0][0] <= until and not over():
                self.now, _, do = heappop(heap)
                self.idle_calls = 0
                do()
                if self.broken is not None or self.driver_ends is not None or self.now > self.deadline:
                    break
        finally:
            self.inside = False
        self.check()
        if not over() and seconds > 0:
            self.now, self.idle_calls = max(self.now, until), 0

    def check(self) -> None:
        """Raises DriverEnded if the driver has died, NoProgress if it makes none, and the error in `broken`."""
        if self.broken is not None and not self.inside:
            raise self.broken
        if self.driver_ends is not None and not self.inside:
            raise DriverEnded(self.driver_ends)
        self.idle_calls += 1
        if self.now > self.deadline:
            raise NoProgress(f"the run has not ended after {MAX_SECONDS:g} virtual seconds")
        if self.idle_calls > MAX_IDLE_CALLS:
            raise NoProgress("the driver calls the cluster again and again without waiting")
