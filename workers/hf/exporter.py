"""Converts a checkpoint to Hugging Face files, with about one checkpoint tensor in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.model import ModelSpec
from pentad.schedules.spec.optimizer import moment_offset_of
from pentad.workers.checkpoint.atomic_io import new_folder
from pentad.workers.checkpoint.checkpoint import Checkpoint
from pentad.workers.checkpoint.manifest import Spec
from pentad.workers.checkpoint.safetensors_io import DTYPES, Progress, num_bytes, write_files
from pentad.workers.hf.config import is_interleaved, make_config
from pentad.workers.hf.config_update import DEFAULT_POSITIONS, update_config
from pentad.workers.hf.file_tensors import FileTensors, QuantizedTensors
from pentad.workers.hf.kept_files import write_files as write_kept
from pentad.workers.hf.layout import FP8_BLOCK
from pentad.workers.hf.names import CONFIG, INDEX, OPTIMIZER, SINGLE, STATE, FileLayout, TensorTable, tensor_table
from pentad.workers.hf.stored_tensors import StoredTensors
from pentad.workers.params.sharded_state import optimizer_kinds

Dtype = Literal["bfloat16", "float32", "fp8"]
Weights = FileTensors | QuantizedTensors
FILE_BYTES = 5 * 10**9
GENERATION_CONFIG, HEAD = "generation_config.json", "lm_head.weight"
QUANTIZATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": list(FP8_BLOCK),
}
METADATA = {"format": "pt"}  # transformers refuses files without it


class ExportRequest(NamedTuple):
    """What to export: files of at most `limit` bytes of tensors in `dtype`, and the optimizer's state if requested.
    With fp8, the layers' projections are in FP8 and everything else in bfloat16.

    `positions` is the length of sequences in training (0: unknown). `kept` are further files by name; of these,
    config.json and generation_config.json come from the import and are only updated. `special_tokens` has ids by key.
    """

    family: str
    model: ModelSpec
    positions: int
    kept: Mapping[str, bytes] = MappingProxyType({})
    special_tokens: Mapping[str, int] = MappingProxyType({})
    dtype: Dtype = "float32"
    limit: int = FILE_BYTES
    optimizer: bool = False


class Exported(NamedTuple):
    """The files with weights, their dtype, and the number and total bytes of their tensors."""

    files: tuple[str, ...]
    dtype: str
    tensors: int
    bytes: int


def export_checkpoint(source: Checkpoint, out: Path, request: ExportRequest, progress: Progress) -> Exported:
    """Writes config.json, safetensors files (with an index if several) and the files kept from the import.

    Raises PentadError, and leaves no file, if the checkpoint holds another model than `request` says or the family's
    files cannot express it.
    """
    kept = make_files(request, request.dtype)
    table, weights = model_tensors(source, request, kept)
    states = _optimizer_state(source, request, table)
    total = sum(num_bytes(_specs(each).values()) for each in (weights, *states.values()))
    with new_folder(out) as folder:
        files = _write_files(folder, weights, request.limit, progress, total, 0)
        done = num_bytes(_specs(weights).values())
        for kind, state in states.items():
            (folder / OPTIMIZER / kind).mkdir(parents=True)
            _write_files(folder / OPTIMIZER / kind, state, request.limit, progress, total, done)
            done += num_bytes(_specs(state).values())
        if request.optimizer:
            steps = {"step": source.step, "moment_offset": moment_offset_of(source.meta)}
            (folder / OPTIMIZER / STATE).write_bytes(_json_bytes({**steps, "kinds": list(states)}))
        write_kept(folder, kept)
    return Exported(files, request.dtype, len(weights.dtypes), num_bytes(_specs(weights).values()))


def model_tensors(
    source: Checkpoint, request: ExportRequest, files: Mapping[str, bytes]
) -> tuple[TensorTable, Weights]:
    """The table of names for an export with these files (see `make_files`), and the tensors to write."""
    table = tensor_table(request.family, request.model, FileLayout(interleaved=interleaves(files)))
    dtype = getattr(torch, _written_dtype(request.dtype))
    weights = FileTensors(StoredTensors(source, "model", request.model), table, dtype)
    weights.dtypes.pop(HEAD if HEAD in table.copies else "", None)  # like transformers, leave out a tied head
    if request.dtype == "fp8" and request.model.expert_biases:
        found = "--dtype is fp8 for experts with biases, which transformers does not read in 8 bits"
        raise PentadError(f"{found}: expected bfloat16 or float32")
    return table, QuantizedTensors(weights) if request.dtype == "fp8" else weights


def _written_dtype(dtype: str) -> str:
    """The dtype in config.json, which all tensors not in FP8 have."""
    return "bfloat16" if dtype == "fp8" else dtype


def _optimizer_state(source: Checkpoint, request: ExportRequest, table: TensorTable) -> dict[str, FileTensors]:
    """The optimizer's state by kind, empty unless requested. Raises PentadError if the checkpoint has none."""
    kinds = optimizer_kinds(source) if request.optimizer else []
    if request.optimizer and not kinds:
        raise PentadError(f"checkpoint {source.folder} has no optimizer state: expected one of a step that was trained")
    return {
        kind: FileTensors(StoredTensors(source, f"optimizer.{kind}", request.model), table, torch.float32)
        for kind in kinds
    }


def _specs(tensors: Weights) -> dict[str, Spec]:
    """The tensors' specs, wide dtypes first so that all are aligned in the files."""
    names = sorted(tensors.dtypes, key=lambda name: -tensors.dtypes[name].itemsize)
    return {name: Spec(dtype=DTYPES[tensors.dtypes[name]], shape=list(tensors.shapes[name])) for name in names}


def _write_files(
    folder: Path, tensors: Weights, limit: int, progress: Progress, total: int, before: int
) -> tuple[str, ...]:
    """Writes one file, or several with an index, and returns their names. `before` of the `total` bytes have been
    written already."""
    specs = _specs(tensors)

    def read(name: str) -> list[torch.Tensor]:
        return [tensors.read(name)]

    def report(done: int, _: int) -> None:
        progress(before + done, total)

    shards = write_files(folder, specs, limit, _file_name, read, report, METADATA)
    if len(shards) > 1:
        weight_map = {name: shard.file for shard in shards for name in shard.tensors}
        index = {"metadata": {"total_size": num_bytes(specs.values())}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX).write_bytes(_json_bytes(index))
    return tuple(shard.file for shard in shards)


def make_files(request: ExportRequest, dtype: str) -> dict[str, bytes]:
    """The config.json of an export in `dtype` and the kept files, with special tokens in both configs.

    Raises PentadError for a model that the family's config.json cannot express.
    """
    family, model, positions, files = request.family, request.model, request.positions, dict(request.kept)
    is_quantized, dtype = dtype == "fp8", _written_dtype(dtype)
    if CONFIG in files:
        config = update_config(json.loads(files[CONFIG]), family, model, positions=positions, dtype=dtype)
    else:
        config = make_config(family, model, positions=positions or DEFAULT_POSITIONS, dtype=dtype)
        config |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    if is_quantized:
        config["quantization_config"] = QUANTIZATION
    files[CONFIG] = _json_bytes({**config, **request.special_tokens})
    if request.special_tokens and GENERATION_CONFIG in files:
        files[GENERATION_CONFIG] = _json_bytes({**json.loads(files[GENERATION_CONFIG]), **request.special_tokens})
    return files


def interleaves(files: Mapping[str, bytes]) -> bool:
    """Whether rotary parts are interleaved, according to the config.json of an export."""
    return is_interleaved(json.loads(files[CONFIG]))


def _json_bytes(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _file_name(number: int, count: int) -> str:
    return SINGLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"
