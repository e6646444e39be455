"""What it costs to watch a run: heartbeats, watchers, metrics and spans, as shares of a step.

PYTHONPATH=.typings:tests/support python tests/bench/overhead.py --seconds 120 --json OUT
PYTHONPATH=.typings:tests/support python tests/bench/overhead.py --config CONFIG --seconds 60 --json OUT

One run (the quickstart on CPUs, or that of a config), in which heartbeats and watchers are switched on and off every
few seconds: CPU seconds a step of all its processes, and seconds a step, are compared. What is never off is timed: the
driver's accounts of steps, and, in a loop of its own, what a rank spends to write down an instruction. Shares of what
is timed are of a step's CPU seconds; on GPUs those of spans are of its seconds, because the GPU waits for them.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from record import record
from rich.console import Console

from pentad.orchestrator.cluster.group import WorkerGroup
from pentad.orchestrator.config.config import load
from pentad.orchestrator.monitoring.event_bus import EventBus
from pentad.orchestrator.run import driver
from pentad.orchestrator.run.measure import History
from pentad.orchestrator.run.step_loop import StepLoop
from pentad.schedules.compiler import compile_program
from pentad.workers.runtime.progress_file import ProgressFile
from pentad.workers.runtime.streams import HostStreams


class Switch:
    """Turns what can be off on and off by the clock, and notes the steps and CPU seconds of each period."""

    def __init__(self, period: float) -> None:
        self.began, self.period = 0.0, period
        self.steps: list[tuple[float, float, float]] = []  # start, end, seconds
        self.marks: list[tuple[float, float, int]] = []  # at a change: time, CPU seconds so far, steps done
        self.accounts: list[float] = []  # CPU seconds of History.add a step
        self.told: list[float] = []  # the same of watchers and ticks, while on

    def on(self, at: float | None = None) -> bool:
        return int(((time.monotonic() if at is None else at) - self.began) / self.period) % 2 == 0

    def patch(self) -> None:
        self._gate(WorkerGroup, "statuses", dict)
        self._gate(StepLoop, "_tick", lambda: None)
        add, tell, say = History.add, EventBus.steps_done, EventBus.update
        switch = self

        def timed_add(history: History, results: Any) -> Any:
            began = time.thread_time()
            rows = add(history, results)
            switch.accounts += [(time.thread_time() - began) / len(rows)] * len(rows)
            return rows

        def steps(news: EventBus, rows: Any, spans: Any) -> None:
            for row, its in zip(rows, spans, strict=True):
                switch.steps.append((min(s.start for s in its), max(s.end for s in its), row["step_seconds"]))
            _quietly(news, lambda: tell(news, rows, spans), switch.on(), switch.told)

        def view(news: EventBus, **changes: Any) -> None:
            _quietly(news, lambda: say(news, **changes), switch.on(), switch.told)

        History.add, EventBus.steps_done, EventBus.update = timed_add, steps, view  # type: ignore[method-assign, assignment]

    def watch(self, seconds: float) -> None:
        """Once steps come: notes CPU seconds at each change; ends the run as a signal would."""
        while len(self.steps) < 8:
            time.sleep(0.1)
        self.began = time.monotonic()
        for number in range(int(seconds / self.period) + 1):
            time.sleep(max(0.0, self.began + number * self.period - time.monotonic()))
            self.marks.append((time.monotonic(), cpu_seconds(), len(self.steps)))
        os.kill(os.getpid(), signal.SIGTERM)

    def _gate(self, kind: type, name: str, instead: Callable[[], Any]) -> None:
        real, switch = getattr(kind, name), self

        def gated(*arguments: Any, **named: Any) -> Any:
            if not switch.on():
                return instead()
            began = time.thread_time()
            answer = real(*arguments, **named)
            switch.told.append(time.thread_time() - began)
            return answer

        setattr(kind, name, gated)


def _quietly(news: EventBus, tell: Callable[[], None], on: bool, told: list[float]) -> None:
    watchers = news.watchers
    news.watchers = watchers if on else []
    began = time.thread_time()
    try:
        tell()
    finally:
        news.watchers = watchers
        if on:
            told.append(time.thread_time() - began)


def cpu_seconds() -> float:
    """Of this process and all below it."""
    total = 0.0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system
    return total


def span_seconds() -> float:
    """What a rank spends to write down where it is and when an instruction ran."""
    stream = compile_program("1f1b", 4, 8).streams[0]
    part, lanes, count = stream[0].parts[0], HostStreams(), 20_000
    with tempfile.TemporaryDirectory() as folder:
        board = ProgressFile(Path(folder, "board"), 1)
        lanes.begin_step()
        began = time.thread_time()
        for number in range(count):
            board.write(0, number)
            with lanes.issue(part):
                pass
        return (time.thread_time() - began) / count


def gpu_span_seconds() -> float:
    """What a GPU spends on the two timed events of an instruction and the word that counts it, over one event."""
    from pentad.workers.runtime.streams import CudaStreams

    stream = compile_program("1f1b", 4, 8).streams[0]
    part, lanes, count = stream[0].parts[0], CudaStreams(torch.device("cuda", 0), {"compute"}), 2_000
    seconds = []
    for spans in (True, False) * 3:
        lanes.begin_step()
        events = [torch.cuda.Event() for _ in range(count)]
        torch.cuda._sleep(200_000_000)  # all of it is issued before the GPU begins
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for event in events:
            if spans:
                with lanes.issue(part):
                    pass
            else:
                event.record()
        last.record()
        torch.cuda.synchronize()
        seconds.append(first.elapsed_time(last) / 1e3 / count)
        lanes.read_times(lambda: None)
    return statistics.median(seconds[::2]) - statistics.median(seconds[1::2])


def report(switch: Switch, instructions: int, ranks: int, gpu: bool) -> dict[str, Any]:
    """Shares as above; `instructions` are those of a step, of all ranks."""
    periods: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for (since, used, _), (until, more, _) in zip(switch.marks, switch.marks[1:], strict=False):
        # Steps that overlap an end of the period count by their part within.
        done = sum(max(0.0, min(end, until) - max(start, since)) / (end - start) for start, end, _ in switch.steps)
        if done > 1:
            periods[switch.on((since + until) / 2)].append(((more - used) / done, (until - since) / done))
    cpu = {on: statistics.median(c for c, _ in its) for on, its in periods.items()}
    wall = {on: statistics.median(w for _, w in its) for on, its in periods.items()}
    span = gpu_span_seconds() if gpu else span_seconds()
    spans = span * instructions / ranks / wall[False] if gpu else span * instructions / cpu[False]
    accounts = statistics.mean(switch.accounts)
    on_steps = sum(switch.on(start) for start, _, _ in switch.steps)
    told = sum(switch.told) / max(1, on_steps)
    pairs = list(zip(periods[True], periods[False], strict=False))
    return {
        "periods": {"on": len(periods[True]), "off": len(periods[False]), "seconds": switch.period},
        "cpu_seconds_a_step": {"on": cpu[True], "off": cpu[False]},
        "seconds_a_step": {"on": wall[True], "off": wall[False]},
        "watching_share_by_difference": statistics.median(on[0] / off[0] - 1 for on, off in pairs),
        "step_share_by_difference": statistics.median(on[1] / off[1] - 1 for on, off in pairs),
        "watching_share_of_driver_thread": told / cpu[False],
        "accounts_share": accounts / cpu[False],
        "spans_share": spans,
        "measured_directly_share": (told + accounts) / cpu[False] + spans,
        "instructions_a_step": instructions,
        "span_microseconds": 1e6 * span,
        "rows": [{"cpu_on": on[0], "cpu_off": off[0], "wall_on": on[1], "wall_off": off[1]} for on, off in pairs],
    }


def measure(seconds: float, period: float, path: Path | None, overrides: list[str]) -> dict[str, Any]:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    switch = Switch(period)
    switch.patch()
    threading.Thread(target=switch.watch, args=(seconds,), daemon=True).start()
    with tempfile.TemporaryDirectory() as folder:
        fixed = [f"run.folder={folder}", "run.steps=1000000", "cluster.dashboard=false", "checkpoint.every=0"]
        fixed += [] if path else ["cluster.device=cpu"]
        config = load(path, [*fixed, *overrides])
        driver.train(config, console=Console(quiet=True))
    ranks, microbatches, replicas = config.mesh.pp, config.schedule.microbatches, config.mesh.dp
    program = compile_program(config.schedule.name, ranks, microbatches, replicas=replicas)
    instructions = replicas * sum(len(unit.parts) for stream in program.streams for unit in stream)
    return report(switch, instructions, replicas * ranks, gpu=path is not None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--period", type=float, default=6.0, help="seconds between two changes")
    parser.add_argument("--config", type=Path, help="a run on GPUs; the quickstart on CPUs, if not given")
    parser.add_argument("--json", type=Path, help="results; those of other parts that are there already stay")
    parser.add_argument("overrides", nargs="*", help="SECTION.KEY=VALUE over the config")
    args = parser.parse_args()
    record(args.json, "overhead", lambda: measure(args.seconds, args.period, args.config, args.overrides))


if __name__ == "__main__":
    main()
