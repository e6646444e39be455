"""Flags that the ranks of a host share, with a driver that waits and writes at once."""

from __future__ import annotations

import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from host_copies import Driver

from pentad.workers.transport import stream_flags
from pentad.workers.transport.stream_flags import StreamFlags

pytestmark = pytest.mark.timeout(30)
HOSTS = ((0, 2), (1, 3))


@pytest.fixture
def flags(monkeypatch: pytest.MonkeyPatch) -> dict[int, StreamFlags]:
    """The flags of four ranks on two hosts."""
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=Driver()))
    monkeypatch.setattr(stream_flags, "handle_of", lambda stream: 0)
    store = dist.HashStore()
    return {rank: StreamFlags(store, rank, ranks, {"a": 0, "b": 7}, 1) for ranks in HOSTS for rank in ranks}


def test_ranks_of_a_host_share_flags_and_others_have_their_own(flags: dict[int, StreamFlags]) -> None:
    flags[0].write("a", 5)
    flags[2].wait("a", 5)
    flags[3].write("a", 1)
    flags[0].wait("a", 5)
    assert [[int(word) for word in flags[rank].words[::32]] for rank in range(4)] == [[5, 7], [1, 7], [5, 7], [1, 7]]
    for each in flags.values():
        each.close()


def test_a_release_frees_all_of_a_host_within_a_second_and_none_of_another(flags: dict[int, StreamFlags]) -> None:
    began, freed = time.monotonic(), []

    def wait(rank: int) -> None:
        flags[rank].wait("a", 2**20)
        freed.append((rank, time.monotonic() - began, flags[rank].cancelled.isnan().item()))

    threads = [threading.Thread(target=wait, args=(rank,), daemon=True) for rank in range(4)]
    for thread in threads:
        thread.start()
    flags[2].release()
    for rank in HOSTS[0]:
        threads[rank].join(10)
    assert sorted((rank, is_cancelled) for rank, _, is_cancelled in freed) == [(0, True), (2, True)]
    assert all(seconds < 1 for _, seconds, _ in freed)
    assert [flags[rank].cancelled.item() for rank in HOSTS[1]] == [0, 0]
    flags[3].write("a", 2**20)
    for rank in HOSTS[1]:
        threads[rank].join(10)
    assert len(freed) == 4 and not any(is_cancelled for rank, _, is_cancelled in freed if rank in HOSTS[1])
    for each in flags.values():
        each.close()
