"""Reserves room for the ranks in the cluster, and assigns ranks to nodes and GPUs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import ray
from ray.util.placement_group import PlacementGroup

from pentad.schedules.ir.errors import PentadError
from pentad.schedules.spec.mesh import Coordinates, Mesh

PREEMPTION = 2  # of the reasons to drain a node, the one that does not wait for it to be idle


class Place(NamedTuple):
    """Room for one rank: a bundle of the placement group, its node, and its GPU (-1: none, or not known yet)."""

    bundle: int
    node: str
    gpu: int = -1


def order_places(places: Sequence[Place], mesh: Mesh, *, tensor_across_nodes: bool = False) -> tuple[int, ...]:
    """The bundle of each rank of the mesh.

    Places are sorted by node and GPU and filled with tp innermost, then cp, ep, pp and dp: the pipeline stages of a
    replica are adjacent, and no replica is split on nodes whose size is a multiple of a replica's. Raises PentadError
    when a tp group would span nodes, unless it may.
    """
    assert len(places) == mesh.size
    size = Counter(place.node for place in places)
    if not tensor_across_nodes and any(count % mesh.tp for count in size.values()):
        offers = ", ".join(map(str, sorted(size.values(), reverse=True)))
        expected = "expected multiples of mesh.tp, or mesh.tp_across_nodes = true"
        raise PentadError(f"mesh.tp is {mesh.tp}, but nodes have room for {offers} ranks, {expected}")
    replica = mesh.size // mesh.dp
    line = sorted(places, key=lambda p: (size[p.node] % replica > 0, -size[p.node], p.node, p.gpu, p.bundle))
    rows = product(*(range(axis) for axis in (mesh.dp, mesh.pp, mesh.ep, mesh.cp, mesh.tp)))
    found = {
        mesh.rank(Coordinates(dp=dp, pp=pp, cp=cp, tp=tp, ep=ep)): place.bundle
        for place, (dp, pp, ep, cp, tp) in zip(line, rows, strict=True)
    }
    return tuple(found[rank] for rank in range(mesh.size))


def reserve(
    mesh: Mesh, device: str, timeout_seconds: float, *, fixed: bool, detached: str | None = None
) -> PlacementGroup:
    """A placement group of one bundle per rank, packed onto as few nodes as possible; waits until it is placed. With a
    name, `detached`, it outlives this driver.

    Raises PentadError, with nothing reserved, when the cluster has no room within the time, and at once when it never
    will: it is too small and `fixed`, without an autoscaler that adds nodes.
    """
    bundle = {"GPU": 1, "CPU": 1} if device == "cuda" else {"CPU": 1}
    total = ray.cluster_resources()
    if fixed and any(total.get(kind, 0) < mesh.size for kind in bundle):
        raise PentadError(f"{_needed(mesh, bundle)}, but the cluster has only {_amounts(total, bundle)} on {_nodes()}")
    lifetime = {"name": detached, "lifetime": "detached"} if detached else {}
    group = ray.util.placement_group([bundle] * mesh.size, strategy="PACK", **lifetime)
    try:
        if group.wait(timeout_seconds):
            return group
        state = ray.util.placement_group_table(group)["stats"]["scheduling_state"].replace("_", " ").lower()
        free = ray.available_resources()
        raise PentadError(
            f"{_needed(mesh, bundle)}, but within cluster.start_timeout_seconds = {timeout_seconds:g} only "
            f"{_amounts(free, bundle)} of {_amounts(ray.cluster_resources(), bundle)} on {_nodes()} were free ({state})"
        )
    except BaseException:
        release(group)
        raise


def release(group: PlacementGroup) -> None:
    """Removes the placement group. Idempotent."""
    ray.util.remove_placement_group(group)


def bundle_places(group: PlacementGroup) -> tuple[Place, ...]:
    """The bundles of a placement group, with their nodes."""
    nodes: dict[int, str] = ray.util.placement_group_table(group)["bundles_to_node_id"]
    return tuple(Place(bundle, node) for bundle, node in sorted(nodes.items()))


def living_bundles(group: PlacementGroup) -> dict[int, str]:
    """The nodes of bundles that are on living nodes; Ray moves the others when it finds room.

    A draining node accepts no actors, and its bundles are moved once it is gone.
    """
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]} - set(draining())
    return {place.bundle: place.node for place in bundle_places(group) if place.node in alive}


def draining() -> dict[str, int]:
    """Deadlines of draining nodes in Unix milliseconds, 0 if unknown."""
    try:
        return dict(ray._private.state.state.get_draining_nodes())
    except Exception:  # private to Ray: without it there is no notice
        return {}


def drain(node: str, seconds: float, reason: str) -> bool:
    """Has Ray place nothing more on a node that ends in so many seconds; returns whether it accepts that."""
    try:
        client = ray._raylet.GcsClient(address=ray.get_runtime_context().gcs_address)
        accepted, _ = client.drain_node(node, PREEMPTION, reason, int((time.time() + seconds) * 1000))
    except Exception:  # private to Ray
        return False
    return bool(accepted)


def hosts(group: PlacementGroup) -> int:
    """Number of nodes that a placement group uses."""
    return len({place.node for place in bundle_places(group)})


def _needed(mesh: Mesh, bundle: dict[str, int]) -> str:
    return f"mesh {mesh} has {mesh.size} ranks and needs {_amounts(dict.fromkeys(bundle, mesh.size), bundle)}"


def _amounts(amounts: Mapping[str, float], kinds: Iterable[str]) -> str:
    return " and ".join(f"{amounts.get(kind, 0):g} {kind}s" for kind in kinds)


def _nodes() -> str:
    alive = sum(node["Alive"] for node in ray.nodes())
    return f"{alive} node" + "s" * (alive != 1)
