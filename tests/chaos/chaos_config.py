"""Configurations and plans of simulated runs."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from pentad.orchestrator.config.config import RunConfig, load
from pentad.orchestrator.planning.planning import make_plan
from pentad.schedules.spec.plan import Plan

SMALL = (
    *("model.layers=8", "model.hidden=32", "model.heads=4", "model.kv_heads=2", "model.ffn=32", "model.vocab=256"),
    *("batch.sequence_length=16", "elastic.hang_seconds=3", "cluster.start_timeout_seconds=20"),
    *("elastic.wait_seconds=2", "metrics.timeline_steps=0", "data.holdout=0.1", "eval.every=3", "cluster.device=cpu"),
    "elastic.slow_rank=evict",
)


@lru_cache(128)
def planned(schedule: str, mesh: tuple[str, ...]) -> tuple[RunConfig, Plan]:
    count = 8 if "mesh.pp=4" in mesh else 4
    replicas = 4 if "mesh.dp=4" in mesh else 2 if "mesh.dp=2" in mesh or "mesh.ep=2" in mesh else 1
    batch = f"schedule.microbatches={count}", f"batch.global_batch_size={count * replicas}"
    chunks = ("schedule.chunks=2",) if schedule == "interleaved" else ()
    config = load(None, [f"schedule.name={schedule}", *batch, *chunks, *SMALL, *mesh])
    return config, make_plan(config, "cpu")


@lru_cache(4096)
def configured(schedule: str, mesh: tuple[str, ...], overrides: tuple[str, ...], steps: int, folder: str) -> RunConfig:
    config, _ = planned(schedule, mesh)
    changed: dict[str, dict[str, Any]] = {"run": {"folder": folder, "name": "chaos", "steps": steps}}
    for override in overrides:
        key, _, value = override.partition("=")
        section, _, name = key.partition(".")
        changed.setdefault(section, {})[name] = int(value)
    sections = {name: getattr(config, name).model_copy(update=values) for name, values in changed.items()}
    return config.model_copy(update=sections)
