"""Converts Hugging Face files to a checkpoint of step 0, with about two file tensors in memory at a time."""

from __future__ import annotations

import re
import shutil
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
from pentad.workers.hf.config import make_section, parse_config
from pentad.workers.hf.folder import TensorFiles, read_config
from pentad.workers.hf.layout import SCALE_SUFFIX, fp8_block_size, to_half_split
from pentad.workers.hf.names import MODEL_FILE, TOKENIZER_FILES, Layout, TensorTable, tensor_table

KEPT_KEYS = ("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")  # of config.json, for an export
CHECKPOINT = checkpoint.folder_of(Path("checkpoints"), 0)
FILE_BYTES = 4 << 30
_IGNORED = re.compile(r".*rotary_emb\.inv_freq")  # buffers in old files


class Imported(NamedTuple):
    """The checkpoint's folder, and the model it holds. `bytes` are of all tensors; `tokenizer` are the files copied."""

    folder: Path
    family: str
    model: ModelSpec
    tensors: int
    parameters: int
    bytes: int
    tokenizer: tuple[str, ...]


def import_folder(
    source: Path, out: Path, *, render: Callable[[dict[str, Any]], str], progress: Progress, limit: int = FILE_BYTES
) -> Imported:
    """Writes OUT/checkpoints/step-00000000 with float32 weights and no optimizer state, in files of at most `limit`
    bytes, OUT/model.yaml (the model section, as text from `render`), and the tokenizer's files.

    Raises PentadError, with nothing left behind, for a folder that is incomplete or of an unsupported model.
    """
    config = read_config(source)
    family, model = parse_config(config)
    with TensorFiles(source, fp8_block_size(config)) as files:
        if not any(f"model.layers.{model.layers}." in name for name in files.files):
            model = replace(model, mtp_layers=0)  # transformers does not save those layers
        fused = any(name.endswith(".experts.gate_up_proj") for name in files.files)
        table = tensor_table(family, model, Layout(fused, config.get("rope_interleave") is not False))
        _check_tensors(files, table)
        with new_folder(out) as folder:
            section = make_section(family, model)
            kept = {key: config[key] for key in KEPT_KEYS if config.get(key) is not None}
            make_folder(folder / CHECKPOINT)
            entries = {f"model.{entry.name}": entry for entry in table.entries}
            specs = {name: Spec(dtype="F32", shape=list(entry.shape)) for name, entry in entries.items()}

            def read(name: str) -> Iterator[torch.Tensor]:
                return (to_half_split(files.read(part.name), part.rotary) for part in entries[name].parts)

            shards = write_files(
                folder / CHECKPOINT, specs, limit, lambda number, _: f"model-{number:03d}.safetensors", read, progress
            )
            meta = {"model": section, "hugging_face": kept}
            checkpoint.commit(folder / CHECKPOINT, step=0, shards=shards, meta=meta)
            (folder / MODEL_FILE).write_text(render({"model": section}), encoding="utf-8")
            copied = [name for name in TOKENIZER_FILES if (source / name).is_file()]
            for name in copied:
                shutil.copyfile(source / name, folder / name)
    parameters = sum(torch.Size(entry.shape).numel() for entry in table.entries)
    return Imported(out / CHECKPOINT, family, model, len(specs), parameters, num_bytes(specs.values()), tuple(copied))


def _check_tensors(files: TensorFiles, table: TensorTable) -> None:
    """Raises PentadError unless the files hold exactly this model's tensors; copies may be missing."""
    expected = {part.name: part.shape for entry in table.entries for part in entry.parts}
    expected |= {part.name: part.shape for part in table.zeros}
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
