"""A folder of Hugging Face files, opened: its config, and its tensors one at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from pentad.schedules.ir.errors import PentadError
from pentad.workers.hf import fp8
from pentad.workers.hf.fp8 import Blocks

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_READABLE = ("F32", "F16", "BF16")


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder; PentadError if there is none."""
    if not folder.is_dir():
        raise PentadError(f"DIR is '{folder}', which is no folder: expected one with {CONFIG} and safetensors files")
    return _json(folder / CONFIG)


class Files:
    """The tensors of a folder by name, in one file or in those of an index; eight-bit ones in `blocks`. PentadError
    names the file that is missing or cannot be read."""

    def __init__(self, folder: Path, blocks: Blocks | None = None) -> None:
        self.folder, self.blocks = folder, blocks
        self._opened: dict[str, Any] = {}
        if (folder / INDEX).exists():
            places = _json(folder / INDEX).get("weight_map")
            if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
                raise PentadError(f"{folder / INDEX} has no weight_map of names to files: expected one")
            self.where: dict[str, str] = places
            for file in sorted(set(places.values())):
                if Path(file).name != file:
                    raise PentadError(f"{folder / INDEX} names the file {file!r}: expected a plain name in its folder")
        else:
            self.where = dict.fromkeys(self._open(SINGLE).keys(), SINGLE)

    def spec(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(dtype as safetensors spells it, shape) of a tensor."""
        file = self.where[name]
        try:
            found = self._open(file).get_slice(name)
        except SafetensorError:
            raise PentadError(f"{self.folder / file} has no tensor {name}: expected it there by {INDEX}") from None
        return found.get_dtype(), tuple(found.get_shape())

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """PentadError unless there is a tensor of this name and shape that float32 can hold."""
        if name not in self.where:
            raise PentadError(f"tensor {name} is not in {self.folder}: expected one of shape {list(shape)}")
        dtype, found = self.spec(name)
        if found != shape:
            raise PentadError(f"tensor {name} in {self.folder} has shape {list(found)}: expected {list(shape)}")
        if dtype == fp8.DTYPE and self.blocks is not None and len(shape) == 2:
            self.check(name + fp8.SUFFIX, fp8.factors_shape(shape, self.blocks))
        elif dtype not in _READABLE:
            raise PentadError(
                f"tensor {name} in {self.folder} has dtype {dtype}: expected one of {', '.join(_READABLE)}"
            )

    def read(self, name: str) -> torch.Tensor:
        """A tensor in float32."""
        stored = self._read(name)
        if self.blocks is not None and stored.dtype == torch.float8_e4m3fn:
            return fp8.scaled(stored, self._read(name + fp8.SUFFIX), self.blocks)
        return stored.to(torch.float32)

    def _read(self, name: str) -> torch.Tensor:
        """A tensor as it is, in the file's memory perhaps."""
        file = self.where[name]
        try:
            return self._open(file).get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise PentadError(f"{self.folder / file} cannot be read ({error}): expected a whole file") from None

    def _open(self, file: str) -> Any:
        if file not in self._opened:
            path = self.folder / file
            if not path.is_file():
                raise PentadError(f"{path} is missing: expected the model's tensors in safetensors files")
            try:
                self._opened[file] = safe_open(path, framework="pt").__enter__()
            except (OSError, SafetensorError) as error:
                raise PentadError(f"{path} cannot be read ({error}): expected a safetensors file") from None
        return self._opened[file]

    def close(self) -> None:
        for opened in self._opened.values():
            opened.__exit__(None, None, None)
        self._opened.clear()

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise PentadError(f"{path} cannot be read ({error.strerror}): expected a model's {path.name}") from None
    except (ValueError, RecursionError):
        raise PentadError(f"{path} is no JSON: expected a model's {path.name}") from None
    if not isinstance(found, dict):
        raise PentadError(f"{path} holds no JSON object: expected a model's {path.name}")
    return found
