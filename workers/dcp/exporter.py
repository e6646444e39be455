"""Converts a checkpoint to one of torch.distributed.checkpoint, with about one tensor in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.model import ModelSpec
from pentad.schedules.spec.optimizer import moment_offset_of
from pentad.workers.checkpoint.atomic_io import new_folder
from pentad.workers.checkpoint.checkpoint import Checkpoint
from pentad.workers.checkpoint.safetensors_io import Progress
from pentad.workers.dcp.source import MOMENTS
from pentad.workers.dcp.titan_names import titan_table
from pentad.workers.dcp.writer import ToWrite, write_dcp
from pentad.workers.hf.exporter import Dtype, Exported, ExportRequest, interleaves, make_files
from pentad.workers.hf.file_tensors import FileTensors
from pentad.workers.hf.kept_files import write_files
from pentad.workers.hf.names import FileLayout, TensorTable, tensor_table
from pentad.workers.hf.stored_tensors import StoredTensors
from pentad.workers.params.sharded_state import optimizer_kinds


def export_dcp(
    source: Checkpoint, out: Path, request: ExportRequest, progress: Progress, *, titan: bool, dtype: Dtype | None
) -> Exported:
    """Writes a checkpoint under torchtitan's names or those of transformers' modules, with all copies of tied tensors,
    in `dtype` (None: as stored), and beside it the other files of a Hugging Face export.

    The optimizer's state has the names of torch's Adam: optimizer.state.NAME.exp_avg, .exp_avg_sq and .step. Raises
    PentadError, and leaves no file, for a model or an optimizer that these names cannot express.
    """
    weights = StoredTensors(source, "model", request.model)
    stored = weights.dtype("embedding") or torch.float32
    chosen = dtype or str(stored).removeprefix("torch.")
    kept = make_files(request, chosen)
    if titan:
        table = titan_table(request.family, request.model)
    else:
        table = tensor_table(
            request.family, request.model, FileLayout(fused_experts=True, interleaved=interleaves(kept))
        )
    tensors = {each.path: each for each in _weights(weights, table, getattr(torch, chosen))}
    if request.optimizer:
        tensors |= {each.path: each for each in _moments(source, request.model, table)}
    with new_folder(out) as folder:
        write_dcp(folder, tuple(tensors.values()), progress)
        write_files(folder, kept)
    files = tuple(sorted(path.name for path in out.glob("*.distcp")))
    return Exported(files, chosen, len(tensors), sum(each.num_bytes for each in tensors.values()))


def _weights(source: StoredTensors, table: TensorTable, dtype: torch.dtype) -> Iterator[ToWrite]:
    weights = FileTensors(source, table, dtype)
    for name in weights.dtypes:
        yield ToWrite((name,), weights.dtypes[name], weights.shapes[name], partial(weights.read, name))


def _moments(source: Checkpoint, model: ModelSpec, table: TensorTable) -> Iterator[ToWrite]:
    if (kinds := optimizer_kinds(source)) != sorted(MOMENTS):
        found, expected = ", ".join(kinds) or "nothing", f"{' and '.join(MOMENTS)}, the moments of Adam"
        raise PentadError(f"checkpoint {source.folder} has {found} of the optimizer: expected {expected}")
    step, names = torch.tensor(float(source.step + moment_offset_of(source.meta))), dict[str, None]()
    for kind, theirs in MOMENTS.items():
        moment = FileTensors(StoredTensors(source, f"optimizer.{kind}", model), table, None)
        names |= dict.fromkeys(moment.dtypes)
        for name in moment.dtypes:
            path = ("optimizer", "state", name, theirs)
            yield ToWrite(path, moment.dtypes[name], moment.shapes[name], partial(moment.read, name))
    for name in names:
        yield ToWrite(("optimizer", "state", name, "step"), step.dtype, (), lambda: step)
