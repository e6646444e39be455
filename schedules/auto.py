"""The schedule with the least time among the catalogue, for given costs and a limit on activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pentad.schedules.catalogue import CATALOGUE, NONE, generate, shape_of
from pentad.schedules.check import peak_activations
from pentad.schedules.costs import Costs
from pentad.schedules.errors import PentadError
from pentad.schedules.order import compute_times
from pentad.schedules.program import Program
from pentad.schedules.shape import Options

AUTO = "auto"
MOST_CHUNKS = 4
CostsOf = Callable[[Program], Costs | None]


class Candidate(NamedTuple):
    """A schedule that keeps to the limit. Times in the unit of the costs; `peak` in microbatches of a whole rank."""

    name: str
    asked: Options
    makespan: float
    longest: float
    peak: float


@dataclass(frozen=True)
class Choice:
    """The candidates, the best first, and a time that no schedule of the best one's stages can be quicker than."""

    candidates: tuple[Candidate, ...]
    bound: float

    @property
    def best(self) -> Candidate:
        return self.candidates[0]

    @property
    def gap(self) -> float:
        """How much longer than the bound the best one takes, as a share of it."""
        return self.best.makespan / self.bound - 1


def choose(ranks: int, microbatches: int, costs_of: CostsOf, asked: Options = NONE) -> Choice:
    """Tries every schedule, number of chunks and group; the least makespan wins, then the least memory.

    `costs_of` tells the costs of a placement's stages; None where there are none, such as more stages than layers.
    Parameters that a schedule holds twice (dualpipe) are not counted. Raises PentadError when nothing fits, and on
    options that it chooses itself.
    """
    refuse_chosen(asked)
    found = []
    for name, options in _tried(ranks, microbatches, asked.limit):
        placed = generate(name, ranks, microbatches, options)
        costs = costs_of(placed)
        if costs is None:
            continue
        program = generate(name, ranks, microbatches, options, costs) if "costs" in CATALOGUE[name].takes else placed
        peak = max(peak_activations(program))
        if asked.limit is None or peak <= asked.limit + 1e-9:
            found.append((Candidate(name, options, *_lengths(program, costs), peak), lower_bound(program, costs)))
    if not found:
        raise PentadError(f"schedule {AUTO}: none fits {ranks} ranks (mesh.pp) and {microbatches} microbatches")
    found.sort(key=lambda pair: (float(f"{pair[0].makespan:.9g}"), pair[0].peak))  # sums of costs differ by rounding
    return Choice(tuple(candidate for candidate, _ in found), found[0][1])


def refuse_chosen(asked: Options) -> None:
    """Raises PentadError on what `choose` chooses itself, and on a limit that no schedule keeps to."""
    for option, value in (("chunks", asked.chunks), ("group", asked.group), ("slices", asked.slices)):
        if value is not None:
            raise PentadError(f"{option} is {value}, but schedule {AUTO} chooses it, wanted no {option}")
    if asked.limit is not None and not asked.limit >= 1:
        raise PentadError(f"schedule {AUTO}: memory_limit is {asked.limit:g}, but at least 1 is needed")


def lower_bound(program: Program, costs: Costs) -> float:
    """A makespan below which no order of a program's placement can come, whatever its transfers cost.

    A rank begins when a microbatch has come through the stages above its first one, and does all its work; what may be
    left after its last B are its W, while the gradient goes back through the stages above.
    """
    f, b, w = costs.forward, costs.backward, costs.weight
    runs: list[list[int]] = [[] for _ in program.streams]
    for (stage, _), rank in program.home.items():
        runs[rank].append(stage)
    bound = 0.0
    for stages in runs:
        first = min(stages)
        work, late = sum(f[s] + b[s] + w[s] for s in stages), sum(w[s] for s in stages)
        back = sum(b[:first]) + (w[0] if first else 0.0)
        bound = max(bound, sum(f[:first]) + work + max(0.0, back - late))
    return bound


def _tried(ranks: int, microbatches: int, limit: float | None) -> Iterator[tuple[str, Options]]:
    for name, found in CATALOGUE.items():
        if "slices" in found.takes:  # what a slice costs is not told by the costs of a microbatch
            continue
        chunks = range(2, MOST_CHUNKS + 1) if "chunks" in found.takes else [None]
        groups = sorted({ranks, 2 * ranks, microbatches}) if "group" in found.takes else [None]
        bound = limit if "limit" in found.takes else None
        for each in chunks:
            for group in groups:
                asked = Options(each, group, bound)
                if (group or 0) <= max(microbatches, ranks) and _allowed(name, ranks, microbatches, asked):
                    yield name, asked


def _allowed(name: str, ranks: int, microbatches: int, asked: Options) -> bool:
    try:
        shape_of(name, ranks, microbatches, asked)
    except PentadError:
        return False
    return True


def _lengths(program: Program, costs: Costs) -> tuple[float, float]:
    """(makespan, longest) of the compute order, transfers never queueing."""
    times = compute_times(program, costs)
    makespan = max(spans[-1][1] for spans in times) - min(spans[0][0] for spans in times)
    return makespan, max(spans[-1][1] - spans[0][0] for spans in times)
