"""Changes a run's compute order once, to suit the costs measured in its first steps (schedule.replan)."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from threading import Thread
from typing import Any, NamedTuple

from pentad.orchestrator.cluster.group import WorkerGroup
from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.monitoring.event_bus import EventBus
from pentad.orchestrator.planning.formatting import format_duration, format_percent
from pentad.orchestrator.search.replanned_order import ReplannedOrder, find_order, order_facts, replans
from pentad.schedules.diagnosis.rank_times import RankTime
from pentad.schedules.diagnosis.slow_ranks import WARM_UP
from pentad.schedules.spec.plan import Plan

STEPS = 8  # steps whose medians are the costs: three of them may be disturbed
Found = Future[ReplannedOrder | str]


class OrderChange(NamedTuple):
    """The configuration, plan and order that the ranks change to, and the facts for the journal."""

    found: ReplannedOrder
    facts: dict[str, Any]


class Replan:
    """Replans one run, once, from STEPS steps of the full batch. They follow the first WARM_UP steps of a generation,
    which compile kernels and allocate memory. The search runs in a thread of its own."""

    def __init__(self, config: RunConfig, group: WorkerGroup, bus: EventBus) -> None:
        self.group, self.bus, self.steps = group, bus, config.run.steps
        self.ramp = sum(stage.steps for stage in config.batch.rampup or ())
        self.over = not replans(config) or config.schedule.order is not None or config.mesh.pp == 1
        self.generation, self.first = -1, 0  # `first`: the generation's first step of the full batch
        self.searched: Plan | None = None
        self.search: Found | None = None
        self.change: OrderChange | None = None  # for the next step boundary

    def due(self, plan: Plan, config: RunConfig) -> OrderChange | None:
        """The change that is due at the next step boundary, if any; `plan` is the ranks' plan, made from `config`."""
        if self.over:
            return None
        if self.generation != self.group.generation:
            self.generation, self.first = self.group.generation, max(self.bus.view.step, self.ramp)
        if self.searched is not plan:  # what was measured no longer holds
            self.searched = self.search = self.change = None
        if self.search is None:
            if len(steps := self._quiet_steps()) == STEPS:
                left = self.steps - self.bus.view.step
                self.searched, self.search = plan, in_thread(config, plan, steps, left)
        elif self.change is None and self.search.done():
            self._conclude(config, self.search.result())
        return self.change

    def take(self, plan: Plan) -> OrderChange | None:
        """The change of this plan, if any, which the caller now makes; no other follows."""
        if self.change is None or self.searched is not plan:
            return None
        change, self.change, self.over = self.change, None, True
        return change

    def _quiet_steps(self) -> list[tuple[RankTime, ...]]:
        first = self.first + WARM_UP
        return [times for times in self.bus.folder.rank_times if times and times[0].step >= first][:STEPS]

    def _conclude(self, config: RunConfig, found: ReplannedOrder | str) -> None:
        facts: dict[str, Any] = {"generation": self.group.generation}
        if isinstance(found, str):
            self.over, text = True, f"the order of instructions stays as it was planned: {found}"
            self.bus.record("not replanned", step=self.bus.view.step, **facts, cause=found, sentence=text)
            self.bus.display.note(text)
            return
        before, after = map(format_duration, (found.before, found.after))
        text = f"re-planned with the measured costs of {STEPS} steps: by simulation a step takes {after} instead of "
        text += f"{before}, {format_percent(found.gain)} less, with the same bits"
        facts |= {"before": self.group.plan.program.hash, "program": found.plan.program.hash, "order": found.order.hash}
        facts |= {"predicted_seconds": [found.before, found.after], **order_facts(config), "sentence": text}
        self.change = OrderChange(found, facts)


def in_thread(config: RunConfig, plan: Plan, steps: Sequence[tuple[RankTime, ...]], left: int) -> Found:
    """Runs `find_order` in a daemon thread: a run does not wait for it at its end."""
    future: Found = Future()

    def search() -> None:
        try:
            future.set_result(find_order(config, plan, steps, left))
        except BaseException as error:
            future.set_exception(error)  # raised by the driver

    Thread(target=search, name="replan", daemon=True).start()
    return future
