"""Hugging Face files to a checkpoint of step 0, one tensor of the files in memory at a time."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.model import ModelShape
from pentad.workers.checkpoint import checkpoint
from pentad.workers.checkpoint.atomic_io import make_folder
from pentad.workers.checkpoint.hf_stream import cut, write
from pentad.workers.checkpoint.manifest import Spec
from pentad.workers.hf.config import section_of, shape_of
from pentad.workers.hf.folder import Files, read_config
from pentad.workers.hf.fp8 import SUFFIX, blocks_of
from pentad.workers.hf.hf_files import MODEL_FILE, TOKENIZER_FILES
from pentad.workers.hf.hf_place import fresh_folder
from pentad.workers.hf.layout import to_halves
from pentad.workers.hf.names import Entry, Layout, Table, table

KEPT = ("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")  # of config.json, for the way back
FILE_BYTES = 4 << 30

Progress = Callable[[int, int], None]  # bytes done, and of how many
_UNUSED = re.compile(r".*rotary_emb\.inv_freq")  # buffers that old files hold


class Imported(NamedTuple):
    """What a checkpoint was made of."""

    folder: Path
    family: str
    shape: ModelShape
    tensors: int
    parameters: int
    bytes: int
    tokenizer: tuple[str, ...]


def import_folder(
    source: Path, out: Path, *, render: Callable[[dict[str, Any]], str], progress: Progress, limit: int = FILE_BYTES
) -> Imported:
    """Writes OUT/checkpoints/step-00000000 with float32 weights and no optimizer state, OUT/model.yaml, which is what
    `render` makes of the model section, and the tokenizer's files.

    PentadError in one sentence for a folder that is not whole or of another kind of model, and then nothing is left.
    """
    config = read_config(source)
    family, shape = shape_of(config)
    with Files(source, blocks_of(config)) as files:
        shape = _as_stored(files, shape)
        fused = any(name.endswith(".experts.gate_up_proj") for name in files.where)
        names = table(family, shape, Layout(fused, config.get("rope_interleave") is not False))
        _check(files, names)
        with fresh_folder(out):
            folder = checkpoint.folder_of(out / "checkpoints", 0)
            section = section_of(family, shape)
            kept = {key: config[key] for key in KEPT if config.get(key) is not None}
            meta = {"model": section, "hugging_face": kept}
            total = _write(files, names, folder, meta, limit, progress)
            (out / MODEL_FILE).write_text(render({"model": section}), encoding="utf-8")
            copied = [name for name in TOKENIZER_FILES if (source / name).is_file()]
            for name in copied:
                shutil.copyfile(source / name, out / name)
    count = sum(torch.Size(entry.shape).numel() for entry in names.entries)
    return Imported(folder, family, shape, len(names.entries), count, total, tuple(copied))


def _write(files: Files, names: Table, folder: Path, meta: dict[str, Any], limit: int, progress: Progress) -> int:
    """The checkpoint's files and its manifest; the bytes of its tensors."""
    entries = {f"model.{entry.name}": entry for entry in names.entries}
    specs = ((name, Spec(dtype="F32", shape=list(entry.shape))) for name, entry in entries.items())
    plan = cut(specs, limit)
    total, done = sum(planned.bytes for planned in plan), 0
    make_folder(folder)
    shards = []

    def pieces(held: list[Entry]) -> Iterator[torch.Tensor]:
        nonlocal done
        for entry in held:
            for part in entry.parts:
                yield to_halves(files.read(part.name), part.rotary)
                done += 4 * torch.Size(part.shape).numel()
                progress(done, total)

    for number, planned in enumerate(plan):
        path = folder / f"model-{number:03d}.safetensors"
        shards.append(write(path, planned, pieces([entries[name] for name in planned.specs])))
    checkpoint.commit(folder, step=0, shards=shards, meta=meta)
    return total


def _as_stored(files: Files, shape: ModelShape) -> ModelShape:
    """Without predicted layers where the files have none of their tensors: transformers saves none."""
    there = any(f"model.layers.{shape.layers}." in name for name in files.where)
    return shape if there else replace(shape, mtp_layers=0)


def _check(files: Files, names: Table) -> None:
    """PentadError unless the files hold this model's tensors, and no others."""
    expected = {part.name: part.shape for entry in names.entries for part in entry.parts}
    expected |= {part.name: part.shape for part in names.zeros}
    for name, shape in expected.items():
        files.check(name, shape)
    for name, original in names.copies.items():
        if name in files.where:
            files.check(name, expected[original])
            if not torch.equal(files.read(name), files.read(original)):
                raise PentadError(f"tensor {name} in {files.folder} differs from {original}: expected a copy of it")
    for name in files.where:
        known = name.removesuffix(SUFFIX) if files.blocks is not None else name
        if known not in expected and known not in names.copies and not _UNUSED.fullmatch(name):
            raise PentadError(f"tensor {name} is in {files.folder}: expected none such by its config.json")
