"""Where a rank stands: the five axes of parallelism and the groups they form."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from itertools import product
from typing import Literal, NamedTuple

Axis = Literal["dp", "pp", "cp", "tp", "ep"]
ORDER: tuple[Axis, ...] = ("pp", "dp", "ep", "cp", "tp")  # outermost first: tp ranks are neighbours


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

    | axis | its ranks | a dense parameter over it |
    |---|---|---|
    | dp | hold different samples | replicated (or sharded by ZeRO) |
    | pp | hold different stages | split by layer |
    | cp | split a sequence | replicated |
    | tp | split weights, share tokens | split |
    | ep | hold different samples and different experts | replicated |
    """

    dp: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def size(self) -> int:
        return math.prod(asdict(self).values())

    def coordinates(self, rank: int) -> Coordinates:
        found = {}
        for axis in reversed(ORDER):
            rank, found[axis] = divmod(rank, getattr(self, axis))
        return Coordinates(**found)

    def rank(self, at: Coordinates) -> int:
        rank = 0
        for axis in ORDER:
            rank = rank * getattr(self, axis) + getattr(at, axis)
        return rank

    def move(self, rank: int, **to: int) -> int:
        """The rank that differs from `rank` in the given coordinates only."""
        return self.rank(self.coordinates(rank)._replace(**to))

    def group(self, axes: tuple[Axis, ...], rank: int) -> tuple[int, ...]:
        """Ranks that differ from `rank` in the given axes only, itself included, in rank order."""
        here = self.coordinates(rank)
        along = (range(getattr(self, axis)) if axis in axes else (getattr(here, axis),) for axis in ORDER)
        return tuple(self.rank(Coordinates(**dict(zip(ORDER, at, strict=True)))) for at in product(*along))

    def __str__(self) -> str:
        sizes = asdict(self).items()
        return " x ".join(f"{axis}{size}" for axis, size in sizes if size > 1) or "one rank"
