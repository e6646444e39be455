"""The full tensors of a checkpoint by name, with LoRA adapters merged into their weights."""

from __future__ import annotations

import torch

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.lora import adapters_of, lora_of
from pentad.schedules.spec.model import ModelSpec
from pentad.schedules.spec.tensors import Tensor, tensors
from pentad.workers.checkpoint.checkpoint import Checkpoint
from pentad.workers.checkpoint.lora_base import open_base
from pentad.workers.params.sharded_state import read_full, stored_dtype


class StoredTensors:
    """The tensors of one kind: 'model', 'optimizer.m' ...

    Raises PentadError if the checkpoint has adapters and their base weights cannot be read, or if the optimizer's state
    is requested: merged weights have none.
    """

    def __init__(self, source: Checkpoint, kind: str, model: ModelSpec) -> None:
        self.source, self.kind, self.lora = source, kind, lora_of(source.meta)
        self.base, self.targets = source, dict[str, Tensor]()
        if self.lora is None:
            return
        if kind != "model":
            raise PentadError(
                f"checkpoint {source.folder} has adapters: expected no --optimizer, as merged weights have no state"
            )
        assert self.lora.base is not None, "adapters of initial values are never saved by the driver"
        self.base = open_base(self.lora.base)
        self.targets = {tensor.name: tensor for tensor in tensors(model)}

    def dtype(self, name: str) -> torch.dtype | None:
        """The tensor's dtype in the checkpoint; None if there is no such tensor."""
        return stored_dtype(self.base, f"{self.kind}.{name}")

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """W, or with adapters W + alpha / rank B A, in float32 unless W is float64. Raises PentadError if the tensor is
        missing or has another shape."""
        full = read_full(self.base, f"{self.kind}.{name}", shape)
        if self.lora is None or name not in self.targets:
            return full
        adapters = adapters_of(self.lora, self.targets[name])
        if not adapters:
            return full
        wide = full.to(torch.promote_types(full.dtype, torch.float32))
        for first, a, b in adapters:
            values_a, values_b = (
                read_full(self.source, f"model.{each.name}", each.shape).to(wide.dtype) for each in (a, b)
            )
            wide[..., first : first + b.shape[-2], :] += self.lora.scale * (values_b @ values_a)
        return wide
