"""Builds parts in several processes; the corpus does not depend on which process builds which part."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple, cast

from pentad.schedules.ir.errors import PentadError
from pentad.workers.preprocess.part_builder import Options, PartBuilder
from pentad.workers.preprocess.parts import BuildPart


class Task(NamedTuple):
    part: BuildPart
    key: str


class Done(NamedTuple):
    """What was done since the last report: `characters` read, and the part that is now complete, if any."""

    characters: int
    part: BuildPart | None = None


Note = Callable[[str], None]


def build_parts(
    out: Path,
    partial: Path,
    options: Options,
    tasks: list[Task],
    workers: int,
    report: Callable[[Done], None],
    note: Note,
) -> None:
    """Builds all `tasks`, in this process if one is enough. Passes each line to `note` once, however many processes
    send it. Raises the first PentadError of any process."""
    note = cache(note)
    if min(workers, len(tasks)) > 1:
        with _started(min(workers, len(tasks)), out, partial, options) as processes:
            _hand_out(processes, iter(tasks), report, note)
        return
    builder = PartBuilder(out, partial, options, note)
    for part, key in tasks:
        builder.build(part, key, lambda characters: report(Done(characters)))
        report(Done(0, part))


def _hand_out(
    processes: dict[Connection, BaseProcess], tasks: Iterator[Task], report: Callable[[Done], None], note: Note
) -> None:
    busy = set[Connection]()
    for connection, task in zip(processes, tasks, strict=False):
        connection.send(task)
        busy.add(connection)
    while busy:
        for connection in cast(list[Connection], wait(busy)):
            try:
                answer: Done | str | PentadError = connection.recv()
            except (EOFError, ConnectionError):
                process = processes[connection]
                process.join()
                expected = f"expected it to finish (is there memory for --workers {len(processes)}?)"
                raise PentadError(f"a process of the build has exit code {process.exitcode}: {expected}") from None
            if isinstance(answer, PentadError):
                raise answer
            if isinstance(answer, str):
                note(answer)
                continue
            report(answer)
            if answer.part:
                busy.discard(connection)
                if following := next(tasks, None):
                    with suppress(ConnectionError):  # it has just died, which the next recv reports
                        connection.send(following)
                    busy.add(connection)


@contextmanager
def _started(count: int, out: Path, partial: Path, options: Options) -> Iterator[dict[Connection, BaseProcess]]:
    """Processes that wait for tasks; they end with the block."""
    context = multiprocessing.get_context("spawn")  # Arrow's and the tokenizer's threads do not survive a fork
    processes: dict[Connection, BaseProcess] = {}
    try:
        for _ in range(count):
            here, there = context.Pipe()
            process: BaseProcess = context.Process(target=_work, args=(there, out, partial, options), daemon=True)
            process.start()
            there.close()
            processes[here] = process
        yield processes
    finally:
        for connection, process in processes.items():
            process.terminate()
            process.join()
            connection.close()


def _work(connection: Connection, out: Path, partial: Path, options: Options) -> None:
    """The main function of a process: builds the tasks that it is sent until it is terminated or its parent dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "FASTOKENS_BPE_THREADS": "1", "RAYON_NUM_THREADS": "1"}
    builder = PartBuilder(out, partial, options, connection.send)
    while True:
        part, key = connection.recv()
        try:
            builder.build(part, key, lambda characters: connection.send(Done(characters)))
            connection.send(Done(0, part))
        except PentadError as error:
            connection.send(error)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
