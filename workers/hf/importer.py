"""Converts Hugging Face files to a checkpoint of step 0, with about two file tensors in memory at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.model import ModelSpec
from pentad.workers.checkpoint import checkpoint
from pentad.workers.checkpoint.atomic_io import make_folder, new_folder
from pentad.workers.checkpoint.manifest import Spec
from pentad.workers.checkpoint.safetensors_io import Progress, num_bytes, write_files
from pentad.workers.hf.config import is_interleaved, make_section, parse_config
from pentad.workers.hf.folder import TensorFiles, read_config
from pentad.workers.hf.kept_files import FOLDER, read_files
from pentad.workers.hf.kept_files import write_files as write_kept
from pentad.workers.hf.layout import SCALE_SUFFIX, fp8_block_size, to_half_split
from pentad.workers.hf.names import MODEL_FILE, Layout, TensorTable, tensor_table

CHECKPOINT = checkpoint.folder_of(Path("checkpoints"), 0)
FILE_BYTES = 4 << 30
_IGNORED = re.compile(r".*rotary_emb\.inv_freq")  # buffers in old files


class Imported(NamedTuple):
    """The checkpoint's folder, and the model it holds. `bytes` are of all tensors; `kept` are the files beside the
    weights, for an export."""

    folder: Path
    family: str
    model: ModelSpec
    tensors: int
    parameters: int
    bytes: int
    kept: tuple[str, ...]


def import_folder(
    source: Path, out: Path, *, render: Callable[[dict[str, Any]], str], progress: Progress, limit: int = FILE_BYTES
) -> Imported:
    """Writes OUT/checkpoints/step-00000000 with float32 weights and no optimizer state, in files of at most `limit`
    bytes, OUT/model.yaml (the model section, as text from `render`), and all files but the weights, in OUT/hf.

    Raises PentadError, with nothing left behind, for a folder that is incomplete or of an unsupported model.
    """
    config, kept = read_config(source), read_files(source)
    family, model = parse_config(config)
    with TensorFiles(source, fp8_block_size(config)) as files:
        if not any(f"model.layers.{model.layers}." in name for name in files.files):
            model = replace(model, mtp_layers=0)  # transformers does not save those layers
        fused = any(name.endswith(".experts.gate_up_proj") for name in files.files)
        table = tensor_table(family, model, Layout(fused, is_interleaved(config)))
        _check_tensors(files, table)
        with new_folder(out) as folder:
            section = make_section(family, model)
            make_folder(folder / CHECKPOINT)
            entries = {f"model.{entry.name}": entry for entry in table.entries}
            specs = {name: Spec(dtype="F32", shape=list(entry.shape)) for name, entry in entries.items()}

            def read(name: str) -> Iterator[torch.Tensor]:
                return (to_half_split(files.read(part.name), part.rotary) for part in entries[name].parts)

            shards = write_files(
                folder / CHECKPOINT, specs, limit, lambda number, _: f"model-{number:03d}.safetensors", read, progress
            )
            checkpoint.commit(folder / CHECKPOINT, step=0, shards=shards, meta={"model": section})
            (folder / MODEL_FILE).write_text(render({"model": section}), encoding="utf-8")
            write_kept(folder / FOLDER, kept)
    parameters = sum(torch.Size(entry.shape).numel() for entry in table.entries)
    return Imported(out / CHECKPOINT, family, model, len(specs), parameters, num_bytes(specs.values()), tuple(kept))


def _check_tensors(files: TensorFiles, table: TensorTable) -> None:
    """Raises PentadError unless the files hold exactly this model's tensors; copies may be missing."""
    expected = {part.name: part.shape for entry in table.entries for part in entry.parts}
    for name, shape in expected.items():
        files.check(name, shape)
    for name, original in table.copies.items():
        if name in files.files:
            files.check(name, expected[original])
            if not torch.equal(files.read(name), files.read(original)):
                raise PentadError(f"tensor {name} in {files.folder} differs from {original}: expected a copy of it")
    for name in files.files:
        known = name.removesuffix(SCALE_SUFFIX) if files.block is not None else name
        if known not in expected and known not in table.copies and not _IGNORED.fullmatch(name):
            raise PentadError(f"tensor {name} is in {files.folder}: expected only those that its config.json implies")
