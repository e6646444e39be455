"""One place where a run's news come in: it keeps the view, writes the journal and tells the watchers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from pentad.orchestrator.cluster.group import WorkerGroup
from pentad.orchestrator.cluster.worker import Status
from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.monitoring.display import Display, RankState
from pentad.orchestrator.monitoring.run_state import RankView, RunView, Watcher
from pentad.orchestrator.monitoring.runfolder import RunFolder
from pentad.schedules.simulate.timeline import Span
from pentad.workers.runtime.telemetry import GpuState


class EventBus:
    """Of one run, over all its generations."""

    def __init__(
        self, config: RunConfig, folder: RunFolder, display: Display, first: int, dashboard: str | None
    ) -> None:
        self.folder, self.display = folder, display
        self.watchers: list[Watcher] = []
        self.gpus: Callable[[dict[int, GpuState]], None] = lambda states: None
        plan, path = folder.plan, str(folder.path.absolute())
        ends = {"dashboard": dashboard} if dashboard else {}
        name, steps, mesh = config.run.name, config.run.steps, str(plan.mesh)
        self.view = RunView(name, path, "starting", first, steps, 0, mesh, plan.program.name, plan.program.hash)
        self.view = self.view._replace(endpoints=ends)

    def plan(self, group: WorkerGroup) -> None:
        """The ranks are in their places, for the first time or after a recovery."""
        now, plan = time.monotonic(), group.plan
        ranks = tuple(
            RankView(rank, plan.mesh.coordinates(rank), at.ip, at.pid, at.gpu, "starting", self.view.step, "", now)
            for rank, at in enumerate(group.places)
        )
        mesh, program = str(plan.mesh), plan.program
        self.view = self.view._replace(
            ranks=ranks, generation=group.generation, mesh=mesh, schedule=program.name, program=program.hash
        )
        for watcher in self.watchers:
            watcher.plan(self.view)
        self.say()

    def say(self, **changes: Any) -> None:
        """Changes the view and tells it."""
        self.view = self.view._replace(**changes)
        for watcher in self.watchers:
            watcher.view(self.view)

    def state(self, state: str) -> None:
        if state != self.view.state:
            self.display.turn(state)
            self.say(state=state)

    def ranks(self, statuses: dict[int, Status], heard: dict[int, float], hung: Sequence[int] = ()) -> None:
        """What the ranks do, in the view and in the terminal."""
        views = []
        for view in self.view.ranks:
            status = statuses.get(view.rank)
            if status is not None:
                state = "hung" if view.rank in hung else _state(status)
                view = view._replace(state=state, step=status.step, instruction=status.instruction)
            views.append(view._replace(heartbeat=heard.get(view.rank, view.heartbeat)))
        self._ranks(tuple(views))
        self.gpus({rank: status.gpu for rank, status in statuses.items() if status.gpu is not None})

    def lost(self, rank: int) -> None:
        self._ranks(tuple(v._replace(state="lost") if v.rank == rank else v for v in self.view.ranks))

    def steps(self, rows: Sequence[dict[str, Any]], spans: Sequence[tuple[Span, ...]]) -> None:
        """Steps are done."""
        for row in rows:
            self.folder.metrics(row)
            self.display.step(row)
            if row["skipped"]:
                self.display.note(f"step {row['step']} had a gradient norm that is not finite: no weight changed")
        for watcher in self.watchers:
            watcher.steps(rows, spans)
        last = rows[-1]
        self.say(step=last["step"] + 1, loss=last["loss"], tokens_per_second=last["tokens_per_second"], verdict="")

    def _ranks(self, views: tuple[RankView, ...]) -> None:
        self.say(ranks=views)
        self.display.refresh([RankState(v.rank, v.coordinates, v.state, v.instruction, v.step) for v in views])

    def event(self, event: str, **facts: Any) -> None:
        """A line of the journal."""
        entry = self.folder.event(event, **facts)
        for watcher in self.watchers:
            watcher.event(entry)


def _state(status: Status) -> str:
    if not status.instruction:
        return "idle"
    others = "RECV" in status.instruction or "#" in status.instruction  # a transfer, or something that a group does
    return "waiting" if others else "running"
