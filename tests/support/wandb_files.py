"""The history in W&B's own files: a LevelDB log of protobuf records, which wandb only uploads."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, HEADER = 32768, 7
FULL, LAST = 1, 4


def history(folder: Path) -> list[dict[str, Any]]:
    """The rows of all runs under a folder in the order in which they were logged, with the run's `id` and `_step`."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows = []
    for path in sorted(folder.glob("*run-*/*.wandb")):
        for record in map(Record.FromString, _records(path.read_bytes())):
            if record.WhichOneof("record_type") == "history":
                values = {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
                rows.append(values | {"id": path.stem, "_step": record.history.step.num})
    return rows


def _records(data: bytes) -> Iterator[bytes]:
    at, parts = HEADER, b""  # the file has its own header
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:  # padding at the end of a block
            at += BLOCK - at % BLOCK
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + HEADER : at + HEADER + size]
        at += HEADER + size
        if kind in (FULL, LAST):
            yield parts
            parts = b""
