"""A committed checkpoint of one tensor, made and read without torch."""

from typing import Any

import numpy as np
import safetensors.numpy

from pentad.schedules.ir.errors import PentadError
from pentad.workers.checkpoint.checkpoint import commit, open_checked, unreadable
from pentad.workers.checkpoint.location import Location
from pentad.workers.checkpoint.manifest import Shard
from pentad.workers.checkpoint.storage import storage_of

FILE = "stage-000.safetensors"


def save_small(folder: Location, step: int, meta: dict[str, Any] | None = None) -> None:
    """Writes the checkpoint after `step` steps, replacing an existing one."""
    storage = storage_of(folder)
    storage.make_folder(folder)
    file, content = storage.new_name(FILE), safetensors.numpy.save({"steps": np.array(step)})
    written = storage.write(folder / file, [memoryview(content)])
    shard = Shard(file, written.bytes, written.sha256, {"steps": {"dtype": "I64", "shape": []}}, written.crc32)
    commit(folder, step=step, shards=[shard], meta=meta or {})


def problem_of(folder: Location) -> PentadError | None:
    """The problem that a rank reading all files would find."""
    try:
        opened = open_checked(folder)
        for file in {piece.file for pieces in opened.tensors.values() for piece in pieces}:
            assert opened.opened is not None
            with opened.opened(file) as content:
                content.read(1 << 20)
    except OSError as error:
        return unreadable(str(folder), error)
    except PentadError as error:
        return error
    return None
