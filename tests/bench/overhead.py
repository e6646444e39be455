"""Measures the overhead of monitoring a run: heartbeats, watchers, metrics and spans, as fractions of a step.

PYTHONPATH=.typings:tests/support python tests/bench/overhead.py --seconds 120 --json OUT
PYTHONPATH=.typings:tests/support python tests/bench/overhead.py --config CONFIG --seconds 60 --json OUT

Heartbeats and watchers of a run (the quickstart on CPUs, or a config on GPUs) are switched on and off every few
seconds, and CPU seconds per step, of all processes, and seconds per step are compared. What cannot be switched off is
timed: the driver's `History.add`, and, in a separate loop, how long a rank takes to record its progress and a span.
Fractions are of a step's CPU seconds; those of spans on GPUs are of its seconds, because the GPU waits for their
events.
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
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch
from record import record

from pentad.orchestrator.cluster.group import WorkerGroup
from pentad.orchestrator.config.config import load
from pentad.orchestrator.monitoring.event_bus import EventBus
from pentad.orchestrator.run.measure import History
from pentad.orchestrator.run.step_loop import StepLoop
from pentad.orchestrator.run.train import train
from pentad.schedules.compiler import compile_program
from pentad.workers.lanes.progress_file import ProgressFile
from pentad.workers.lanes.streams import HostStreams


class Switch:
    """Switches heartbeats and watchers on and off by the clock, and records steps and CPU seconds of each period."""

    def __init__(self, period: float) -> None:
        self.began, self.period = 0.0, period
        self.steps: list[tuple[float, float]] = []  # start, end
        self.samples: list[tuple[float, float]] = []  # at each switch: time, CPU seconds so far
        self.history_seconds: list[float] = []  # thread CPU seconds of History.add, per step
        self.notifying = False
        self.monitoring_seconds: list[float] = []  # thread CPU seconds of each call of watchers and ticks, while on

    def on(self, at: float | None = None) -> bool:
        return int(((time.monotonic() if at is None else at) - self.began) / self.period) % 2 == 0

    def patch(self) -> None:
        """Replaces the methods of the driver that are switched or timed."""
        self._gate(WorkerGroup, "statuses", dict)
        self._gate(StepLoop, "_tick", lambda: None)
        add, steps_done, update = History.add, EventBus.steps_done, EventBus.update
        switch = self

        def timed_add(history: History, results: Any) -> Any:
            began = time.thread_time()
            rows = add(history, results)
            switch.history_seconds += [(time.thread_time() - began) / len(rows)] * len(rows)
            return rows

        def timed_steps_done(bus: EventBus, rows: Any, spans: Any) -> None:
            switch.steps += [(min(span.start for span in step), max(span.end for span in step)) for step in spans]
            switch._notify(bus, lambda: steps_done(bus, rows, spans))

        def timed_update(bus: EventBus, **changes: Any) -> None:
            switch._notify(bus, lambda: update(bus, **changes))

        History.add = timed_add  # type: ignore[method-assign, assignment]
        EventBus.steps_done, EventBus.update = timed_steps_done, timed_update  # type: ignore[method-assign, assignment]

    def sample(self, seconds: float) -> None:
        """Once the run makes steps: samples CPU seconds at each switch, then stops the run by SIGTERM."""
        while len(self.steps) < 8:
            time.sleep(0.1)
        self.began = time.monotonic()
        for number in range(int(seconds / self.period) + 1):
            time.sleep(max(0.0, self.began + number * self.period - time.monotonic()))
            self.samples.append((time.monotonic(), cpu_seconds()))
        os.kill(os.getpid(), signal.SIGTERM)

    def _gate(self, cls: type, name: str, replacement: Callable[[], Any]) -> None:
        """While off, the method is replaced; while on, it is timed."""
        method, switch = getattr(cls, name), self

        def gated(*args: Any, **kwargs: Any) -> Any:
            if not switch.on():
                return replacement()
            began = time.thread_time()
            result = method(*args, **kwargs)
            switch.monitoring_seconds.append(time.thread_time() - began)
            return result

        setattr(cls, name, gated)

    def _notify(self, bus: EventBus, call: Callable[[], None]) -> None:
        """Makes a call of the event bus: without watchers while off, timed while on."""
        if self.notifying:  # the bus calls itself
            return call()
        self.notifying, on, watchers = True, self.on(), bus.watchers
        bus.watchers = watchers if on else []
        began = time.thread_time()
        try:
            call()
        finally:
            self.notifying, bus.watchers = False, watchers
            if on:
                self.monitoring_seconds.append(time.thread_time() - began)


def cpu_seconds() -> float:
    """CPU seconds of this process and all its descendants."""
    total = 0.0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system
    return total


def span_seconds() -> float:
    """Seconds that a rank on a CPU takes to record its progress and the span of an instruction."""
    stream = compile_program("1f1b", 4, 8).streams[0]
    part, lanes, count = stream[0].parts[0], HostStreams(), 20_000
    with tempfile.TemporaryDirectory() as folder:
        progress = ProgressFile(Path(folder, "progress"), 1)
        lanes.begin_step()
        began = time.thread_time()
        for number in range(count):
            progress.write(0, number)
            with lanes.issue(part):
                pass
        return (time.thread_time() - began) / count


def gpu_span_seconds() -> float:
    """GPU seconds for an instruction's two timed events and progress counter, beyond those for one event."""
    from pentad.workers.lanes.streams import CudaStreams

    stream = compile_program("1f1b", 4, 8).streams[0]
    part, lanes, count = stream[0].parts[0], CudaStreams(torch.device("cuda", 0), {"compute"}), 2_000
    seconds = []
    for spans in (True, False) * 3:
        lanes.begin_step()
        events = [torch.cuda.Event() for _ in range(count)]
        torch.cuda._sleep(200_000_000)  # so that everything is issued before the GPU starts on it
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
    """Fractions as described above. `instructions` is their number in a step, over all ranks."""
    periods: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for (since, cpu_before), (until, cpu_after) in pairwise(switch.samples):
        # A step that crosses an end of the period counts by the fraction of it that lies within.
        steps = sum(max(0.0, min(end, until) - max(start, since)) / (end - start) for start, end in switch.steps)
        if steps > 1:
            periods[switch.on((since + until) / 2)].append(((cpu_after - cpu_before) / steps, (until - since) / steps))
    cpu = {on: statistics.median(c for c, _ in rows) for on, rows in periods.items()}
    wall = {on: statistics.median(w for _, w in rows) for on, rows in periods.items()}
    span = gpu_span_seconds() if gpu else span_seconds()
    spans = span * instructions / ranks / wall[False] if gpu else span * instructions / cpu[False]
    history = statistics.mean(switch.history_seconds)
    monitoring = sum(switch.monitoring_seconds) / max(1, sum(switch.on(start) for start, _ in switch.steps))
    pairs = list(zip(periods[True], periods[False], strict=False))
    return {
        "periods": {"on": len(periods[True]), "off": len(periods[False]), "seconds": switch.period},
        "cpu_seconds_a_step": {"on": cpu[True], "off": cpu[False]},
        "seconds_a_step": {"on": wall[True], "off": wall[False]},
        "watching_share_by_difference": statistics.median(on[0] / off[0] - 1 for on, off in pairs),
        "step_share_by_difference": statistics.median(on[1] / off[1] - 1 for on, off in pairs),
        "watching_share_of_driver_thread": monitoring / cpu[False],
        "accounts_share": history / cpu[False],
        "spans_share": spans,
        "measured_directly_share": (monitoring + history) / cpu[False] + spans,
        "instructions_a_step": instructions,
        "span_microseconds": 1e6 * span,
        "rows": [{"cpu_on": on[0], "cpu_off": off[0], "wall_on": on[1], "wall_off": off[1]} for on, off in pairs],
    }


def measure(seconds: float, period: float, path: Path | None, overrides: list[str]) -> dict[str, Any]:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    switch = Switch(period)
    switch.patch()
    threading.Thread(target=switch.sample, args=(seconds,), daemon=True).start()
    with tempfile.TemporaryDirectory() as folder:
        settings = [
            f"run.folder={folder}",
            "run.steps=1000000",
            "cluster.dashboard=false",
            "checkpoint.every_seconds=0",
        ]
        settings += [] if path else ["cluster.device=cpu"]
        config = load(path, [*settings, *overrides])
        train(config)
    ranks, microbatches, replicas = config.mesh.pp, config.schedule.microbatches, config.mesh.dp
    program = compile_program(config.schedule.name, ranks, microbatches, replicas=replicas)
    instructions = replicas * sum(len(action.parts) for stream in program.streams for action in stream)
    return report(switch, instructions, replicas * ranks, gpu=path is not None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--period", type=float, default=6.0, help="seconds between two switches")
    parser.add_argument("--config", type=Path, help="a run on GPUs; default: the quickstart on CPUs")
    parser.add_argument("--json", type=Path, help="JSON file of the results; other sections in it are left as they are")
    parser.add_argument("overrides", nargs="*", help="SECTION.KEY=VALUE over the config")
    args = parser.parse_args()
    record(args.json, "overhead", lambda: measure(args.seconds, args.period, args.config, args.overrides))


if __name__ == "__main__":
    main()
