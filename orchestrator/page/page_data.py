"""The data of a run's page: a watcher stores it in the driver's thread, and readers' threads turn it into JSON and
figures.

The driver only stores what it has at hand; everything that takes time happens on request.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from pentad.orchestrator.cluster.rank_status import Status
from pentad.orchestrator.memory.curve import memory_curves
from pentad.orchestrator.monitoring.event_bus import EventBus
from pentad.orchestrator.monitoring.run_state import OVER, RunView, Watcher
from pentad.orchestrator.monitoring.runfolder import METRICS, TIMED_STEPS
from pentad.orchestrator.page.data_flow import data_flow
from pentad.orchestrator.page.drawing import rank_times_svg, timeline_html
from pentad.orchestrator.page.step_curves import StepCurves
from pentad.orchestrator.planning.estimate import costs_of
from pentad.orchestrator.planning.fit import device_memory
from pentad.orchestrator.records.gpu_clocks import clocks_in
from pentad.orchestrator.records.json_lines import read_lines
from pentad.orchestrator.recovery.hang_detection import SILENT_SECONDS, positions_in_program
from pentad.schedules.diagnosis.rank_times import RankTime
from pentad.schedules.draw.memory import memory_page
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.instruction import Op
from pentad.schedules.simulate.read_costs import read_costs
from pentad.schedules.simulate.simulate import simulate
from pentad.schedules.simulate.timeline import Span, Timeline
from pentad.schedules.spec.mesh import LAYER_AXES
from pentad.schedules.spec.plan import Plan
from pentad.schedules.verify.hang_diagnosis import GROUP_AXES, find_cause

if TYPE_CHECKING:
    from pentad.orchestrator.page.ended_run import EndedState

MOST_EVENTS = 200
PACE = ("step_seconds", "mfu", "bubble_measured", "bubble_planned")
OPEN_SECONDS, TELL_SECONDS = 3.0, 1.5  # a page that asked this recently is open; how long the run's end waits for it
QUIET = ("evaluation", "checkpoint", "best", "copies")  # events too frequent to be listed
T = TypeVar("T")


class Moment(NamedTuple):
    """The run's view, its plan, and the last statuses of its ranks, all of one generation."""

    view: RunView
    plan: Plan
    statuses: dict[int, Status]


class PageData(Watcher):
    """The data of one run's page, across all its generations."""

    def __init__(self, bus: EventBus | EndedState, timeline_steps: int) -> None:
        self.bus, self.lock = bus, threading.Lock()  # held for moments, while the driver adds or a reader copies
        self.plan = bus.folder.plan
        self.now = Moment(bus.view, self.plan, {})
        self.first = bus.view.step  # rows of earlier steps are read from metrics.jsonl once somebody asks
        self.curves = StepCurves()
        self.steps = deque[tuple[int, tuple[Span, ...]]](maxlen=timeline_steps)
        self.times = deque[tuple[RankTime, ...]](maxlen=TIMED_STEPS)
        known = [entry for entry in bus.folder.journal() if entry["event"] not in QUIET]
        self.events = deque[dict[str, Any]](known, maxlen=MOST_EVENTS)
        self.newest: dict[str, Any] | None = None  # the row of the newest step
        self.asked, self.told = -math.inf, threading.Event()  # when a page last asked; set once one knows the run ended
        self.made = dict[str, tuple[Any, Any]]()  # the cached results of `_once` by name, each with its key
        self.making = dict[str, threading.Lock]()

    # ---- in the driver's thread ----

    def on_ranks_placed(self, view: RunView) -> None:
        """Drops the kept steps, as steps of different meshes or programs are not drawn together."""
        with self.lock:
            self.plan = self.bus.folder.plan
            self.steps.clear()
            self.times.clear()
        self.on_view(view)

    def on_view(self, view: RunView) -> None:
        self.now = Moment(view, self.plan, self.bus.statuses)

    def on_steps(self, rows: Sequence[dict[str, Any]], spans: Sequence[tuple[Span, ...]]) -> None:
        with self.lock:
            self.curves.add(rows)
            self.newest = rows[-1]
            done = {row["step"] for row in rows}  # a long call has spans only of its last steps
            self.steps.extend((each[0].step, each) for each in spans if each and each[0].step in done)

    def on_rank_times(self, times: tuple[RankTime, ...]) -> None:
        with self.lock:
            self.times.append(times)

    def on_rewind(self, step: int) -> None:
        with self.lock:
            self.first = min(self.first, step)
            self.curves.rewind(step)
            self.newest = None
            for kept in [each for each in self.steps if each[0] >= step]:
                self.steps.remove(kept)

    def on_event(self, entry: dict[str, Any]) -> None:
        if entry["event"] not in QUIET:
            with self.lock:
                self.events.append(entry)

    def tell_end(self) -> None:
        """Waits until an open page, which asks every second, has learned how the run ended."""
        if self.now.view.state in OVER and time.monotonic() < self.asked + OPEN_SECONDS:
            self.told.wait(TELL_SECONDS)

    # ---- in a reader's thread ----

    def answered(self, view: RunView) -> None:
        """Notes that a page has received a state at least as new as this view."""
        self.asked = time.monotonic()
        if view.state in OVER:
            self.told.set()

    def state(self) -> dict[str, Any]:
        """All that the page shows at this moment, except figures."""
        view, plan, statuses = self.now
        with self.lock:
            kept, events = [step for step, _ in self.steps], list(self.events)
            has_times, newest = bool(self.times) and plan.mesh.size > plan.mesh.pp, self.newest
        age = time.monotonic()
        silent = {rank.rank for rank in view.ranks if rank.heartbeat < age - SILENT_SECONDS}
        waits = self._once("waits", (statuses, silent), lambda: _waits(view, plan, statuses, silent))
        ranks = [
            {
                **{"rank": rank.rank, **rank.coordinates._asdict(), "node": rank.node, "gpu": rank.gpu},
                **{"state": rank.state, "step": rank.step, "instruction": rank.instruction},
                **{"age": round(max(0.0, age - rank.heartbeat), 1), "waits": waits.get(rank.rank)},
            }
            for rank in view.ranks
        ]
        names = ("run", "state", "step", "steps", "generation", "mesh", "schedule", "program")
        return {
            **{name: getattr(view, name) for name in (*names, "loss", "tokens_per_second", "verdict")},
            "newest": newest and _pace(newest),
            "seconds_left": view.seconds_left if view.state == "running" else None,
            "axes": asdict(plan.mesh),
            "ranks": ranks,
            "flow": self._once("flow", plan, lambda: self.flow(plan)),
            "curves": self._curves(),
            "evaluations": [each._asdict() for each in view.evaluations],
            "events": events,
            "kept": kept,
            "has_times": has_times,
            "has_experts": bool(self.bus.expert_load.layers),
            "dashboard": view.endpoints.get("dashboard", ""),
        }

    def flow(self, plan: Plan) -> dict[str, Any]:
        """What the ranks send each other in a step."""
        return data_flow(plan)

    def experts(self) -> dict[str, Any]:
        """The load of each expert in the newest step with reported loads, as multiples of its layer's mean."""
        step, loads = self.bus.expert_load
        layers = sorted(loads.items())
        return {"step": step, "layers": [{"layer": layer, "load": _relative(load)} for layer, load in layers]}

    def timeline_html(self) -> str:
        """The page of the kept steps, measured above simulated. Raises PentadError if there are none."""
        plan, measured = self._measured()
        if not measured.spans:
            raise PentadError("no step has been measured yet: expected one (metrics.timeline_steps)")
        return self._once("timeline", (plan, measured.steps), lambda: timeline_html(plan, measured, costs_of(plan)))

    def memory_html(self) -> str:
        """The page of the planned memory of every pipeline rank over a step, by kind and by unit, timed with the newest
        measured costs."""
        plan, measured = self._measured()
        newest = measured.of_step(measured.steps[-1]) if measured.spans else measured

        def draw() -> str:
            costs = read_costs(plan.program, newest)
            timing = "at the costs of the planner" if costs is None else f"at the costs of step {newest.steps[-1]}"
            curves = memory_curves(plan, simulate(plan.program, costs or costs_of(plan)))
            sizes = [gpu.memory_total for gpu in self.bus.gpus.values() if gpu.memory_total]
            available = min(sizes) if sizes else device_memory(plan.device, gpu=plan.gpu).bytes
            facts = {"mesh": str(plan.mesh), "program": plan.program.name, "bytes": "as planned", "time": timing}
            return memory_page(curves, title=f"{plan.name}: memory over a step", facts=facts, available=available)

        return self._once("memory", (plan, newest.steps), draw)

    def rank_times_svg(self) -> str:
        """The figure of every rank beside its peers, by step and op. Raises PentadError if there is nothing to
        compare."""
        with self.lock:
            plan, times = self.plan, list(self.times)
        newest = times[-1][0].step if times and times[-1] else None
        title = f"{plan.name}: ranks beside their peers"
        rows = [each for step in times for each in step]
        drawn = self._once("times", newest, lambda: rank_times_svg(rows, plan.mesh, title)) if rows else ""
        if not drawn:
            raise PentadError("no rank has peers with measured times: expected dp, cp, tp or ep of at least 2")
        return drawn

    def _measured(self) -> tuple[Plan, Timeline]:
        """The kept steps that ran the same program as the newest one, with the plan reduced to that program."""
        with self.lock:
            plan, steps = self.plan, [spans for _, spans in self.steps]
        sizes = [_microbatches(spans) for spans in steps]
        kept = [spans for spans, size in zip(steps, sizes, strict=True) if size == sizes[-1]]
        numbers = [
            number
            for number, program in enumerate(plan.trained_programs)
            if sizes and program.microbatches == sizes[-1]
        ]
        plan = self._once("plan", (plan, tuple(numbers)), lambda: plan.with_program(numbers[0] if numbers else 0))
        return plan, Timeline("measured", tuple(span for spans in kept for span in spans))

    def _curves(self) -> dict[str, Any]:
        """The curves of steps from before this driver began and since."""
        read = self._once("earlier", None, lambda: StepCurves(read_lines(self.bus.folder.path / METRICS, ["step"])))
        with self.lock:
            read.rewind(self.first)
            both, live = read.copy(), self.curves.copy()
        both.steps.extend(live.steps)
        for key, column in both.columns.items():
            column.extend(live.columns[key])
        return self._once("curves", (len(both.steps), both.steps[-1:]), both.points)

    def _once(self, name: str, of: Any, make: Callable[[], T]) -> T:
        """The result of `make`, cached until the key `of` changes; computed only once, however many ask at a time."""
        with self.making.setdefault(name, threading.Lock()):
            if name not in self.made or self.made[name][0] != of:
                self.made[name] = of, make()
            return self.made[name][1]


def _pace(row: dict[str, Any]) -> dict[str, Any]:
    """How fast a step was, and the clocks of its GPUs in words."""
    clocks = clocks_in(row)
    return {**{key: row.get(key) for key in PACE}, "clocks": "" if clocks is None else str(clocks)}


def _relative(load: Sequence[int]) -> list[float]:
    total = max(1, sum(load))
    return [round(len(load) * tokens / total, 3) for tokens in load]


def _microbatches(spans: Sequence[Span]) -> int:
    return 1 + max((span.microbatch for span in spans if span.op == Op.F), default=0)


def _waits(view: RunView, plan: Plan, statuses: dict[int, Status], silent: set[int]) -> dict[int, dict[str, Any]]:
    """By rank, for which ranks and what it waits, judged by the last statuses; empty unless all ranks of the present
    generation have answered."""
    if set(statuses) != set(range(plan.mesh.size)) or {each.generation for each in statuses.values()} != {
        view.generation
    }:
        return {}
    number, positions = positions_in_program(plan, [statuses[rank] for rank in range(plan.mesh.size)])
    axes = GROUP_AXES if plan.batch.capacity else LAYER_AXES
    found = find_cause(plan.programs[number], plan.mesh, positions, silent, axes)
    return {wait.rank: {"for": wait.peers, "what": str(wait.missing), "axis": wait.axis} for wait in found.waits}
