"""`pentad.load_checkpoint`: the weights of a checkpoint in memory."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, Literal, overload

from pentad.orchestrator.api.runs import Run
from pentad.orchestrator.monitoring.runfolder import find_checkpoint
from pentad.schedules.ir.argument_types import checks_types
from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint.checkpoint import Checkpoint

if TYPE_CHECKING:
    import torch

    from pentad.workers.hf.exporter import Dtype

Source = Run | str | os.PathLike[str]
DTYPES = ("float32", "bfloat16")


def checkpoint_of(source: Source) -> Checkpoint:
    """A checkpoint by its folder, or the newest one of a run or an import. Raises PentadError if there is none."""
    return find_checkpoint(str(source.folder) if isinstance(source, Run) else os.fspath(source), "CHECKPOINT")


@overload
def load_checkpoint(
    source: Source, form: Literal["pentad", "hf"] = "pentad", *, dtype: Dtype = "float32"
) -> dict[str, torch.Tensor]: ...
@overload
def load_checkpoint(source: Source, form: Literal["transformers"], *, dtype: Dtype = "float32") -> Any: ...
@checks_types
def load_checkpoint(
    source: Source, form: Literal["pentad", "hf", "transformers"] = "pentad", *, dtype: Dtype = "float32"
) -> dict[str, torch.Tensor] | Any:
    """The weights of a checkpoint, saved on any mesh, on the CPU.

    `source` is a checkpoint's folder, or a run or an import, whose newest checkpoint is taken. `form` is 'pentad' for
    tensors by pentad's names, 'hf' for tensors by the names of Hugging Face files, without a tied head, or
    'transformers' for a model of that library with its config.

    Raises PentadError if there is no intact checkpoint, for a custom model, and for a family that the form cannot
    express.
    """
    if dtype not in DTYPES:
        raise PentadError(f"dtype is {dtype!r}: expected one of {', '.join(DTYPES)}")
    import torch

    from pentad.orchestrator.api.exports import export_request
    from pentad.workers.hf.exporter import FILE_BYTES, make_files, model_tensors
    from pentad.workers.hf.names import CONFIG, tensor_table
    from pentad.workers.hf.stored_tensors import StoredTensors

    checkpoint, kind = checkpoint_of(source), getattr(torch, dtype)
    request = export_request(checkpoint, dtype, FILE_BYTES)
    if form == "pentad":
        entries = tensor_table(request.family, request.model).entries
        stored = StoredTensors(checkpoint, "model", request.model)
        full = ((entry.name, stored.read(entry.name, entry.shape)) for entry in entries)
        return {name: tensor.to(kind) for name, tensor in full}
    files = make_files(request, dtype)
    _, tensors = model_tensors(checkpoint, request, files)
    state = {name: tensors.read(name) for name in tensors.dtypes}
    return state if form == "hf" else _transformers_model(json.loads(files[CONFIG]), state, kind)


def _transformers_model(config: dict[str, Any], state: dict[str, torch.Tensor], dtype: torch.dtype) -> Any:
    try:
        import transformers
    except ImportError:
        raise PentadError("form is transformers, which is not installed: expected `pip install transformers`") from None
    kind = getattr(transformers, config["architectures"][0])
    return kind.from_pretrained(None, config=kind.config_class.from_dict(config), state_dict=state, dtype=dtype)
