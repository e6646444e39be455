"""A checkpoint's tensors as stored in files of other formats: under the names there, split and reordered."""

from __future__ import annotations

import re

import torch

from pentad.kernels.optimizer.param_remainders import nearest
from pentad.workers.hf.layout import FP8_BLOCK, SCALE_SUFFIX, quantized, scales_shape, to_file
from pentad.workers.hf.names import FileTensor, TensorEntry, TensorTable
from pentad.workers.hf.stored_tensors import StoredTensors

BIAS = "experts.bias"
PROJECTIONS = re.compile(r".*\.layers\.\d+\.(.*(?<!eh)_proj(_with_mqa)?|.*\.experts\.\d+\.w[123])\.weight")


class FileTensors:
    """The file tensors of one kind by name, with their `dtypes` and `shapes`.

    `dtype` None: as in the checkpoint. Keeps the checkpoint tensor read last in memory, because the file tensors in it
    are read one after the other.
    """

    def __init__(self, source: StoredTensors, table: TensorTable, dtype: torch.dtype | None) -> None:
        self.source, kind = source, source.kind
        self.parts: dict[
            str, tuple[TensorEntry, FileTensor, int]
        ] = {}  # entry, file tensor, and the index of its first element in the entry
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        for entry in table.entries:
            stored = source.dtype(entry.name)
            if stored is None and kind != "model":  # the optimizer may not have this kind of state for all tensors
                continue
            offset = 0
            for part in entry.parts:
                self.parts[part.name] = entry, part, offset
                self.shapes[part.name] = part.shape
                # Routing biases are never rounded, because their updates are small.
                keeps = entry.name.endswith(BIAS) and dtype in (torch.bfloat16, torch.float16)
                self.dtypes[part.name] = torch.float32 if keeps else dtype or stored or torch.float32
                offset += torch.Size(part.shape).numel()
        if kind == "model":
            for copy, original in table.copies.items():
                self.parts[copy], self.shapes[copy] = self.parts[original], self.shapes[original]
                self.dtypes[copy] = self.dtypes[original]
        self._entry: TensorEntry | None = None
        self._tensor = torch.empty(0)

    def read(self, name: str) -> torch.Tensor:
        """[shapes[name]] in dtypes[name]. Raises PentadError if the checkpoint holds another model."""
        entry, part, offset = self.parts[name]
        if entry is not self._entry:
            self._tensor = torch.empty(0)  # frees the previous one before reading the next
            self._tensor, self._entry = self.source.read(entry.name, entry.shape), entry
        end = offset + torch.Size(part.shape).numel()
        return nearest(to_file(self._tensor.view(-1)[offset:end], part).contiguous(), self.dtypes[name])


class QuantizedTensors:
    """The same tensors, but with the layers' projections in FP8, in blocks of 128 x 128 with scales, as in the files of
    DeepSeek-V3."""

    def __init__(self, tensors: FileTensors) -> None:
        self.tensors, self.dtypes, self.shapes = tensors, dict(tensors.dtypes), dict(tensors.shapes)
        for name in filter(PROJECTIONS.fullmatch, tensors.dtypes):
            if len(shape := tensors.shapes[name]) == 2:
                self.dtypes[name], self.dtypes[name + SCALE_SUFFIX] = torch.float8_e4m3fn, torch.float32
                self.shapes[name + SCALE_SUFFIX] = scales_shape(shape, FP8_BLOCK)

    def read(self, name: str) -> torch.Tensor:
        """[shapes[name]] in dtypes[name]."""
        if self.dtypes[name] == torch.float8_e4m3fn:
            return quantized(self.tensors.read(name))[0]
        if name not in self.tensors.dtypes:
            return quantized(self.tensors.read(name.removesuffix(SCALE_SUFFIX)))[1]
        return self.tensors.read(name)
