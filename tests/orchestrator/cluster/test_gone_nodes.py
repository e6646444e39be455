"""Which nodes are gone, judged by the answers of their hosts' kernels."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest
import ray

from pentad.orchestrator.cluster.gone_nodes import CONNECT_SECONDS, gone_nodes

AWAY = ("192.0.2.1", 9)  # reserved for documentation: no host has this address


@pytest.fixture
def address() -> Iterator[Callable[[bool], tuple[str, int]]]:
    """Makes the address of a process that is stopped: it listens, but accepts nothing; or of one that has ended."""
    sockets = []

    def make(lives: bool) -> tuple[str, int]:
        sockets.append(socket.create_server(("127.0.0.1", 0)))
        at = sockets[-1].getsockname()
        if not lives:
            sockets[-1].close()
        return at

    yield make
    for each in sockets:
        each.close()


def known(monkeypatch: pytest.MonkeyPatch, **nodes: tuple[tuple[str, int], bool]) -> None:
    """Sets what Ray knows: the addresses of nodes, and whether it believes that they are alive."""
    rows = [
        {"NodeID": name, "NodeManagerAddress": host, "NodeManagerPort": port, "Alive": alive}
        for name, ((host, port), alive) in nodes.items()
    ]
    monkeypatch.setattr(ray, "nodes", lambda: rows)


def test_a_node_is_gone_if_its_host_refuses_and_not_if_its_raylet_stands_still(
    monkeypatch: pytest.MonkeyPatch, address: Callable[[bool], tuple[str, int]]
) -> None:
    known(monkeypatch, ended=(address(False), True), stopped=(address(True), True), dead=(address(True), False))
    assert gone_nodes({"ended", "stopped", "dead", "unknown"}) == {"ended", "dead"}
    assert gone_nodes({"stopped"}) == gone_nodes(()) == frozenset()


def test_a_host_that_is_away_is_left_to_rays_health_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    def times_out(at: tuple[str, int], seconds: float) -> socket.socket:
        assert at == AWAY and seconds == CONNECT_SECONDS
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", times_out)
    known(monkeypatch, away=(AWAY, True))
    assert gone_nodes({"away"}) == frozenset()
