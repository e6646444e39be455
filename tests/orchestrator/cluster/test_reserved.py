"""Room in a cluster: reserved, found again, moved and released, with a fake Ray that only keeps a record."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray import PlacementGroupID

from pentad.orchestrator.cluster import placement as placements
from pentad.orchestrator.cluster.placement import (
    NODE,
    Placement,
    bundle_places,
    drain,
    draining,
    find_placement,
    living_bundles,
    node_names,
    node_of,
    placed_hosts,
    release,
    reserve,
    strategy_of,
)
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.mesh import Mesh


class Group:
    def __init__(self, bundles: list[dict[str, float]], options: dict[str, Any], *, has_room: bool) -> None:
        self.bundle_count, self.bundles, self.options, self.has_room = len(bundles), bundles, options, has_room
        self.id = PlacementGroupID.from_random()

    def wait(self, seconds: float) -> bool:
        return self.has_room


class Cluster:
    """Nodes of four CPUs each, on which the bundles of `groups` are placed in order."""

    def __init__(self, patch: pytest.MonkeyPatch, *nodes: str) -> None:
        self.living, self.has_room, self.groups = dict.fromkeys(nodes, True), True, list[Any]()
        self.drained: dict[str, int] = {}
        state = SimpleNamespace(state=SimpleNamespace(get_draining_nodes=lambda: self.drained))
        gcs = SimpleNamespace(GcsClient=lambda address: SimpleNamespace(drain_node=self._drain))
        self.fake = SimpleNamespace(
            nodes=lambda: [
                {
                    "NodeID": node,
                    "Alive": alive,
                    "Resources": {"CPU": 4.0},
                    "NodeManagerAddress": node.rpartition("-")[2],
                }
                for node, alive in self.living.items()
            ],
            available_resources=lambda: {"CPU": 3.0},
            get_runtime_context=lambda: SimpleNamespace(gcs_address="h:1"),
            _private=SimpleNamespace(state=state),
            _raylet=gcs,
            util=SimpleNamespace(
                placement_group=self._reserve,
                placement_group_table=self._table,
                remove_placement_group=self.groups.remove,
            ),
        )
        patch.setattr(placements, "ray", self.fake)

    def _reserve(self, bundles: list[dict[str, float]], **options: Any) -> Group:
        self.groups.append(Group(bundles, options, has_room=self.has_room))
        return self.groups[-1]

    def _table(self, group: Group | None = None) -> dict[str, Any]:
        if group is None:
            return {
                each.id.hex(): {
                    "name": each.options.get("name", ""),
                    "state": "CREATED" if each.has_room else "PENDING",
                }
                for each in self.groups
            }
        nodes = list(self.living)
        placed = {bundle: nodes[bundle // 4] for bundle in range(group.bundle_count)}
        if selectors := group.options.get("bundle_label_selector"):
            (chosen,) = {each[NODE] for each in selectors}
            placed = dict.fromkeys(placed, chosen)
        return {"bundles_to_node_id": placed, "stats": {"scheduling_state": "NO_RESOURCES"}}

    def _drain(self, node: str, why: int, reason: str, deadline: int) -> tuple[bool, str]:
        self.drained[node] = deadline
        return node in self.living, reason


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch, "a", "b")


def test_a_mesh_gets_a_bundle_for_each_rank_on_nodes_that_are_not_left_out(cluster: Cluster) -> None:
    placement = reserve(Mesh(dp=8), "cpu", 1.0, fixed=True)
    hosts = placed_hosts(placement, Mesh(dp=8), tensor_across_nodes=False)
    assert placement.bundle_count == 8 and hosts == (0, 0, 0, 0, 1, 1, 1, 1)
    assert [place.node for place in bundle_places(placement)] == ["a"] * 4 + ["b"] * 4
    assert cluster.groups[0].bundles == [{"CPU": 1}] * 8 and cluster.groups[0].options == {"strategy": "PACK"}
    reserve(Mesh(dp=2), "cuda", 1.0, fixed=False, detached="run", without=["b", "a"])
    assert cluster.groups[1].bundles == [{"GPU": 1, "CPU": 1}] * 2
    options = {"name": "run", "lifetime": "detached", "bundle_label_selector": [{NODE: "!in(a,b)"}] * 2}
    assert cluster.groups[1].options == {"strategy": "PACK", **options}
    release(placement)
    assert len(cluster.groups) == 1


def test_a_cluster_that_is_too_small_or_busy_is_said_to_be_with_nothing_reserved(cluster: Cluster) -> None:
    with pytest.raises(PentadError, match=r"^mesh dp9 has 9 ranks and needs 9 CPUs, but .* only 8 CPUs on 2 nodes$"):
        reserve(Mesh(dp=9), "cpu", 1.0, fixed=True)
    with pytest.raises(PentadError, match=r"needs 5 CPUs, but the cluster has only 4 CPUs on 1 node$"):
        reserve(Mesh(dp=5), "cpu", 1.0, fixed=True, without=["a"])
    cluster.has_room = False
    busy = r"start_timeout_seconds = 1 only 3 CPUs of 8 CPUs on 2 nodes were free \(no resources\)$"
    with pytest.raises(PentadError, match=busy):
        reserve(Mesh(dp=8), "cpu", 1.0, fixed=True)
    assert not cluster.groups


def test_bundles_move_to_other_room_and_back(cluster: Cluster) -> None:
    placement = reserve(Mesh(dp=4), "cpu", 1.0, fixed=True)
    other, unused = (placement.reserve_elsewhere([1, 3], "cpu", "b") for _ in range(2))
    placement.move([1, 3], other)
    placement.give_up(unused)
    assert [place.node for place in bundle_places(placement)] == ["a", "b", "a", "b"] and node_of(other) == "b"
    assert placement.find(3) == (other, 1) and placement.find(0) == (placement.group, 0)
    assert strategy_of(placement, 3).placement_group_bundle_index == 1
    assert placement.move_back([0, 3]) and not placement.move_back([0, 3])
    assert [place.node for place in bundle_places(placement)] == ["a", "b", "a", "a"]
    release(placement)
    assert not cluster.groups


def test_another_driver_finds_the_room_and_what_has_moved(cluster: Cluster) -> None:
    assert find_placement("run") is None
    placement = reserve(Mesh(dp=4), "cpu", 1.0, fixed=True, detached="run")
    reserve(Mesh(dp=2), "cpu", 1.0, fixed=True, detached="running")
    moves = [([1, 3], "b"), ([3], "a")]
    for bundles, node in moves:
        placement.move(bundles, placement.reserve_elsewhere(bundles, "cpu", node))
    cluster.has_room = False
    waiting = placement.reserve_elsewhere([0], "cpu", "b")
    found = find_placement("run")
    assert found is not None and found.group.id == placement.group.id and found.number == 3
    assert [group.id for group in found.others] == [group.id for group in placement.others]
    assert found.others[-1].id == waiting.id
    where = {bundle: (group.id, index) for bundle, (group, index) in found.moved.items()}
    assert where == {bundle: (group.id, index) for bundle, (group, index) in placement.moved.items()}
    assert set(where) == {1, 3} and where[3][1] == 0, "the later move counts"


def test_bundles_on_nodes_that_are_gone_or_about_to_be_are_not_living(cluster: Cluster) -> None:
    placement = reserve(Mesh(dp=8), "cpu", 1.0, fixed=True)
    assert set(living_bundles(placement)) == set(range(8))
    cluster.living["a"] = False
    assert living_bundles(placement) == dict.fromkeys(range(4, 8), "b")
    assert drain("b", 30.0, "notice") and set(draining()) == {"b"} and not drain("c", 30.0, "notice")
    assert not living_bundles(placement)


def test_what_ray_no_longer_has_costs_the_notice_and_nothing_else(cluster: Cluster) -> None:
    del cluster.fake._private, cluster.fake._raylet
    assert draining() == {} and not drain("a", 30.0, "notice")


def test_nodes_of_one_machine_have_different_names(monkeypatch: pytest.MonkeyPatch) -> None:
    Cluster(monkeypatch, "111111-10.0.0.1", "222222-10.0.0.2", "333333-10.0.0.2")
    names = node_names()
    assert list(names.values()) == ["10.0.0.1", "10.0.0.2/222222", "10.0.0.2/333333"]


def test_room_without_bundles_has_no_node(cluster: Cluster) -> None:
    assert node_of(Group([], {}, has_room=True)) == ""
    assert Placement(Group([], {}, has_room=True)).bundle_count == 0
