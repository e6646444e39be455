"""Converts a checkpoint to Hugging Face files, with about one checkpoint tensor in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch

from pentad.schedules.spec.model import ModelSpec
from pentad.workers.checkpoint.atomic_io import new_folder
from pentad.workers.checkpoint.checkpoint import Checkpoint
from pentad.workers.checkpoint.manifest import Spec
from pentad.workers.checkpoint.safetensors_io import DTYPES, Progress, num_bytes, write_files
from pentad.workers.hf.config import make_config
from pentad.workers.hf.layout import to_interleaved
from pentad.workers.hf.names import CONFIG, INDEX, SINGLE, Entry, FileTensor, tensor_table
from pentad.workers.params.sharded_state import read_full

Dtype = Literal["bfloat16", "float32"]
FILE_BYTES = 5 * 10**9
_METADATA = {"format": "pt"}  # transformers refuses files without it


class Request(NamedTuple):
    """What to export: files of at most `limit` bytes of tensors in `dtype`.

    `positions` is the longest sequence, `special_tokens` are ids by key of config.json, and `tokenizer` are further
    files by name.
    """

    family: str
    model: ModelSpec
    positions: int
    special_tokens: dict[str, Any]
    tokenizer: Mapping[str, bytes] = MappingProxyType({})
    dtype: Dtype = "float32"
    limit: int = FILE_BYTES


class Exported(NamedTuple):
    """The files with tensors, the number of tensors in them and their bytes."""

    files: tuple[str, ...]
    tensors: int
    bytes: int


def export_checkpoint(source: Checkpoint, out: Path, request: Request, progress: Progress) -> Exported:
    """Writes config.json, safetensors files (with an index if several) and the tokenizer's files.

    Raises PentadError, with nothing left behind, if the checkpoint holds another model than `request` says or the
    family's files cannot express it.
    """
    config = make_config(request.family, request.model, positions=request.positions, dtype=request.dtype)
    config |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **request.special_tokens}
    with new_folder(out) as folder:
        tensors = _FileTensors(source, request)
        shards = write_files(folder, tensors.specs, request.limit, _file_name, tensors.read, progress, _METADATA)
        total = num_bytes(tensors.specs.values())
        if len(shards) > 1:
            weight_map = {name: shard.file for shard in shards for name in shard.tensors}
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        for name, content in request.tokenizer.items():
            (folder / name).write_bytes(content)
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return Exported(tuple(shard.file for shard in shards), len(tensors.specs), total)


def _file_name(number: int, count: int) -> str:
    return SINGLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


class _FileTensors:
    """The tensors of the files by name, made from a checkpoint's.

    Keeps the checkpoint tensor read last in memory, because the file tensors it contains are read in a row.
    """

    def __init__(self, source: Checkpoint, request: Request) -> None:
        self.source = source
        table = tensor_table(request.family, request.model)
        self.copies = table.copies
        shapes = {part.name: part.shape for part in table.zeros}
        self.parts: dict[str, tuple[Entry, FileTensor, int]] = {}  # its entry, itself, its first element in the entry
        for entry in table.entries:
            offset = 0
            for part in entry.parts:
                self.parts[part.name] = entry, part, offset
                shapes[part.name] = part.shape
                offset += torch.Size(part.shape).numel()
        # As transformers does, leave out a tied head, but write the copies in MTP layers: readers ask for them.
        names = (*shapes, *(name for name in table.copies if name != "lm_head.weight"))
        # An expert bias stays float32, since its steps are small; the wide dtype comes first, so all are aligned.
        self.dtypes = {name: torch.float32 if _is_bias(name) else getattr(torch, request.dtype) for name in names}
        self.specs = {
            name: Spec(dtype=DTYPES[self.dtypes[name]], shape=list(shapes[self.copies.get(name, name)]))
            for name in sorted(names, key=lambda name: not _is_bias(name))
        }
        self._entry: Entry | None = None
        self._tensor = torch.empty(0)

    def read(self, name: str) -> Iterator[torch.Tensor]:
        original = self.copies.get(name, name)
        if original not in self.parts:
            yield torch.zeros(self.specs[name]["shape"], dtype=self.dtypes[name])
            return
        entry, part, offset = self.parts[original]
        if entry is not self._entry:
            self._tensor = torch.empty(0)  # frees the previous one before reading the next
            self._tensor, self._entry = read_full(self.source, f"model.{entry.name}", entry.shape), entry
        end = offset + torch.Size(part.shape).numel()
        tensor = self._tensor.view(-1)[offset:end].view(part.shape)
        yield to_interleaved(tensor, part.rotary).to(self.dtypes[name])


def _is_bias(name: str) -> bool:
    return name.endswith("e_score_correction_bias")
