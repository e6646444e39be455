"""Writes a checkpoint for torch.distributed.checkpoint, one tensor in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, SavePlan
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from pentad.workers.checkpoint.safetensors_io import Progress


class ToWrite(NamedTuple):
    """A tensor by its path in the nested dictionary as which torch loads a checkpoint; the path joined by dots is its
    name."""

    path: tuple[str, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]

    @property
    def name(self) -> str:
        return ".".join(self.path)

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_dcp(folder: Path, tensors: Sequence[ToWrite], progress: Progress) -> None:
    """Writes `.metadata` and one `.distcp` file into an existing folder; each tensor is read when it is written.

    Raises OSError.
    """
    writer = _Writer(folder)
    writer.set_up_storage_writer(True)
    items, described = [], dict[str, TensorStorageMetadata | BytesStorageMetadata]()
    for tensor in tensors:
        size, properties = torch.Size(tensor.shape), TensorProperties(tensor.dtype)
        chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
        data = TensorWriteData(chunk, properties, size)
        items.append(WriteItem(MetadataIndex(tensor.name, chunk.offsets), WriteItemType.TENSOR, tensor_data=data))
        described[tensor.name] = TensorStorageMetadata(properties, size, [chunk])
    (plan,) = writer.prepare_global_plan([writer.prepare_local_plan(SavePlan(items))])
    results = writer.write_data(plan, _Reader(tensors, progress)).wait()
    writer.finish(Metadata(described, planner_data={tensor.name: tensor.path for tensor in tensors}), [results])


class _Writer(FileSystemWriter):
    def storage_meta(self) -> StorageMeta:
        """Empty: without the folder's path, which changes, and a random ID, the same tensors give the same bytes."""
        return StorageMeta()


class _Reader(DefaultSavePlanner):
    """Gives torch's writer the tensors; the plan for all of them is made in `write_dcp`."""

    def __init__(self, tensors: Sequence[ToWrite], progress: Progress) -> None:
        super().__init__()
        self.tensors, self.progress = {tensor.name: tensor for tensor in tensors}, progress
        self.done, self.total = 0, sum(tensor.num_bytes for tensor in tensors)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        tensor = self.tensors[write_item.index.fqn]
        self.done += tensor.num_bytes
        self.progress(self.done, self.total)
        return tensor.read().contiguous()
