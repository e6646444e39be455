"""The network between nodes: all pairs are measured, and a slow node is told apart from its partners."""

import pytest
from network_ranks import measure_all

from pentad.orchestrator.doctor.finding import Finding
from pentad.orchestrator.doctor.network import judge_network
from pentad.workers.health.network import partner


@pytest.mark.parametrize("size", range(2, 10))
def test_nodes_meet_in_pairs_and_each_pair_once(size: int) -> None:
    met = []
    for number in range(size - 1 + size % 2):
        pairs = {rank: partner(rank, number, size) for rank in range(size)}
        assert all(other != rank and (other is None or pairs[other] == rank) for rank, other in pairs.items())
        met += [(rank, other) for rank, other in pairs.items() if other is not None]
    assert sorted(met) == [(a, b) for a in range(size) for b in range(size) if a != b]


def test_a_slow_node_is_told_from_those_that_wait_for_it() -> None:
    links = measure_all(3, slow=1)
    assert [sorted(link.source for link in its) for its in links] == [[1, 2], [0, 2], [0, 1]]
    figures = {f"node {rank}": {"links": [link._asdict() for link in its]} for rank, its in enumerate(links)}
    found = judge_network({node: Finding("ok", "", figures=its) for node, its in figures.items()})
    assert [node for node, each in found.items() if each.verdict == "failure"] == ["node 1"]
