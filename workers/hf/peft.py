"""Reads and writes adapters as PEFT stores them: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.lora import EXPERTS, TARGETS, LoraSpec, adapters_of, lora_of
from pentad.schedules.spec.tensors import Tensor, tensors
from pentad.workers.checkpoint import checkpoint
from pentad.workers.checkpoint.atomic_io import new_folder
from pentad.workers.checkpoint.checkpoint import Checkpoint
from pentad.workers.checkpoint.location import Location
from pentad.workers.checkpoint.manifest import Spec
from pentad.workers.checkpoint.safetensors_io import DTYPES, Progress, num_bytes, write_files
from pentad.workers.checkpoint.shards import write_shard
from pentad.workers.hf.config import is_interleaved
from pentad.workers.hf.exporter import METADATA, Exported, ExportRequest
from pentad.workers.hf.layout import from_file, to_file
from pentad.workers.hf.names import CONFIG as HF_CONFIG
from pentad.workers.hf.names import FileLayout, FileTensor, tensor_table
from pentad.workers.params.sharded_state import read_full

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_FOLDERS = {"attention": "self_attn", "mlp": "mlp", "experts": "mlp"}
_NAME = re.compile(
    r"base_model\.model\.model\.layers\.\d+\.(?:mlp\.experts(?:\.base_layer)?|(?:self_attn|mlp)\.(\w+))"
    r"\.lora_[AB]\.weight"
)
# Variants in PEFT's LoraConfig that do not compute W x + alpha / r B A x, or that train other tensors as well.
_VARIANTS = ("use_dora", "use_rslora", "use_qalora", "use_bdlora", "lora_bias", "fan_in_fan_out", "rank_pattern",
             "alpha_pattern", "modules_to_save", "layer_replication", "trainable_token_indices",
             "alora_invocation_tokens", "arrow_config", "kasa_config", "monteclora_config",
             "velora_config")  # fmt: skip
_KEEPING_W = (True, False, None, "gaussian", "orthogonal", "eva")  # initializations that leave W unchanged


def export_adapter(source: Checkpoint, out: Path, request: ExportRequest, progress: Progress) -> Exported:
    """Writes the adapters so that `peft.PeftModel.from_pretrained` loads them onto the model that the run began with.

    Raises PentadError, and leaves no file, if the checkpoint has no adapters.
    """
    lora = lora_of(source.meta)
    if lora is None:
        raise PentadError(
            f"CHECKPOINT is '{source.folder}', which has no adapters: expected one of a run with lora.rank"
        )
    dtype: torch.dtype = getattr(torch, request.dtype)
    names = {each.name: each for each in _peft_tensors(request, lora)}
    specs = {name: Spec(dtype=DTYPES[dtype], shape=list(each.shape)) for name, each in names.items()}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": [target for target in lora.targets if target not in EXPERTS],
        "bias": "none",
        "inference_mode": True,
    }
    if lora.adapts_experts:
        config["target_parameters"] = [target for target in lora.targets if target in EXPERTS]

    def read(name: str) -> list[torch.Tensor]:
        each = names[name]
        return [each.to_file(read_full(source, f"model.{each.adapter.name}", each.adapter.shape).to(dtype))]

    with new_folder(out) as folder:
        size = num_bytes(specs.values())
        shards = write_files(folder, specs, max(1, size), lambda number, count: WEIGHTS, read, progress, METADATA)
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return Exported(tuple(shard.file for shard in shards), request.dtype, len(specs), size)


class PeftTensor(NamedTuple):
    """A or B of an adapter as PEFT stores it: one matrix, even for all experts. B has a `part`, because PEFT has its
    rows in the order of the base weight's rows in files."""

    name: str
    adapter: Tensor
    part: FileTensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        *experts, rows, columns = self.adapter.shape
        count = math.prod(experts)
        return (rows * count, columns) if self.part is None else (rows, columns * count)

    def to_file(self, values: torch.Tensor) -> torch.Tensor:
        """Converts values to PEFT's form. The experts' matrices are stacked in A; in B an output's row has, for each
        rank, the values of all experts."""
        if self.part is None:
            return values.view(self.shape)
        values = to_file(values, self.part)
        return values.permute(1, 2, 0).reshape(self.shape) if self.adapter.experts else values

    def from_file(self, values: torch.Tensor) -> torch.Tensor:
        """The inverse of `to_file`."""
        experts, rows, rank = (1, *self.adapter.shape)[-3:]
        if self.part is None:
            return values.view(self.adapter.shape)
        if self.adapter.experts:
            values = values.view(rows, rank, experts).permute(2, 0, 1)
        return from_file(values, self.part).contiguous()


def _peft_tensors(request: ExportRequest, lora: LoraSpec) -> list[PeftTensor]:
    """All adapter matrices of a model."""
    layout = FileLayout(interleaved=is_interleaved(json.loads(request.kept.get(HF_CONFIG, b"{}"))))
    table = tensor_table(request.family, request.model, layout)
    parts, found = {entry.name: entry.parts[0] for entry in table.entries}, []
    for base in tensors(request.model):
        for _, a, b in adapters_of(lora, base):
            rotary, stack = parts[base.name].rotary, parts[base.name].stack
            part = FileTensor("", b.shape, rotary, stack and stack._replace(is_transposed=False))
            found += [PeftTensor(_peft_name(a.name, lora), a), PeftTensor(_peft_name(b.name, lora), b, part)]
    return found


def _peft_name(name: str, lora: LoraSpec) -> str:
    """PEFT's name: layers.0.attention.q_proj.lora_A is base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight.
    Adapters of parameters wrap the experts' module; that of down_proj wraps that of gate_up_proj."""
    layers, number, part, module, matrix = name.split(".")
    if part == "experts":
        module = "experts.base_layer" if module == "gate_up_proj" and set(EXPERTS) <= set(lora.targets) else "experts"
    return f"base_model.model.model.{layers}.{number}.{_FOLDERS[part]}.{module}.{matrix}.weight"


def import_adapter(source: Path, checkpoints: Location, request: ExportRequest, lora: LoraSpec) -> Location:
    """Writes a checkpoint of step 0 with the adapters in `source` and no optimizer state; returns its folder.

    Raises PentadError as `read_adapter` does, and if the storage fails.
    """
    values = {f"model.{name}": each for name, each in read_adapter(source, request, lora).items()}
    folder = checkpoint.folder_of(checkpoints, 0)
    shard = write_shard(folder, "adapters.safetensors", values)
    checkpoint.commit(folder, step=0, shards=[shard], meta={"lora": lora.plain})
    return folder


def read_adapter(folder: Path, request: ExportRequest, lora: LoraSpec) -> dict[str, torch.Tensor]:
    """The adapters in a folder written by `peft.PeftModel.save_pretrained`, by pentad's names, in float32 or float64.
    Only the request's base model is used: its family, sizes and config.json.

    Raises PentadError unless they are plain LoRA with this rank, alpha and targets for a model of these sizes.
    """
    parameters = _check_config(folder, lora)
    try:
        found = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise PentadError(f"{folder / WEIGHTS} cannot be read ({error}): expected the adapters of PEFT") from None
    _check_targets(folder, found, parameters, lora)
    expected, layers = {each.name: each for each in _peft_tensors(request, lora)}, request.model.layers
    if unknown := sorted(found.keys() - expected.keys()):
        text = f"tensor {unknown[0]} is in {folder / WEIGHTS}"
        raise PentadError(f"{text}: expected only those of {layers} layers, which the model of run.init_from has")
    for name, each in expected.items():
        shape = tuple(found[name].shape) if name in found else None
        if shape != each.shape:
            text = f"tensor {name} in {folder / WEIGHTS} " + (f"has shape {list(shape)}" if shape else "is missing")
            raise PentadError(f"{text}: expected {list(each.shape)}, from the sizes of the model of run.init_from")
    wide = {name: torch.promote_types(values.dtype, torch.float32) for name, values in found.items()}
    return {each.adapter.name: each.from_file(found[name].to(wide[name])) for name, each in expected.items()}


def _check_config(folder: Path, lora: LoraSpec) -> set[str]:
    """The expert matrices that adapter_config.json names. Raises PentadError unless it describes plain LoRA with this
    rank and alpha."""
    path = folder / CONFIG
    try:
        config: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        expected = f"a folder with {CONFIG} and {WEIGHTS}, as PEFT saves them"
        raise PentadError(f"lora.init_from is '{folder}', whose {CONFIG} cannot be read: expected {expected}") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise PentadError(f"{path} has no peft_type LORA: expected the configuration of a LoRA adapter")
    odd = [key for key in _VARIANTS if config.get(key)] + ["bias"] * (config.get("bias", "none") != "none")
    odd += ["init_lora_weights"] * (config.get("init_lora_weights") not in _KEEPING_W)
    for key in odd:
        raise PentadError(f"{path} has {key} = {json.dumps(config[key])}: expected plain LoRA without it")
    for key, name, value in (("rank", "r", lora.rank), ("alpha", "lora_alpha", lora.alpha)):
        if config.get(name) != value:
            raise PentadError(f"lora.{key} is {value:g}: expected {config.get(name)}, the {name} of {path}")
    match config.get("target_parameters"):
        case None | []:
            return set()
        case [*names] if all(isinstance(name, str) for name in names):
            return {f"experts.{name.rpartition('.')[2]}" for name in names}
        case found:
            raise PentadError(f"{path} has target_parameters = {json.dumps(found)[:100]}: expected a list of names")


def _check_targets(folder: Path, names: Collection[str], parameters: set[str], lora: LoraSpec) -> None:
    """Raises PentadError unless the modules and parameters with adapters are those of lora.targets."""
    modules = set(parameters)
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None:
            raise PentadError(f"tensor {name} is in {folder / WEIGHTS}: expected only adapters of {', '.join(TARGETS)}")
        if match[1]:
            modules.add(match[1])
    if modules != set(lora.targets):
        found, expected = (", ".join(sorted(each)) for each in (lora.targets, modules))
        raise PentadError(f"lora.targets is {found}: expected {expected or 'none'}, as in {folder / WEIGHTS}")
