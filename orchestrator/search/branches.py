"""The branches of the search by branch and bound: subsets of a `Space` that it divides further, and the settings that
it ends with."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pentad.orchestrator.memory.variants import Variants
from pentad.orchestrator.search.layout import Layout
from pentad.orchestrator.search.memory_bounds import MemoryBounds
from pentad.orchestrator.search.space import Order, Setting, Sharding
from pentad.orchestrator.search.time_bounds import Timed
from pentad.schedules.spec.mesh import Mesh
from pentad.schedules.spec.plan import Plan


class Shape(NamedTuple):
    mesh: Mesh
    microbatches: int
    slices: int


class Ordered(NamedTuple):
    shape: Shape
    order: Order
    unit_layers: int | None
    shards: int | None

    @property
    def mesh(self) -> Mesh:
        return self.shape.mesh


class LaidOut(NamedTuple):
    """Settings of one layout, before their order is made; `shardings` come in rows, one for each `Group`."""

    setting: Setting
    layout: Layout
    is_plain: bool
    is_saving: bool
    shardings: list[tuple[Sharding, ...]]

    @property
    def mesh(self) -> Mesh:
        return self.setting.mesh


class Group(NamedTuple):
    """Settings that differ in recomputation or offloading: the one with neither (`is_plain`), and, if that one does not
    fit or is not in the group, the others (`is_saving`). `later` are the ZeRO stages and numbers of gathered units
    still to try, each no faster than the one before and with no more memory; `chains` are those of earlier
    shardings, by kind of saving and by room."""

    setting: Setting
    timed: Timed
    bounds: MemoryBounds
    is_plain: bool
    is_saving: bool
    later: tuple[Sharding, ...]
    chains: Mapping[tuple[int, int], Chain] = {}

    @property
    def mesh(self) -> Mesh:
        return self.setting.mesh


@dataclass
class Chain:
    """`settings` with decreasing memory and increasing time, planned by `variants`: all up to index `low` need more
    than `room`, index `high` does not. `plain` bounds the time without recomputation and offloading, `excess` is what
    the last planned setting needed beyond its memory bound, and `bounded` the last setting whose time a simulation
    bounds (None until `low` is known). `faster` is the chain of an earlier sharding: from where it fits, this one is no
    better."""

    settings: list[Setting]
    variants: Callable[[], Variants]
    timed: Timed
    bounds: MemoryBounds
    plain: float
    room: int
    low: int
    high: int
    faster: Chain | None = None
    excess: int = 0
    bounded: int | None = None

    @property
    def mesh(self) -> Mesh:
        return self.settings[0].mesh

    @property
    def end(self) -> int:
        """The first setting that is known to fit, or to be no better than one that fits."""
        return self.high if self.faster is None else min(self.high, self.faster.end)

    def seconds(self, at: int) -> float:
        return self.timed.bound_with(self.plain, self.settings[at])

    def least(self, at: int) -> int:
        return self.bounds.least(self.settings[at])

    def first_within(self, room: int) -> int:
        """The first setting with a memory bound of at most `room`."""
        return bisect_left(self.settings, True, key=lambda setting: self.bounds.least(setting, room) <= room)


class Fitting(NamedTuple):
    """A setting that fits, the seconds of its step and the bytes of its fullest rank; `plan` is set if it is exactly
    the plan of the setting's configuration."""

    setting: Setting
    seconds: float
    bytes: int
    plan: Plan | None

    @property
    def mesh(self) -> Mesh:
        return self.setting.mesh


Branch = Shape | Ordered | LaidOut | Group | Chain | Fitting
