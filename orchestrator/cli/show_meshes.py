"""`pentad plan --gpus N`: the meshes that fit, the fastest first, and why others are rejected; `pentad init`: a
configuration with the first of them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from pentad.orchestrator.api.starting_config import StartingConfig
from pentad.orchestrator.config.config import RunConfig
from pentad.orchestrator.monitoring.tables import fitted_table
from pentad.orchestrator.planning.estimate import mfu
from pentad.orchestrator.planning.fit import DeviceMemory
from pentad.orchestrator.planning.formatting import format_bytes, format_count, format_duration, format_percent
from pentad.orchestrator.planning.mesh_search import MeshChoice, overrides_of, search_meshes
from pentad.schedules.ir.errors import PentadError


def show_meshes(config: RunConfig, gpus: int, device: DeviceMemory, console: Console, *, as_json: bool) -> int:
    """Prints them. Returns the exit status: 1 if none fits."""
    search = search_meshes(config, gpus, device)
    if as_json:
        meshes = [_facts(choice) for choice in search.choices]
        counts = {"gpus": gpus, "available": device.bytes, "fitting": search.num_fitting}
        print(json.dumps({**counts, "meshes": meshes, "rejected": search.rejected}))
        return int(not search.choices)
    if search.choices:
        heads = ("mesh", "m x rows>", "zero>", "recompute", "step>", "tok/s>", "MFU>", "memory>")
        drop = ("MFU", "tok/s", "recompute", "zero", "m x rows")
        console.print(fitted_table(heads, list(map(_cells, search.choices)), console.width, drop=drop))
        overrides = " ".join(f"{key}={value}" for key, value in overrides_of(search.choices[0].plan).items())
        console.print(Text(f" the first one: {overrides}", "dim"), soft_wrap=True)
    text = f" {search.num_fitting} meshes of {gpus} GPUs fit in the {format_bytes(device.bytes)} {device.where}"
    style = "green" if search.choices else "bold red"
    console.print(Text(f"{text}; seconds come from assumed rates", style), soft_wrap=True)
    for sentence, number in search.rejected.items():
        more = f", and {number - 1} more for this reason" if number > 1 else ""
        console.print(Text(f" rejected: {sentence}{more}", "dim"), soft_wrap=True)
    return int(not search.choices)


def show_init(found: StartingConfig, out: Path | None, *, as_json: bool) -> None:
    """Writes the configuration to a new file, or prints it. Raises PentadError if the file exists."""
    if out is not None:
        try:
            with out.open("x", encoding="utf-8") as file:
                file.write(found.text)
        except OSError as error:
            reason = error.strerror or str(error)
            raise PentadError(f"OUT is '{out}', which cannot be written ({reason}): expected a new file") from None
    if as_json:
        facts = {"file": str(out) if out else None, "config": found.config.model_dump(), **_facts(found.choice)}
        print(json.dumps(facts))
    elif out is None:
        print(found.text, end="")
    else:
        print(f"{out}: see what it would run with `pentad plan {out} --device cuda`")


def _cells(choice: MeshChoice) -> list[str]:
    batch, facts = choice.plan.batch, _facts(choice)
    return [
        str(choice.plan.mesh).replace(" x ", " "),
        f"{batch.microbatches} x {batch.micro_batch_size}",
        str(choice.plan.zero),
        facts["recompute"],
        format_duration(choice.seconds),
        format_count(choice.tokens_per_second),
        format_percent(facts["mfu"]),
        format_bytes(choice.bytes),
    ]


def _facts(choice: MeshChoice) -> dict[str, Any]:
    plan = choice.plan
    return {
        "mesh": asdict(plan.mesh),
        "microbatches": plan.batch.microbatches,
        "rows": plan.batch.micro_batch_size,
        "zero": plan.zero,
        "recompute": overrides_of(plan)["memory.recompute"],
        "step_seconds": choice.seconds,
        "tokens_per_second": choice.tokens_per_second,
        "mfu": mfu(choice.tokens_per_second, plan, plan.gpu),
        "peak_bytes": choice.bytes,
    }
