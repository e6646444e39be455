"""Folders of adapters in PEFT's format, without PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from pentad.schedules.spec.lora import LoraSpec, trained_tensors
from pentad.schedules.spec.model import ModelSpec

PLAIN = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none", "use_dora": False, "rank_pattern": {}}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def write_adapter(folder: Path, model: ModelSpec, **changes: Any) -> Path:
    """Random adapters of rank 2 with alpha 4 for attention; `changes` apply to adapter_config.json."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**PLAIN, **changes}))
    generator, tensors = torch.Generator().manual_seed(0), {}
    for each in trained_tensors(model, LoraSpec(2, 4.0, ATTENTION)):
        name = f"base_model.model.model.{each.name.replace('attention', 'self_attn')}.weight"
        tensors[name] = 0.1 * torch.randn(each.shape, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder
