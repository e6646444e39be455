"""A run without ranks whose events are made up, and its page."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from rich.console import Console

from pentad.orchestrator.cluster.group import WorkerGroup
from pentad.orchestrator.cluster.rank_status import Status
from pentad.orchestrator.config.config import load
from pentad.orchestrator.monitoring.display import Display
from pentad.orchestrator.monitoring.event_bus import EventBus
from pentad.orchestrator.monitoring.runfolder import METRIC_KEYS, RunFolder
from pentad.orchestrator.page.page_data import PageData
from pentad.orchestrator.page.page_server import PageServer
from pentad.orchestrator.planning.estimate import costs_of
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.diagnosis.rank_times import RankTime
from pentad.schedules.ir.instruction import Op
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.simulate.timeline import Span, Timeline
from pentad.schedules.spec.mesh import to_mesh_ranks

TOKEN = "secret-of-the-run"
LOADS = ((1, (300, 100, 0, 0)), (2, (100,) * 4))  # of experts, by layer
HOSTILE = "</script><img src=x onerror=alert(1)>"


class PageRun:
    """dp2 x pp2, 1F1B; `served` is its page."""

    def __init__(self, bus: EventBus, data: PageData, served: PageServer) -> None:
        self.bus, self.data, self.served = bus, data, served
        self.plan = bus.folder.plan
        self.spans = to_mesh_ranks(simulate(self.plan.program, costs_of(self.plan)), self.plan.mesh).spans

    def place(self, generation: int = 1) -> None:
        places = [SimpleNamespace(ip="10.0.0.1", pid=100 + rank, gpu=-1) for rank in range(self.plan.mesh.size)]
        group = SimpleNamespace(plan=self.plan, generation=generation, places=places)
        self.bus.ranks_placed(cast(WorkerGroup, group))

    def run(self, *steps: int, generation: int = 1, together: bool = False, loads: Any = LOADS) -> None:
        """Measured steps, each as simulated; `together`, in one call, of which only the last ones are measured."""
        rows, measured = list[dict[str, Any]](), list[tuple[Span, ...]]()
        for step in steps:
            spans = tuple(s._replace(step=step, start=s.start + step, end=s.end + step) for s in self.spans)
            times = tuple(RankTime(step, rank, "F", rank // 2, 1.0 + 0.1 * (rank == 3)) for rank in range(4))
            facts: dict[str, Any] = {
                "step": step,
                "generation": generation,
                "skipped": False,
                "loss": 2 + math.exp(-step / 4),
            }
            facts |= {"tokens": 4096, "rank_times": times, "expert_load": dict(loads)}
            rows.append(dict.fromkeys(METRIC_KEYS, 1.0) | facts)
            measured.append(spans)
        for first in [0] if together else range(len(steps)):
            last = len(steps) if together else first + 1
            self.bus.steps_done(rows[first:last], measured[first:last][-10:])

    def stall(self) -> None:
        """Rank 3, of the last stage, stays in its first forward: rank 1 waits for its gradient. The other replica goes
        on, until both meet at the end of the step."""
        for rank in (0, 1, 2, 3):
            self.at(rank, Op.F if rank == 3 else Op.BW if rank < 2 else Op.F)
        self.bus.update_ranks(self.statuses, dict.fromkeys(range(4), time.monotonic() + 3600))  # all answer

    def at(self, rank: int, op: Op) -> None:
        """Puts the rank at the first instruction with this op."""
        stream = self.plan.program.streams[self.plan.mesh.coordinates(rank).pp]
        counter = next(number for number, action in enumerate(stream) if action.key.op is op)
        self.statuses = {**getattr(self, "statuses", {}), rank: Status(1, 3, str(stream[counter].key), 0.1, counter)}


@contextmanager
def page_run(folder: Path, *words: str, first: int = 0) -> Iterator[PageRun]:
    """A run with placed ranks; its folder has `first` steps of an earlier driver."""
    defaults = (f"run.folder={folder}", "run.name=trial", "run.steps=40", "mesh.dp=2", "mesh.pp=2")
    config = load(None, [*defaults, "schedule.name=1f1b", *words])
    plan = make_plan(config, "cpu")
    with RunFolder(config, plan) as opened:
        for step in range(first):
            row: dict[str, Any] = dict.fromkeys(METRIC_KEYS, 1.0)
            opened.metrics(row | {"step": step, "generation": 0, "loss": None, "tokens": 4096})
        bus = EventBus(config, opened, Display(Console(file=StringIO()), "trial", 40), first, None)
        data = PageData(bus, config.metrics.timeline_steps)
        bus.watchers.append(data)
        served = PageServer(data, "127.0.0.1", 0, TOKEN, None)
        try:
            made = PageRun(bus, data, served)
            made.place()
            yield made
        finally:
            served.close()


def ended_run(folder: Path) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """A run that has ended: its folder, and what its page showed last."""
    with page_run(folder, "run.steps=7") as run:
        where = {"node": "10.0.0.1", "gpu": -1, "pid": 1}
        ranks = [{"rank": rank, "coordinates": {}, **where} for rank in range(run.plan.mesh.size)]
        run.bus.record("start")
        run.bus.record("place", generation=1, ranks=ranks)
        run.bus.record("lost", rank=1, fault="killed")
        run.run(*range(7))
        _, measured = run.data._measured()
        run.bus.folder.timelines(Timeline("measured", measured.spans), costs_of(run.plan))
        run.bus.folder.save_expert_load(*run.bus.expert_load)
        run.bus.record("end")
        run.bus.folder.files.settle()
        return run.bus.folder.path, run.data.state(), run.data.experts()
