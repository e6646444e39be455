"""What stands before the tensors of a safetensors file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

import torch

from pentad.workers.checkpoint.manifest import Spec

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_SIZES = {name: dtype.itemsize for dtype, name in DTYPES.items()}


def nbytes(spec: Spec) -> int:
    return _SIZES[spec["dtype"]] * math.prod(spec["shape"])


def head(specs: Mapping[str, Spec], about: Mapping[str, str] | None = None) -> bytes:
    """The length of its JSON (u64, little endian), the JSON, blanks up to 8 bytes; the tensors follow in the order of
    `specs`, and `about` is what the file says of itself."""
    entries: dict[str, object] = {"__metadata__": about} if about else {}
    start = 0
    for name, spec in specs.items():
        entries[name] = {**spec, "data_offsets": [start, start + nbytes(spec)]}
        start += nbytes(spec)
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
