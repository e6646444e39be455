"""What a rank does in a thread of its own beside other calls."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

POLL_SECONDS = 0.02
T = TypeVar("T")


def in_background(function: Callable[[], T]) -> Future[T]:
    """Runs a function in a thread of its own."""
    thread = ThreadPoolExecutor(1)
    try:
        return thread.submit(function)
    finally:
        thread.shutdown(wait=False)


def awaited(result: Future[T], check: Callable[[], None]) -> T:
    """Waits for the result, or raises the error; calls `check` meanwhile, which may raise."""
    while not result.done():
        check()
        wait([result], POLL_SECONDS)
    return result.result()
