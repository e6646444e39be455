"""`pentad plan --gpus N`: the meshes that fit, the quickest first, and why the others are left out."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.monitoring.tables import table_of
from pentad.orchestrator.planning.estimate import utilisation
from pentad.orchestrator.planning.fit import Room, gpu_name
from pentad.orchestrator.planning.hardware import ASSUMED, DEVICES
from pentad.orchestrator.planning.mesh_search import Found, changed, survey
from pentad.orchestrator.planning.quantities import count, duration, percent, size


def show_meshes(config: RunConfig, gpus: int, room: Room, console: Console, *, as_json: bool) -> int:
    """Prints them. Returns the exit status: 1 where none fits."""
    result = survey(config, gpus, room)
    if as_json:
        found = [_facts(each) for each in result.found]
        facts = {"gpus": gpus, "available": room.bytes, "fit": result.fit, "found": found, "left_out": result.left_out}
        print(json.dumps(facts))
        return int(not result.found)
    table = table_of("mesh", "m x rows>", "zero>", "recompute", "step>", "tok/s>", "MFU>", "memory>")
    for each in result.found:
        plan, used = each.plan, _used(each)
        parts = f"{plan.batch.microbatches} x {plan.batch.micro_batch_size}"
        again = str(changed(plan)["memory.recompute"])
        cells = [
            str(plan.mesh).replace(" x ", " "),
            parts,
            str(plan.zero),
            again,
            duration(each.seconds),
            count(each.pace),
        ]
        table.add_row(*cells, "-" if used is None else percent(used), size(each.bytes))
    if result.found:
        console.print(table)
        best = " ".join(f"{key}={value}" for key, value in changed(result.found[0].plan).items())
        console.print(Text(f" the first one: {best}", "dim"), soft_wrap=True)
    text = f" {result.fit} meshes of {gpus} GPUs fit {room.where}, which has {size(room.bytes)}"
    console.print(Text(f"{text}; seconds come from assumed rates", "green" if result.fit else "bold red"))
    for sentence, number in result.left_out.items():
        more = f", and {number - 1} more like it" if number > 1 else ""
        console.print(Text(f" left out: {sentence}{more}", "dim"), soft_wrap=True)
    return int(not result.found)


def _facts(found: Found) -> dict[str, Any]:
    plan = found.plan
    return {
        "mesh": asdict(plan.mesh),
        "microbatches": plan.batch.microbatches,
        "rows": plan.batch.micro_batch_size,
        "zero": plan.zero,
        "recompute": changed(plan)["memory.recompute"],
        "step_seconds": found.seconds,
        "tokens_per_second": found.pace,
        "mfu": _used(found),
        "peak_bytes": found.bytes,
    }


def _used(found: Found) -> float | None:
    name = gpu_name()
    return utilisation(found.pace, found.plan, name if name in DEVICES else ASSUMED)
