"""manifest.json of a checkpoint: its shards, the tensors in each, and a checksum over everything."""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, TypedDict

from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint.checksums import num_digits

VERSION = 4  # 3: no CRC-32s; 2: no tensor was cut; 1: other keys for model and mesh
READABLE = (2, 3, 4)
MAX_BYTES = 1 << 27  # about a million tensors; a larger file is foreign and is never read

_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}\.safetensors")
_SHA256, _CRC32 = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]*")
_PIECE = re.compile(r"(.+)#((?:[0-9]{1,18}(?:x[0-9]{1,18}){0,7})?):([0-9]{1,18})-([0-9]{1,18})")
_FIELDS = {"bytes", "checksum", "meta", "shards", "step", "version"}


class UnknownVersion(PentadError):
    """An intact checkpoint written by another version of pentad. Unlike a damaged one, it is never skipped."""


class Spec(TypedDict):
    """Dtype (in safetensors' spelling: F32, BF16, ...) and shape of a tensor."""

    dtype: str
    shape: list[int]


@dataclass(frozen=True)
class Shard:
    """One file of a checkpoint as it was written: name in the folder, size, sha256, its tensors by name, and `crc32` as
    in `Written`, '' if written by an earlier version of pentad."""

    file: str
    bytes: int
    sha256: str
    tensors: dict[str, Spec]
    crc32: str = ""

    def plain(self) -> dict[str, Any]:
        """This shard as dicts, lists, strings and integers."""
        return asdict(self)

    @staticmethod
    def from_plain(plain: Any) -> "Shard":
        """The inverse of `plain`. Raises PentadError for anything else, and for a file outside the folder."""
        fields = {"file", "bytes", "sha256", "tensors"}
        _check(isinstance(plain, dict) and plain.keys() - {"crc32"} == fields, "a shard", plain)
        _check(is_file_name(plain["file"]), "a shard's file: a plain name that ends in .safetensors", plain["file"])
        _check(_is_count(plain["bytes"]), "a shard's bytes", plain["bytes"])
        sha256 = plain["sha256"]
        _check(isinstance(sha256, str) and _SHA256.fullmatch(sha256) is not None, "a shard's sha256", sha256)
        crc32 = plain.get("crc32", "")
        is_of_all = isinstance(crc32, str) and len(crc32) in (0, num_digits(plain["bytes"]))
        _check(is_of_all and _CRC32.fullmatch(crc32) is not None, "a shard's CRC-32s", crc32)
        _check(isinstance(plain["tensors"], dict), "a shard's tensors", plain["tensors"])
        for name, spec in plain["tensors"].items():
            _check(isinstance(name, str) and _is_spec(spec), f"dtype and shape of tensor {name!r}", spec)
        return Shard(**plain)


class StoredPart(NamedTuple):
    """Elements `start` to `end`, in C order, of a tensor of this shape, which are the tensor `stored` of a file."""

    file: str
    stored: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's step (number of steps done), plain JSON from the driver, and the shards."""

    step: int
    meta: dict[str, Any]
    shards: tuple[Shard, ...]


def is_file_name(name: object) -> bool:
    """Whether `name` can name a shard: letters, digits, `.`, `_`, `-`, no folder, ending in .safetensors."""
    return isinstance(name, str) and _FILE.fullmatch(name) is not None


def encode(manifest: Manifest) -> bytes:
    """The bytes of manifest.json. Raises PentadError if `meta` is not plain JSON or a tensor or file occurs twice."""
    pieces_by_tensor(manifest.shards)
    _check(_is_count(manifest.step), "step", manifest.step)
    try:
        is_plain = json.loads(_canonical(manifest.meta)) == manifest.meta
    except (TypeError, ValueError, RecursionError):
        is_plain = False
    _check(is_plain, "meta: JSON with string keys, lists and finite numbers only", manifest.meta)
    body = {
        "bytes": sum(shard.bytes for shard in manifest.shards),
        "meta": manifest.meta,
        "shards": [shard.plain() for shard in manifest.shards],
        "step": manifest.step,
        "version": VERSION,
    }
    data = _canonical(body | {"checksum": _checksum(body)})
    _check(len(data) <= MAX_BYTES, f"at most {MAX_BYTES} bytes", len(data))
    return data


def decode(data: bytes) -> Manifest:
    """The inverse of `encode`.

    Raises UnknownVersion for an intact manifest of another version, and PentadError unless `data` is, byte for byte,
    what `encode` writes.
    """
    try:
        body = json.loads(data)
        again = _canonical(body)
    except (ValueError, RecursionError):
        raise PentadError("manifest.json is damaged: expected JSON") from None
    if not isinstance(body, dict) or "checksum" not in body:
        raise PentadError("manifest.json is not pentad's: expected an object with a checksum")
    rest = {key: value for key, value in body.items() if key != "checksum"}
    if again != data or body["checksum"] != _checksum(rest):  # the first also catches changed whitespace or escapes
        raise PentadError("manifest.json is damaged: expected content that matches its checksum")
    if body.get("version") not in READABLE:
        version = str(body.get("version"))[:20]
        remedy = "it was written by another version of pentad: start a new run, or go back to that version"
        raise UnknownVersion(f"manifest.json has format {version}: expected {VERSION} ({remedy})")
    _check(body.keys() == _FIELDS, f"the fields {sorted(_FIELDS)}", sorted(body))
    _check(_is_count(body["step"]), "step", body["step"])
    _check(isinstance(body["meta"], dict), "meta", body["meta"])
    _check(isinstance(body["shards"], list), "shards", body["shards"])
    shards = tuple(Shard.from_plain(plain) for plain in body["shards"])
    _check(body["bytes"] == sum(shard.bytes for shard in shards), "bytes: the sum over its shards", body["bytes"])
    pieces_by_tensor(shards)
    return Manifest(body["step"], body["meta"], shards)


def piece_name(name: str, shape: Sequence[int], start: int, end: int) -> str:
    """The name in a file of elements `start` to `end` of a tensor: `norm#64:0-32`; the tensor's own name for all of
    them."""
    sizes = "x".join(map(str, shape))
    return name if (start, end) == (0, math.prod(shape)) else f"{name}#{sizes}:{start}-{end}"


def pieces_by_tensor(shards: Sequence[Shard]) -> dict[str, tuple[StoredPart, ...]]:
    """The pieces of each tensor, in the order of its elements.

    Raises PentadError if a tensor or file occurs twice, an element is missing, or there is no shard.
    """
    _check(len(shards) > 0, "at least one shard", "none")
    for file in _repeated(shard.file for shard in shards):
        raise PentadError(f"manifest.json lists the file {file} twice: expected once")
    for stored in _repeated(stored for shard in shards for stored in shard.tensors):
        files = " and ".join(shard.file for shard in shards if stored in shard.tensors)
        raise PentadError(f"manifest.json lists the tensor {stored} in the files {files}: expected one file")
    found: dict[str, list[StoredPart]] = {}
    for shard in shards:
        for stored, spec in shard.tensors.items():
            name, piece = _piece(shard.file, stored, spec)
            found.setdefault(name, []).append(piece)
    return {name: _joined(name, pieces) for name, pieces in found.items()}


def _piece(file: str, stored: str, spec: Spec) -> tuple[str, StoredPart]:
    """The name of the tensor that a stored tensor is a piece of, and the piece."""
    _check(_is_spec(spec), f"dtype and shape of tensor {stored!r}", spec)
    cut = _PIECE.fullmatch(stored)
    if cut is None:
        return stored, StoredPart(file, stored, tuple(spec["shape"]), 0, math.prod(spec["shape"]))
    shape, start, end = tuple(map(int, filter(None, cut[2].split("x")))), int(cut[3]), int(cut[4])
    _check(spec["shape"] == [end - start], f"the shape [{end - start}] of tensor {stored}", spec["shape"])
    return cut[1], StoredPart(file, stored, shape, start, end)


def _joined(name: str, pieces: list[StoredPart]) -> tuple[StoredPart, ...]:
    pieces.sort(key=lambda piece: piece.start)
    at, shape = 0, pieces[0].shape
    for piece in pieces:
        _check((piece.shape, piece.start) == (shape, at), f"element {at} of tensor {name} there", piece.stored)
        at = piece.end
    _check(at == math.prod(shape), f"all {math.prod(shape)} elements of tensor {name}", at)
    return tuple(pieces)


def _repeated(names: Iterable[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def _checksum(body: dict[str, Any]) -> str:
    return hashlib.sha256(_canonical(body)).hexdigest()


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_spec(spec: object) -> bool:
    return (
        isinstance(spec, dict)
        and spec.keys() == {"dtype", "shape"}
        and isinstance(spec["dtype"], str)
        and isinstance(spec["shape"], list)
        and all(_is_count(size) for size in spec["shape"])
    )


def _check(holds: bool, expected: str, found: object) -> None:
    if not holds:
        raise PentadError(f"manifest.json has {str(found)[:200]}: expected {expected}")
