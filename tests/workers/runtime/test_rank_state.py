"""The state of a rank is read from a disk and from the memory of ranks, piece by piece."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from plans import plan_of

from pentad.schedules.spec.schedule_spec import MemoryOptions
from pentad.workers.checkpoint import checkpoint, shards
from pentad.workers.checkpoint.manifest import Shard
from pentad.workers.checkpoint.snapshot import layout, snapshot_bytes
from pentad.workers.params import sharded_state
from pentad.workers.replication.parts import CopyKey, CopyPart, HostCopies
from pentad.workers.replication.source import CopySource, FoundPart, checkpoint_in_memory
from pentad.workers.replication.transfer import CopyServer
from pentad.workers.runtime import rank_state
from pentad.workers.runtime.rank_state import RankState


@pytest.mark.sampled(4)
@pytest.mark.parametrize("where", ["disk", "this process", "another process"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_state_is_read_in_pieces_to_the_same_bits(corpus, tmp_path, monkeypatch, where, dtype):
    """float64 finds no room in the buffers, which are for elements of 4 bytes."""
    monkeypatch.setattr(sharded_state, "READ_ELEMENTS", 1000)
    monkeypatch.setattr(rank_state, "READ_BYTES", 4000)
    plan = plan_of("1f1b", 2, 1, 4, corpus, dtype, memory_options=MemoryOptions(zero=3))
    cpu, folder, key = torch.device("cpu"), checkpoint.folder_of(tmp_path, 1), CopyKey(1, 1, 2)
    states, here, copies = [RankState(plan, rank, cpu) for rank in range(2)], HostCopies(), HostCopies()
    written = list[Shard]()
    for rank, state in enumerate(states):
        for parameters in state.parameters.values():
            for tensor in parameters.state_tensors():
                tensor.normal_()
        files = state.files()
        written += [shards.write_shard(folder, name, tensors) for name, tensors in files.items()]
        copies.put(key, rank, copy_part(files))
    checkpoint.commit(folder, step=1, shards=written, meta={})
    server = CopyServer(copies, "127.0.0.1", b"t" * 32)
    parts = tuple(FoundPart(part, server.address) for part in copies.held())
    if where == "disk":
        source = checkpoint.open_checked(folder)
    else:
        held = copies if where == "this process" else here
        source = checkpoint_in_memory(CopySource(key, parts, b"t" * 32), held, lambda: None)
    for rank, expected in enumerate(states):
        found = RankState(plan, rank, cpu)
        found.read(source)
        for shard, parameters in expected.parameters.items():
            pairs = list(zip(parameters.state_parts(), found.parameters[shard].state_parts(), strict=True))
            assert all(torch.equal(a, b) for (*_, a), (*_, b) in pairs)
            assert max(a.numel() for (*_, a), _ in pairs) > 2000, "nothing was cut"
    server.close()


def copy_part(files: dict[str, dict[str, torch.Tensor]]) -> CopyPart:
    index, data = layout(files), np.zeros(snapshot_bytes(files), np.uint8)
    for file, its in index.items():
        for name, (_, at) in its.items():
            found = files[file][name].contiguous().view(-1).view(torch.uint8).numpy()
            data[at : at + found.nbytes] = found
    return CopyPart(index, data, data, lambda _: None)
