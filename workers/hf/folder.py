"""Reads a folder of Hugging Face files: config.json, and tensors one at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from pentad.schedules.ir.errors import PentadError
from pentad.workers.hf.layout import (
    EXPONENT_SUFFIX,
    FP8_DTYPE,
    MXFP4,
    PACKED_SUFFIX,
    SCALE_SUFFIX,
    Quantization,
    dequantized,
    packed_shapes,
    scales_shape,
    unpacked,
)
from pentad.workers.hf.names import CONFIG, INDEX, OPTIMIZER, SINGLE, STATE

_READABLE = ("F32", "F16", "BF16")
_BYTES = ("U8",)


def read_config(folder: Path) -> dict[str, Any]:
    """The contents of config.json. Raises PentadError if there is none."""
    if not folder.is_dir():
        raise PentadError(f"DIR is '{folder}', which is not a folder: expected one with {CONFIG} and safetensors files")
    return _read_json(folder / CONFIG)


def read_optimizer(folder: Path, stack: ExitStack) -> tuple[int, int, dict[str, TensorFiles]]:
    """(step, moment_offset, tensors by kind) of the optimizer state written by an export; the files stay open as long
    as `stack`. Raises PentadError if there is none."""
    if not (folder / OPTIMIZER / STATE).is_file():
        raise PentadError(f"DIR is '{folder}', which has no {OPTIMIZER}/{STATE}: expected an export with --optimizer")
    match _read_json(folder / OPTIMIZER / STATE):
        case {"step": int(step), "kinds": [*kinds], **rest} if all(re.fullmatch(r"\w+", str(k)) for k in kinds):
            offset = rest.get("moment_offset", 0)
            if step >= 0 and isinstance(offset, int) and step + offset >= 0:
                folders = {str(kind): folder / OPTIMIZER / str(kind) for kind in kinds}
                return step, offset, {kind: stack.enter_context(TensorFiles(path)) for kind, path in folders.items()}
    raise PentadError(f"{folder / OPTIMIZER / STATE} has no valid step and kinds: expected what an export wrote")


class TensorFiles(ExitStack):
    """The tensors of a folder by name, in one file or in several with an index; use it in a `with` block.

    `files` maps each stored tensor to its file. Raises PentadError naming a file that is missing or unreadable.
    """

    def __init__(self, folder: Path, quantization: Quantization | None = None) -> None:
        super().__init__()
        self.folder, self.has_mxfp4 = folder, quantization == MXFP4
        self.block = quantization if isinstance(quantization, tuple) else None
        self._opened: dict[str, Any] = {}
        if not (folder / INDEX).exists():
            self.files = dict.fromkeys(self._open(SINGLE).keys(), SINGLE)
            return
        files = _read_json(folder / INDEX).get("weight_map")
        if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
            raise PentadError(f"{folder / INDEX} has no valid weight_map: expected a mapping of tensors to files")
        for file in sorted(set(files.values())):
            if Path(file).name != file:
                raise PentadError(f"{folder / INDEX} names the file {file!r}: expected a plain name in its folder")
        self.files = files

    @property
    def names(self) -> Collection[str]:
        """The names of the weights, without the scales and exponents of quantized ones."""
        if self.has_mxfp4:
            packed = {name.removesuffix(PACKED_SUFFIX) for name in self.files if name.endswith(PACKED_SUFFIX)}
            parts = {name + suffix for name in packed for suffix in (PACKED_SUFFIX, EXPONENT_SUFFIX)}
            return [*(name for name in self.files if name not in parts), *packed]
        scale = SCALE_SUFFIX if self.block is not None else None
        return [name for name in self.files if scale is None or not name.endswith(scale)]

    def dtype(self, name: str) -> torch.dtype:
        """The dtype that `read` returns."""
        return torch.float32

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises PentadError unless there is a tensor of this name and shape in a dtype that float32 can represent."""
        if self._is_packed(name) and len(shape) == 3:
            for suffix, part in zip((PACKED_SUFFIX, EXPONENT_SUFFIX), packed_shapes(shape), strict=True):
                self._check(name + suffix, part, _BYTES)
        elif self._check(name, shape, _READABLE if self.block is None else (*_READABLE, FP8_DTYPE)) == FP8_DTYPE:
            assert self.block is not None
            self._check(name + SCALE_SUFFIX, scales_shape(shape, self.block), _READABLE)

    def _check(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> str:
        """The stored dtype of a tensor. Raises PentadError unless it is one of `dtypes` and the shape is right."""
        if name not in self.files:
            raise PentadError(f"tensor {name} is not in {self.folder}: expected one of shape {list(shape)}")
        file = self.files[name]
        try:
            stored = self._open(file).get_slice(name)
        except SafetensorError:
            raise PentadError(f"{self.folder / file} has no tensor {name}: expected it, according to {INDEX}") from None
        found, dtype = tuple(stored.get_shape()), str(stored.get_dtype())
        if found != shape:
            raise PentadError(f"tensor {name} in {self.folder} has shape {list(found)}: expected {list(shape)}")
        if dtype not in dtypes or (dtype == FP8_DTYPE and len(shape) != 2):
            raise PentadError(f"tensor {name} in {self.folder} has dtype {dtype}: expected {' or '.join(dtypes)}")
        return dtype

    def read(self, name: str) -> torch.Tensor:
        """A tensor in float32, in the shape given to `check`."""
        if self._is_packed(name):
            return unpacked(self._read(name + PACKED_SUFFIX), self._read(name + EXPONENT_SUFFIX))
        stored = self._read(name)
        if self.block is not None and stored.dtype == torch.float8_e4m3fn:
            return dequantized(stored, self._read(name + SCALE_SUFFIX), self.block)
        return stored.to(torch.float32)

    def _is_packed(self, name: str) -> bool:
        return self.has_mxfp4 and name + PACKED_SUFFIX in self.files

    def _read(self, name: str) -> torch.Tensor:
        """A tensor as stored, possibly a view of the mapped file."""
        file = self.files[name]
        try:
            return self._open(file).get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise PentadError(f"{self.folder / file} cannot be read ({error}): expected a complete file") from None

    def _open(self, file: str) -> Any:
        if file not in self._opened:
            path = self.folder / file
            if not _is_file(path):
                raise PentadError(f"{path} is missing: expected the model's tensors in safetensors files")
            try:
                self._opened[file] = self.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise PentadError(f"{path} cannot be read ({error}): expected a safetensors file") from None
        return self._opened[file]


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # such as for a name that is too long
        return False


def _read_json(path: Path) -> dict[str, Any]:
    if path.exists() and not (path.is_file() or path.is_dir()):  # reading might never end
        raise PentadError(f"{path} is a pipe or device: expected a file")
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise PentadError(f"{path} cannot be read ({error.strerror}): expected a model's {path.name}") from None
    except (ValueError, RecursionError):
        raise PentadError(f"{path} is not JSON: expected a model's {path.name}") from None
    if not isinstance(found, dict):
        raise PentadError(f"{path} is JSON but not an object: expected a model's {path.name}")
    return found
