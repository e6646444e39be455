"""Reads tensors that torch.distributed.checkpoint wrote to `.metadata` and `.distcp` files, without unpickling.

`.metadata` is a pickle: tensors by name with size, dtype and chunks, and for each chunk a file, an offset and a length.
There lies a zip archive as torch.save writes it. A parser of our own reads the pickles of both (restricted_pickle). In
the safetensors form (`HuggingFaceStorageWriter` with `save_distributed`) the header of each file says which parts of
tensors it holds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from pentad.schedules.ir.errors import PentadError
from pentad.workers.dcp.restricted_pickle import Record, parse_pickle
from pentad.workers.dcp.torch_save import read_saved_tensor

METADATA, SHARDING = ".metadata", "DCP_SHARDING_INFO"
MAX_METADATA = 1 << 30  # bytes; a larger file cannot be metadata and is never read
_MODULE = "torch.distributed.checkpoint.metadata"
_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
}
_SAFETENSORS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_RECORDS = (
    *(f"{_MODULE} {name}" for name in ("Metadata", "TensorStorageMetadata", "ChunkStorageMetadata", "StorageMeta")),
    *(f"{_MODULE} {name}" for name in ("BytesStorageMetadata", "TensorProperties", "MetadataIndex")),
    "torch.distributed.checkpoint.filesystem _StorageInfo",
)


class Chunk(NamedTuple):
    """A part of a tensor: its offsets in the tensor, its sizes, and a function that reads it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    read: Callable[[], torch.Tensor]


class DcpTensor(NamedTuple):
    """A tensor of a checkpoint; `dtype` is None for unsupported dtypes."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    chunks: tuple[Chunk, ...]


def is_dcp(folder: Path) -> bool:
    """Whether a folder is a checkpoint of torch.distributed.checkpoint, in either form."""
    return (folder / METADATA).is_file() or any(_has_shards(path) for path in sorted(folder.glob("*.safetensors"))[:1])


def open_dcp(folder: Path) -> dict[str, DcpTensor]:
    """The tensors of a checkpoint by name; values other than tensors are left out.

    Raises PentadError, naming the file, for one that is damaged or holds anything but a checkpoint's metadata.
    """
    if (folder / METADATA).is_file():
        return _read_metadata(folder)
    return _read_headers(folder)


def _read_metadata(folder: Path) -> dict[str, DcpTensor]:
    path = folder / METADATA
    try:
        if (size := path.stat().st_size) > MAX_METADATA:
            raise PentadError(f"{path} has {size} bytes: expected at most {MAX_METADATA}")
        data = path.read_bytes()
    except OSError as error:
        raise PentadError(f"{path} cannot be read ({error.strerror}): expected a readable file") from None
    try:
        metadata = parse_pickle(data, _known())
        return dict(_tensors(folder, metadata))
    except PentadError as error:
        raise PentadError(f"{path}: {error}") from None
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        fault = f"is not the metadata of a checkpoint ({str(error)[:100]})"
        raise PentadError(f"{path} {fault}: expected what torch.distributed.checkpoint wrote") from None


def _known() -> dict[str, Any]:
    """Replacements for the classes and constants named in `.metadata`."""
    known: dict[str, Any] = {name: _record(name) for name in _RECORDS}
    known |= {f"torch {name}": name for name in _numbers()}
    known["torch Size"] = lambda sizes=(): tuple(sizes)
    known["torch.serialization _get_layout"] = known[f"{_MODULE} _MEM_FORMAT_ENCODING"] = lambda value: value
    known |= dict.fromkeys(("pathlib PosixPath", "pathlib._local PosixPath"), lambda *parts: parts)
    return known


def _record(name: str) -> Callable[[], Record]:
    return lambda: Record(name.rpartition(" ")[2])


def _numbers() -> list[str]:
    """The names of torch's dtypes."""
    return [name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)]


def _tensors(folder: Path, metadata: Any) -> Iterator[tuple[str, DcpTensor]]:
    stored = _stored(metadata.get("storage_data"))
    for name, entry in metadata.get("state_dict_metadata").items():
        if entry.name != "TensorStorageMetadata":
            continue
        shape, dtype = _sizes(entry.get("size")), _DTYPES.get(entry.get("properties").state[0])
        chunks = []
        for each in entry.get("chunks"):
            offsets, sizes = _sizes(each.get("offsets")), _sizes(each.get("sizes"))
            chunks.append(Chunk(offsets, sizes, _reader(folder, stored[name, offsets], sizes, dtype, name)))
        _check_chunks(name, shape, chunks)
        yield name, DcpTensor(shape, dtype, tuple(chunks))


def _stored(storage_data: Any) -> dict[tuple[str, tuple[int, ...]], Record]:
    """Where each chunk is stored, by the tensor's name and the chunk's offsets."""
    found = {}
    for key, info in storage_data.items():
        index = dict(key[1:])
        if index.get("offset") is not None:
            found[index["fqn"], _sizes(index["offset"])] = info
    return found


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple) or not all(type(each) is int and each >= 0 for each in value):
        raise ValueError("a size that is not a tuple of numbers")
    return value


def _check_chunks(name: str, shape: tuple[int, ...], chunks: list[Chunk]) -> None:
    for chunk in chunks:
        if not len(shape) == len(chunk.offsets) == len(chunk.sizes):
            raise ValueError(f"a chunk of {name} has another number of dimensions")
        if any(at + size > end for at, size, end in zip(chunk.offsets, chunk.sizes, shape, strict=True)):
            raise ValueError(f"a chunk of {name} ends outside of it")
    if (found := sum(math.prod(chunk.sizes) for chunk in chunks)) != math.prod(shape):
        raise ValueError(f"the chunks of {name} have {found} elements instead of {math.prod(shape)}")


def _reader(
    folder: Path, info: Record, sizes: tuple[int, ...], dtype: torch.dtype | None, name: str
) -> Callable[[], torch.Tensor]:
    file, start, length = (info.get(key) for key in ("relative_path", "offset", "length"))
    if not isinstance(file, str) or Path(file).name != file:
        raise ValueError(f"tensor {name} is in {str(file)[:100]!r}, which is no plain file name")
    if type(start) is not int or type(length) is not int or min(start, length) < 0:
        raise ValueError(f"tensor {name} has no valid place in {file}")
    if info.get("transform_descriptors"):
        raise ValueError(f"tensor {name} is compressed")

    def read() -> torch.Tensor:
        try:
            return read_saved_tensor(folder / file, start, length, sizes, dtype)
        except PentadError as error:
            raise PentadError(f"tensor {name} in {folder / file}: {error}") from None

    return read


def _has_shards(path: Path) -> bool:
    try:
        with safe_open(path, framework="pt") as file:
            return SHARDING in (file.metadata() or {})
    except (OSError, SafetensorError):
        return False


def _read_headers(folder: Path) -> dict[str, DcpTensor]:
    chunks: dict[str, list[tuple[str, Chunk]]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                places = json.loads((file.metadata() or {})[SHARDING])
                for name in file.keys():  # noqa: SIM118 (not a mapping)
                    part, offsets = file.get_slice(name), tuple(places[name]["saved_offsets"])
                    chunk = Chunk(_sizes(offsets), tuple(part.get_shape()), _slice_reader(path, name))
                    chunks.setdefault(name, []).append((part.get_dtype(), chunk))
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            expected = f"a safetensors file with {SHARDING}, as the others in its folder"
            raise PentadError(f"{path} cannot be read ({str(error)[:100]}): expected {expected}") from None
    return {name: _joined(folder, name, parts) for name, parts in chunks.items()}


def _joined(folder: Path, name: str, parts: list[tuple[str, Chunk]]) -> DcpTensor:
    """The tensor made up of these parts. Its shape follows from where the last chunk ends: the headers do not give it.
    Raises PentadError if parts are missing."""
    shape = tuple(max(ends) for ends in zip(*(_ends(chunk) for _, chunk in parts), strict=True))
    chunks = [chunk for _, chunk in parts]
    try:
        _check_chunks(name, shape, chunks)
    except ValueError as error:
        raise PentadError(f"{folder} lacks parts ({error}): expected the files of all ranks") from None
    dtype = _DTYPES.get(_SAFETENSORS.get(parts[0][0], ""))
    return DcpTensor(shape, dtype, tuple(chunks))


def _ends(chunk: Chunk) -> tuple[int, ...]:
    return tuple(at + size for at, size in zip(chunk.offsets, chunk.sizes, strict=True))


def _slice_reader(path: Path, name: str) -> Callable[[], torch.Tensor]:
    def read() -> torch.Tensor:
        with safe_open(path, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
            return tensor

    return read
