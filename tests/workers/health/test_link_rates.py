"""Copies between the ranks of a host are measured together: no rank waits for something that its peers do not do."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pentad.schedules.ir.errors import PentadError
from pentad.workers.health import link_rates
from pentad.workers.health.link_rates import PEER_KINDS, measure_peers

RANKS, SIZES = 3, (2**6, 2**9)


class Host:
    """A host whose ranks are threads, with flags and memory in one process."""

    def __init__(self) -> None:
        self.flags: dict[Hashable, int] = {}
        self.memory: dict[int, dict[str, Tensor]] = {}
        self.changed, self.open = threading.Condition(), 0
        self.copied: list[tuple[int, int]] = []  # peer, and elements read from or written to it

    def share(self, store: object, name: str, rank: int, tensors: dict[str, Tensor], peers: list[int]) -> Any:
        self.memory[rank] = tensors
        self.open += 1
        return SimpleNamespace(read=self.read, write=self.write, close=self.close)

    def read(self, peer: int, name: str, first: int, row: Tensor) -> None:
        self.copied.append((peer, row.numel()))

    def write(self, peer: int, name: str, first: int, row: Tensor) -> None:
        assert row.numel() <= self.memory[peer][name].numel()
        self.copied.append((peer, row.numel()))

    def close(self) -> None:
        self.open -= 1

    def signal(self, store: object, rank: int, ranks: int, names: list[Hashable], lane: int) -> Any:
        def write(name: Hashable, turn: int) -> None:
            with self.changed:
                self.flags[name] = turn
                self.changed.notify_all()

        def wait(name: Hashable, turn: int) -> None:
            assert name in names
            with self.changed:
                assert self.changed.wait_for(lambda: self.flags.get(name, 0) >= turn, 20), f"{rank}: {name} {turn}"

        self.open += 1
        return SimpleNamespace(write=write, wait=wait, close=self.close)


def runs_twice(work: Any) -> float:
    work()
    work()
    return 1e-3


CLOCK: Any = SimpleNamespace(seconds=runs_twice, slowest=lambda seconds: seconds, wait=lambda: None)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    made, barrier = Host(), threading.Barrier(RANKS)
    monkeypatch.setattr(link_rates, "PeerMemory", made.share)
    monkeypatch.setattr(link_rates, "StreamFlags", made.signal)
    monkeypatch.setattr(link_rates, "dist", SimpleNamespace(barrier=lambda: barrier.wait(20)))
    return made


def measured(rank: int) -> Any:
    store: Any = None
    return measure_peers(store, rank, RANKS, SIZES, torch.device("cpu"), CLOCK)


def test_ranks_copy_in_turn_and_each_kind_is_measured_at_each_size(host: Host) -> None:
    with ThreadPoolExecutor(RANKS) as threads:
        found = list(threads.map(measured, range(RANKS)))
    share = (RANKS - 1) / RANKS
    for timings in found:
        assert set(timings) == set(PEER_KINDS)
        for kind, points in timings.items():
            assert [size for size, _ in points] == [size * (1 if kind == "send" else share) for size in SIZES]
    assert host.open == 0, "memory and flags are given back"
    for peer in range(RANKS):  # two kinds read a part of both others, one writes everything, each twice
        counts = [count for other, count in host.copied if other == peer]
        expected = [each for size in SIZES for each in [size // 4 // RANKS] * 8 + [size // 4] * 2]
        assert sorted(counts) == sorted(expected)


def test_without_memory_to_share_nothing_is_measured(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PentadError("no peer access")

    monkeypatch.setattr(link_rates, "StreamFlags", refused)
    assert measured(0) is None and not host.copied
