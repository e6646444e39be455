"""Adapters of a checkpoint as PEFT stores them: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.lora import lora_of, trained_tensors
from pentad.workers.checkpoint.atomic_io import new_folder
from pentad.workers.checkpoint.checkpoint import Checkpoint
from pentad.workers.checkpoint.manifest import Spec
from pentad.workers.checkpoint.safetensors_io import DTYPES, Progress, num_bytes, write_files
from pentad.workers.hf.exporter import METADATA, Exported, Request
from pentad.workers.params.sharded_state import read_full

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_FOLDERS = {"attention": "self_attn", "mlp": "mlp"}


def export_adapter(source: Checkpoint, out: Path, request: Request, progress: Progress) -> Exported:
    """Writes what `peft.PeftModel.from_pretrained` loads beside the model that the run began with.

    Raises PentadError, with nothing left behind, if the checkpoint has no adapters.
    """
    lora = lora_of(source.meta)
    if lora is None:
        raise PentadError(
            f"CHECKPOINT is '{source.folder}', which has no adapters: expected one of a run with lora.rank"
        )
    dtype: torch.dtype = getattr(torch, request.dtype)
    names = {_peft_name(each.name): each for each in trained_tensors(request.model, lora)}
    specs = {name: Spec(dtype=DTYPES[dtype], shape=list(tensor.shape)) for name, tensor in names.items()}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(lora.targets),
        "bias": "none",
        "inference_mode": True,
    }

    def read(name: str) -> list[torch.Tensor]:
        return [read_full(source, f"model.{names[name].name}", names[name].shape).to(dtype)]

    with new_folder(out) as folder:
        size = num_bytes(specs.values())
        shards = write_files(folder, specs, max(1, size), lambda number, count: WEIGHTS, read, progress, METADATA)
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return Exported(tuple(shard.file for shard in shards), request.dtype, len(specs), size)


def _peft_name(name: str) -> str:
    """layers.0.attention.q_proj.lora_A is base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight there."""
    layers, number, part, module, matrix = name.split(".")
    return f"base_model.model.model.{layers}.{number}.{_FOLDERS[part]}.{module}.{matrix}.weight"
