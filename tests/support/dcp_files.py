"""Checkpoints of torch.distributed.checkpoint, written by torch."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter, SavePlan
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

Parts = Mapping[str, tuple[tuple[int, ...], torch.Tensor]]  # by name: offset in the full tensor, and the values


def save(state: Mapping[str, Any], folder: Path, **how: Any) -> Path:
    with warnings.catch_warnings(action="ignore"):
        dcp.save(dict(state), checkpoint_id=folder, no_dist=True, **how)
    return folder


def load(like: dict[str, Any], folder: Path, **how: Any) -> dict[str, Any]:
    """Fills the tensors of `like`."""
    with warnings.catch_warnings(action="ignore"):
        dcp.load(like, checkpoint_id=folder, no_dist=True, **how)
    return like


def save_sharded(ranks: list[Parts], full: Mapping[str, torch.Tensor], writer: FileSystemWriter) -> None:
    """Saves what ranks with these parts of the tensors save together."""
    plans = []
    for parts in ranks:
        items = []
        for name, (offsets, values) in parts.items():
            chunk = ChunkStorageMetadata(torch.Size(offsets), values.shape)
            data = TensorWriteData(chunk, TensorProperties(values.dtype), full[name].shape)
            items.append(WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data))
        plans.append(writer.prepare_local_plan(SavePlan(items)))
    plans, metadata = _Ranks(ranks[0]).create_global_plan(plans)
    plans = writer.prepare_global_plan(plans)
    results = [writer.write_data(plan, _Ranks(parts)).wait() for plan, parts in zip(plans, ranks, strict=True)]
    writer.finish(metadata, results)


class _Ranks(DefaultSavePlanner):
    """One rank's part of a plan."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(flatten_state_dict=False)
        self.parts = parts

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        return self.parts[write_item.index.fqn][1]
