"""The weights and Adam's moments in a checkpoint of torch.distributed.checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from pentad.schedules.ir.errors import PentadError
from pentad.workers.dcp import titan_names
from pentad.workers.dcp.reader import Chunk, DcpTensor, open_dcp
from pentad.workers.params.sharded_state import TensorAssembly

HF_EMBEDDING = "model.embed_tokens.weight"
MOMENTS = {"m": "exp_avg", "v": "exp_avg_sq"}  # pentad's name -> that of torch's Adam
_READABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_ROOTS = ("model.", "lm_head.", "layers.", "tok_embeddings.", "norm.", "output.")  # prefixes of a model's tensors


class DcpSource:
    """Tensors by their names in the model's own state_dict, read as float32, or float64 if stored so."""

    def __init__(self, folder: Path, tensors: Mapping[str, DcpTensor]) -> None:
        self.folder, self.tensors, self.names = folder, tensors, frozenset(tensors)

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises PentadError unless there is a tensor of floating-point numbers of this name and shape."""
        if name not in self.tensors:
            raise PentadError(f"tensor {name} is not in {self.folder}: expected one of shape {list(shape)}")
        found = self.tensors[name]
        if found.shape != shape:
            raise PentadError(f"tensor {name} in {self.folder} has shape {list(found.shape)}: expected {list(shape)}")
        if found.dtype not in _READABLE:
            expected = " or ".join(str(each).removeprefix("torch.") for each in _READABLE)
            raise PentadError(f"tensor {name} in {self.folder} has dtype {found.dtype}: expected {expected}")

    def dtype(self, name: str) -> torch.dtype:
        """The dtype that `read` returns."""
        return torch.promote_types(torch.float32, self.tensors[name].dtype or torch.float32)

    def read(self, name: str) -> torch.Tensor:
        """A full tensor. Raises PentadError if parts are damaged or missing."""
        found = self.tensors[name]
        assembly = TensorAssembly(found.shape)
        for chunk in found.chunks:
            assembly.add(chunk.read(), _range_name(chunk))
        if assembly.missing:
            raise PentadError(f"tensor {name} in {self.folder} lacks {assembly.missing} of its elements")
        return assembly.tensor.to(self.dtype(name))


class DcpModel:
    """A model in a checkpoint: its `weights`, its `moments` by pentad's kinds (empty without optimizer state), and the
    number of steps that Adam has done. `is_titan`: names are torchtitan's, else transformers'."""

    def __init__(self, folder: Path) -> None:
        tensors = open_dcp(folder)
        embeddings = [name for name in tensors if name.endswith((HF_EMBEDDING, titan_names.EMBEDDING))]
        if not embeddings:
            expected = f"one that ends in {HF_EMBEDDING} or {titan_names.EMBEDDING}"
            raise PentadError(f"{folder} has no tensor of an embedding: expected {expected}")
        first = min(embeddings, key=len)
        self.is_titan = first.endswith(titan_names.EMBEDDING)
        self.embedding = titan_names.EMBEDDING if self.is_titan else HF_EMBEDDING
        prefix = first.removesuffix(self.embedding)
        weights = {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}
        model = {name: each for name, each in weights.items() if name.startswith(_ROOTS)}
        self.weights = DcpSource(folder, model)
        state = next((name for name in tensors if name.endswith(f"state.{self.embedding}.{MOMENTS['m']}")), "")
        before = state.removesuffix(f"{self.embedding}.{MOMENTS['m']}")
        found = {name.removeprefix(before): each for name, each in tensors.items() if state and name.startswith(before)}
        self.moments = {kind: DcpSource(folder, _ending(found, f".{name}")) for kind, name in MOMENTS.items() if state}
        self._steps = DcpSource(folder, _ending(found, ".step"))

    @property
    def step(self) -> int:
        """The number of steps that Adam has done. Raises PentadError if the optimizer state lacks it."""
        if self.embedding not in self._steps.names:
            raise PentadError(f"{self._steps.folder} has no step of the optimizer: expected it beside its moments")
        tensors = self._steps.tensors[self.embedding]
        return int(tensors.chunks[0].read().item())


def _ending(tensors: Mapping[str, DcpTensor], suffix: str) -> dict[str, DcpTensor]:
    return {name.removesuffix(suffix): each for name, each in tensors.items() if name.endswith(suffix)}


def _range_name(chunk: Chunk) -> str:
    """The chunk's range in the notation of sharded_state."""
    ends = zip(chunk.offsets, chunk.sizes, strict=True)
    return "@" + ",".join(f"{at}-{at + size}" for at, size in ends) if chunk.sizes else ""
