"""The schedule with the least time, for given costs and a limit on activations: the catalogue, and orders beyond it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from pentad.schedules.catalogue import CATALOGUE, NONE, generate, mirrored, shape_of
from pentad.schedules.ir.errors import PentadError
from pentad.schedules.ir.program import Program
from pentad.schedules.search.bounds import Bound, lower_bound
from pentad.schedules.search.search import Search, programs
from pentad.schedules.search.search_problem import By, Problem, room_of
from pentad.schedules.simulate.costs import Costs
from pentad.schedules.simulate.dependencies import compute_times
from pentad.schedules.spec.schedule_spec import Options
from pentad.schedules.verify.check import peak_activations

AUTO = "auto"
MOST_CHUNKS = 4
EFFORT = 1_500_000  # operations placed by rules and timed after moves: some seconds


class CostsOf(Protocol):
    def __call__(self, placed: Program, /) -> Costs | None:
        """The costs of a placement's stages; None where there are none, such as more stages than layers."""


class Candidate(NamedTuple):
    """A compute order that keeps to the limit. Times in the unit of the costs, `peak` in microbatches of a whole rank.

    `name` and `asked` generate it; where the name is `auto` it was searched, and `origin` says from what.
    """

    name: str
    asked: Options
    makespan: float
    longest: float
    peak: float
    program: Program
    origin: str = ""


@dataclass(frozen=True)
class Choice:
    """The candidates, the best first, with the bound of the best one's placement, and the least of all placements."""

    candidates: tuple[Candidate, ...]
    bound: Bound
    least: Bound
    by: By

    @property
    def best(self) -> Candidate:
        return self.candidates[0]

    @property
    def gap(self) -> float:
        """How much longer than the bound of its placement the best one takes, as a share of it."""
        return max(getattr(self.best, self.by) / self.bound.time - 1, 0.0)

    @property
    def catalogued(self) -> Candidate | None:
        """The best of the catalogue."""
        return next((each for each in self.candidates if each.name != AUTO), None)


class Placed(NamedTuple):
    """A placement of stages that was tried: `program` is some order of it."""

    program: Program
    costs: Costs
    bound: Bound


def choose(
    ranks: int,
    microbatches: int,
    costs_of: CostsOf,
    asked: Options = NONE,
    by: By = "makespan",
    effort: int = EFFORT,
    twice: bool | None = None,
) -> Choice:
    """Tries every schedule, number of chunks and group, then searches; the least time wins, then the least memory.

    Never worse than the catalogue. `effort` 0 leaves out the search. What a schedule needs to hold its parameters twice
    (dualpipe) is not counted; it is left out unless `twice` (None: where no limit is asked for). Raises PentadError
    when nothing fits, and on options that it chooses itself.
    """
    refuse_chosen(asked)
    twice = asked.memory_limit is None if twice is None else twice
    found: list[Candidate] = []
    places: dict[tuple[tuple[int, ...], ...], Placed] = {}
    for name, options in _tried(ranks, microbatches, asked.memory_limit):
        if not twice and CATALOGUE[name].placement is mirrored:
            continue
        placed = generate(name, ranks, microbatches, options)
        key = placed.placement
        if key not in places:
            costs = costs_of(placed)
            if costs is None:
                continue
            places[key] = Placed(placed, costs, lower_bound(placed, costs, asked.memory_limit, by))
        costs = places[key].costs
        program = generate(name, ranks, microbatches, options, costs) if "costs" in CATALOGUE[name].takes else placed
        found.append(_candidate(name, options, program, costs))
    fitting = [each for each in found if asked.memory_limit is None or each.peak <= asked.memory_limit + 1e-9]
    if effort:
        fitting += _searched(places, fitting, asked, by, effort)
    if not fitting:
        raise PentadError(f"schedule {AUTO}: none fits {ranks} ranks (mesh.pp) and {microbatches} microbatches")
    fitting.sort(key=lambda each: (_rounded(getattr(each, by)), each.peak))
    bounds = [place.bound for place in places.values()]
    best = places[fitting[0].program.placement].bound
    return Choice(tuple(fitting), best, min(bounds, key=lambda bound: bound.time), by)


def describe(choice: Choice) -> str:
    """Where the best one is from, what the catalogue has, how near the bound it is, and what binds it."""
    best, known = choice.best, choice.catalogued
    asked = "".join(f", {key} {value:g}" for key, value in best.asked._asdict().items() if value is not None)
    source = f"of the catalogue{asked}" if best.name != AUTO else f"searched from {best.origin}{asked}"
    time = getattr(best, choice.by)
    if best.name != AUTO or known is None:
        gain = f"the quickest of {len(choice.candidates)}"
    else:
        gain = f"{100 * (1 - time / getattr(known, choice.by)):.2f} % quicker than {known.name}"
    chunks = best.program.chunks
    placed = f"{chunks} chunk{'s' * (chunks > 1)} a rank"
    met = "meets its bound" if choice.gap < 1e-9 else f"{100 * choice.gap:.2f} % above its bound"
    return f"{source}, {placed}, {gain}; {met} of {choice.bound.time:.6g}: {choice.bound.why}"


def refuse_chosen(asked: Options) -> None:
    """Raises PentadError on what `choose` chooses itself, and on a limit that no schedule keeps to."""
    for option, value in (("chunks", asked.chunks), ("group", asked.group), ("slices", asked.slices)):
        if value is not None:
            raise PentadError(f"{option} is {value}, but schedule {AUTO} chooses it: expected no {option}")
    if asked.memory_limit is not None and not asked.memory_limit >= 1:
        raise PentadError(f"schedule {AUTO}: memory_limit is {asked.memory_limit:g}, but at least 1 is needed")


def _searched(
    places: dict[tuple[tuple[int, ...], ...], Placed],
    found: list[Candidate],
    asked: Options,
    by: By,
    effort: int,
) -> Iterator[Candidate]:
    """Rules on every placement whose bound leaves hope, then moves on the best of them."""
    best = min((getattr(each, by) for each in found), default=float("inf"))
    hopeful = {key: place for key, place in places.items() if _rounded(place.bound.time) < _rounded(best)}
    searches: dict[tuple[tuple[int, ...], ...], Search] = {}
    for key, place in sorted(hopeful.items(), key=lambda pair: pair[1].bound.time):
        if len({stage for held in key for stage in held}) < sum(map(len, key)):
            continue  # a stage on two ranks, as dualpipe has it
        limit, chunks = asked.memory_limit, place.program.chunks
        room = room_of(limit, chunks, place.program.ranks, place.program.microbatches)
        if min(room) < 2 * chunks:
            continue
        problem = Problem(key, place.program.microbatches, chunks, place.costs, room, by)
        search = Search(problem, problem.ticks(place.bound.time), [])
        for each in found:
            if each.program.placement == key:
                search.start(each.name, each.program.streams)
        search.rules(effort // 2 // len(hopeful))
        searches[key] = search
    ranked = sorted((each for each in searches.values() if each.best), key=lambda each: each.span)
    for number, search in enumerate(ranked[:3]):
        search.moves(effort // 2 // 2 ** (number + 1))
    for search in ranked:
        yield from _found(search, places, asked)


def _found(search: Search, places: dict[tuple[tuple[int, ...], ...], Placed], asked: Options) -> Iterator[Candidate]:
    place = places[search.problem.placement]
    for origin, streams in programs(search):
        program = Program(AUTO, streams, place.program.placement, place.program.microbatches, place.program.chunks)
        yield _candidate(AUTO, asked, program, place.costs, origin)


def _candidate(name: str, asked: Options, program: Program, costs: Costs, origin: str = "") -> Candidate:
    """Times of the compute order, transfers never queueing."""
    times = compute_times(program, costs)
    makespan = max(spans[-1][1] for spans in times) - min(spans[0][0] for spans in times)
    longest = max(spans[-1][1] - spans[0][0] for spans in times)
    return Candidate(name, asked, makespan, longest, max(peak_activations(program)), program, origin)


def _rounded(time: float) -> float:
    """Sums of the same costs differ by rounding."""
    return float(f"{time:.9g}")


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
