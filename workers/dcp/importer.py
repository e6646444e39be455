"""Converts a checkpoint of torch.distributed.checkpoint to one of pentad."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.model import ModelSpec
from pentad.workers.dcp.source import DcpModel
from pentad.workers.dcp.titan_names import titan_table
from pentad.workers.hf.config import is_interleaved
from pentad.workers.hf.importer import Imported, ModelTensors, Target, write_import
from pentad.workers.hf.names import CONFIG, FileLayout, tensor_table


def import_dcp(
    source: Path, family: str, model: ModelSpec, kept: Mapping[str, bytes], target: Target, *, optimizer: bool = False
) -> Imported:
    """Writes the same as `import_folder`, from a checkpoint under the names of transformers or torchtitan, in float64
    if any tensor is. `kept` are files to keep for an export.

    Raises PentadError, and leaves no file, for a checkpoint that is damaged or of another model.
    """
    found = DcpModel(source)
    names = found.weights.names
    if not any(f"model.layers.{model.layers}." in name for name in names):
        model = replace(model, mtp_layers=0)
    if found.is_titan:
        table = titan_table(family, model, names)
    else:
        fused = any(name.endswith(".experts.gate_up_proj") for name in names)
        config = json.loads(kept[CONFIG]) if CONFIG in kept else {}
        table = tensor_table(family, model, FileLayout(fused, is_interleaved(config)))
    if optimizer and not found.moments:
        raise PentadError(f"{source} has no optimizer state: expected moments of Adam")
    step, moments = (found.step, found.moments) if optimizer else (0, {})
    return write_import(ModelTensors(family, model, table, found.weights, moments, step, kept), target)
