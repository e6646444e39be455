"""`pentad eval`: evaluates a checkpoint outside of training, on a mesh of its own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pentad.orchestrator.cluster.local_head import launch
from pentad.orchestrator.config.config import RunConfig, load
from pentad.orchestrator.config.data_sections import name_of
from pentad.orchestrator.config.includes import read_file
from pentad.orchestrator.monitoring.display import Display
from pentad.orchestrator.planning.planning import first_plan
from pentad.orchestrator.records.checkpoint_places import CONFIG, home_of
from pentad.orchestrator.run.init_from import with_base
from pentad.orchestrator.run.interrupts import Interrupts
from pentad.orchestrator.run.train import RUNNER, with_eval_fingerprints
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.lora import lora_of
from pentad.workers.checkpoint.checkpoint import Checkpoint, Start
from pentad.workers.hf.kept_files import FOLDER
from pentad.workers.hf.names import CONFIG as HF_CONFIG
from pentad.workers.hf.names import MODEL_FILE

IMPORTED_LENGTH = 2048  # most tokens of a sequence for an imported model


def eval_config(
    checkpoint: Checkpoint, data: Sequence[str], sequences: int | None, overrides: Sequence[str]
) -> RunConfig:
    """The configuration that evaluates a checkpoint: its run's, or one of a single rank for an imported model.

    `data` are corpora, PATH or NAME=PATH; if empty, the run's. Raises PentadError.
    """
    home = home_of(checkpoint.folder)
    sections: dict[str, Any] = {"checkpoint": {"keep_best": False}, "eval": {}}
    if sequences is not None:
        sections["eval"]["sequences"] = sequences
    if data:
        named = [_named(each) for each in data]
        sections["eval"]["data"] = named
        mixture = dict.fromkeys(("sources", "curriculum"))  # none
        sections["data"] = {"path": named[0]["path"], **mixture, "packing": "windows", "holdout": 0.0}
    if (home / CONFIG).is_file():
        config = load(home / CONFIG, overrides, sections)
    elif data:
        config = load(_imported(checkpoint, home), overrides, sections)
    else:
        raise PentadError(f"--data is missing: expected a corpus, since {home} was not trained here")
    if not config.data_sets:
        raise PentadError(
            "--data is missing: expected a corpus, since the run evaluates none (data.holdout, eval.data)"
        )
    return config


def _named(data: str) -> dict[str, str]:
    name, equals, path = data.partition("=")
    if not equals or set(name) & {"/", ":"}:  # the = is part of the path, such as an option of a URI
        name, path = "", data
    return {"name": name or name_of(path), "path": path}


def _imported(checkpoint: Checkpoint, home: Path) -> dict[str, Any]:
    """A configuration for an imported model: one rank, one sequence at a time."""
    model = checkpoint.meta.get("model") or read_file(home / MODEL_FILE).values["model"]
    return {
        "run": {"name": "eval", "steps": 1},
        "model": model,
        "schedule": {"name": "gpipe", "microbatches": 1},
        "batch": {"global_batch_size": 1, "sequence_length": min(_positions(home), IMPORTED_LENGTH)},
    }


def _positions(home: Path) -> int:
    """The longest sequence of an imported model by its config.json, else IMPORTED_LENGTH."""
    try:
        found = json.loads((home / FOLDER / HF_CONFIG).read_text(encoding="utf-8"))["max_position_embeddings"]
    except (OSError, ValueError, KeyError, TypeError):
        return IMPORTED_LENGTH
    return found if isinstance(found, int) and found > 0 else IMPORTED_LENGTH


def evaluate(config: RunConfig, checkpoint: Checkpoint, display: Display, runner: str = RUNNER) -> list[dict[str, Any]]:
    """Evaluates the weights of a checkpoint: returns a row as in eval.jsonl for each data set. Changes no file.

    Raises PentadError for a user's mistake and WorkerError if a rank fails. Leaves no process behind.
    """
    display.phase("checking the data and planning")
    lora = lora_of(checkpoint.meta)
    plan = with_base(first_plan(config), None if lora is None else lora.base)
    plan = with_eval_fingerprints(plan, "--data")
    with ExitStack() as stack:
        stack.enter_context(Interrupts())
        display.phase("starting Ray" if config.cluster.address == "local" else f"joining {config.cluster.address}")
        head = stack.enter_context(launch(config.cluster, config.mesh.size))
        from pentad.orchestrator.run.driver import evaluate_on  # imports ray

        start = Start(checkpoint.folder.absolute(), checkpoint.step, optimizer=False)
        return evaluate_on(config, plan, start, head, runner, display)
