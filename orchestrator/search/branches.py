"""The branches of a search by branch and bound: subsets of a `Space`, which it divides, and what it finds in the last
of them."""

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
    """The settings of a layout whose order is not made yet, by rows of their `shardings`: see `Group`."""

    setting: Setting
    layout: Layout
    is_plain: bool
    is_saving: bool
    shardings: list[tuple[Sharding, ...]]

    @property
    def mesh(self) -> Mesh:
        return self.setting.mesh


class Group(NamedTuple):
    """Settings that differ in what they recompute or offload: that with neither (`is_plain`), and, if that does not fit
    or is not in the group, the others (`is_saving`). `later` are the stages of ZeRO and gathered units, each no faster
    than the one before, of settings that take as little memory or less; `chains` those of the ones before, by what
    they do more and more of and by room."""

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
    """`settings` with less and less memory and more and more time, planned by `variants`: all up to number `low` take
    more than `room`, number `high` does not. `plain` is the bound of their time without recomputation and offloading,
    `excess` what the last one that was planned needs beyond its memory bound, `bounded` the last one whose time is
    bounded by a simulation; None before `low` is known. `faster` is that of an earlier stage of ZeRO: where it fits,
    this one is no better."""

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
        """The first setting that fits, or is no better than one that does."""
        return self.high if self.faster is None else min(self.high, self.faster.end)

    def seconds(self, at: int) -> float:
        return self.timed.bound_with(self.plain, self.settings[at])

    def least(self, at: int) -> int:
        return self.bounds.least(self.settings[at])

    def first_within(self, room: int) -> int:
        """The first setting whose memory bound is within `room`."""
        return bisect_left(self.settings, True, key=lambda setting: self.bounds.least(setting, room) <= room)


class Fitting(NamedTuple):
    """A setting that fits, the seconds of its step and the bytes of its fullest rank; and its plan, if that is the one
    that its configuration has."""

    setting: Setting
    seconds: float
    bytes: int
    plan: Plan | None

    @property
    def mesh(self) -> Mesh:
        return self.setting.mesh


Branch = Shape | Ordered | LaidOut | Group | Chain | Fitting
