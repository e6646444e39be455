"""The page of a run that has ended or whose driver is gone, from the files in its folder."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from pentad.orchestrator.cluster.rank_status import Status
from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.control.control_client import last_view
from pentad.orchestrator.monitoring.event_bus import ExpertLoads
from pentad.orchestrator.monitoring.run_state import RankView, RunView
from pentad.orchestrator.monitoring.runfolder import EXPERT_LOAD, JOURNAL, METRICS, PAGE, PROGRAM, RANK_TIMES, TIMELINE
from pentad.orchestrator.page.page_data import PageData
from pentad.orchestrator.page.saved_plan import last_config, last_places, planned_again
from pentad.orchestrator.records.json_lines import read_lines
from pentad.schedules.diagnosis import rank_times
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.program import Program
from pentad.schedules.ir.regular_files import MOST_JSON, regular_file
from pentad.schedules.simulate.timeline import Timeline, grouped
from pentad.schedules.spec.model import ModelSpec
from pentad.schedules.spec.plan import Plan
from pentad.workers.runtime.telemetry import GpuState

_STEP = attrgetter("step")


class EndedFolder(NamedTuple):
    path: Path
    plan: Plan

    def journal(self) -> list[dict[str, Any]]:
        return read_lines(self.path / JOURNAL, ["event"])


class EndedState(NamedTuple):
    """What is left of the state in a live run's EventBus."""

    view: RunView
    folder: EndedFolder
    expert_load: ExpertLoads
    statuses: dict[int, Status]
    gpus: dict[int, GpuState]


class EndedRun(PageData):
    """The page data of an ended run. Its plan is compiled again, without the sizes of a custom model: measuring them
    would execute the user's file. Raises PentadError for files that cannot be read."""

    def __init__(self, folder: Path) -> None:
        view, journal = last_view(folder), read_lines(folder / JOURNAL, ["event"])
        config, placed = last_config(folder, journal), last_places(journal)
        self.is_custom = config.model.custom is not None
        plan = planned_again(config, placed, _stand_in(config, folder) if self.is_custom else None)
        view = view._replace(mesh=str(plan.mesh), ranks=_ranks(plan, placed, view.step))
        state = EndedState(view, EndedFolder(folder, plan), _expert_load(folder), {}, {})
        spans = Timeline.load(folder / TIMELINE).spans if (folder / TIMELINE).is_file() else ()
        times = rank_times.load(folder / RANK_TIMES) if (folder / RANK_TIMES).is_file() else ()
        super().__init__(state, config.metrics.timeline_steps)
        self.newest = next(reversed(read_lines(folder / METRICS, ["step"])), None)
        self.steps.extend((step, tuple(its)) for step, its in sorted(grouped(spans, _STEP).items()))
        self.times.extend(tuple(its) for _, its in sorted(grouped(times, _STEP).items()))

    def flow(self, plan: Plan) -> dict[str, Any]:
        return {"sends": [], "collectives": []} if self.is_custom else super().flow(plan)

    def memory_html(self) -> str:
        if self.is_custom:
            raise PentadError("what a custom model holds is known while its run is live: expected another model")
        return super().memory_html()

    def timeline_html(self) -> str:
        """The timeline as the run itself drew it, with the program that it ran."""
        path = self.bus.folder.path / PAGE
        if not path.is_file():
            raise PentadError("no step has been measured: expected one (metrics.timeline_steps)")
        return regular_file(path).read_text(encoding="utf-8")


def _stand_in(config: RunConfig, folder: Path) -> ModelSpec:
    """A stand-in for a custom model, with as many layers as its stages need."""
    layers = sum(config.schedule.layers_per_stage or ()) or Program.load(folder / PROGRAM).stages
    return ModelSpec(layers, config.model.hidden, 1, 1, 1, config.model.vocab)


def _ranks(plan: Plan, placed: Sequence[dict[str, Any]], step: int) -> tuple[RankView, ...]:
    """The ranks at the places where they were, or nowhere if the mesh has changed since."""
    known, nowhere = {each["rank"]: each for each in placed}, {"node": "", "gpu": -1, "pid": 0}
    found = known if len(known) == plan.mesh.size else {}
    now = time.monotonic()
    views = []
    for rank in range(plan.mesh.size):
        at = found.get(rank, nowhere)
        where = plan.mesh.coordinates(rank), at["node"], at["pid"], at["gpu"]
        views.append(RankView(rank, *where, "idle", step - 1, "", now))
    return tuple(views)


def _expert_load(folder: Path) -> ExpertLoads:
    try:
        found = json.loads(regular_file(folder / EXPERT_LOAD, MOST_JSON).read_text(encoding="utf-8"))
        return ExpertLoads(found["step"], {int(layer): tuple(load) for layer, load in found["layers"].items()})
    except FileNotFoundError:
        return ExpertLoads()
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        raise PentadError(f"{folder / EXPERT_LOAD} is damaged: expected step and layers") from None
