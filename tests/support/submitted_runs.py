"""The run that tests of jobs submit, whole and in parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

STEPS = 300
SMALL = (
    *("model.layers=2", "model.hidden=32", "model.heads=2", "model.kv_heads=2", "model.ffn=64", "model.vocab=300"),
    *("batch.global_batch_size=2", "batch.sequence_length=16", "schedule.name=1f1b", "schedule.microbatches=2"),
    *("mesh.pp=2", "cluster.device=cpu", "cluster.start_timeout_seconds=200", f"run.steps={STEPS}"),
)


def steps(run: Path) -> list[tuple[Any, ...]]:
    """Step, loss and gradient norm of each step so far."""
    path = run / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows]
