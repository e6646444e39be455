"""Reserves room for the ranks in the cluster, and assigns ranks to nodes and GPUs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import ray
from ray import PlacementGroupID
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from pentad.orchestrator.planning.formatting import counted
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.mesh import Mesh, numbered, ranks_in_host_order

PREEMPTION = 2  # the reason to drain a node that does not wait until it is idle
NODE = "ray.io/node-id"  # label with the node's ID, which Ray gives every node


class Place(NamedTuple):
    """Room for one rank: a bundle of the placement group, its node, and its GPU (-1: none or not yet known)."""

    bundle: int
    node: str
    gpu: int = -1


class Placement:
    """Room for the ranks of a run: the bundles of a placement group. Bundles that have `moved` are in another group;
    their old place stays reserved so that nothing runs there. With a `name` the groups outlive this driver."""

    def __init__(self, group: PlacementGroup, name: str | None = None) -> None:
        self.group, self.name, self.number = group, name, 0
        self.others: list[PlacementGroup] = []
        self.moved: dict[int, tuple[PlacementGroup, int]] = {}

    @property
    def bundle_count(self) -> int:
        return int(self.group.bundle_count)

    def find(self, bundle: int) -> tuple[PlacementGroup, int]:
        """Where a bundle is now: a placement group and the index in it."""
        return self.moved.get(bundle, (self.group, bundle))

    def reserve_elsewhere(self, bundles: Sequence[int], device: str, nodes: str) -> PlacementGroup:
        """Requests other room from Ray for some of the bundles, all on one node that the label selector `nodes`
        allows."""
        self.number += 1
        name = f"{self.name}/{self.number}/{'-'.join(map(str, bundles))}"
        lifetime = {"name": name, "lifetime": "detached"} if self.name else {}
        needs, labels = [_bundle(device)] * len(bundles), [{NODE: nodes}] * len(bundles)
        group = ray.util.placement_group(needs, strategy="STRICT_PACK", bundle_label_selector=labels, **lifetime)
        self.others.append(group)
        return group

    def move(self, bundles: Sequence[int], group: PlacementGroup) -> None:
        """Moves bundles to the room reserved for them."""
        self.moved |= {bundle: (group, index) for index, bundle in enumerate(bundles)}

    def move_back(self, bundles: Iterable[int]) -> bool:
        """Returns bundles that have moved to their old places; False if none had moved."""
        returning = [bundle for bundle in bundles if bundle in self.moved]
        for bundle in returning:
            del self.moved[bundle]
        return bool(returning)

    def give_up(self, group: PlacementGroup) -> None:
        """Frees other room into which nothing has moved."""
        self.others.remove(group)
        ray.util.remove_placement_group(group)


def find_placement(name: str) -> Placement | None:
    """The placement with this name, if there is one, with bundles moved to other room that was reserved and found."""
    main, others = None, []
    for key, facts in ray.util.placement_group_table().items():
        group = PlacementGroup(PlacementGroupID(bytes.fromhex(key)))
        if facts["state"] == "REMOVED":
            continue
        if facts["name"] == name:
            main = group
        elif facts["name"].startswith(f"{name}/"):
            number, _, bundles = facts["name"].removeprefix(f"{name}/").partition("/")
            is_placed = facts["state"] in ("CREATED", "RESCHEDULING")
            others.append((int(number), [*map(int, bundles.split("-"))], group, is_placed))
    if main is None:
        return None
    placement = Placement(main, name)
    for placement.number, bundles, group, is_placed in sorted(others, key=lambda each: each[0]):
        placement.others.append(group)
        if is_placed:
            placement.move(bundles, group)
    return placement


def order_places(places: Sequence[Place], mesh: Mesh, *, tensor_across_nodes: bool = False) -> tuple[int, ...]:
    """The bundle of each rank of the mesh.

    Places are sorted by node and GPU and filled with tp innermost, then cp, ep, pp and dp: the pipeline stages of a
    replica are adjacent, and no replica is split on nodes whose size is a multiple of a replica's. Raises PentadError
    if a tp group would span nodes, unless `tensor_across_nodes`.
    """
    assert len(places) == mesh.size
    size = Counter(place.node for place in places)
    if not tensor_across_nodes and any(count % mesh.tp for count in size.values()):
        offers = ", ".join(map(str, sorted(size.values(), reverse=True)))
        expected = "expected multiples of mesh.tp, or mesh.tp_across_nodes = true"
        raise PentadError(f"mesh.tp is {mesh.tp}, but nodes have room for {offers} ranks, {expected}")
    replica = mesh.size // mesh.dp
    line = sorted(places, key=lambda p: (size[p.node] % replica > 0, -size[p.node], p.node, p.gpu, p.bundle))
    found = {rank: place.bundle for rank, place in zip(ranks_in_host_order(mesh), line, strict=True)}
    return tuple(found[rank] for rank in range(mesh.size))


def reserve(
    mesh: Mesh,
    device: str,
    timeout_seconds: float,
    *,
    fixed: bool,
    detached: str | None = None,
    without: Collection[str] = (),
) -> Placement:
    """Reserves one bundle per rank, packed onto as few nodes as possible, none of which is in `without`, and waits
    until they are placed. With a name, `detached`, the placement outlives this driver.

    Raises PentadError, with nothing reserved, if there is no room within `timeout_seconds`, and at once if the cluster
    is too small and `fixed`, that is, has no autoscaler.
    """
    bundle = _bundle(device)
    total = _total(without)
    if fixed and any(total.get(kind, 0) < mesh.size for kind in bundle):
        offers = f"{_amounts(total, bundle)} on {_nodes(without)}"
        raise PentadError(f"{_needed(mesh, bundle)}, but the cluster has only {offers}")
    options: dict[str, Any] = {"name": detached, "lifetime": "detached"} if detached else {}
    if without:
        options["bundle_label_selector"] = [{NODE: all_but(without)}] * mesh.size
    group = ray.util.placement_group([bundle] * mesh.size, strategy="PACK", **options)
    placement = Placement(group, detached)
    try:
        if group.wait(timeout_seconds):
            return placement
        state = ray.util.placement_group_table(group)["stats"]["scheduling_state"].replace("_", " ").lower()
        free = ray.available_resources()
        raise PentadError(
            f"{_needed(mesh, bundle)}, but within cluster.start_timeout_seconds = {timeout_seconds:g} only "
            f"{_amounts(free, bundle)} of {_amounts(total, bundle)} on {_nodes(without)} were free ({state})"
        )
    except BaseException:
        release(placement)
        raise


def release(placement: Placement) -> None:
    """Removes its placement groups. Idempotent."""
    for group in (*placement.others, placement.group):
        ray.util.remove_placement_group(group)


def all_but(nodes: Collection[str]) -> str:
    """A label selector for all nodes but these."""
    return f"!in({','.join(sorted(nodes))})"


def node_of(group: PlacementGroup) -> str:
    """The node of the group's first bundle; '' if it has none yet."""
    return _nodes_of(group).get(0, "")


def node_names() -> dict[str, str]:
    """The nodes' addresses by Ray's IDs, with a part of the ID added where several nodes share an address."""
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    counts = Counter(addresses.values())
    return {node: at if counts[at] == 1 else f"{at}/{node[:6]}" for node, at in addresses.items()}


def label_values(label: str) -> dict[str, str]:
    """The values of a Ray node label, by node; nodes without it are left out."""
    return {node["NodeID"]: node["Labels"][label] for node in ray.nodes() if label in node["Labels"]}


def failure_domains(nodes: Iterable[str], label: str | None) -> list[str]:
    """The failure domain of each node: its value of the Ray node label `label`, which nodes that fail together share. A
    node without one fails alone."""
    values = {} if label is None else label_values(label)
    return [values.get(node, node) for node in nodes]


def strategy_of(placement: Placement, bundle: int) -> PlacementGroupSchedulingStrategy:
    """The strategy with which Ray places an actor in a bundle."""
    group, index = placement.find(bundle)
    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)


def strategy_on(node: str) -> NodeAffinitySchedulingStrategy:
    """The strategy with which Ray places an actor on this node and on no other."""
    return NodeAffinitySchedulingStrategy(node, soft=False)


def free_rooms(device: str) -> dict[str, int] | None:
    """How many more ranks each node that is not draining has room for; None if Ray does not say."""
    needs, leaving = _bundle(device), draining()
    try:
        free = ray._private.state.available_resources_per_node()
    except Exception:  # private to Ray, whose head may be unreachable
        return None
    return {
        node: min(int(has.get(kind, 0.0) // need) for kind, need in needs.items())
        for node, has in free.items()
        if node not in leaving
    }


def bundle_places(placement: Placement) -> tuple[Place, ...]:
    """The bundles that are placed, with their nodes."""
    nodes = _nodes_of(placement.group)
    nodes |= {bundle: _nodes_of(group).get(index, "") for bundle, (group, index) in placement.moved.items()}
    return tuple(Place(bundle, node) for bundle, node in sorted(nodes.items()))


def living_bundles(placement: Placement) -> dict[int, str]:
    """The nodes of the bundles that are on living nodes; Ray moves the others once it finds room.

    A draining node accepts no actors, and its bundles are moved once it is gone.
    """
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]} - set(draining())
    return {place.bundle: place.node for place in bundle_places(placement) if place.node in alive}


def draining() -> dict[str, int]:
    """Deadlines of draining nodes in Unix milliseconds, 0 if unknown."""
    try:
        return dict(ray._private.state.state.get_draining_nodes())
    except Exception:  # private to Ray: if it fails, there is no notice
        return {}


def drain(node: str, seconds: float, reason: str) -> bool:
    """Has Ray place nothing more on a node that ends in `seconds`; returns whether Ray accepts that."""
    try:
        client = ray._raylet.GcsClient(address=ray.get_runtime_context().gcs_address)
        accepted, _ = client.drain_node(node, PREEMPTION, reason, int((time.time() + seconds) * 1000))
    except Exception:  # private to Ray
        return False
    return bool(accepted)


def placed_hosts(placement: Placement, mesh: Mesh, *, tensor_across_nodes: bool) -> tuple[int, ...]:
    """The host of each rank when placed in the order of `order_places`. Raises PentadError as that does."""
    places = bundle_places(placement)
    node = {place.bundle: place.node for place in places}
    return numbered(node[bundle] for bundle in order_places(places, mesh, tensor_across_nodes=tensor_across_nodes))


def _nodes_of(group: PlacementGroup) -> dict[int, str]:
    return dict(ray.util.placement_group_table(group)["bundles_to_node_id"])


def _total(without: Collection[str]) -> Counter[str]:
    """The total resources of the living nodes that are not in `without`."""
    total = Counter[str]()
    for node in ray.nodes():
        if node["Alive"] and node["NodeID"] not in without:
            total.update(node["Resources"])
    return total


def _bundle(device: str) -> dict[str, float]:
    return {"GPU": 1, "CPU": 1} if device == "cuda" else {"CPU": 1}


def _needed(mesh: Mesh, bundle: dict[str, float]) -> str:
    return f"mesh {mesh} has {mesh.size} ranks and needs {_amounts(dict.fromkeys(bundle, mesh.size), bundle)}"


def _amounts(amounts: Mapping[str, float], kinds: Iterable[str]) -> str:
    return " and ".join(f"{amounts.get(kind, 0):g} {kind}s" for kind in kinds)


def _nodes(without: Collection[str]) -> str:
    alive = sum(node["Alive"] and node["NodeID"] not in without for node in ray.nodes())
    return counted(alive, "node")
