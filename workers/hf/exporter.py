"""A checkpoint to Hugging Face files, one tensor of the checkpoint in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch

from pentad.schedules.spec.model import ModelShape
from pentad.workers.checkpoint.checkpoint import Checkpoint
from pentad.workers.checkpoint.hf_stream import cut, write
from pentad.workers.checkpoint.manifest import Spec
from pentad.workers.hf.config import config_of
from pentad.workers.hf.folder import CONFIG, INDEX, SINGLE
from pentad.workers.hf.hf_place import fresh_folder
from pentad.workers.hf.layout import to_pairs
from pentad.workers.hf.names import Entry, Table, table
from pentad.workers.params.sharded_state import read_whole

Dtype = Literal["bfloat16", "float32"]
DTYPES = {"bfloat16": ("BF16", torch.bfloat16), "float32": ("F32", torch.float32)}
FILE_BYTES = 5 * 10**9

Progress = Callable[[int, int], None]  # bytes done, and of how many


class Request(NamedTuple):
    """What files are asked for: of which model, in what dtype, each of at most `limit` bytes. `positions` are the
    tokens of a sequence, `tokens` the special tokens' ids by key of config.json, `tokenizer` other files by name."""

    family: str
    shape: ModelShape
    positions: int
    tokens: dict[str, Any]
    tokenizer: Mapping[str, bytes] = MappingProxyType({})
    dtype: Dtype = "float32"
    limit: int = FILE_BYTES


class Exported(NamedTuple):
    """Files of tensors, how many tensors they hold, and the bytes of those."""

    files: tuple[str, ...]
    tensors: int
    bytes: int


def export_checkpoint(found: Checkpoint, out: Path, request: Request, progress: Progress) -> Exported:
    """Writes config.json, safetensors files (with an index where there are several) and the tokenizer's files.

    PentadError where the checkpoint holds another model than `request` says or the family's files cannot hold it; then
    nothing is left.
    """
    config = config_of(request.family, request.shape, positions=request.positions, dtype=request.dtype)
    config |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **request.tokens}
    names = table(request.family, request.shape)
    with fresh_folder(out):
        done = _write(found, names, out, request, progress)
        for name, content in request.tokenizer.items():
            (out / name).write_bytes(content)
        (out / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return done


def _write(found: Checkpoint, names: Table, out: Path, request: Request, progress: Progress) -> Exported:
    owners = {part.name: entry for entry in names.entries for part in entry.parts}
    parts = {part.name: part for part in (*(p for e in names.entries for p in e.parts), *names.zeros)}
    order = sorted((*parts, *_written_copies(request.shape, names)), key=lambda name: not _is_bias(name))
    kind = DTYPES[request.dtype][0]

    def spec(name: str) -> Spec:  # a bias of experts is never narrow: its steps are small
        shape = parts[names.copies.get(name, name)].shape
        return Spec(dtype="F32" if _is_bias(name) else kind, shape=list(shape))

    plan = cut(((name, spec(name)) for name in order), request.limit)
    files = (
        [SINGLE] if len(plan) == 1 else [f"model-{i + 1:05d}-of-{len(plan):05d}.safetensors" for i in range(len(plan))]
    )
    total, done = sum(planned.bytes for planned in plan), 0
    held = _Held(found)

    def pieces(written: dict[str, Spec]) -> Iterator[torch.Tensor]:
        nonlocal done
        for name in written:
            original = names.copies.get(name, name)
            part, dtype = parts[original], torch.float32 if _is_bias(name) else DTYPES[request.dtype][1]
            if original in owners:
                yield to_pairs(held.part(owners[original], original), part.rotary).to(dtype)
            else:
                yield torch.zeros(part.shape, dtype=dtype)
            done += torch.Size(part.shape).numel() * dtype.itemsize
            progress(done, total)

    for file, planned in zip(files, plan, strict=True):
        write(out / file, planned, pieces(planned.specs))
    if len(plan) > 1:
        places = {name: file for file, planned in zip(files, plan, strict=True) for name in planned.specs}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        (out / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return Exported(tuple(files), len(order), total)


class _Held:
    """The tensor of a checkpoint that was read last: its parts are asked for one behind the other."""

    def __init__(self, found: Checkpoint) -> None:
        self.found, self.name = found, ""
        self.whole = torch.empty(0)

    def part(self, entry: Entry, name: str) -> torch.Tensor:
        """One of the tensors that `entry` is made of."""
        if entry.name != self.name:
            self.whole = torch.empty(0)  # what was held makes room
            whole = read_whole(self.found, f"model.{entry.name}", entry.shape)
            self.name, self.whole = entry.name, whole
        start = 0
        for part in entry.parts:
            count = torch.Size(part.shape).numel()
            if part.name == name:
                return self.whole.view(-1)[start : start + count].view(part.shape)
            start += count
        raise AssertionError(name)


def _written_copies(shape: ModelShape, names: Table) -> list[str]:
    """A tied head is left out, as transformers does; what predicted layers share is not, since readers ask for it."""
    return [name for name in names.copies if name != "lm_head.weight"]


def _is_bias(name: str) -> bool:
    return name.endswith("e_score_correction_bias")
