"""Stages and their units, which many layouts share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

from pentad.orchestrator.search.space import Placement
from pentad.schedules.passes.units import place_units
from pentad.schedules.spec.plan import split_layers_into_units
from pentad.schedules.spec.tensors import LayerRange


class UnitBytes(NamedTuple):
    """Bytes of one piece in a unit: held between F and B and between B and W, and at most during F, B and BW."""

    saved: int
    deferred: int
    forward: int
    backward: int
    both: int


@dataclass(frozen=True, eq=False)
class Units:
    """`counts` is the number of units of each stage. Units of one `kind` cost and hold the same."""

    placement: Placement
    stages: tuple[LayerRange, ...]
    counts: tuple[int, ...]
    kind: Callable[[LayerRange], int]

    @cached_property
    def layers(self) -> tuple[LayerRange, ...]:
        """The layers of each unit."""
        return split_layers_into_units(self.stages, self.counts)

    @cached_property
    def of_stages(self) -> list[range]:
        return [range(*span) for span in pairwise(accumulate(self.counts, initial=0))]

    @cached_property
    def of_ranks(self) -> tuple[tuple[int, ...], ...]:
        return place_units(self.placement, self.counts)

    @cached_property
    def stage_of(self) -> list[int]:
        """The stage of each unit."""
        return [stage for stage, units in enumerate(self.of_stages) for _ in units]

    @cached_property
    def layers_before(self) -> list[int]:
        """By unit, the number of layers in earlier units of its stage."""
        return [unit.first - self.stages[of].first for unit, of in zip(self.layers, self.stage_of, strict=True)]

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """The kind of each unit."""
        return tuple(map(self.kind, self.layers))

    @cached_property
    def examples(self) -> dict[int, LayerRange]:
        """The layers of one unit of each kind."""
        return dict(zip(self.kinds, self.layers, strict=True))

    @cached_property
    def runs(self) -> list[list[range]]:
        """The units of each stage, as runs of consecutive units of one kind."""
        runs = [[list(run) for _, run in groupby(units, self.kinds.__getitem__)] for units in self.of_stages]
        return [[range(run[0], run[-1] + 1) for run in of_stage] for of_stage in runs]

    @cached_property
    def different(self) -> tuple[int, ...]:
        """The first rank of each group of equal ranks."""
        return tuple(dict.fromkeys(self.alike))

    @cached_property
    def alike(self) -> list[int]:
        """For each pipeline rank the first one with the same kinds of units in its stages."""
        of_stages = [tuple(map(self.kinds.__getitem__, units)) for units in self.of_stages]
        of_ranks = [tuple(of_stages[stage] for stage in held) for held in self.placement]
        first = dict(zip(reversed(of_ranks), reversed(range(len(of_ranks))), strict=True))
        return [*map(first.__getitem__, of_ranks)]
