"""Work that is done by turns: a generator that yields where it needs what operations between ranks have yet to bring.

Of a forward and a backward at work together each computes while the other's operations run (DualPipe, arXiv
2412.19437, section 3.2.1). Turns depend on the program and on shapes, never on time: all ranks of a group start their
operations in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Generic, TypeVar

import torch.distributed as dist

S = TypeVar("S")
T = TypeVar("T")
Turns = Generator[None, None, T]


class AsyncResult(Generic[T]):
    """What operations between ranks, which have been started, will bring.

    `yield from` it gives up the turn, unless nothing had to be started, and waits when it is resumed: on a GPU the
    current stream does, not the host. `made` says what came; `held` is what the operations read and write meanwhile.
    """

    def __init__(self, works: Sequence[dist.Work | None], made: Callable[[], T], *held: object) -> None:
        self.works, self.made, self.held = works, made, held

    def __iter__(self) -> Turns[T]:
        if self.works:
            yield
        return self.now()

    def now(self) -> T:
        """Without giving up the turn."""
        for work in self.works:
            if work is not None:  # as it is where this rank is not of the group
                work.wait()
        return self.made()


def ready(value: T) -> AsyncResult[T]:
    """What no rank has to bring."""
    return AsyncResult((), lambda: value)


def gather2(first: AsyncResult[S], second: AsyncResult[T]) -> AsyncResult[tuple[S, T]]:
    """Awaited in one turn."""
    return AsyncResult((*first.works, *second.works), lambda: (first.made(), second.made()), first.held, second.held)


def run_to_completion(turns: Turns[T]) -> T:
    """All of it at once."""
    while True:
        try:
            next(turns)
        except StopIteration as end:
            return end.value


def on_yield(turns: Turns[T], act: Callable[[], None]) -> Turns[T]:
    """Acts whenever a turn is given up, before it is, and at the end."""
    while True:
        try:
            next(turns)
        except StopIteration as end:
            act()
            return end.value
        act()
        yield


def interleave(*works: Turns[None]) -> None:
    """Each as far as it gets, in this order, until all have ended."""
    left = list(works)
    try:
        while left:
            left = [work for work in left if next(work, "ended") is None]
    finally:
        for work in works:
            work.close()
