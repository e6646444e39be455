"""`pentad init`: a first configuration of a model for a number of GPUs, with the fastest mesh that fits."""

from __future__ import annotations

import math
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pentad.orchestrator.api.commented_yaml import commented_yaml
from pentad.orchestrator.api.model_sizes import MODEL_SIZES
from pentad.orchestrator.checked_folders import checked_folder
from pentad.orchestrator.config.config import RunConfig, load
from pentad.orchestrator.config.errors import nearest
from pentad.orchestrator.planning.fit import DeviceMemory
from pentad.orchestrator.planning.formatting import counted, format_bytes, format_count, format_duration
from pentad.orchestrator.planning.hardware import rates_for
from pentad.orchestrator.search.result import Planned
from pentad.orchestrator.search.search import search
from pentad.orchestrator.search.space import AXES, overrides
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.tensors import num_parameters

SCHEDULE = "1f1b"  # until the search has chosen
ALWAYS_WRITTEN = (
    *(f"mesh.{axis}" for axis in AXES),
    *("schedule.name", "schedule.microbatches", "memory.recompute", "zero.stage"),
)
BATCH_TOKENS = 2**20
LENGTH = 4096
# Peak learning rates up to a number of parameters: the quickstart's, and those of LLaMA (arXiv 2302.13971, table 2).
LEARNING_RATES = ((2e8, 3e-3), (15e9, 3e-4), (float("inf"), 1.5e-4))


@dataclass(frozen=True)
class StartingConfig:
    """A configuration, the choice of its mesh, and its commented YAML."""

    config: RunConfig
    choice: Planned
    text: str


def starting_config(
    model: str, gpus: int, device: DeviceMemory, *, data: str, length: int | None, sequences: int | None
) -> StartingConfig:
    """A configuration for a model, given as one of MODEL_SIZES or as the folder of a Hugging Face model, on the fastest
    mesh that fits.

    `length` is that of sequences (None: 4096, or the model's longest), `sequences` the number in a step (None: about a
    million tokens). Raises PentadError for an unknown model, and if no mesh fits.
    """
    section, longest = _model(model)
    length = length or min(LENGTH, longest)
    batch = {"global_batch_size": sequences or max(gpus, BATCH_TOKENS // length), "sequence_length": length}
    values: dict[str, Any] = {
        "run": {"name": _run_name(model), "seed": 0, "steps": 1000},
        "model": section,
        "mesh": {},
        "schedule": {"name": SCHEDULE, "microbatches": 1},
        "batch": batch,
        "data": {"path": data},
        "optimizer": {},
        "memory": {},
        "zero": {},
        "checkpoint": {"every": 100, "keep": 2},
    }
    base = load(values)
    values["model"] = {"family": base.model.family, **base.model.model_dump(exclude_defaults=True)}
    parameters = num_parameters(base.model.spec)
    rate = next(rate for most, rate in LEARNING_RATES if parameters <= most)
    values["optimizer"] = {"learning_rate": rate, "warmup_steps": 100}
    choice = _fastest(base, gpus, device)
    changed = overrides(base, choice.config)
    for key, value in {**choice.setting.values, **changed}.items():
        part, _, name = key.partition(".")
        if key in changed or key in ALWAYS_WRITTEN:
            values[part] = {**values.get(part, {}), name: value}
    config = load(values)
    return StartingConfig(config, choice, _heading(model, gpus, parameters, choice, device) + commented_yaml(values))


def _model(model: str) -> tuple[dict[str, Any], int]:
    """The model section, and the model's longest sequence."""
    if model in MODEL_SIZES:
        return dict(MODEL_SIZES[model]), LENGTH
    if not Path(model).is_dir():
        near = nearest(model, MODEL_SIZES)
        hint = f" (did you mean {near}?)" if near else ""
        names = ", ".join(MODEL_SIZES)
        raise PentadError(f"--model is '{model}'{hint}: expected the folder of a Hugging Face model, or one of {names}")
    from pentad.workers.hf.config import make_section, parse_config
    from pentad.workers.hf.folder import read_config

    raw = read_config(checked_folder(Path(model)))
    longest = raw.get("max_position_embeddings")
    return make_section(*parse_config(raw)), longest if isinstance(longest, int) and longest > 0 else LENGTH


def _fastest(config: RunConfig, gpus: int, device: DeviceMemory) -> Planned:
    found = search(config, gpus, device, listed=1)
    if found.choices:
        return found.choices[0]
    least = min(found.refusals.values(), key=lambda each: each.least_bytes or math.inf)
    raise PentadError(
        f"--gpus is {gpus}, of which no mesh fits in the {format_bytes(device.bytes)} {device.where}: {least.why}"
    )


def _run_name(model: str) -> str:
    """The model's name turned into a valid name of a run: letters, digits, '_', '.' and '-'."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(model).absolute().name).lstrip(".-")
    return name[:100] or "run"


def _heading(model: str, gpus: int, parameters: int, choice: Planned, device: DeviceMemory) -> str:
    size = f"{format_count(parameters)} parameters on {counted(gpus, 'GPU')}"
    memory = f"{format_bytes(choice.bytes)} of the {format_bytes(device.bytes)} {device.where}"
    source = rates_for(choice.config.cluster, "cuda").source
    pace = f"{format_duration(choice.seconds)} a step, {format_count(choice.tokens_per_second)} tokens/s"
    importing = f"pentad import-hf {shlex.quote(model)} runs/{choice.config.run.name}"
    start = f"# It starts from random weights, unless `{importing}` has read the model's.\n"
    return (
        f"# {model}: {size}, written by `pentad init`; docs/configuration.md has all keys.\n"
        f"# Predicted from rates {source}: {pace}.\n"
        f"# The fullest rank needs {memory}.\n{'' if model in MODEL_SIZES else start}\n"
    )
