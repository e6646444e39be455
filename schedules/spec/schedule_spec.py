"""What a schedule is generated for: sizes, options and costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from pentad.schedules.simulate.costs import Costs


class ScheduleOptions(NamedTuple):
    """Options that a schedule may accept (see `ScheduleSpec`); None leaves the choice to the schedule."""

    chunks: int | None = None
    group: int | None = None
    memory_limit: float | None = None
    slices: int | None = None


class MemoryOptions(NamedTuple):
    """How a program trades time for memory.

    `zero` is the ZeRO stage, 0 to 3. With 3, a rank holds the gathered parameters of at most `max_gathered` stages at
    once (None: all its stages), and a gather starts `prefetch` compute actions before its reader. The stages in
    `recompute` save only their input and recompute the rest. `max_resident` is the largest number of activations that
    stay on the device, in microbatches of a whole rank (None: all); `offload` are stages whose activations leave the
    device instead, all or some of the bytes (see Plan); `offload_prefetch` of their compute actions run beside a copy.
    `units[stage]` is the number of units that a pipeline stage is cut into (empty: one); for all other options, stages
    are then units. `reduce` says when gradients are reduced with ZeRO-2 and 3: once a 'step', for every 'microbatch',
    or None, which is 'microbatch' if more than two stages of a rank hold gradients at once. `sizes` (for ZeRO-2 and 3)
    and `logits_in_w` (for ZeRO-3) are as in Program.
    """

    zero: int = 0
    prefetch: int = 1
    max_gathered: int | None = None
    recompute: frozenset[int] = frozenset()
    max_resident: float | None = None
    offload: frozenset[int] = frozenset()
    offload_prefetch: int = 1
    units: tuple[int, ...] = ()
    reduce: Literal["step", "microbatch"] | None = "step"
    sizes: tuple[tuple[int, ...], ...] = ()
    logits_in_w: bool = False


@dataclass(frozen=True)
class ScheduleSpec:
    """The argument of every generator: `ranks` pipeline ranks and the `microbatches` of one step.

    `chunks` is the number of model chunks per rank, `group` the number of microbatches that go through one chunk before
    the next chunk starts (interleaved schedules), `slices` the number of equal parts that sequences are cut into.
    `costs` are those of every stage, for schedules that plan with them. `memory_limit` is the largest number of
    activations that a rank may hold, in microbatches of a whole rank (None: the schedule's own limit).
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
