"""Arrow arrays without nulls, built without `pa.array`, which imports pandas if it is installed and so costs every rank
0.6 s of CPU time at its start."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa

NUMBERS = {pa.int32(): np.int32, pa.int64(): np.int64, pa.float64(): np.float64}


def filled_array(values: Iterable[object], kind: pa.DataType) -> pa.Array:
    """An array of strings, or of numbers of a `kind` in NUMBERS."""
    if kind == pa.string():
        texts = [str(value).encode() for value in values]
        offsets = np.cumsum([0, *map(len, texts)], dtype=np.int32)
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(texts))]
        return pa.Array.from_buffers(kind, len(texts), buffers)
    numbers = np.ascontiguousarray(values if isinstance(values, np.ndarray) else list(values), NUMBERS[kind])
    return pa.Array.from_buffers(kind, len(numbers), [None, pa.py_buffer(numbers)])
