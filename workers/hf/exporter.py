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
from pentad.workers.hf.config import is_interleaved, make_config
from pentad.workers.hf.config_update import DEFAULT_POSITIONS, update_config
from pentad.workers.hf.kept_files import write_files as write_kept
from pentad.workers.hf.layout import to_interleaved
from pentad.workers.hf.names import CONFIG, INDEX, SINGLE, Entry, FileTensor, Layout, tensor_table
from pentad.workers.params.sharded_state import read_full

Dtype = Literal["bfloat16", "float32"]
FILE_BYTES = 5 * 10**9
GENERATION_CONFIG = "generation_config.json"
_METADATA = {"format": "pt"}  # transformers refuses files without it


class Request(NamedTuple):
    """What to export: files of at most `limit` bytes of tensors in `dtype`.

    `positions` is the length of sequences in training (0: unknown). `kept` are further files by name; config.json and
    generation_config.json among them are those of the import, and only updated. `special_tokens` are ids by their keys.
    """

    family: str
    model: ModelSpec
    positions: int
    kept: Mapping[str, bytes] = MappingProxyType({})
    special_tokens: Mapping[str, int] = MappingProxyType({})
    dtype: Dtype = "float32"
    limit: int = FILE_BYTES


class Exported(NamedTuple):
    """The files with tensors, the number of tensors in them and their bytes."""

    files: tuple[str, ...]
    tensors: int
    bytes: int


def export_checkpoint(source: Checkpoint, out: Path, request: Request, progress: Progress) -> Exported:
    """Writes config.json, safetensors files (with an index if several) and the files kept from the import.

    Raises PentadError, with nothing left behind, if the checkpoint holds another model than `request` says or the
    family's files cannot express it.
    """
    config = _config(request)
    with new_folder(out) as folder:
        tensors = _FileTensors(source, request, Layout(interleaved=is_interleaved(config)))
        shards = write_files(folder, tensors.specs, request.limit, _file_name, tensors.read, progress, _METADATA)
        total = num_bytes(tensors.specs.values())
        if len(shards) > 1:
            weight_map = {name: shard.file for shard in shards for name in shard.tensors}
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            (folder / INDEX).write_bytes(_json_bytes(index))
        write_kept(folder, {**_kept(request), CONFIG: _json_bytes(config)})
    return Exported(tuple(shard.file for shard in shards), len(tensors.specs), total)


def _config(request: Request) -> dict[str, Any]:
    family, model, positions, dtype = request.family, request.model, request.positions, request.dtype
    if CONFIG in request.kept:
        config = update_config(json.loads(request.kept[CONFIG]), family, model, positions=positions, dtype=dtype)
    else:
        made = make_config(family, model, positions=positions or DEFAULT_POSITIONS, dtype=dtype)
        config = made | {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return config | request.special_tokens


def _kept(request: Request) -> dict[str, bytes]:
    """The kept files but config.json; special tokens that are not those of the import are written to both configs."""
    kept = {name: content for name, content in request.kept.items() if name != CONFIG}
    if request.special_tokens and GENERATION_CONFIG in kept:
        updated = json.loads(kept[GENERATION_CONFIG]) | request.special_tokens
        kept[GENERATION_CONFIG] = _json_bytes(updated)
    return kept


def _json_bytes(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _file_name(number: int, count: int) -> str:
    return SINGLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


class _FileTensors:
    """The tensors of the files by name, made from a checkpoint's.

    Keeps the checkpoint tensor read last in memory, because the file tensors it contains are read in a row.
    """

    def __init__(self, source: Checkpoint, request: Request, layout: Layout) -> None:
        self.source = source
        table = tensor_table(request.family, request.model, layout)
        self.copies = table.copies
        shapes: dict[str, tuple[int, ...]] = {}
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
        entry, part, offset = self.parts[self.copies.get(name, name)]
        if entry is not self._entry:
            self._tensor = torch.empty(0)  # frees the previous one before reading the next
            self._tensor, self._entry = read_full(self.source, f"model.{entry.name}", entry.shape), entry
        end = offset + torch.Size(part.shape).numel()
        tensor = self._tensor.view(-1)[offset:end].view(part.shape)
        yield to_interleaved(tensor, part.rotary).to(self.dtypes[name])


def _is_bias(name: str) -> bool:
    return name.endswith("e_score_correction_bias")
