"""Room elsewhere for slow ranks, on a node that joins for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from chaos_cluster import Node

from pentad.orchestrator.cluster.placement import Placement

if TYPE_CHECKING:
    from chaos_history import Simulation

ROOM_SECONDS = 0.5  # until the node has joined


class SimPlacement(Placement):
    """A placement whose bundles are those of the simulated cluster."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation, self.cluster = simulation, simulation.cluster
        super().__init__(SimpleNamespace(bundle_count=len(self.cluster.bundles)))

    def reserve_elsewhere(self, bundles: Sequence[int], device: str, nodes: str) -> Any:
        node = Node(f"node{len(self.cluster.nodes)}")
        self.cluster.nodes[node.name] = node
        self.others.append(SimpleNamespace(node=node, at=self.simulation.world.now + ROOM_SECONDS))
        return self.others[-1]

    def move(self, bundles: Sequence[int], group: Any) -> None:
        for bundle in bundles:
            self.moved[bundle] = self.cluster.bundles[bundle], bundle
            self.cluster.bundles[bundle] = group.node.name
        self.simulation.evictions += 1

    def move_back(self, bundles: Iterable[int]) -> bool:
        back = [bundle for bundle in bundles if bundle in self.moved]
        for bundle in back:
            self.cluster.bundles[bundle] = self.moved[bundle][0]
        return super().move_back(back)

    def give_up(self, group: Any) -> None:
        self.others.remove(group)


def node_of(simulation: Simulation, room: Any) -> str:
    return str(room.node.name) if room.node.is_alive and simulation.world.now >= room.at else ""
