"""Importing, changing and reading Hugging Face files in tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.model import ModelSpec
from pentad.schedules.spec.plan import Plan
from pentad.workers.checkpoint.checkpoint import open_checkpoint
from pentad.workers.checkpoint.shards import read
from pentad.workers.hf.exporter import Exported, ExportRequest, export_checkpoint
from pentad.workers.hf.importer import FILE_BYTES, Imported, Target, import_folder
from pentad.workers.model.stage import Stage
from pentad.workers.params.param_buffers import make_param_buffers
from pentad.workers.params.parameters import create_parameters
from pentad.workers.params.sharded_state import read_full

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def target(out: Path, limit: int = FILE_BYTES) -> Target:
    return Target(out, json.dumps, lambda done, total: None, limit)


def take(source: Path, out: Path, limit: int = FILE_BYTES, **how: Any) -> Imported:
    return import_folder(source, target(out, limit), **how)


def give(checkpoint: Path, out: Path, family: str, model: ModelSpec, **how: Any) -> Exported:
    request = ExportRequest(family, model, positions=64, **how)
    return export_checkpoint(open_checkpoint(checkpoint), out, request, lambda done, total: None)


def with_tensors(files: Path, tensors: dict[str, torch.Tensor], out: Path) -> Path:
    """A folder with the config.json of `files` and other tensors."""
    out.mkdir()
    save_file(tensors, out / SINGLE)
    (out / "config.json").write_bytes((files / "config.json").read_bytes())
    return out


def tensors_of(done: Imported) -> dict[str, torch.Tensor]:
    found = open_checkpoint(done.folder)
    return read(found, found.tensors)


def stage_of(plan: Plan, folder: Path) -> Stage:
    """The only stage of a single-process plan, with the weights of a checkpoint."""
    held = {share: create_parameters(plan, share, torch.device("cpu"), blank=True) for share in plan.param_shards_of(0)}
    stage, found = Stage(plan, 0, make_param_buffers(plan, 0, 0, held)), open_checkpoint(folder)
    for parameters in held.values():
        for local, view in zip(parameters.local_tensors, parameters.views(parameters.master).values(), strict=True):
            view.copy_(read_full(found, f"model.{local.name}", local.tensor.shape))
        for key, bias in parameters.router_bias.by_name.items():
            bias.copy_(read_full(found, f"model.{key}", tuple(bias.shape)))
    return stage


def change(files: Path, **tensors: torch.Tensor | None) -> None:
    """Adds tensors to the file, or removes them if None; names have '__' for '.'."""
    state = load_file(files / SINGLE)
    for key, tensor in tensors.items():
        name = key.replace("__", ".")
        state.pop(name, None)
        if tensor is not None:
            state[name] = tensor
    save_file(state, files / SINGLE, metadata={"format": "pt"})


def refused(source: Path, out: Path, *words: str, **how: Any) -> None:
    with pytest.raises(PentadError) as caught:
        take(source, out / "deep" / "out", **how)
    text = str(caught.value)
    assert all(word in text for word in words), text
    assert "\n" not in text and ": expected " in text
    assert not (out / "deep").exists()
