"""Which ranks share a host."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from functools import lru_cache
from itertools import product

from pentad.schedules.simulate.rates import HOST_ORDER
from pentad.schedules.spec.mesh import Axis, Coordinates, Mesh


def ranks_in_host_order(mesh: Mesh) -> list[int]:
    """Ranks in the order in which they fill hosts: the stages of a replica are adjacent."""
    places = product(*(range(getattr(mesh, axis)) for axis in HOST_ORDER))
    return [mesh.rank(Coordinates(**dict(zip(HOST_ORDER, place, strict=True)))) for place in places]


@lru_cache(maxsize=256)
def hosts_of_size(mesh: Mesh, gpus: int) -> tuple[int, ...]:
    """The host of each rank where every host has `gpus` GPUs; empty if there is only one."""
    host = {rank: place // gpus for place, rank in enumerate(ranks_in_host_order(mesh))}
    return numbered(host[rank] for rank in range(mesh.size))


def numbered(names: Iterable[Hashable]) -> tuple[int, ...]:
    """Hosts by rank, numbered in the order of ranks, from any `names` of them; empty if there is only one."""
    by_rank = list(names)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(by_rank))}
    return tuple(map(numbers.__getitem__, by_rank)) if len(numbers) > 1 else ()


@lru_cache(maxsize=4096)
def are_on_one_host(mesh: Mesh, axes: tuple[Axis, ...], hosts: tuple[int, ...]) -> bool:
    """Whether every group of ranks along these axes is on one of the `hosts`, by rank; empty: all are on one."""
    return not hosts or all(len({hosts[other] for other in mesh.group(axes, rank)}) == 1 for rank in range(mesh.size))
