"""The device mesh: five axes of parallelism, the coordinates of a rank, the groups along any axes, and the hosts of
ranks."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import product
from typing import Literal, NamedTuple

import numpy as np

from pentad.schedules.simulate.rates import HOST_ORDER
from pentad.schedules.simulate.timeline import Span, Timeline

Axis = Literal["dp", "pp", "cp", "tp", "ep"]
ORDER: tuple[Axis, ...] = ("pp", "dp", "ep", "cp", "tp")  # outermost first: tp ranks are adjacent
# Axes along which ranks hold the same parameters, and the same experts.
DENSE_AXES: tuple[Axis, ...] = ("dp", "cp", "ep")
EXPERT_AXES: tuple[Axis, ...] = ("dp", "cp")
LAYER_AXES: tuple[Axis, ...] = ("tp", "cp", "ep")  # along which ranks share layers


class Coordinates(NamedTuple):
    dp: int
    pp: int
    cp: int
    tp: int
    ep: int

    def __str__(self) -> str:
        rest = (f" {axis}{getattr(self, axis)}" for axis in ("cp", "tp", "ep") if getattr(self, axis))
        return f"dp{self.dp} pp{self.pp}" + "".join(rest)


@dataclass(frozen=True)
class Mesh:
    """World size = dp * pp * cp * tp * ep.

    | axis | its ranks | a dense parameter is |
    |---|---|---|
    | dp | have different samples | replicated (or sharded by ZeRO) |
    | pp | have different stages | split by layer |
    | cp | split a sequence | replicated |
    | tp | split weights, share tokens | split |
    | ep | have different samples and different experts | replicated |
    """

    dp: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def size(self) -> int:
        return self.dp * self.pp * self.cp * self.tp * self.ep

    @property
    def is_local(self) -> bool:
        """Whether no ranks share layers."""
        return self.tp * self.cp * self.ep == 1

    def coordinates(self, rank: int) -> Coordinates:
        at = {}
        for axis in reversed(ORDER):
            rank, at[axis] = divmod(rank, getattr(self, axis))
        return Coordinates(**at)

    def rank(self, at: Coordinates) -> int:
        rank = 0
        for axis in ORDER:
            rank = rank * getattr(self, axis) + getattr(at, axis)
        return rank

    def move(self, rank: int, **to: int) -> int:
        """The rank that differs from `rank` only in the given coordinates."""
        return self.rank(self.coordinates(rank)._replace(**to))

    def group(self, axes: tuple[Axis, ...], rank: int) -> tuple[int, ...]:
        """Ranks that differ from `rank` only in the given axes, itself included, in ascending order."""
        at = self.coordinates(rank)
        along = (range(getattr(self, axis)) if axis in axes else (getattr(at, axis),) for axis in ORDER)
        return tuple(self.rank(Coordinates(**dict(zip(ORDER, each, strict=True)))) for each in product(*along))

    def place_in_pool(self, rank: int) -> int:
        """The place of a rank among those of its stage that have different tokens: along dp, ep and cp."""
        at = self.coordinates(rank)
        return (at.dp * self.ep + at.ep) * self.cp + at.cp

    def __str__(self) -> str:
        sizes = asdict(self).items()
        return " x ".join(f"{axis}{size}" for axis, size in sizes if size > 1) or "one rank"


def to_mesh_ranks(timeline: Timeline, mesh: Mesh) -> Timeline:
    """A timeline of pipeline ranks as one of all ranks of the mesh: every replica does the same."""
    by_stage: list[list[Span]] = [[] for _ in range(mesh.pp)]
    for span in timeline.spans:
        by_stage[span.rank].append(span)
    spans = []
    for rank in range(mesh.size):
        line = (*mesh.group(("pp",), rank), -1)  # the last for spans without a peer
        spans += [each._replace(rank=rank, peer=line[each.peer]) for each in by_stage[mesh.coordinates(rank).pp]]
    return Timeline(timeline.source, tuple(spans))


def ranks_in_host_order(mesh: Mesh) -> list[int]:
    """Ranks in the order in which they fill hosts: the stages of a replica are adjacent."""
    places = product(*(range(getattr(mesh, axis)) for axis in HOST_ORDER))
    return [mesh.rank(Coordinates(**dict(zip(HOST_ORDER, place, strict=True)))) for place in places]


@lru_cache(maxsize=256)
def hosts_of_size(mesh: Mesh, gpus: int) -> tuple[int, ...]:
    """The host of each rank where every host has `gpus` GPUs; empty if there is only one."""
    places = np.arange(mesh.size).reshape([getattr(mesh, axis) for axis in HOST_ORDER])
    by_rank = places.transpose([HOST_ORDER.index(axis) for axis in ORDER]).ravel()
    return numbered((by_rank // gpus).tolist())


def numbered(names: Iterable[Hashable]) -> tuple[int, ...]:
    """The host of each rank, from any `names` of the ranks' hosts: numbers in the order of ranks; empty if there is
    only one."""
    by_rank = list(names)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(by_rank))}
    return tuple(map(numbers.__getitem__, by_rank)) if len(numbers) > 1 else ()


@lru_cache(maxsize=4096)
def are_on_one_host(mesh: Mesh, axes: tuple[Axis, ...], hosts: tuple[int, ...], size: int = 0) -> bool:
    """Whether every group of ranks along these axes, or of `size` consecutive ranks of such a group, is on one host.
    `hosts` has the host of each rank; empty: all are on one."""
    if not hosts:
        return True
    across, along = ([place for place, axis in enumerate(ORDER) if (axis in axes) is is_in] for is_in in (False, True))
    shape = [getattr(mesh, axis) for axis in ORDER]
    groups = np.array(hosts).reshape(shape).transpose(across + along)
    groups = groups.reshape(-1, math.prod(shape[place] for place in along))
    parts = (groups[:, first : first + (size or mesh.size)] for first in range(0, groups.shape[1], size or mesh.size))
    return all(bool((part == part[:, :1]).all()) for part in parts)


def are_copied(
    mesh: Mesh, axis: Axis, hosts: tuple[int, ...], *, zero: int, zero_shards: int, has_mirrors: bool, is_dynamic: bool
) -> bool:
    """Whether ranks on these hosts move data along an axis by peer copies, for which each group must be on one host.

    'dp' stands for the holders over which ZeRO cuts the same parameters, which gather and reduce. Reductions without
    ZeRO go by NCCL, and so do exchanges of data-aware groups (`is_dynamic`) along cp and ep, which differ from step to
    step."""
    if axis != "dp":
        return (axis in ("pp", "tp") or not is_dynamic) and are_on_one_host(mesh, (axis,), hosts)
    # of all but experts, and of experts; also along pp for DualPipe's mirrors
    groups = ((*DENSE_AXES, "pp"),) if has_mirrors and not zero_shards else (DENSE_AXES, EXPERT_AXES)
    return zero > 0 and all(are_on_one_host(mesh, axes, hosts, zero_shards) for axes in groups)
