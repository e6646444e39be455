"""The state of a rank is read piece by piece from disk or from the memory of ranks; without it no step runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from plans import SHALLOW, plan_of

from pentad.orchestrator.cluster.copies import newest_copy
from pentad.orchestrator.recovery.fence import handed_over
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.schedule_spec import MemoryOptions
from pentad.workers.checkpoint import checkpoint, shards
from pentad.workers.checkpoint.manifest import Shard
from pentad.workers.checkpoint.snapshot import layout, snapshot_bytes
from pentad.workers.params import sharded_state
from pentad.workers.replication.parts import CopyKey, CopyPart, HostCopies
from pentad.workers.replication.source import CopySource, FoundPart, checkpoint_in_memory
from pentad.workers.replication.transfer import CopyServer
from pentad.workers.runtime import rank_state, state_transfer
from pentad.workers.runtime.rank_state import RankState
from pentad.workers.runtime.runner import Runner
from pentad.workers.runtime.state_transfer import hand_over

ZERO = [MemoryOptions(zero=zero) for zero in range(4)]


def randomize(tensor: torch.Tensor) -> None:
    tensor.normal_() if tensor.is_floating_point() else tensor.random_()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("where", ["disk", "this process", "another process"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_state_is_read_in_pieces_to_the_same_bits(corpus, tmp_path, monkeypatch, where, dtype):
    """float64 does not fit into the buffers, which are for elements of 4 bytes."""
    monkeypatch.setattr(sharded_state, "READ_ELEMENTS", 1000)
    monkeypatch.setattr(rank_state, "READ_BYTES", 4000)
    plan = plan_of("1f1b", 2, 1, 4, corpus, dtype, memory_options=MemoryOptions(zero=3))
    cpu, folder, key = torch.device("cpu"), checkpoint.folder_of(tmp_path, 1), CopyKey(1, 1, 2)
    states, here, copies = [RankState(plan, rank, cpu) for rank in range(2)], HostCopies(), HostCopies()
    written = list[Shard]()
    for rank, state in enumerate(states):
        for parameters in state.parameters.values():
            for tensor in parameters.state_tensors():
                randomize(tensor)
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


MOVES: dict[str, tuple[Any, Any]] = {  # schedule, dp, pp, ZeRO stage and shards before and after
    "half of the replicas": (("1f1b", 2, 2, 0), ("1f1b", 1, 2, 0)),
    "fewer stages": (("1f1b", 1, 4, 0), ("1f1b", 1, 2, 0)),
    "ZeRO-3, growth": (("1f1b", 2, 2, 3), ("1f1b", 4, 2, 3)),
    "ZeRO-1, to fewer stages": (("1f1b", 2, 2, 1), ("1f1b", 4, 1, 1)),
    "dualpipe": (("dualpipe", 1, 4, 0), ("1f1b", 1, 2, 0)),
    "shards with replicas": (("1f1b", 4, 1, 2, 2), ("1f1b", 2, 2, 1)),
    "to shards with replicas": (("dualpipe", 2, 2, 1), ("1f1b", 4, 1, 3, 2)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", MOVES)
def test_state_that_ranks_hand_over_is_that_of_a_checkpoint_on_any_mesh(corpus, tmp_path, case):
    """Any process may read any part: here each reads its own, and those of others over connections."""
    old, new = (
        plan_of(name, dp, pp, 8, corpus, "float32", model=SHALLOW, memory_options=ZERO[zero], zero_shards=sum(shards))
        for name, dp, pp, zero, *shards in MOVES[case]
    )
    cpu, folder, token, written = torch.device("cpu"), checkpoint.folder_of(tmp_path, 1), b"t" * 32, list[Shard]()
    states = [RankState(old, rank, cpu) for rank in range(old.mesh.size)]
    for state in states:
        for shard, parameters in state.parameters.items():
            torch.manual_seed(hash((shard, parameters.layout.shard_index)) % 2**31)  # replicas hold the same
            for tensor in parameters.state_tensors():
                randomize(tensor)
        written += [shards.write_shard(folder, name, tensors) for name, tensors in state.files().items()]
    checkpoint.commit(folder, step=1, shards=written, meta={})
    parts = handed_over(old, range(old.mesh.size))
    key = CopyKey(2, 1, len({number for its in parts.values() for number in its}))
    held = {rank: HostCopies() for rank in parts}
    for rank, its in parts.items():
        hand_over(states[rank], held[rank], key, its, 1)
    servers = {CopyServer(copies, "127.0.0.1", token): copies for copies in held.values()}
    source = newest_copy({server.address: copies.held() for server, copies in servers.items()}, token)
    assert source is not None and source.key == key
    for rank in range(new.mesh.size):
        found, expected = RankState(new, rank, cpu), RankState(new, rank, cpu)
        found.read(checkpoint_in_memory(source, held.get(rank, HostCopies()), lambda: None))
        expected.read(checkpoint.open_checked(folder))
        for shard, parameters in expected.parameters.items():
            pairs = zip(parameters.state_tensors(), found.parameters[shard].state_tensors(), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs) and bool(parameters.m.any())
    for server in servers:
        server.close()


def test_a_state_for_which_there_is_no_memory_is_not_handed_over(corpus, monkeypatch):
    monkeypatch.setattr(state_transfer, "available_bytes", lambda: 1000)
    plan, copies = plan_of("1f1b", 1, 1, 4, corpus, "float32"), HostCopies()
    with pytest.raises(PentadError, match=r"^the state of rank 0 needs \d+ bytes of host memory: expected up to 500$"):
        hand_over(RankState(plan, 0, torch.device("cpu")), copies, CopyKey(2, 1, 1), {0: plan.param_shards[0]}, 2)
    assert not copies.held()


def copy_part(files: dict[str, dict[str, torch.Tensor]]) -> CopyPart:
    index, data = layout(files), np.zeros(snapshot_bytes(files), np.uint8)
    for file, its in index.items():
        for name, (_, at) in its.items():
            found = files[file][name].contiguous().view(-1).view(torch.uint8).numpy()
            data[at : at + found.nbytes] = found
    return CopyPart(index, data, data, lambda _: None)


def test_a_rank_without_a_state_does_not_train(corpus, tmp_path):
    """Its weights are zeros, from which nothing can be learned."""
    runner = Runner(plan_of("1f1b", 1, 1, 2, corpus, model=SHALLOW), 0, tmp_path / "progress")
    runner.connect(runner.serve("127.0.0.1", 30.0), 30.0)
    with pytest.raises(AssertionError, match="restore or receive"):
        runner.run(0, 1)
    runner.restore(None)
    assert len(runner.run(0, 1)) == 1
    runner.close()
