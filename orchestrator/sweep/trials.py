"""Trials: short runs of configurations, or the reasons why there are none."""

from __future__ import annotations

import hashlib
import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pentad.orchestrator.api.plans import PlannedRun, planned
from pentad.orchestrator.config.config import RunConfig, dump, load, unchecked
from pentad.orchestrator.planning.fit import device_memory
from pentad.orchestrator.planning.formatting import counted, format_count, format_percent
from pentad.orchestrator.planning.hardware import gpu_of
from pentad.orchestrator.search.result import without_evaluation
from pentad.orchestrator.search.search import search
from pentad.orchestrator.search.space import AXES, given_and_changed, load_for_search
from pentad.orchestrator.sweep.free_devices import FreeDevices
from pentad.orchestrator.sweep.grid import MOST_TRIALS, Point
from pentad.orchestrator.sweep.results import TrialRow
from pentad.schedules.ir.errors import PentadError, ScheduleError
from pentad.schedules.passes.recompute import config_text
from pentad.schedules.spec.tensors import num_parameters


@dataclass(frozen=True)
class Trial:
    """A trial. `row` has what is known before it runs; `config` is None if it is pruned."""

    row: TrialRow
    config: RunConfig | None = None

    @property
    def name(self) -> str:
        return self.row.trial


@dataclass(frozen=True)
class SweepRequest:
    """A configuration file, the points of a grid, and the steps of a trial. With a `search`, that many of the best
    meshes are tried at each point, on each number of `gpus` (empty: as many as the point's mesh has)."""

    file: Path | None
    points: Sequence[Point]
    steps: int
    search: int = 0
    gpus: Sequence[int] = ()


def trials_of(request: SweepRequest, free: FreeDevices, folder: Path) -> list[Trial]:
    """The trials in the order of the points, each configuration once; their runs will be in `folder`. Raises
    PentadError if there are too many."""
    found = dict[str, Trial]()
    for point in request.points:
        for candidate in _candidates(request, point) if request.search else [point]:
            trial = candidate if isinstance(candidate, Trial) else plan_trial(request, candidate, free, folder)
            found.setdefault(trial.name, trial)
    if len(found) > MOST_TRIALS:
        raise PentadError(f"the sweep has {len(found):,} trials: expected at most {MOST_TRIALS:,}")
    return list(found.values())


def first_valid(file: Path | None, points: Sequence[Point], *, searched: bool = False) -> RunConfig:
    """The configuration of the first point that has a valid one (if `searched`, valid for a search). Raises the error
    of the first point if none has."""
    errors = list[PentadError]()
    for point in points:
        try:
            return load_for_search(file, point.words)[0] if searched else load(file, point.words)
        except PentadError as error:
            errors.append(error)
    raise errors[0]


def _candidates(request: SweepRequest, point: Point) -> Iterator[Point | Trial]:
    """The search's best meshes at a point, as points; or pruned trials that say why there are none."""
    try:
        config, words = load_for_search(request.file, point.words)
    except PentadError as error:
        yield _pruned(request, point, str(error))
        return
    held = frozenset(word.partition("=")[0] for word in point.words)
    device = device_memory("cuda", gpu=gpu_of(config.cluster))
    for gpus in request.gpus or (config.mesh.size,):
        try:
            found = search(config, gpus, device, held, listed=request.search)
        except PentadError as error:
            yield _pruned(request, point, str(error), gpus)
            continue
        for each in found.choices:
            given, changed = given_and_changed(words, config, each.config)
            yield Point((*given, *changed), (*point.varied, *changed))
        if not found.choices:
            least = min(found.refusals.values(), key=lambda each: each.least_bytes, default=None)
            reason = f": {least.why}" if least else ""
            yield _pruned(request, point, f"nothing fits on {counted(gpus, 'GPU')}{reason}", gpus)


def plan_trial(request: SweepRequest, point: Point, free: FreeDevices, folder: Path) -> Trial:
    """The trial of a point, pruned if the configuration is invalid, does not fit, or needs more devices than there
    are."""
    try:
        config = trial_config(load(request.file, point.words), request.steps, free.device)
        if config.mesh.size > free.most:
            raise PentadError(f"mesh is {config.mesh.mesh}, which has {config.mesh.size} ranks: {free.sentence}")
        found = planned(config, free.device)
    except (PentadError, ScheduleError) as error:
        return _pruned(request, point, str(error).partition("\n")[0])
    name = _digest(dump(config))
    row = TrialRow(trial=name, **_written(request, point), **_facts(found, config.model.family or "custom"))
    if not found.ok:
        return Trial(
            row._replace(cause=". ".join(filter(None, (found.data_error or found.fit.sentence, found.remedy))))
        )
    return Trial(row, load(config, sections={"run": {"name": name, "folder": str(folder)}}))


def trial_config(config: RunConfig, steps: int, device: str) -> RunConfig:
    """The configuration of a run's first `steps`, with its full batch and the whole run's learning rates, but without
    evaluations, checkpoints and loggers. The first failure ends it."""
    changes = {
        "run": {"name": "trial", "steps": steps, "folder": "trials"},
        "batch": {"rampup": None},
        "optimizer": {"decay_steps": config.optimizer.decay_steps or max(config.run.steps, steps)},
        "checkpoint": {"path": None, "every": 0, "every_seconds": 0.0, "keep_every": 0, "at_end": False},
        "spikes": {"policy": "none"},
        "elastic": {"max_failures": 0, "driver_lease": 0.0, "spares": 0},
        "metrics": {"port": 0, "control_port": 0, "page_port": 0},
        "loggers": {"use": [], "wandb": None, "mlflow": None},
        "cluster": {"device": device, "dashboard": False, "dashboard_port": 0},
    }
    return load(without_evaluation(config), sections=changes)


def _pruned(request: SweepRequest, point: Point, why: str, ranks: int | None = None) -> Trial:
    """A pruned trial, with what the configuration, valid or not, says about its mesh and schedule."""
    raw, facts = _sections(request, point), dict[str, Any]()
    mesh, schedule = raw.get("mesh"), raw.get("schedule")
    if isinstance(mesh, Mapping) and ranks is None:
        sizes = {axis: mesh.get(axis, 1) for axis in AXES}
        if all(isinstance(size, int) and 0 < size < 2**31 for size in sizes.values()):
            facts, ranks = sizes, math.prod(sizes.values())
    if isinstance(schedule, Mapping) and isinstance(schedule.get("name"), str):
        facts["schedule"] = schedule["name"]
    name = _digest(json.dumps([point.words, ranks, request.search]))
    return Trial(TrialRow(trial=name, **_written(request, point), ranks=ranks, cause=why, **facts))


def _sections(request: SweepRequest, point: Point) -> dict[str, Any]:
    try:
        return unchecked(request.file, point.words)
    except PentadError:  # already the reason for pruning
        return {}


def _written(request: SweepRequest, point: Point) -> dict[str, Any]:
    command = ["pentad", "train", *([str(request.file)] if request.file else []), *point.words]
    return {"settings": " ".join(point.varied), "command": shlex.join(command)}


def _facts(found: PlannedRun, family: str) -> dict[str, Any]:
    plan = found.plan
    parameters = num_parameters(plan.model)
    return {
        "device": plan.device,
        "model": f"{family} {format_count(parameters)}",
        "parameters": parameters,
        "layout": layout_text(found),
        "ranks": plan.mesh.size,
        **{axis: getattr(plan.mesh, axis) for axis in AXES},
        "schedule": plan.program.name,
        "microbatches": plan.program.microbatches,
        "sequences": plan.batch.micro_batch_size,
        "zero": plan.zero,
        "recompute": config_text(plan.recomputation),
        "predicted_seconds": found.step_seconds,
        "predicted_bytes": found.fit.needed,
    }


def layout_text(found: PlannedRun) -> str:
    """The layout in words, such as 'dp4 x pp2, zb-v, 8 x 1 sequences, ZeRO-1'."""
    plan = found.plan
    parts = [
        str(plan.mesh),
        plan.program.name,
        f"{plan.program.microbatches} x {plan.batch.micro_batch_size} sequences",
    ]
    if plan.zero:
        parts.append(f"ZeRO-{plan.zero}")
    if (mode := config_text(plan.recomputation)) != "none":
        parts.append(f"recomputes {mode}")
    if most := max(plan.offload, default=0.0):
        parts.append(f"{format_percent(most)} offloaded")
    return ", ".join(parts)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
