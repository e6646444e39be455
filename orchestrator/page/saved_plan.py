"""The plan of a run that has ended, from the files in its folder."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.monitoring.runfolder import JOURNAL, ORDER, PROGRAM
from pentad.orchestrator.planning.planning import make_plan
from pentad.orchestrator.records.checkpoint_places import saved_config
from pentad.orchestrator.records.json_lines import read_lines
from pentad.orchestrator.search.rebalanced_plan import with_rebalanced_layers
from pentad.orchestrator.search.replanned_order import with_replanned_order
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.program import Program
from pentad.schedules.spec.mesh import Mesh
from pentad.schedules.spec.model import ModelSpec
from pentad.schedules.spec.plan import Plan

Places = Sequence[dict[str, Any]]  # rank, node and GPU (-1: CPU) of every rank


class SavedPlan(NamedTuple):
    """The plan of the steps that ran a program; or None, with the reason why it is unknown."""

    plan: Plan | None
    why: str = ""


def saved_plan(folder: Path, program: Program) -> SavedPlan:
    """The plan of the last run in a folder, compiled again, with the `program` that its steps or evaluations ran. The
    plan of a custom model stays unknown, because its file is not executed."""
    try:
        journal = read_lines(folder / JOURNAL, ["event"])
        config = last_config(folder, journal)
        if config.model.custom is not None:
            return SavedPlan(None, f"model.custom is {config.model.custom}, whose file is not executed here")
        plan = planned_again(config, last_places(journal))
    except PentadError as error:
        return SavedPlan(None, str(error))
    number = next((n for n, each in enumerate(plan.programs) if _shape(each) == _shape(program)), None)
    if number is None:
        return SavedPlan(None, "config.yaml is planned with other stages, units or microbatches than the run had")
    return SavedPlan(replace(plan if program.forward_only else plan.with_program(number), program=program))


def last_config(folder: Path, journal: Sequence[dict[str, Any]]) -> RunConfig:
    """The configuration with the mesh, layers per stage and order that the run had last. The program of a user's
    function is read from its file, so that looking at a run does not execute the function."""
    config = saved_config(folder)
    if ":" in config.schedule.name:
        read = {"name": str(folder / PROGRAM), "chunks": None}
        config = config.model_copy(update={"schedule": config.schedule.model_copy(update=read)})
    starts = [number for number, row in enumerate(journal) if row["event"] == "start"]
    rows = journal[starts[-1] :] if starts else ()
    meshes = [row["mesh"] for row in rows if row["event"] == "recovered" and "mesh" in row]
    if meshes and meshes[-1] != str(config.mesh.mesh):
        sizes = dict.fromkeys(asdict(Mesh()), 1) | {a: int(n) for a, n in re.findall(r"([a-z]+)(\d+)", meshes[-1])}
        config = config.model_copy(update={"mesh": config.mesh.model_copy(update=sizes)})
    return with_replanned_order(with_rebalanced_layers(config, lambda: journal), lambda: journal, folder / ORDER)


def last_places(journal: Sequence[dict[str, Any]]) -> Places:
    """Where the ranks were when the run was last started."""
    placed = [row for row in journal if row["event"] == "place"]
    return placed[-1].get("ranks", []) if placed else []


def planned_again(config: RunConfig, places: Places, model: ModelSpec | None = None) -> Plan:
    """The plan for ranks at these places, without proof; `model` stands in for a custom model."""
    if not any(place["gpu"] >= 0 for place in places):
        return make_plan(config, "cpu", model=model, proved=False)
    nodes = [place["node"] for place in sorted(places, key=lambda place: int(place["rank"]))]
    hosts = tuple(map(nodes.index, nodes)) if len(nodes) == config.mesh.size else None  # None: the mesh has changed
    return make_plan(config, "cuda", hosts=hosts, model=model, proved=False)


def _shape(program: Program) -> tuple[object, ...]:
    return program.placement, program.units, program.microbatches, program.slices, program.forward_only
