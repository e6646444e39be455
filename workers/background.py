"""Runs what a rank does in a thread of its own, beside other calls."""

from __future__ import annotations

import threading
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


def in_daemon(function: Callable[[], T]) -> Future[T]:
    """Runs a function, which may never return, in a thread of its own that ends with the process."""
    result = Future[T]()
    threading.Thread(target=answer, args=(function, result), daemon=True).start()
    return result


def within(seconds: float, function: Callable[[], T]) -> T:
    """The function's result. Raises TimeoutError if it takes longer, leaving it behind in its thread."""
    return in_daemon(function).result(seconds)


def answer(function: Callable[[], T], result: Future[T]) -> None:
    try:
        result.set_result(function())
    except BaseException as error:
        result.set_exception(error)
        del result  # the traceback of its error refers to this frame


def awaited(result: Future[T], check: Callable[[], None]) -> T:
    """The result, or its error raised; calls `check`, which may raise, while it waits."""
    while not result.done():
        check()
        wait([result], POLL_SECONDS)
    return result.result()
