"""What a schedule is made for: the one argument of every generator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pentad.schedules.simulate.costs import Costs


class Options(NamedTuple):
    """What a user may ask of a schedule that takes it; None: as the schedule likes. Meanings are those of Shape."""

    chunks: int | None = None
    group: int | None = None
    memory_limit: float | None = None
    slices: int | None = None


class MemoryOptions(NamedTuple):
    """What a program does to need less memory.

    `zero` is the stage of ZeRO, 0 to 3; with 3 a rank has at most `gathered` stages' parameters whole at once (None:
    all it holds) and begins a gather `prefetch` compute units before its reader. The stages in `recompute` compute
    again what their forward does not keep. `keep` is the most activations that stay on the device, in microbatches of a
    whole rank (None: all). `buckets[stage]` is in how many parts, one behind the other, a stage's gradients are reduced
    (empty: in one).
    """

    zero: int = 0
    prefetch: int = 1
    max_gathered: int | None = None
    recompute: frozenset[int] = frozenset()
    max_resident: float | None = None
    buckets: tuple[int, ...] = ()


@dataclass(frozen=True)
class ScheduleSpec:
    """`ranks` pipeline ranks and `microbatches` of one step.

    `chunks` is the number of parts that a rank's layers are cut into, `group` how many microbatches go through a chunk
    before the next chunk's turn (interleaved schedules). `costs` are those of every stage, for schedules that plan with
    them. `limit` is the most activations that a rank may keep, in microbatches of a whole rank (None: as the schedule
    likes). `slices` is the number of equal parts that the sequences of a microbatch are cut into.
    """

    ranks: int
    microbatches: int
    chunks: int = 1
    group: int = 0
    costs: Costs | None = None
    memory_limit: float | None = None
    slices: int = 1

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks
