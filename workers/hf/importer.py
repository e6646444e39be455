"""Converts weights in other formats to a checkpoint, with about two of their tensors in memory at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.model import ModelSpec
from pentad.workers.checkpoint import checkpoint
from pentad.workers.checkpoint.atomic_io import make_folder, new_folder
from pentad.workers.checkpoint.manifest import Spec
from pentad.workers.checkpoint.safetensors_io import DTYPES, Progress, num_bytes, write_files
from pentad.workers.hf.config import is_interleaved, make_section, parse_config
from pentad.workers.hf.folder import TensorFiles, read_config, read_optimizer
from pentad.workers.hf.kept_files import FOLDER, read_files
from pentad.workers.hf.kept_files import write_files as write_kept
from pentad.workers.hf.layout import from_file, quantization_of
from pentad.workers.hf.names import MODEL_FILE, FileLayout, TensorEntry, TensorTable, tensor_table

FILE_BYTES = 4 << 30
_IGNORED = re.compile(r".*rotary_emb\.inv_freq")  # a buffer in old files


class Imported(NamedTuple):
    """The checkpoint's folder and the model that it holds. `bytes` counts all tensors; `kept` are the files beside the
    weights, for an export."""

    folder: Path
    family: str
    model: ModelSpec
    step: int
    tensors: int
    parameters: int
    bytes: int
    kept: tuple[str, ...]


class Target(NamedTuple):
    """Where a checkpoint goes: a new folder `out`, called `name` in errors, with files of at most `limit` bytes.
    `render` turns the model section into the text of its model.yaml."""

    out: Path
    render: Callable[[dict[str, Any]], str]
    progress: Progress
    limit: int = FILE_BYTES
    name: str = "OUT"


class TensorSource(Protocol):
    """Tensors by name; `read` returns the dtype given by `dtype`, float32 or float64."""

    folder: Path

    @property
    def names(self) -> Collection[str]: ...

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises PentadError unless the tensor can be read and has this shape."""

    def dtype(self, name: str) -> torch.dtype: ...

    def read(self, name: str) -> torch.Tensor: ...


class ModelTensors(NamedTuple):
    """What is imported: a model's weights, its optimizer's state by kind after `step` steps (0 without one), the table
    of tensor names, and the files beside the weights."""

    family: str
    model: ModelSpec
    table: TensorTable
    weights: TensorSource
    moments: Mapping[str, TensorSource]
    step: int
    kept: Mapping[str, bytes]
    moment_offset: int = 0


def import_folder(source: Path, target: Target, *, optimizer: bool = False) -> Imported:
    """Writes the weights of Hugging Face files in float32 to OUT/checkpoints/step-00000000, the model section to
    OUT/model.yaml, and all other files to OUT/hf. With `optimizer`, its state is included and the step is the export's.

    Raises PentadError, and leaves no file, for a folder that is incomplete or has an unsupported model.
    """
    config, kept = read_config(source), read_files(source)
    family, model = parse_config(config)
    with ExitStack() as stack:
        files = stack.enter_context(TensorFiles(source, quantization_of(config)))
        if not any(f"model.layers.{model.layers}." in name for name in files.names):
            model = replace(model, mtp_layers=0)  # transformers does not save those layers
        fused = any(name.endswith(".experts.gate_up_proj") for name in files.names)
        table = tensor_table(family, model, FileLayout(fused, is_interleaved(config)))
        step, offset, moments = read_optimizer(source, stack) if optimizer else (0, 0, {})
        return write_import(ModelTensors(family, model, table, files, moments, step, kept, offset), target)


def write_import(found: ModelTensors, target: Target) -> Imported:
    """Writes the target's folder. Raises PentadError, and leaves no file, for a tensor that is missing or wrong."""
    sources = {"model": found.weights} | {f"optimizer.{kind}": source for kind, source in found.moments.items()}
    entries = {f"{kind}.{entry.name}": (source, entry) for kind, source, entry in _stored(found, sources)}
    _refuse_unknown(found)
    _check_copies(found)
    wide = any(source.dtype(part.name) == torch.float64 for source, entry in entries.values() for part in entry.parts)
    dtype = torch.float64 if wide else torch.float32
    specs = {name: Spec(dtype=DTYPES[dtype], shape=list(entry.shape)) for name, (_, entry) in entries.items()}

    def read(name: str) -> Iterator[torch.Tensor]:
        source, entry = entries[name]
        return (from_file(source.read(part.name), part).to(dtype) for part in entry.parts)

    place, section = checkpoint.folder_of(Path("checkpoints"), found.step), make_section(found.family, found.model)
    with new_folder(target.out, target.name) as folder:
        make_folder(folder / place)
        shards = write_files(folder / place, specs, target.limit, _file_name, read, target.progress)
        meta = {"model": section, "moment_offset": found.moment_offset}
        checkpoint.commit(folder / place, step=found.step, shards=shards, meta=meta)
        (folder / MODEL_FILE).write_text(target.render({"model": section}), encoding="utf-8")
        write_kept(folder / FOLDER, found.kept)
    parameters = sum(torch.Size(entry.shape).numel() for entry in found.table.entries)
    return Imported(
        folder=target.out / place,
        family=found.family,
        model=found.model,
        step=found.step,
        tensors=len(specs),
        parameters=parameters,
        bytes=num_bytes(specs.values()),
        kept=tuple(found.kept),
    )


def _stored(
    found: ModelTensors, sources: Mapping[str, TensorSource]
) -> Iterator[tuple[str, TensorSource, TensorEntry]]:
    """All weights, and the optimizer's state of those that have some. Raises PentadError for a tensor that is missing
    or wrong."""
    for kind, source in sources.items():
        for entry in found.table.entries:
            if kind == "model" or any(part.name in source.names for part in entry.parts):
                for part in entry.parts:
                    source.check(part.name, part.shape)
                yield kind, source, entry


def _check_copies(found: ModelTensors) -> None:
    """Raises PentadError if a copy of a tensor differs from the original; copies may be missing."""
    source, shapes = found.weights, {part.name: part.shape for entry in found.table.entries for part in entry.parts}
    for name, original in found.table.copies.items():
        if name in source.names:
            source.check(name, shapes[original])
            if not torch.equal(source.read(name), source.read(original)):
                raise PentadError(f"tensor {name} in {source.folder} differs from {original}: expected a copy of it")


def _refuse_unknown(found: ModelTensors) -> None:
    """Raises PentadError for a tensor that the model does not have."""
    expected = {part.name for entry in found.table.entries for part in entry.parts} | found.table.copies.keys()
    for name in found.weights.names:
        if name not in expected and not _IGNORED.fullmatch(name):
            text = f"tensor {name} is in {found.weights.folder}"
            raise PentadError(f"{text}: expected only those that its config.json implies")


def _file_name(number: int, _: int) -> str:
    return f"model-{number:03d}.safetensors"
